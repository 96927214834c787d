"""An event loop whose time is virtual: it never waits, it jumps to the next timer.

`asyncio.sleep`, time-outs and `loop.time()` all follow, so the run loop needs no clock of its own and a simulated
hour takes as long as its events.  Ready callbacks run in the order in which they were scheduled: a run is
deterministic.  There are no sockets and no threads in it, so a loop costs next to nothing to make.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(RuntimeError):
    """Nothing is scheduled and nothing is ready: the tasks of a loop wait for one another."""


class _Jump:
    """What stands in for a selector: it advances the loop's time by the time-out instead of waiting for it."""

    def __init__(self, now: float) -> None:
        self.now = now

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("nothing is scheduled and nothing is ready: every task of this loop waits for ever")
        self.now += timeout
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop on virtual time, which starts at `start` seconds."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self._selector = _Jump(start)

    def time(self) -> float:
        """Virtual seconds."""
        return self._selector.now

    def _process_events(self, event_list: list[Any]) -> None:
        """There is nothing to read from."""

    def _write_to_self(self) -> None:
        """Nobody wakes a loop that never sleeps."""


def run_virtual(main: Coroutine[Any, Any, T], start: float = 0.0) -> T:
    """Runs a coroutine to its end on a loop of its own with virtual time; what it leaves behind is cancelled.

    Raises:
      Stuck: if the coroutine can never end because all tasks wait for one another.
    """
    loop = VirtualLoop(start)
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        try:
            _cancel_all(loop)
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    # What nobody will ask for any more need not be reported.
    loop.set_exception_handler(lambda loop, context: None)
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
