"""An event loop whose time is virtual: it never waits, it jumps to the next timer.

`asyncio.sleep`, time-outs and `loop.time()` all follow, so the run loop needs no clock of its own and a simulated
hour takes as long as its events.  Ready callbacks run in the order in which they were scheduled: a run is
deterministic.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.DefaultSelector):
    """A selector that advances the loop's time by the time-out instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("nothing is scheduled and nothing is ready: every task of this loop waits for ever")
        self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time, which starts at 0.0 seconds."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jump.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end on a loop of its own with virtual time.

    Raises:
      RuntimeError: if the coroutine can never end because all tasks wait for one another.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
