"""A run that is under way, from another process: its driver is found by name on the cluster where it runs.

That cluster is named by an address, by RAY_ADDRESS, or by the run itself: a file in its folder says where its Ray
answers while it runs, so a local run can be spoken to from any process of the same machine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from ray_diloco.checkpoint.rundir import RunDirectory
from ray_diloco.cluster.session import NAMESPACE, joined
from ray_diloco.errors import ClusterError, DilocoError
from ray_diloco.observe.view import RunView

# Seconds that a driver may take to answer; it does so between two events of its run.
ANSWER_S = 30.0
# Number of the error that another process runs in the run's folder.
UNDER_WAY = 530


@contextmanager
def announced(directory: RunDirectory) -> Iterator[None]:
    """While the block runs, the run's folder says where its Ray answers."""
    # Whether the folder can be written is for the driver to say; a run that is not announced has RAY_ADDRESS.
    before, left = _announced(directory), None
    with contextlib.suppress(OSError):
        directory.path.mkdir(parents=True, exist_ok=True)
        directory.address.write_text(ray.get_runtime_context().gcs_address, encoding="utf-8")
    try:
        yield
    except DilocoError as error:
        # A second command for the same run is refused, and the first one's Ray is that of the run.
        left = before if error.number == UNDER_WAY else None
        raise
    finally:
        with contextlib.suppress(OSError):
            if left is None:
                directory.address.unlink(missing_ok=True)
            else:
                directory.address.write_text(left, encoding="utf-8")


class Control:
    """The driver of a run."""

    def __init__(self, run: str, driver: Any) -> None:
        self._run, self._driver = run, driver

    def scale(self, asked: Mapping[str, int]) -> list[str]:
        """Asks for numbers of islands by region, "" for the whole run; returns those that are wanted now."""
        wanted: list[str] = self._ask("scale", dict(asked))
        return wanted

    def drain(self, island: str) -> None:
        """Asks an island to leave."""
        self._ask("drain", island)

    def stop(self) -> None:
        """Asks the run to stop at its newest commit."""
        self._ask("stop")

    def view(self) -> RunView:
        """The run, now."""
        view: RunView = self._ask("view")
        return view

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._driver, method).remote(*arguments), timeout=ANSWER_S)
        except RayTaskError as error:
            if isinstance(error.cause, DilocoError):
                raise error.cause from None
            raise
        except (GetTimeoutError, RayActorError) as error:
            raise ClusterError(
                206,
                f"the driver of {self._run} gave no answer within {ANSWER_S:g} s: {type(error).__name__}",
                "ask again in a moment; it may be starting, or starting again",
            ) from error


@contextmanager
def control(run: str, root: str = "runs", address: str | None = None) -> Iterator[Control]:
    """The driver of a run, for the length of the block.

    Args:
      run: name of the run, or its folder.
      root: folder of all runs.
      address: of its cluster.

    Raises:
      ClusterError: RD-201, no cluster answers there; RD-205, no run of this name is under way there.
    """
    folder = next((path for path in (Path(root) / run, Path(run)) if path.is_dir()), Path(root) / run)
    directory = RunDirectory(folder.parent, folder.name)
    address = address or os.environ.get("RAY_ADDRESS") or _announced(directory)
    if address is None and not ray.is_initialized():
        raise _none(directory.name, f"{directory.path} names no Ray, and neither does RAY_ADDRESS")
    with joined(address):
        try:
            driver = ray.get_actor(directory.name, namespace=NAMESPACE)
        except ValueError:
            raise _none(directory.name, f"the Ray at {address or 'hand'} knows none") from None
        yield Control(directory.name, driver)


def _announced(directory: RunDirectory) -> str | None:
    try:
        return directory.address.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _none(run: str, where: str) -> ClusterError:
    return ClusterError(
        205,
        f"no run named {run!r} is under way: {where}",
        "see that it runs, and give --root where its folder is elsewhere, or --address of its cluster",
    )
