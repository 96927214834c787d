"""The chaos study of Decoupled DiLoCo (2604.21428), simulated: goodput of learners that fail apart, or all together.

    python -m ray_diloco.simulate.chaos [HOURS]

Published is that a chip fails once a year, and goodput at 1.2 and 2.4 million chips (../shared/algorithms.md §5.3); how
long a failure stops whom is not.  Here one failure stops the learner that has the chip for `STOP_S` and costs it the
step that it is in; elastic data parallel is one learner of all chips.  `STOP_S` is fitted to a single number, 58 % of
elastic data parallel at 1.2 million; all others follow.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ray_diloco.config.compose import compose
from ray_diloco.simulate.conditions import Conditions, LinkSpeed, Rates
from ray_diloco.simulate.problem import small_layout
from ray_diloco.simulate.report import Report, report_of
from ray_diloco.simulate.setup import Setup
from ray_diloco.simulate.world import World

HOURS_PER_YEAR = 8766.0
STEP_S = 2.0
# Until the death of a chip is noticed, and until what it stopped goes on.
DETECT_S, STOP_S = 1.0, 17.5

# Learners → goodput as published; 1 is elastic data parallel.
PUBLISHED: dict[int, dict[int, float]] = {
    1_200_000: {1: 0.58, 2: 0.70, 8: 0.88, 16: 0.93},
    2_400_000: {1: 0.40, 8: 0.80, 16: 0.86},
}


@dataclass(frozen=True)
class Row:
    """One simulation of the study."""

    chips: int
    learners: int
    goodput: float
    published: float | None
    failures: int


def simulated(chips: int, learners: int, hours: float, seed: int = 0) -> Report:
    """A run of so many learners that share the chips."""
    rounds = max(2, int(hours * 3600 / STEP_S))
    config = compose(
        [
            f"islands.count={learners}",
            f"run.rounds={rounds}",
            "inner.H=1",
            "inner.micro_batch=1",
            "evaluate.every=0",
            "checkpoint.every=50",
            "checkpoint.inner=false",
            "quorum.kind=at_least",
            "quorum.n=1",
            f"quorum.grace_s={STEP_S / 10}",
            "deadlines.losses=1000000",
        ]
    ).config
    conditions = Conditions(
        seed=seed,
        step_s=STEP_S,
        link=LinkSpeed(0.01),
        launch_s=STOP_S - DETECT_S,
        detect_s=DETECT_S,
        merge_s=0.0,
        commit_s=0.0,
        rates=Rates(exit=chips / learners / HOURS_PER_YEAR),
    )
    world = World(Setup(config, small_layout()), conditions, audited=False, kept_commits=2)
    return report_of(world, world.run())


def study(hours: float, learners: Sequence[int] = (1, 2, 4, 8, 16)) -> list[Row]:
    """All rows of the table."""
    rows = []
    for chips, published in PUBLISHED.items():
        for count in learners:
            report = simulated(chips, count, hours)
            rows.append(Row(chips, count, report.goodput, published.get(count), report.events.get("island_lost", 0)))
    return rows


def main() -> None:
    """Prints the table."""
    hours = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    print("| chips | learners | goodput | published | failures |\n|---|---|---|---|---|")
    for row in study(hours):
        name = "elastic data parallel" if row.learners == 1 else str(row.learners)
        published = "" if row.published is None else f"{row.published:.0%}"
        print(f"| {row.chips / 1e6:.1f} M | {name} | {row.goodput:.1%} | {published} | {row.failures} |", flush=True)


if __name__ == "__main__":
    main()
