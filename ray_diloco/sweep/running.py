"""The trials of a sweep under Ray Tune: which are let in, and Tune itself, told to be quiet.

What a trial does comes from the door (`tuning.py`) as functions, since nothing below the doors knows them.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from ray_diloco.cluster.build import bundles, labels_of
from ray_diloco.cluster.command import for_any_folder
from ray_diloco.cluster.imports import own_folders
from ray_diloco.cluster.placement import check_feasible
from ray_diloco.config.schema import Config
from ray_diloco.config.sweep import Sweep, Trial, tokens_per_round
from ray_diloco.config.typed import Composed
from ray_diloco.errors import DataError, InfeasibleError
from ray_diloco.sweep.progress import Progress
from ray_diloco.sweep.record import BEGUN, DIVERGED, FINISHED, HALTED, REFUSED, Record
from ray_diloco.sweep.trial import RunTrial, Task, read_points, room_of


class Keeper:
    """Knows which trials are decided, and lets in those that are left.

    Args:
      sweep: what is tried.
      record: what is known of trials.
      run: runs a configuration (`api.run`).
      prepare: prepares the data of one (`api.prepare_data`).
      finished: whether the run of one has ended with all its rounds.
      quiet: say nothing.
    """

    def __init__(
        self,
        sweep: Sweep,
        record: Record,
        run: Callable[..., Mapping[str, Any]],
        prepare: Callable[[Config], tuple[Any, Any]],
        finished: Callable[[Config], bool],
        *,
        quiet: bool = False,
    ) -> None:
        self.record, self.progress = record, Progress(sweep.planned, quiet)
        self._sweep, self._run, self._prepare, self._finished = sweep, run, prepare, finished
        self._folders, self._vocabularies = own_folders(), dict[str, int]()

    def is_decided(self, trial: Trial) -> bool:
        """Whether nothing of a trial is left to run."""
        known = self.record.entries.get(trial.label)
        if trial.composed is None or (known is not None and known.status in (HALTED, DIVERGED)):
            return True
        return self._finished(trial.config)

    def find_decided(self, trial: Trial) -> bool:
        """Notes and tells of a trial of which nothing is left to run; False if something is."""
        if not self.is_decided(trial):
            return False
        known = self.record.entries.get(trial.label)
        if trial.refusal is not None:
            self._refuse(trial, f"RD-{trial.refusal.number}: {trial.refusal.what}")
        elif known is not None and known.status in (FINISHED, HALTED, DIVERGED):
            self.progress.ended(known, before=True)
        else:
            points = read_points(trial.config)
            loss, tokens = (points[-1].loss, points[-1].tokens) if points else (None, 0)
            entry = self.record.note(trial.label, trial.parameters, FINISHED, loss=loss, tokens=tokens)
            self.progress.ended(entry, before=True)
        return True

    def admit(self, trial: Trial, known: Callable[[str, Config], object]) -> dict[str, Any] | None:
        """What Tune is given of a trial; None if it is not to be run.  `known` is told of trials that have run."""
        if self.find_decided(trial):
            if trial.composed is not None:
                known(trial.label, trial.config)
            return None
        config = trial.config
        try:
            islands = bundles(config)
            check_feasible(islands, {name: labels_of(config, name) for name in islands})
            limit = self._sweep.options.diverged * math.log(self._vocabulary(config))
        except (InfeasibleError, DataError) as error:
            self._refuse(trial, f"RD-{error.number}: {error.what.splitlines()[0]}")
            return None
        self.record.note(trial.label, trial.parameters, BEGUN)
        assert trial.composed is not None
        composed = Composed(for_any_folder(config), trial.composed.origins)
        return {"trial": trial.label, "task": Task(composed, self._run, limit, os.getcwd(), self._folders)}

    def ended(self, label: str, status: str, reason: str | None, loss: float | None, tokens: int) -> None:
        """Notes and tells how a trial ended."""
        parameters = self.record.entries[label].parameters
        self.progress.ended(self.record.note(label, parameters, status, reason=reason, loss=loss, tokens=tokens))

    def _refuse(self, trial: Trial, reason: str) -> None:
        self.progress.ended(self.record.note(trial.label, trial.parameters, REFUSED, reason=reason))

    def _vocabulary(self, config: Config) -> int:
        """Size of a trial's vocabulary; its data is prepared here, once for all trials that have the same."""
        key = repr((config.data, config.tokenizer, config.islands.overrides))
        if key not in self._vocabularies:
            self.progress.say("preparing data")
            self._vocabularies[key] = self._prepare(config)[1].vocab_size
        return self._vocabularies[key]


def run_trials(sweep: Sweep, proposed: Sequence[Trial], keeper: Keeper, stop: threading.Event) -> None:
    """Has Tune run what is left, until all is decided or `stop` is set."""
    _silence()
    from ray import tune

    from ray_diloco.sweep.gate import Gate, judge_of
    from ray_diloco.sweep.proposals import Proposals

    options = sweep.options
    configs = [trial.config for trial in proposed if trial.composed is not None] or [sweep.base.config]
    longest = max(options.tokens, *(config.run.rounds * tokens_per_round(config) for config in configs))
    gate = Gate(judge_of(options, longest), stop, keeper.ended, read_points)
    here = _this_node()

    class SweepTrial(RunTrial):
        @classmethod
        def default_resource_request(cls, config: dict[str, Any]) -> Any:
            return room_of(config["task"].composed.config, here, options.cpus)

    with tempfile.TemporaryDirectory(prefix="ray_diloco-tune-") as scratch:
        tuner = tune.Tuner(
            SweepTrial,
            tune_config=tune.TuneConfig(
                num_samples=-1,
                search_alg=Proposals(sweep, keeper.record.entries, lambda t: keeper.admit(t, gate.knows), stop),
                scheduler=gate,
                max_concurrent_trials=options.concurrent or None,
                reuse_actors=False,
                trial_name_creator=lambda trial: str(trial.config["trial"]),
                trial_dirname_creator=lambda trial: f"{trial.config['trial']}-{trial.trial_id}",
            ),
            run_config=tune.RunConfig(
                name=sweep.name,
                storage_path=scratch,
                callbacks=[keeper.progress],
                failure_config=tune.FailureConfig(max_failures=options.retries),
                # The commits of the run are its checkpoints.
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                verbose=0,
            ),
        )
        tuner.fit()


def _this_node() -> str:
    """The resource that only this node has."""
    here = ray.get_runtime_context().get_node_id()
    resources = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == here)  # type: ignore[no-untyped-call]
    return str(next(key for key in resources if key.startswith("node:") and "__" not in key))


def _silence() -> None:
    """Tune writes no logs of its own and leaves signals to us; read when it is imported."""
    os.environ |= {
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
        "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
        "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
        "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "0",
        "RAY_AIR_NEW_OUTPUT": "0",
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
    }
    for name in ("ray.tune", "ray.air", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)
