"""One trial as Tune sees it: a run in a thread of its actor, and a result for each evaluation of the run.

The actor is in bundle 0 of the trial's placement group, the driver beside it and the islands in the bundles behind
(`cluster/enclosure.py`).  Whoever wants a trial to end asks the run to stop, which it does at its newest commit; then
the trial reports that it is done.  Only the process of the trial dying is an error to Tune, and then it starts another,
which goes on from the newest commit.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import tune

from ray_diloco.checkpoint.rundir import RunDirectory
from ray_diloco.cluster.build import bundles, labels_of
from ray_diloco.cluster.imports import add_folders
from ray_diloco.config.schema import Config
from ray_diloco.config.typed import Composed
from ray_diloco.errors import DilocoError
from ray_diloco.observe.comparison import Point, points_of
from ray_diloco.observe.lines import read_lines
from ray_diloco.observe.summary import Summary
from ray_diloco.observe.units import show_number
from ray_diloco.observe.view import RunView
from ray_diloco.sweep.record import DIVERGED, FAILED, FINISHED, STOPPED

# Seconds between two looks at the run.
LOOK_S = 0.25
# Seconds that a run may take to stop when Tune ends its trial.
STOP_S = 60.0
# Numbers of errors that say that a run has lost its way: values that are not finite, or strayed far.
ASTRAY = (411, 417, 438, 439, 544)
# Of the resource that only the command's node has: the run directories are there.
HERE_SHARE = 0.001


@dataclass(frozen=True)
class Task:
    """What a trial is asked to do.

    Attributes:
      run: runs a configuration to its end (`api.run`).
      limit: held-out loss above which the trial has diverged, nats per token.
      folder: the command's current folder, which relative paths start from.
      folders: where a user's own modules are imported from.
    """

    composed: Composed
    run: Callable[..., Mapping[str, Any]]
    limit: float
    folder: str
    folders: tuple[str, ...]


class RunTrial(tune.Trainable):
    """A run under the eyes of Tune."""

    def setup(self, config: dict[str, Any]) -> None:
        """Starts the run."""
        task: Task = config["task"]
        os.chdir(task.folder)
        add_folders(task.folders)
        self._task, self._config = task, task.composed.config
        self._stop, self._over = threading.Event(), threading.Event()
        self._lost: str | None = None
        self._ending: tuple[str, str | None] = (FAILED, "it ended without a word")
        points = read_points(self._config)
        # What a run has evaluated before is known to the scheduler.
        self._told = points[-1].round if points else -1
        self._newest = points[-1] if points else None
        self._thread = threading.Thread(target=self._run, name="run", daemon=True)
        self._thread.start()

    def step(self) -> dict[str, Any]:
        """The next evaluation, or how the run ended."""
        while True:
            over = self._over.wait(LOOK_S)
            self._judge()
            for point in read_points(self._config):
                if point.round > self._told:
                    self._told, self._newest = point.round, point
                    self._see(point.loss, f"after round {point.round}")
                    return self._result(point)
            if over:
                status, reason = self._ending
                if self._lost is not None:
                    status, reason = DIVERGED, self._lost
                return self._result(self._newest) | {"done": True, "status": status, "reason": reason}

    def cleanup(self) -> None:
        """Sees that the run has ended: it stops at its newest commit."""
        self._stop.set()
        self._thread.join(STOP_S)

    # What the run shows (see `observe.display.Display`).

    period_s = 0.25

    def update(self, view: RunView) -> None:
        """Looks at the losses of the islands."""
        for island in view.islands:
            if island.loss is not None and not math.isfinite(island.loss):
                self._diverged(f"the training loss of {island.name} is {island.loss} after round {view.round}")

    def note(self, text: str) -> None:
        """Nobody reads it."""

    def close(self, summary: Summary | None = None, folder: str = "") -> None:
        """Nothing to give back."""

    def _run(self) -> None:
        try:
            summary = self._task.run(self._task.composed, display=self, stop=self._stop)
            self._ending = summary["status"], summary.get("reason")
            if summary["status"] == FINISHED and summary["final_eval_loss"] is None:
                self._ending = DIVERGED, "its held-out loss at the end is not a number"
        except DilocoError as error:
            self._ending = (DIVERGED if error.number in ASTRAY else FAILED), f"RD-{error.number}: {error.what}"
        except KeyboardInterrupt:
            self._ending = STOPPED, None
        except Exception as error:  # a defect of one trial must not end the others
            self._ending = FAILED, f"{type(error).__name__}: {error}"
        finally:
            self._over.set()

    def _judge(self) -> None:
        """Looks for evaluations that gave no number, which are no points."""
        for line in read_lines(_metrics(self._config)):
            if line["kind"] == "eval" and line["loss"] is None:
                self._diverged(f"the held-out loss after round {line['round']} is not a number")

    def _see(self, loss: float, when: str) -> None:
        if loss > self._task.limit:
            limit = show_number(self._task.limit)
            self._diverged(f"the held-out loss {when} is {show_number(loss)}, above {limit}")

    def _diverged(self, reason: str) -> None:
        self._lost = self._lost or reason
        self._stop.set()

    @staticmethod
    def _result(point: Point | None) -> dict[str, Any]:
        return {} if point is None else {"loss": point.loss, "tokens": point.tokens, "round": point.round}


def read_points(config: Config) -> Sequence[Point]:
    """The evaluations of a run so far, oldest first."""
    lines = list(read_lines(_metrics(config)))
    return points_of(
        [line for line in lines if line["kind"] == "commit"], [line for line in lines if line["kind"] == "eval"]
    )


def _metrics(config: Config) -> Path:
    return RunDirectory(Path(config.run.root), config.run.name).metrics


def room_of(config: Config, here: str, cpus: float) -> tune.PlacementGroupFactory:
    """The placement group of a trial: driver and anchor on the command's node, then each rank of each island.

    Args:
      config: of the trial.
      here: the resource that only the command's node has.
      cpus: that the trial claims beside those of its islands.
    """
    islands = bundles(config)
    room = [{here: HERE_SHARE, "CPU": cpus}, *(bundle for group in islands.values() for bundle in group)]
    labels = [dict(labels_of(config, name)) for name, group in islands.items() for _ in group]
    more = {"bundle_label_selector": [{}, *labels]} if any(labels) else {}
    return tune.PlacementGroupFactory(room, strategy="PACK", **more)
