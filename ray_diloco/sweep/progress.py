"""What a person sees while a sweep goes on: a line when a trial begins, evaluates and ends, and how many are left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from ray.tune.progress_reporter import TrialProgressCallback

from ray_diloco.observe.units import show_count, show_number
from ray_diloco.sweep.record import DECIDED, FINISHED, Entry

# Seconds between two lines about evaluations of one trial.
QUIET_S = 5.0


class Progress(TrialProgressCallback):
    """Lines of a sweep; also Tune's callback, by which it hears of trials that begin and of evaluations.

    It stands in the place of Tune's own, which prints every result of every trial.

    Args:
      planned: how many trials there will be.
      quiet: say nothing.
      stream: default: standard output.
    """

    def __init__(self, planned: int, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._planned, self._quiet, self._stream = planned, quiet, stream
        self._clock: Callable[[], float] = time.monotonic
        self._numbers: dict[str, int] = {}
        self._spoke: dict[str, float] = {}
        self._best: tuple[float, str] | None = None

    def say(self, text: str) -> None:
        """One line, now."""
        if not self._quiet:
            print(f"{time.strftime('%H:%M:%S')}  {text}", file=self._stream or sys.stdout, flush=True)

    def ended(self, entry: Entry, before: bool = False) -> None:
        """A trial has ended, or has been found to have `before`."""
        words = entry.status + (f": {' '.join(entry.reason.split())}" if entry.reason else "")
        if entry.status == FINISHED:
            words = f"finished, held-out loss {show_number(entry.loss)}"
            if entry.loss is not None and (self._best is None or entry.loss < self._best[0]):
                self._best = entry.loss, entry.label
                words += ", the best so far"
        if entry.status not in DECIDED and entry.reason is None:
            words += "; the same command goes on from here"
        self.say(f"{self._name(entry.label)} {'was ' if before else ''}{words}")

    def __getstate__(self) -> dict[str, Any]:
        """Nothing of it travels: Tune writes what it was given to a file that nobody reads."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial begins."""
        self.say(f"{self._name(trial.config['trial'])} begins")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Nothing: the gate tells how a trial ended."""

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Nothing: the gate tells how a trial ended."""

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """The process of a trial died, and another goes on."""
        self.say(f"{self._name(trial.config['trial'])} lost its process; another one goes on from the last commit")

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """A trial has evaluated; said now and then."""
        label, now = trial.config["trial"], self._clock()
        if result.get("done") or "loss" not in result or now - self._spoke.get(label, -QUIET_S) < QUIET_S:
            return
        self._spoke[label] = now
        loss, tokens = show_number(result["loss"]), show_count(result["tokens"])
        self.say(f"{self._name(label)} round {result['round']}, {tokens} tokens: held-out loss {loss}")

    def _name(self, label: str) -> str:
        number = self._numbers.setdefault(label, len(self._numbers) + 1)
        return f"[{number}/{max(self._planned, number)}] {label}"
