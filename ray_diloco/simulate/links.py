"""Simulated links: latency and bandwidth each way, shared capacity at the anchor's side, cuts and slow spells.

A transfer takes its latency and the bytes over the narrowest part of the way.  What all islands share at the anchor is
a queue: transfers go through one after the other, which takes as long in sum as sharing it would.
"""

from __future__ import annotations

import asyncio
import math

from ray_diloco.rounds.ports import IslandLost
from ray_diloco.simulate.conditions import LinkSpeed

UP, DOWN = "up", "down"


class Hub:
    """The anchor's side of all links."""

    def __init__(self, speed: LinkSpeed) -> None:
        self._speed = {UP: speed.up_bytes_per_s, DOWN: speed.down_bytes_per_s}
        self._free = {UP: 0.0, DOWN: 0.0}

    def pass_at(self, nbytes: int, way: str, start: float) -> float:
        """When so many bytes that come at `start` are through."""
        if self._speed[way] == 0:
            return start
        self._free[way] = max(start, self._free[way]) + nbytes / self._speed[way]
        return self._free[way]


class Link:
    """The link of one incarnation of an island."""

    def __init__(self, speed: LinkSpeed, hub: Hub, deadline_s: float) -> None:
        self._speed, self._hub, self._deadline_s = speed, hub, deadline_s
        self._cut_until = self._slow_until = 0.0
        self._slow = math.inf

    @property
    def usual(self) -> float:
        """Bytes per second up, in good times."""
        return self._speed.up_bytes_per_s or 1e9

    def cut(self, now: float, seconds: float) -> None:
        """Lets nothing through for a while; 0 seconds: any more."""
        self._cut_until = max(self._cut_until, now + (seconds or math.inf))

    def slow(self, now: float, seconds: float, bytes_per_s: float) -> None:
        """Narrows the link for a while."""
        self._slow_until, self._slow = now + (seconds or math.inf), bytes_per_s

    def ready_at(self, nbytes: int, way: str, now: float) -> float:
        """When a transfer that begins now has arrived; infinity if it never does."""
        own = self._speed.up_bytes_per_s if way == UP else self._speed.down_bytes_per_s
        start = max(now, self._cut_until)
        if math.isinf(start):
            return math.inf
        narrow = min(own or math.inf, self._slow if start < self._slow_until else math.inf)
        arrived = start + self._speed.latency_s + (0.0 if math.isinf(narrow) else nbytes / narrow)
        return max(arrived, self._hub.pass_at(nbytes, way, start))

    async def transfer(self, nbytes: int, way: str) -> None:
        """Waits for a transfer.  Raises IslandLost if it takes longer than the deadline."""
        now = asyncio.get_running_loop().time()
        seconds = self.ready_at(nbytes, way, now) - now
        if seconds > self._deadline_s:
            await asyncio.sleep(self._deadline_s)
            raise IslandLost(f"no answer within {self._deadline_s:g} s: its link is cut or too slow")
        if seconds > 0:
            await asyncio.sleep(seconds)
