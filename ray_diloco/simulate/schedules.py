"""Random runs: one seed says which algorithm, which islands, how fast, and everything that goes wrong, and when.

A schedule is small, three or four rounds of two to four islands, so that many thousands can be tried; what it lacks in
size its faults make up for.  `try_seed` runs one and holds it to what must always hold; the same seed is the same run
to the last bit, and `command` says how to see it again.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from ray_diloco.config.compose import compose
from ray_diloco.config.schema import Config
from ray_diloco.rounds.faults import (
    DRIVER,
    ISLAND,
    KINDS,
    PASSES,
    SHARD,
    SLOW_LINK,
    STORAGE,
    STRIKES,
    Fault,
    FaultPlan,
)
from ray_diloco.rounds.position import Position
from ray_diloco.simulate.conditions import Conditions, LinkSpeed, Rates
from ray_diloco.simulate.problem import small_layout
from ray_diloco.simulate.setup import Setup
from ray_diloco.simulate.world import Ending, Steer, World

SMALL = ("inner.H=4", "run.rounds=3", "inner.micro_batch=1", "evaluate.every=2", "islands.count=4")

# Ways to run, as arguments of the command line.
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "wait": (),
    "seldom": ("checkpoint.every=2",),
    "quorum": ("quorum.kind=at_least", "quorum.n=2", "quorum.grace_s=1"),
    "carry": ("quorum.kind=at_least", "quorum.n=1", "quorum.late=carry", "outer.momentum=0"),
    "deadline": ("quorum.deadline_s=1.5",),
    "seconds": ("inner.round_seconds=3",),
    "async": ("quorum.kind=immediate", "outer.kind=delayed_nesterov"),
    "by_speed": ("quorum.kind=immediate", "outer.kind=sgd", "inner.work=by_speed"),
    "delay": ("schedule.delay=2", "adopt.kind=mix"),
    "rebase": ("schedule.delay=3", "adopt.kind=rebase", "quorum.kind=at_least", "quorum.n=1"),
    "lag": ("schedule.lag=1", "adopt.kind=rebase"),
    "streaming": (
        "fragments.kind=layers",
        "fragments.size=2",
        "schedule.spread=true",
        "schedule.delay=1",
        "adopt.kind=mix",
    ),
    "bins": ("fragments.kind=bins", "fragments.count=3", "quorum.kind=at_least", "quorum.n=1", "quorum.grace_s=0.5"),
    "eager": ("topology.anchors=per_island", "schedule.lag=1", "stale.own_fresh=true", "adopt.kind=rebase"),
    "pairs": ("topology.anchors=per_island", "topology.kind=pairs", "merge.consensus=0.5", "outer.kind=heavy_ball"),
    "fast": ("channels.fast.H=2", "channels.fast.fragments.kind=random", "channels.fast.outer.kind=sgd"),
    "robust": ("merge.kind=median", "quorum.kind=at_least", "quorum.n=2"),
    "moments": ("outer.kind=adamw", "checkpoint.inner=false"),
    "reanchored": (
        "quorum.kind=immediate",
        "outer.kind=sgd",
        "stale.reanchor=true",
        "fragments.kind=bins",
        "fragments.count=2",
    ),
}

# Evaluation is the same for all; a few are enough.
EVALUATED = ("wait", "quorum", "async", "streaming")

# Errors with which a run may end when enough goes wrong: too many failures in a row, too many lives.
ALLOWED = (459, 490)


@lru_cache
def _composed(variant: str) -> Config:
    return compose([*SMALL, *VARIANTS[variant]]).config


@cache
def setup_of(variant: str, islands: int, rounds: int = 3) -> Setup:
    """A small run of a kind.  Composed once; the number of islands is changed behind the check of combinations."""
    config = deepcopy(_composed(variant))
    # Where there are several fragments, as many rounds of fragments as others have, or thereabouts.
    several = len(Setup(config, small_layout()).recipes) > 1
    config.run.rounds = 2 if several else rounds
    # No slots for others: they cost time and are filled by nobody here.
    config.islands.count = config.islands.max = islands
    return Setup(config, small_layout(), heldout=2 if variant in EVALUATED else 0, blocks=50)


@dataclass(frozen=True)
class Verdict:
    """What became of one schedule.

    Attributes:
      blamed: what did not hold; empty where all is well.
      digest: of the events, equal whenever the seed is.
    """

    seed: int
    variant: str
    ending: Ending | None
    blamed: tuple[str, ...]
    events: int

    @property
    def command(self) -> str:
        """Shows the same run again."""
        return f"ray-diloco simulate --seeds {self.seed}:{self.seed + 1}"


def world_of(seed: int) -> tuple[str, World]:
    """The run that a seed stands for, not yet run, with the name of its variant."""
    luck = random.Random(seed)
    variant, islands = luck.choice(tuple(VARIANTS)), luck.choice((2, 2, 2, 2, 3, 3, 4))
    setup = setup_of(variant, islands, luck.choice((2, 2, 2, 3)))
    conditions = Conditions(
        seed=seed,
        step_s=luck.choice((0.1, 1.0)),
        spread=luck.choice((0.0, 0.1, 0.8)),
        jitter=luck.choice((0.0, 0.2)),
        link=LinkSpeed(luck.choice((0.0, 0.05, 2.0)), *([luck.choice((0.0, 100.0))] * 2)),
        hub=LinkSpeed(0.0, *([luck.choice((0.0, 200.0))] * 2)),
        launch_s=luck.choice((0.1, 1.0, 5.0)),
        repair_s=luck.choice((0.0, 3.0)),
        detect_s=luck.choice((0.0, 0.5)),
        silence_s=5.0,
        exchange_s=20.0,
        merge_s=luck.choice((0.0, 0.01, 2.0)),
        commit_s=luck.choice((0.0, 0.02, 1.0)),
        write_s=luck.choice((0.0, 0.5, 9.0)),
        restart_s=1.0,
        rates=_rates(luck),
        grid_s=(0.0, 0.05, 0.25, 1.0)[seed % 4],
    )
    faults = tuple(fault_of(luck, setup) for _ in range(luck.choice((0, 1, 1, 1, 2, 2, 4))))
    stops = [luck.uniform(0.0, 20.0) for _ in range(luck.choice((0, 0, 0, 0, 0, 0, 1, 3)))]
    points = {"progress_every": luck.choice((0, 1, 2)), "progress_wait_s": luck.choice((0.0, 3.0, 60.0))}
    steers = _steers(luck, setup)
    times = {"drain_s": luck.choice((0.5, 3.0, 60.0)), "away_s": luck.choice((0.5, 5.0))}
    setup = changed(setup, checkpoint=points, islands=times)
    return variant, World(setup, conditions, FaultPlan(faults), stops, steers)


def _steers(luck: random.Random, setup: Setup) -> list[Steer]:
    """Islands that are asked to leave, notices of their machines, numbers of islands; in the end all are wanted."""
    if luck.random() < 0.6:
        return []
    fixed = setup.rules(Position()).fixed
    asked: list[Steer] = []
    for _ in range(luck.choice((1, 1, 2, 3))):
        at, name = luck.uniform(0.0, 20.0), luck.choice(setup.names)
        if fixed or luck.random() < 0.4:
            asked.append(Steer(at, name, returns=True))
        elif luck.random() < 0.5:
            asked.append(Steer(at, name))
        else:
            asked.append(Steer(at, count=luck.randint(1, len(setup.names))))
    if not fixed:
        asked.append(Steer(luck.uniform(20.0, 40.0), count=len(setup.names)))
    return asked


def fault_of(luck: random.Random, setup: Setup) -> Fault:
    """A fault that can happen in a run."""
    kind = luck.choice(KINDS)
    target = luck.choice(STRIKES[kind] if luck.random() < 0.3 else STRIKES[kind][:1])
    names = {ISLAND: luck.choice(setup.names), SHARD: f"{SHARD}:0", DRIVER: DRIVER, STORAGE: STORAGE}
    return Fault(
        kind,
        names[target],
        luck.randint(1, setup.config.run.rounds),
        luck.choice(PASSES[target]),
        incarnation=luck.choice((0, 0, 0, 1)) if target in (ISLAND, DRIVER) else 0,
        seconds=luck.choice((0.0, 0.5, 3.0, 8.0)),
        bytes_per_s=5.0 if kind == SLOW_LINK else 0.0,
    )


def _rates(luck: random.Random) -> Rates:
    if luck.random() < 0.6:
        return Rates()

    def some(rate: float) -> float:
        return luck.choice((0.0, 0.0, rate))

    return Rates(
        exit=some(200.0),
        freeze=some(60.0),
        cut=some(200.0),
        slow=some(200.0),
        corrupt=some(0.2),
        nan=some(0.1),
        storage=some(0.4),
        driver=some(80.0),
        trouble_s=3.0,
    )


def try_seed(seed: int) -> Verdict:
    """Runs a schedule and says what did not hold."""
    variant, world = world_of(seed)
    ending: Ending | None = None
    blamed: list[str] = []
    try:
        ending = world.run()
        if ending.error is not None and ending.error.number not in ALLOWED:
            blamed.append(f"the run ended with {ending.error}")
    except Exception:  # whatever comes here is a defect of the loop or of the simulator, and is shown with its place
        blamed.append(traceback.format_exc(limit=-4))
    auditor = world.auditor
    blamed += auditor.blamed if auditor is not None else []
    return Verdict(seed, variant, ending, tuple(blamed), len(world.events))


def changed(setup: Setup, **sections: Mapping[str, Any]) -> Setup:
    """A setup with some keys changed, section by section."""
    config = replace(setup.config)
    for name, keys in sections.items():
        setattr(config, name, replace(getattr(config, name), **keys))
    return replace(setup, config=config)
