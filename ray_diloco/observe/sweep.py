"""Results of a sweep: what each trial came to, and which was best.

Everything is read from the run directories and from what the sweep wrote of its trials, so it can be made again.  The
best trial is the one that finished with the lowest held-out loss: at fewer tokens a loss is not comparable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray_diloco.observe.comparison import Outcome, gather


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """One trial.

    Attributes:
      label: its name in tables.
      parameters: what was tried, by key.
      status: finished, halted, diverged, failed, refused, stopped, begun or waiting.
      reason: why, where that is known.
      loss: newest held-out loss, nats per token; the final one if it has finished.
      run: what its run came to; its name is that of the run's folder.
    """

    label: str
    parameters: dict[str, Any]
    status: str
    reason: str | None
    loss: float | None
    run: Outcome


@dataclass(frozen=True, slots=True)
class SweepResults:
    """All of `sweep.json`.

    Attributes:
      command: what makes it again.
      measured: UTC day of the newest line of metrics, 2026-01-31; empty before there is one.
      machine: processors, system and versions that the runs had.
      common: what all trials set, `key=value`.
      keys: what was tried.
      chosen: how, in words.
      planned: how many trials there are to be.
      trials: those that are known, best first: finished by loss, then the others.
      best: label of the best one.
    """

    sweep: str
    command: str
    measured: str
    machine: str
    common: tuple[str, ...]
    keys: tuple[str, ...]
    chosen: str
    planned: int
    trials: tuple[TrialOutcome, ...]
    best: str | None


@dataclass(frozen=True, slots=True)
class Known:
    """What a sweep wrote of a trial: see `TrialOutcome`; `run` is the name of its folder."""

    label: str
    run: str
    parameters: Mapping[str, Any]
    status: str
    reason: str | None


def gather_sweep(
    folder: Path,
    known: Sequence[Known],
    *,
    command: str,
    common: Sequence[str],
    keys: Sequence[str],
    chosen: str,
    planned: int,
) -> SweepResults:
    """Reads the runs of a sweep; see `SweepResults`.

    Raises:
      CheckpointError: RD-581 or RD-583, a file of a run is broken.
    """
    read = gather(folder, {each.run: () for each in known}, (), command=command, common=common)
    outcomes = {outcome.name: outcome for outcome in read.variants}
    trials = sorted((_trial(each, outcomes[each.run]) for each in known), key=_rank)
    best = next((trial.label for trial in trials if trial.status == "finished" and trial.loss is not None), None)
    return SweepResults(
        sweep=folder.name,
        command=command,
        measured=read.measured,
        machine=read.machine,
        common=tuple(common),
        keys=tuple(keys),
        chosen=chosen,
        planned=planned,
        trials=tuple(trials),
        best=best,
    )


def counts(results: SweepResults) -> str:
    """How many trials have become what, in words."""
    order = ("finished", "halted", "diverged", "refused", "failed", "stopped", "begun")
    found = {status: sum(trial.status == status for trial in results.trials) for status in order}
    words = [f"{number} {status}" for status, number in found.items() if number]
    left = results.planned - len(results.trials)
    return ", ".join([*words, *([f"{left} not begun"] if left > 0 else [])]) or "no trials"


def _trial(known: Known, run: Outcome) -> TrialOutcome:
    loss = run.loss if run.loss is not None else run.points[-1].loss if run.points else None
    run = replace(run, settings=())
    return TrialOutcome(known.label, dict(known.parameters), known.status, known.reason, loss, run)


def _rank(trial: TrialOutcome) -> tuple[int, float, float]:
    """Finished ones by loss; of the others those that came farther first."""
    places = ("finished", "halted", "stopped", "begun", "diverged", "failed", "refused")
    place = places.index(trial.status) if trial.status in places else len(places)
    loss = trial.loss if trial.loss is not None else float("inf")
    return place, -trial.run.tokens if place else 0.0, loss
