"""One round of one fragment: offers come in until the quorum closes it.

`all` closes when every expected island has offered or left; `at_least` when `n` have, plus a grace window for those
who are nearly there; `immediate` with the first, plus that window.  A deadline, counted from the first offer, closes
any.  The rendezvous knows nothing of merging: it resolves `closed`, and the loop takes the offers from there.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from ray_diloco.outer.schedule import Due
from ray_diloco.rounds.ports import Offer, Outcome


@dataclass(frozen=True, slots=True)
class Quorum:
    """When a round closes.  `n` islands for `at_least`; times in seconds, 0 means none.

    `fraction` above 0 takes the place of `n`: that part, rounded up, of the islands that are present, however many that
    is now.  A fixed `n` stays; fewer islands than that wait for one another until all of them have offered.
    `carry`: a contribution that comes after its round has closed is merged in the next one, with its age.
    """

    kind: str = "all"
    n: int = 1
    grace_s: float = 0.0
    deadline_s: float = 0.0
    carry: bool = False
    fraction: float = 0.0

    def enough(self, present: int) -> int:
        """How many offers open the grace window, where so many islands are present."""
        return max(1, math.ceil(self.fraction * present - 1e-9)) if self.fraction > 0 else self.n


class Rendezvous:
    """Collects offers for one round.

    Args:
      due: the round.
      quorum: when it closes.
      expected: says which islands are to offer at present; asked again whenever something changes.
      expects: the same of one island.
    """

    def __init__(
        self, due: Due, quorum: Quorum, expected: Callable[[], set[str]], expects: Callable[[str], bool]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.due = due
        self.offers: dict[str, Offer] = {}
        self.refused: set[str] = set()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.outcome: asyncio.Future[Outcome] = loop.create_future()
        self._quorum = quorum
        self._expected = expected
        self._expects = expects
        # Some of those that were awaited when it was last looked; the last one often still is.
        self._candidates: list[str] = []
        # Islands that were present then; 0: not counted since membership changed.
        self._present = 0
        self._timers: list[asyncio.TimerHandle] = []
        self._grace_runs = False

    @classmethod
    def void(cls, due: Due) -> Rendezvous:
        """A round that is over, for an island that comes long after it."""
        past = cls(due, Quorum(), set, lambda name: False)
        past.closed.set_result(None)
        past.outcome.set_result(Outcome(due.fragment, due.round, None))
        return past

    @property
    def awaited(self) -> set[str]:
        """Islands that the round still waits for."""
        return self._expected() - self.offers.keys() - self.refused

    def offer(self, offer: Offer) -> bool:
        """Takes an offer.  Returns False if the round closed before it came."""
        if self.closed.done():
            return False
        if not self.offers and self._quorum.deadline_s > 0:
            self._call_later(self._quorum.deadline_s)
        self.offers[offer.island] = offer
        self._look()
        return True

    def take(self) -> list[Offer]:
        """Hands over the offers in sorted island order; the rendezvous keeps none, they are as large as models."""
        offers = [self.offers[name] for name in sorted(self.offers)]
        self.offers.clear()
        return offers

    def refuse(self, island: str) -> None:
        """Counts an island as heard but not contributing."""
        self.refused.add(island)
        self._look()

    def reconsider(self) -> None:
        """Closes the round if the quorum says so; to be called whenever membership changes."""
        self._present = 0
        self._look()

    def _look(self) -> None:
        if self.closed.done():
            return
        enough = self._quorum.kind != "all" and self._is_enough()
        if ((self.offers or self.refused) and not self._awaits()) or (enough and self._quorum.grace_s == 0):
            self._close()
        elif enough and not self._grace_runs:
            self._grace_runs = True
            self._call_later(self._quorum.grace_s)

    def _is_enough(self) -> bool:
        """Whether the grace window opens; islands are counted again only if there may be enough."""
        if self._quorum.fraction > 0 and len(self.offers) >= self._quorum.enough(self._present):
            self._present = len(self._expected() | self.offers.keys() | self.refused)
        return len(self.offers) >= self._quorum.enough(self._present)

    def _awaits(self) -> bool:
        """Whether anybody is awaited, without looking at everybody each time."""
        while self._candidates:
            name = self._candidates[-1]
            if name not in self.offers and name not in self.refused and self._expects(name):
                return True
            self._candidates.pop()
        self._candidates = sorted(self.awaited, reverse=True)
        return bool(self._candidates)

    def _call_later(self, seconds: float) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, self._close))

    def _close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        if not self.closed.done():
            self.closed.set_result(None)
