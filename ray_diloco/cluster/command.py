"""The command's side of a run: it starts the driver, shows its view, and sees it through restarts.

The command owns what a run must not leave behind: the driver's actor, and the room of the islands, which outlive a
driver that dies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_diloco.checkpoint.rundir import RunDirectory
from ray_diloco.cluster.build import bundles, cpus_needed
from ray_diloco.cluster.control import announced
from ray_diloco.cluster.driver import DriverActor, Job
from ray_diloco.cluster.enclosure import enclosure
from ray_diloco.cluster.imports import own_folders
from ray_diloco.cluster.placement import here, release
from ray_diloco.cluster.roster import end_all
from ray_diloco.cluster.session import ray_session
from ray_diloco.cluster.storage import shared_storage, take_back
from ray_diloco.config.schema import Config
from ray_diloco.config.show import config_yaml
from ray_diloco.config.typed import Composed
from ray_diloco.errors import ClusterError, DilocoError

if TYPE_CHECKING:
    from ray_diloco.data.blocks import Corpus
    from ray_diloco.observe.display import Display
    from ray_diloco.observe.summary import Summary

# Seconds that a driver that died may take to be there again.
RESTART_S = 60.0
# Seconds between two questions whether it is.
AGAIN_S = 0.25


def drive(
    composed: Composed, corpora: Mapping[str, Corpus], heldout: Corpus, display: Display, stop: threading.Event
) -> Summary:
    """Starts the driver and shows its view until its run ends.

    Raises:
      ClusterError: RD-203, a run of this name is under way; RD-204, the driver died too often.
      DilocoError: what ended the run.
    """
    config = composed.config
    with ray_session(config, cpus_needed(config)):
        config = for_any_folder(config)
        storage = shared_storage(config.run.storage or str(_directory(config).path))
        within = enclosure(bundles(config))
        job = Job(config, config_yaml(composed), corpora, heldout, storage, own_folders(), within)
        place: dict[str, Any] = here()  # where the run directory is
        if within is not None:
            place = {"scheduling_strategy": PlacementGroupSchedulingStrategy(within.group, 0)}
        options = {"name": config.run.name, "max_restarts": config.run.max_restarts} | place
        try:
            driver = DriverActor.options(**options).remote(job)
        except ValueError:
            raise ClusterError(
                203,
                f"a run named {config.run.name!r} is under way on this cluster",
                "wait for it, stop it, or choose another run.name",
            ) from None
        try:
            with announced(_directory(config)):
                return _watch(driver, display, stop)
        finally:
            # On a Ray that lives on, its name is free for the next run at once, and nothing of it stays.
            ray.kill(driver)
            end_all(config.run.name)
            release(config.run.name)
            take_back(storage)


def _watch(driver: Any, display: Display, stop: threading.Event) -> Summary:
    """Shows the driver's view until its run ends, hands a stop on to it, and lets a restarted one go on."""
    died = False
    while True:
        ended, asked = driver.run.remote(died), False
        while not ray.wait([ended], timeout=display.period_s)[0]:
            if stop.is_set() and not asked:
                asked = True
                display.note("stopping at the newest commit; once more to leave at once")
                driver.stop.remote()
            _show(driver, display)
        try:
            summary: Summary = ray.get(ended)
        except RayTaskError as error:
            if isinstance(error.cause, DilocoError):
                raise error.cause from None
            raise
        except RayActorError as error:
            if not _is_back(driver):
                raise ClusterError(
                    204,
                    f"the driver died: {str(error).splitlines()[0]}",
                    "run the same command again: it goes on from the last commit",
                ) from error
            display.note("the driver died; another one goes on from the last commit")
            died = True
            continue
        _show(driver, display)
        return summary


def _is_back(driver: Any) -> bool:
    """Waits for Ray to start a driver again; False if it will not."""
    deadline, tick = time.monotonic() + RESTART_S, threading.Event()
    while time.monotonic() < deadline:
        try:
            ray.get(driver.view.remote(), timeout=RESTART_S)
            return True
        except (ActorUnavailableError, GetTimeoutError):
            tick.wait(AGAIN_S)
        except RayActorError:
            return False
    return False


def _show(driver: Any, display: Display) -> None:
    """Shows the driver's view; a driver that ended or is busy is shown next time."""
    try:
        display.update(ray.get(driver.view.remote(), timeout=5.0))
    except (GetTimeoutError, RayActorError):
        return


def _directory(config: Config) -> RunDirectory:
    return RunDirectory(Path(config.run.root), config.run.name)


def for_any_folder(config: Config) -> Config:
    """The configuration with absolute paths: the processes of a run have different working folders."""
    storage = config.run.storage
    if storage is not None and "://" not in storage:
        storage = str(Path(storage).expanduser().absolute())
    return replace(config, run=replace(config.run, root=str(_directory(config).root), storage=storage))
