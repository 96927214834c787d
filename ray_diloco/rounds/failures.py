"""What ends a run before its last round: too many failures without a commit in between, or one that nobody handles."""

from __future__ import annotations

import asyncio

from ray_diloco.errors import SyncError


class Failures:
    """The failures of a run since its last commit.

    Args:
      most: islands lost, or rounds voided, in a row that a run bears.

    Attributes:
      ended: fails with what ends the run.
    """

    def __init__(self, most: int) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._most, self._count = most, 0

    def count(self, what: str) -> None:
        """Notes a failure; RD-490 if it is one too many."""
        self._count += 1
        if self._count > self._most and not self.ended.done():
            self.ended.set_exception(
                SyncError(
                    490,
                    f"{self._count} failures in a row without a commit; the last: {what}",
                    "look at events.jsonl for the first of them; the same command goes on from the last commit",
                )
            )

    def forget(self) -> None:
        """Notes a commit."""
        self._count = 0

    def end_with(self, task: asyncio.Task[None]) -> None:
        """Ends the run with the error of a task that nobody awaits, if it has one."""
        if not task.cancelled() and (error := task.exception()) is not None and not self.ended.done():
            self.ended.set_exception(error)
