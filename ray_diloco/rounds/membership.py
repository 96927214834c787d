"""Which islands a run has and which it shall have: slots, requests to scale and drain, quarantine, the minimum.

A slot is a name that an island may have.  A slot that is wanted is filled as soon as there is room for it; one whose
island is asked to leave lets it finish its segment, for a while, and what was trained is credited or goes back.  Every
change of who takes part goes through a method here that writes its event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any

from ray_diloco.errors import ClusterError
from ray_diloco.rounds.clock import now
from ray_diloco.rounds.members import ABSENT, Member, State
from ray_diloco.rounds.plans import Planner
from ray_diloco.rounds.ports import IslandLost, Journal
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rules import Rules


class Membership:
    """The slots of a run.

    Attributes:
      lives: by slot, the task of the incarnation that is under way.
      waiting: for which islands the run waits because there are too few, in words; empty: it does not.
    """

    def __init__(
        self, rules: Rules, position: Position, members: dict[str, Member], journal: Journal, plans: Planner
    ) -> None:
        self._rules, self._position, self._members = rules, position, members
        self._journal, self._plans = journal, plans
        # Those that somebody asked for, and those that may come by themselves when there is room.
        self._asked_for = set(rules.initial)
        self._spare = set(rules.islands) - self._asked_for if rules.grows else set()
        self._unplaced: set[str] = set()
        self._seeking: set[str] = set()
        # Slots that stay empty for a while: until a round, and until a time.
        self._until_round: dict[str, int] = {}
        self._until: dict[str, float] = {}
        self._door = asyncio.Semaphore(rules.joins) if rules.joins else None
        self.lives: dict[str, asyncio.Task[bool]] = {}
        self.waiting = ""

    # Who shall be there.

    @property
    def slots(self) -> list[str]:
        """Slots that are to be filled now, or as soon as there is room."""
        return [name for name in self._rules.islands if name in self._asked_for or name in self._spare]

    def keep(self, names: Iterable[str]) -> None:
        """Wants these as well, as far as the run can have them."""
        self._asked_for |= self._rules.islands.keys() & set(names)

    def scale(self, asked: Mapping[str, int]) -> list[str]:
        """Asks for numbers of islands by region ("" is the whole run); returns the slots that are wanted from now on.

        Raises:
          ClusterError: RD-207, more than there may be; RD-208, there is no such region; RD-209, the run cannot change.
        """
        if self._rules.fixed:
            raise ClusterError(
                209,
                "every island of this run has its own anchor, so their number is fixed",
                "islands.count, and resume",
            )
        wanted = set(self._asked_for)
        for region, count in asked.items():
            slots = [name for name, plan in self._rules.islands.items() if region in ("", plan.region)]
            if not slots:
                regions = sorted({plan.region for plan in self._rules.islands.values() if plan.region})
                raise ClusterError(
                    208, f"the run has no region {region!r}", f"regions: {', '.join(regions) or 'none, give a number'}"
                )
            if count > len(slots):
                raise ClusterError(
                    207, f"{count} islands{f' in {region}' * bool(region)} are more than the {len(slots)} that the run "
                    "can have", "continue it with a larger islands.max"
                )  # fmt: skip
            # Those that are there stay rather than others come.
            order = sorted(slots, key=lambda name: (not self._here(name), name not in self._asked_for))
            wanted = (wanted - set(slots)) | set(order[:count])
        if len(wanted) > self._rules.most:
            raise ClusterError(
                207, f"{len(wanted)} islands are more than islands.max={self._rules.most}", "ask for fewer"
            )
        leaving = [name for name in self._rules.islands if self._here(name) and name not in wanted]
        self._asked_for, self._spare = wanted, set()
        self._journal.event("scale_requested", islands=sorted(wanted))
        for name in leaving:
            self._ask_to_leave(name, "fewer islands are wanted")
        self._recall()
        self._plans.pulse()
        return sorted(wanted)

    def drain(self, name: str, reason: str = "asked to", *, returns: bool = False) -> None:
        """Asks an island to leave; with `returns`, its slot is filled again after a while.

        Without, no other takes its room by itself until somebody asks for a number.

        Raises:
          ClusterError: RD-208, there is no such island.
        """
        if name not in self._members or not (name in self._asked_for or self._here(name)):
            if returns:
                return
            here = sorted(name for name in self._members if self._here(name))
            raise ClusterError(208, f"the run has no island {name!r}", f"islands: {', '.join(here) or 'none now'}")
        if returns:
            self._until[name] = now() + self._rules.away_s
            asyncio.get_running_loop().call_later(self._rules.away_s, self._plans.pulse)
        else:
            self._asked_for |= {other for other in self._spare if self._here(other)}
            self._asked_for.discard(name)
            self._spare.clear()
            self._recall()
        self._ask_to_leave(name, reason)

    def _recall(self) -> None:
        """Ends the search for room of slots that nobody wants any more."""
        for name in sorted(self._seeking - self._asked_for - self._spare):
            self._send_away(name, "it is not wanted any more")

    def _ask_to_leave(self, name: str, reason: str) -> None:
        self._journal.event("drain_requested", island=name, reason=reason)
        self._send_away(name, reason)

    def banish(self, name: str, reason: str) -> bool:
        """Puts an island into quarantine, unless too few would be left; returns whether it did."""
        present = [member.name for member in self._plans.present()]
        member = self._members[name]
        if member.leaving or len(set(present) - {name}) < max(1, self._rules.min_islands):
            return False
        self._until_round[name] = self._position.round + self._rules.guard.rounds
        self._send_away(name, reason)
        return True

    def _send_away(self, name: str, reason: str) -> None:
        member, life = self._members[name], self.lives.get(name)
        # A slot that is empty has nobody to send away: it is closed, which is enough.
        if not member.leaving and life is not None and not life.done():
            member.leaving = reason
            self._plans.unplan(name)
            if member.state in (*ABSENT, State.LAUNCHING):
                self._drop(member)
            else:
                asyncio.get_running_loop().call_later(self._rules.drain_s, self._drop, member)
        self._plans.pulse()

    def _drop(self, member: Member) -> None:
        """Ends an island that has had its time to leave; the last evaluation of a run is worth waiting for."""
        life = self.lives.get(member.name)
        if self._members.get(member.name) is not member or life is None or self._plans.complete:
            return
        if member.state is State.JOINING and not self._position.founded:
            # It may be founding the run, which happens whole or not at all.
            asyncio.get_running_loop().call_later(self._rules.drain_s, self._drop, member)
        else:
            life.cancel()

    # Slots.

    async def opened(self, name: str) -> None:
        """Waits until an island is wanted in a slot."""
        while not self._open(name):
            await self._plans.changed()
        if name in self._unplaced or name not in self._rules.initial:
            self._seeking.add(name)

    def _open(self, name: str) -> bool:
        if self._plans.complete:
            # Whoever was there until now may still be needed for the last evaluation; nobody else.
            return name in self._asked_for
        if now() < self._until.get(name, 0.0) or (self._banished(name) and not self._short):
            return False
        return name in self._asked_for or (name in self._spare and self._may_grow(name))

    def _banished(self, name: str) -> bool:
        return self._position.round < self._until_round.get(name, 0)

    def _may_grow(self, name: str) -> bool:
        """Whether one island more may be; one of each region looks for room at a time."""
        region = self._rules.islands[name].region
        there = {other for other in self._members if self._here(other)} | self._seeking | self._asked_for
        rivals = {other for other in self._seeking if self._rules.islands[other].region == region}
        return not rivals and len(there) < self._rules.most

    @contextmanager
    def seeking(self, member: Member) -> Iterator[bool]:
        """While the block runs, a slot looks for room; gives whether it has to, since nobody knows of any."""
        try:
            yield member.name in self._seeking
        finally:
            self._seeking.discard(member.name)

    def may_fail(self, member: Member) -> bool:
        """True if a run that cannot place this island goes on without it: it is none of those it began with."""
        first = member.incarnation == 0 and member.name in self._rules.initial
        return self._rules.grows or not first or self._plans.begun

    def door(self) -> AbstractAsyncContextManager[Any]:
        """What an island passes while it takes up the anchor: so many at a time where others are under way."""
        return self._door if self._door is not None and self._plans.under_way else nullcontext()

    # Transitions that change who takes part.

    def launching(self, member: Member) -> None:
        """The start of an island's ranks begins."""
        member.to(State.LAUNCHING)
        self._journal.event("island_launching", island=member.name, incarnation=member.incarnation)

    def unplaced(self, member: Member, reason: str) -> None:
        """There was no room for it."""
        member.to(State.VACANT)
        self._unplaced.add(member.name)
        self._journal.event("island_unplaced", island=member.name, incarnation=member.incarnation, reason=reason)

    def joined(self, member: Member, region: str) -> None:
        """It has adopted the newest commit and waits to be admitted."""
        member.to(State.READY)
        self._unplaced.discard(member.name)
        self._journal.event("island_joined", island=member.name, incarnation=member.incarnation, region=region or None)

    def lost(self, member: Member, lost: IslandLost) -> None:
        """It has failed."""
        member.to(State.LOST)
        self._journal.event(
            "island_lost",
            island=member.name,
            incarnation=member.incarnation,
            how=lost.how,
            reason=str(lost),
            silent_s=lost.silent_s,
        )
        if lost.stacks:
            self._journal.event(
                "stacks_dumped", island=member.name, incarnation=member.incarnation, stacks=list(lost.stacks)
            )
        if self._banished(member.name):
            self._quarantined(member)

    def left(self, member: Member) -> None:
        """It has gone because it was asked to; one that never came has not."""
        if member.state is State.VACANT:
            return
        if self._banished(member.name):
            self._quarantined(member)
        else:
            member.to(State.LEFT)
            self._journal.event(
                "island_left", island=member.name, incarnation=member.incarnation, reason=member.leaving
            )

    def _quarantined(self, member: Member) -> None:
        member.to(State.QUARANTINED)
        self._journal.event(
            "island_quarantined",
            island=member.name,
            incarnation=member.incarnation,
            until=self._until_round[member.name],
            reason=member.leaving,
        )

    # The minimum.

    async def watch(self) -> None:
        """Says when the run begins and ends to wait because there are too few islands; returns never."""
        since = None
        while True:
            if self._short and since is None:
                since = now()
                have, need = len(self._plans.present()), self._rules.min_islands
                missing = self._missing()
                self._journal.event("islands_awaited", have=have, need=need, islands=missing)
                self.waiting = f"{', '.join(missing) or 'more islands'} ({have} of {need} are here)"
            elif since is not None and not self._short:
                self._journal.event("islands_enough", have=len(self._plans.present()), waited_s=now() - since)
                since, self.waiting = None, ""
            await self._plans.changed()

    @property
    def _short(self) -> bool:
        awaited = self._plans.begun and not self._plans.complete
        return awaited and not self._plans.at_least(max(1, self._rules.min_islands))

    def _missing(self) -> list[str]:
        present = {member.name for member in self._plans.present()}
        return sorted(self._asked_for - present)

    def _here(self, name: str) -> bool:
        member = self._members.get(name)
        return member is not None and member.alive and not member.leaving

    @property
    def shown(self) -> list[str]:
        """Slots that a person wants to see: those that are asked for or were ever filled."""
        filled = {n for n, member in self._members.items() if member.state is not State.VACANT or member.incarnation}
        return sorted(filled | self._asked_for)
