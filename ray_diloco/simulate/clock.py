"""An event loop whose time is virtual: it never waits, it jumps to the next timer.

`asyncio.sleep`, time-outs and `loop.time()` all follow, so the run loop needs no clock of its own and a simulated
hour takes as long as its events.  Ready callbacks run in the order in which they were scheduled: a run is
deterministic.  There are no sockets and no threads in it, so a loop costs next to nothing to make.

Times drawn at random never meet, while a real loop that was held up finds everything that came meanwhile at once.
`Crowding` makes timers meet, and what meets come so many turns of the loop apart.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from contextvars import Context
from dataclasses import dataclass
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


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


@dataclass(frozen=True)
class Crowding:
    """Timers go off at multiples of `grid_s` seconds, each up to `MOST_TURNS` turns of the loop after that."""

    grid_s: float
    luck: random.Random


# A stop takes about eight turns from its cause to the end of a run.
MOST_TURNS = 12


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop on virtual time, which starts at `start` seconds."""

    def __init__(self, start: float = 0.0, crowding: Crowding | None = None) -> None:
        super().__init__()
        self._selector, self._crowding = _Jump(start), crowding

    def time(self) -> float:
        """Virtual seconds."""
        return self._selector.now

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio.loop.call_at`."""
        crowding = self._crowding
        if crowding is None:
            return super().call_at(when, callback, *args, context=context)

        def turn(left: int) -> None:
            if left and not handle.cancelled():
                self.call_soon(turn, left - 1, context=context)
            elif not handle.cancelled():
                callback(*args)

        # Rounded first: a sum of multiples may lie a little beyond one.
        at = math.ceil(round(when / crowding.grid_s, 6)) * crowding.grid_s
        turns = crowding.luck.randint(0, MOST_TURNS)
        handle = super().call_at(max(at, when), turn, turns, context=context)
        return handle

    def _process_events(self, event_list: list[Any]) -> None:
        """There is nothing to read from."""

    def _write_to_self(self) -> None:
        """Nobody wakes a loop that never sleeps."""


def run_virtual(main: Coroutine[Any, Any, T], start: float = 0.0, crowding: Crowding | None = None) -> T:
    """Runs a coroutine to its end on a loop of its own with virtual time; what it leaves behind is cancelled.

    Raises:
      Stuck: if the coroutine can never end because all tasks wait for one another.
    """
    loop = VirtualLoop(start, crowding)
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
