"""What ends a run before its last round: too many failures without a commit in between, or one that nobody handles."""

from __future__ import annotations

import asyncio
from collections import Counter

from ray_diloco.errors import SyncError


class Failures:
    """The failures of a run since its last commit.

    Args:
      most: how often in a row a run bears that the same island is lost, or that a round is void; islands that are lost
        together, with their region, say, are no sign that it cannot go on.

    Attributes:
      ended: fails with what ends the run.
    """

    def __init__(self, most: int) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._most = most
        self._counts: Counter[str] = Counter()

    def count(self, what: str, island: str = "") -> None:
        """Notes the loss of an island, or another failure; RD-490 if it is one too many."""
        self._counts[island] += 1
        if self._counts[island] > self._most and not self.ended.done():
            self.ended.set_exception(
                SyncError(
                    490,
                    f"{self._counts[island]} failures in a row without a commit; the last: {what}",
                    "look at events.jsonl for the first of them; the same command goes on from the last commit",
                )
            )

    def forget(self) -> None:
        """Notes a commit."""
        self._counts.clear()

    def end_with(self, task: asyncio.Task[None]) -> None:
        """Ends the run with the error of a task that nobody awaits, if it has one."""
        if not task.cancelled() and (error := task.exception()) is not None and not self.ended.done():
            self.ended.set_exception(error)
