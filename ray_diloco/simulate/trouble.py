"""What goes wrong for one incarnation of an island: faults of the plan at named points, others by rate.

Faults of the plan are looked up at the points that the island passes.  Failures by rate are drawn when it starts: it
dies, freezes or loses its link at times of its own, whatever it is doing then.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from random import Random

from ray_diloco.rounds.faults import (
    CORRUPT_PAYLOAD,
    DROP_LINK,
    EXIT,
    FREEZE,
    NAN_DELTA,
    SLOW_LINK,
    STALE_EPOCH,
    Fault,
    FaultPlan,
)
from ray_diloco.rounds.ports import IslandLost
from ray_diloco.simulate.conditions import Conditions, waiting_time
from ray_diloco.simulate.links import Link

# A slow link by rate has this part of its speed left.
SLOW_PART = 0.1


class Trouble:
    """The misfortunes of one incarnation.

    Args:
      plan: of the run.
      driver: called with round and point; does not return if the driver ends there.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        conditions: Conditions,
        plan: FaultPlan,
        link: Link,
        driver: Callable[[int, str], None],
        now: float,
    ) -> None:
        self._name, self._incarnation, self._conditions = name, incarnation, conditions
        self._plan, self._link, self._driver = plan, link, driver
        self.damage = ""
        self._later: Fault | None = None
        self.lost, self.lost_at = "", 0.0
        rates = conditions.rates
        self._dies = self._freezes = self._cut = self._slow = math.inf
        self._luck: Random | None = None
        if any((rates.exit, rates.freeze, rates.cut, rates.slow, rates.corrupt, rates.nan)):
            luck = self._luck = conditions.luck("trouble", name, incarnation, round(now * 1e6))
            self._dies, self._freezes = (now + waiting_time(luck, rate) for rate in (rates.exit, rates.freeze))
            self._cut, self._slow = (now + waiting_time(luck, rate) for rate in (rates.cut, rates.slow))

    async def pass_(self, round_: int, phase: str) -> None:
        """Passes a point: what the plan has for it happens, to the driver or the island."""
        if not self._plan:
            return
        self._driver(round_, phase)
        fault = self._plan.at(self._name, round_, phase, self._incarnation)
        if fault is not None:
            await self._strike(fault)

    def wait_at(self, round_: int, phase: str) -> None:
        """Passes a point at which nobody calls the island: what happens there is noticed at the next call."""
        if not self._plan:
            return
        self._driver(round_, phase)
        self._later = self._plan.at(self._name, round_, phase, self._incarnation) or self._later

    async def called(self) -> None:
        """Begins a call: what happened since the last one is noticed."""
        if self.lost:
            raise IslandLost(self.lost)
        fault, self._later = self._later, None
        if fault is not None:
            await self._strike(fault)

    async def spend(self, seconds: float) -> None:
        """Lets time pass; an island that fails meanwhile raises when that is noticed."""
        if self._luck is None:
            await asyncio.sleep(seconds)
            return
        now = asyncio.get_running_loop().time()
        end = min(self._dies, self._freezes)
        if end > now + seconds:
            self._trouble_links(now, now + seconds)
            await asyncio.sleep(seconds)
            return
        await asyncio.sleep(max(0.0, end - now))
        await self._fail(EXIT if end == self._dies else FREEZE)

    def spoil(self) -> str:
        """What is wrong with the contribution that is being sent: a kind of fault, or nothing."""
        damage, self.damage = self.damage, ""
        if damage or self._luck is None:
            return damage
        rates, draw = self._conditions.rates, self._luck.random()
        return CORRUPT_PAYLOAD if draw < rates.corrupt else NAN_DELTA if draw < rates.corrupt + rates.nan else ""

    async def _strike(self, fault: Fault) -> None:
        now = asyncio.get_running_loop().time()
        if fault.kind == EXIT:
            await self._fail(EXIT)
        elif fault.kind == FREEZE and 0 < fault.seconds < self._conditions.silence_s:
            await asyncio.sleep(fault.seconds)
        elif fault.kind == FREEZE:
            await self._fail(FREEZE)
        elif fault.kind == DROP_LINK:
            self._link.cut(now, fault.seconds)
        elif fault.kind == SLOW_LINK:
            self._link.slow(now, fault.seconds, fault.bytes_per_s)
        elif fault.kind in (CORRUPT_PAYLOAD, NAN_DELTA, STALE_EPOCH):
            self.damage = fault.kind

    async def _fail(self, kind: str) -> None:
        conditions = self._conditions
        seconds = conditions.detect_s if kind == EXIT else conditions.silence_s
        self.lost_at = asyncio.get_running_loop().time()
        self.lost = "a rank died" if kind == EXIT else f"no sign of life for {conditions.silence_s:g} s"
        await asyncio.sleep(seconds)
        raise IslandLost(self.lost)

    def _trouble_links(self, now: float, until: float) -> None:
        luck, rates, lasts = self._luck, self._conditions.rates, self._conditions.rates.trouble_s
        if luck is None:
            return
        if self._cut <= until:
            self._link.cut(now, lasts)
            self._cut = until + waiting_time(luck, rates.cut)
        if self._slow <= until:
            self._link.slow(now, lasts, self._link.usual * SLOW_PART)
            self._slow = until + waiting_time(luck, rates.slow)
