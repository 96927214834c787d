"""Who goes on: a scheduler for Tune that asks runs to stop instead of ending their actors.

Around Tune's own ASHA, or around none.  Where ASHA says stop, the trial's driver is asked to stop at its newest commit
and the trial ends by itself, its islands with it; so it is with a sweep that is interrupted.  A trial that goes on from
before brings its evaluations along, so that ASHA judges as if nobody had interrupted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import ray
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler

from ray_diloco.cluster.session import NAMESPACE
from ray_diloco.config.schema import Config
from ray_diloco.config.sweep import SweepOptions
from ray_diloco.observe.comparison import Point
from ray_diloco.observe.units import show_count, show_number
from ray_diloco.sweep.record import FAILED, FINISHED, HALTED, STOPPED

Points = Callable[[Config], Sequence[Point]]
# Called with the label of a trial, what it has become, why, its newest loss, and after how many tokens.
Ended = Callable[[str, str, str | None, float | None, int], object]


def judge_of(options: SweepOptions, longest: int) -> TrialScheduler:
    """Tune's scheduler; `longest` is the number of tokens of the longest trial."""
    if options.scheduler == "none":
        return FIFOScheduler()  # type: ignore[no-untyped-call]
    return ASHAScheduler(
        time_attr="tokens",
        metric="loss",
        mode="min",
        max_t=longest,
        grace_period=min(options.grace_tokens or max(1, longest // 8), longest),
        reduction_factor=options.reduction,
        stop_last_trials=False,
    )


class Gate(TrialScheduler):
    """Tune's view of a sweep.

    Args:
      judge: see `judge_of`.
      stop: once it is set, trials stop and none begins.
      ended: is told of every trial that has ended.
      points: gives the evaluations of a run so far.
    """

    def __init__(self, judge: TrialScheduler, stop: threading.Event, ended: Ended, points: Points) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Any: it is also told of trials that Tune does not know.
        self._judge: Any = judge
        self._stop, self._ended, self._points = stop, ended, points
        self._halted: dict[str, str] = {}
        self._asked: set[str] = set()

    def knows(self, label: str, config: Config) -> None:
        """Tells of a trial that has ended before."""
        trial = SimpleNamespace(trial_id=f"before {label}")
        self._judge.on_trial_add(None, trial)
        for point in self._points(config):
            self._judge.on_trial_result(None, trial, {"loss": point.loss, "tokens": point.tokens})

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """Nothing to set."""
        return True

    def on_trial_add(self, tune_controller: Any, trial: TuneTrial) -> None:
        """A trial is queued; what it has evaluated before is judged now."""
        self._judge.on_trial_add(tune_controller, trial)
        for point in self._points(_config(trial)):
            self._weigh(trial, {"loss": point.loss, "tokens": point.tokens})

    def on_trial_result(self, tune_controller: Any, trial: TuneTrial, result: dict[str, Any]) -> str:
        """An evaluation: whoever is to stop is asked to, and goes on until it has."""
        self._weigh(trial, result)
        self._ask_to_stop(trial)
        go_on: str = TrialScheduler.CONTINUE
        return go_on

    def on_trial_complete(self, tune_controller: Any, trial: TuneTrial, result: dict[str, Any]) -> None:
        """A trial has ended."""
        self._judge.on_trial_complete(tune_controller, trial, result)
        status, reason = result.get("status") or STOPPED, result.get("reason")
        if status == STOPPED and trial.trial_id in self._halted:
            status, reason = HALTED, self._halted[trial.trial_id]
        self._end(trial, status, reason, result)

    def on_trial_error(self, tune_controller: Any, trial: TuneTrial) -> None:
        """The process of a trial has died; Tune starts another, unless that was once too often."""
        self._judge.on_trial_remove(tune_controller, trial)
        self._asked.discard(trial.trial_id)
        if not trial.should_recover():  # type: ignore[no-untyped-call]
            self._end(trial, FAILED, f"its process died {trial.num_failures} times", trial.last_result or {})

    def on_trial_remove(self, tune_controller: Any, trial: TuneTrial) -> None:
        """A trial ends before it has begun."""
        self._judge.on_trial_remove(tune_controller, trial)
        if trial.trial_id in self._halted:
            points = self._points(_config(trial))
            newest = {"loss": points[-1].loss, "tokens": points[-1].tokens} if points else {}
            self._end(trial, HALTED, self._halted[trial.trial_id], newest)

    def choose_trial_to_run(self, tune_controller: Any) -> TuneTrial | None:
        """The next trial that may begin; looked for at every step of Tune, so stops are handed on here."""
        for trial in list(tune_controller.get_trials()):
            if self._stop.is_set() or trial.trial_id in self._halted:
                if trial.status == TuneTrial.PENDING:
                    tune_controller.stop_trial(trial)
                elif trial.status == TuneTrial.RUNNING:
                    self._ask_to_stop(trial)
        chosen: TuneTrial | None = self._judge.choose_trial_to_run(tune_controller)
        return chosen

    def __getstate__(self) -> dict[str, Any]:
        """Nothing of it travels: Tune writes what it was given to a file that nobody reads."""
        return {}

    def debug_string(self) -> str:
        """For Tune's log."""
        text: str = self._judge.debug_string()
        return text

    def _weigh(self, trial: TuneTrial, result: Mapping[str, Any]) -> None:
        if self._judge.on_trial_result(None, trial, result) == TrialScheduler.STOP:
            loss, tokens = show_number(result["loss"]), show_count(result["tokens"])
            self._halted.setdefault(trial.trial_id, f"others were ahead of its loss {loss} at {tokens} tokens")

    def _ask_to_stop(self, trial: TuneTrial) -> None:
        """Asks the driver of a trial to stop, once it is there."""
        wanted = self._stop.is_set() or trial.trial_id in self._halted
        if not wanted or trial.trial_id in self._asked:
            return
        try:
            driver = ray.get_actor(_config(trial).run.name, namespace=NAMESPACE)
        except ValueError:
            return
        driver.stop.remote()
        self._asked.add(trial.trial_id)

    def _end(self, trial: TuneTrial, status: str, reason: str | None, result: Mapping[str, Any]) -> None:
        # What has finished has finished, whoever asked it to stop meanwhile.
        reason = None if status == FINISHED else reason
        self._ended(trial.config["trial"], status, reason, result.get("loss"), result.get("tokens", 0))


def _config(trial: TuneTrial) -> Config:
    config: Config = trial.config["task"].composed.config
    return config
