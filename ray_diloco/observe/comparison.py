"""Results of a comparison: what each run of it came to, and whether the claims about them hold.

Everything is read from the run directories, so the results can be made again at any time.  A variant that has not
finished has no loss: at fewer tokens it is not comparable.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_diloco.observe.report_data import Line, Records, load_records

EXPOSED = ("send_s", "wait_s", "adopt_s")


@dataclass(frozen=True, slots=True)
class Point:
    """An evaluation: held-out loss in nats per token after so many tokens and payload bytes (up and down)."""

    round: int
    tokens: int
    bytes: int
    loss: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one variant came to.

    Attributes:
      settings: what it sets for itself, `key=value`.
      status: finished, stopped, failed, running (not over, or killed) or missing; reason: why, where that is known.
      loss: held-out, at the end, nats per token; None unless finished.
      exposed_s: seconds in which an island sent, waited or adopted instead of training, mean over islands.
      utilisation, wall_s, …: as in `summary.Tally`.
    """

    name: str
    settings: tuple[str, ...]
    status: str
    reason: str | None
    loss: float | None
    rounds: int
    tokens: int
    bytes_up: int
    bytes_down: int
    exposed_s: float
    utilisation: float | None
    wall_s: float
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim and the two losses that it is judged by; `holds` is None where one of them is missing."""

    claim: str
    source: str
    better: str
    worse: str
    within: float
    loss_of_better: float | None
    loss_of_worse: float | None
    holds: bool | None


@dataclass(frozen=True, slots=True)
class Results:
    """All of `compare.json`.

    Attributes:
      command: what makes it again.
      measured: UTC day of the newest line of metrics, 2026-01-31; empty before there is one.
      machine: processors, system and versions that the runs had.
      common: what all variants set, `key=value`.
    """

    comparison: str
    command: str
    measured: str
    machine: str
    common: tuple[str, ...]
    variants: tuple[Outcome, ...]
    orderings: tuple[Verdict, ...]


def gather(
    folder: Path,
    variants: Mapping[str, Sequence[str]],
    orderings: Iterable[Mapping[str, Any]],
    *,
    command: str,
    common: Sequence[str] = (),
    failures: Mapping[str, str] | None = None,
) -> Results:
    """Read the runs of a comparison.

    Args:
      folder: the runs are below it, by name.
      variants: settings of each variant, in order.
      orderings: claim, source, better, worse and within of each.
      failures: why variants failed, of those that could not write it into their summary.

    Raises:
      CheckpointError: RD-581 or RD-583, a file of a run is broken.
    """
    records = {name: load_records(folder / name) for name in variants}
    outcomes = {
        name: _outcome(name, tuple(variants[name]), run, (failures or {}).get(name)) for name, run in records.items()
    }
    newest = max((line["t"] for run in records.values() for line in _lines(run)), default=None)
    machines = dict.fromkeys(filter(None, (_machine(run.figures.get("environment") or {}) for run in records.values())))
    return Results(
        comparison=folder.name,
        command=command,
        measured="" if newest is None else time.strftime("%Y-%m-%d", time.gmtime(newest)),
        machine="; ".join(machines),
        common=tuple(common),
        variants=tuple(outcomes.values()),
        orderings=tuple(judge(outcomes, **ordering) for ordering in orderings),
    )


def judge(
    outcomes: Mapping[str, Outcome], *, claim: str, better: str, worse: str, source: str = "", within: float = 0.0
) -> Verdict:
    """Whether `better` ended below `worse`, or less than `within` nats above it."""
    low, high = outcomes[better].loss, outcomes[worse].loss
    holds = None if low is None or high is None else low < high + within
    return Verdict(claim, source, better, worse, within, low, high, holds)


def points_of(commits: Sequence[Line], evaluations: Sequence[Line]) -> tuple[Point, ...]:
    """Evaluations with the tokens and bytes of all commits up to their round; a loss that is no number is left out."""
    points, tokens, sent, at = [], 0, 0, 0
    in_order = sorted(commits, key=lambda line: line["round"])
    for line in sorted(evaluations, key=lambda line: line["round"]):
        while at < len(in_order) and in_order[at]["round"] <= line["round"]:
            tokens = max(tokens, in_order[at]["tokens_committed"])
            sent += in_order[at]["bytes_up"] + in_order[at]["bytes_down"]
            at += 1
        if line["loss"] is not None:
            points.append(Point(line["round"], tokens, sent, line["loss"]))
    return tuple(points)


def _outcome(name: str, settings: tuple[str, ...], records: Records, failure: str | None) -> Outcome:
    figures = records.figures
    status = "failed" if failure else figures["status"] if records.events else "missing"
    exposed = [math.fsum(line[key] for line in lines for key in EXPOSED) for lines in records.islands.values()]
    return Outcome(
        name=name,
        settings=settings,
        status=status,
        reason=failure or figures.get("reason"),
        loss=figures["final_eval_loss"] if status == "finished" else None,
        rounds=figures["rounds"],
        tokens=figures["tokens_committed"],
        bytes_up=figures["bytes_up"],
        bytes_down=figures["bytes_down"],
        exposed_s=math.fsum(exposed) / len(exposed) if exposed else 0.0,
        utilisation=figures["utilisation"],
        wall_s=figures["wall_s"],
        points=points_of(records.commits, records.evaluations),
    )


def _lines(records: Records) -> Iterable[Line]:
    yield from records.commits
    yield from records.evaluations


def _machine(environment: Mapping[str, Any]) -> str:
    """A machine in a few words, without its name."""
    words = [f"{environment['cpus_usable']} CPUs"] if environment.get("cpus_usable") else []
    words += [str(environment["platform"])] if environment.get("platform") else []
    versions = environment.get("versions") or {}
    words += [f"{name} {versions[name]}" for name in ("python", "torch", "ray", "ray_diloco") if versions.get(name)]
    git = environment.get("git") or {}
    if git.get("commit"):
        words.append(f"commit {git['commit'][:10]}{' with changes' if git.get('modified') else ''}")
    return ", ".join(words)
