"""What lost islands leave of a segment, and how their successors go on with it.

An island that keeps progress points and is lost in the midst of a segment leaves a wreck: its leases stay in flight, it
is planned for like the others, and for a while rounds wait for its successor.  That takes up the newest point and
trains the rest, so that its contribution is that of a segment without interruption.  If it cannot, it joins at the
anchor like any other, and the blocks are issued again.  A run that goes on from a commit finds points too, of the very
work that it hands out first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from ray_diloco.rounds.members import Member, State, Wreck
from ray_diloco.rounds.plans import Assignment, Planner
from ray_diloco.rounds.ports import Island, Journal, Recovery, Work
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rules import Rules

NONE = "the lost one had kept none yet"


class Salvage:
    """The wrecks of a run.

    Args:
      reconsider: looks whether rounds can close.
    """

    def __init__(
        self, rules: Rules, position: Position, journal: Journal, plans: Planner, reconsider: Callable[[], None]
    ) -> None:
        self._rules, self._position, self._journal, self._plans = rules, position, journal, plans
        self._reconsider = reconsider

    def begins(self, member: Member, assignment: Assignment) -> None:
        """An island begins with a segment."""
        if self._rules.points:
            member.begun = Wreck(member.likeness(), assignment)

    def strand(self, member: Member) -> None:
        """A lost island leaves a wreck, unless a part of the segment was offered already, or nobody will come."""
        wreck, member.begun = member.begun, None
        if member.state is not State.LOST or member.leaving or wreck is None or self._plans.complete:
            return
        if wreck.assignment.work.lease not in member.leases or not self._plans.holds(wreck):
            return
        member.wreck, wreck.awaited = wreck, True
        member.leases.clear()
        wait_s = self._rules.point_wait_s
        asyncio.get_running_loop().call_later(wait_s, self._wait_no_more, member.name, wreck)

    async def take_up(self, member: Member, island: Island) -> Assignment | None:
        """Lets a new incarnation go on where the last one was lost; returns the rest of its segment."""
        wreck, member.wreck = member.wreck, None
        if wreck is None:
            return None
        found = Recovery(reason="the run has given its part to others")
        wreck.awaited = False
        if self._plans.holds(wreck):
            # From here on rounds count on it as on any island that is slow.
            member.stand_as(wreck.member)
            self._plans.keep_place(member.name, True)
            work = wreck.assignment.work
            found = await island.recover(work, anchored=False)
        if found.steps:
            self._told(member, work, found)
            return Assignment(replace(work, done=found.steps), wreck.assignment.boundary)
        self._position.release(wreck.member.leases)
        member.stand_as(Member(member.name, member.incarnation))
        self._plans.withdraw(member.name)
        self._reconsider()
        self._ignored(member, found.reason or NONE)
        return None

    async def resumed(self, member: Member, island: Island, work: Work) -> Work:
        """Lets an island go on that trained the same work under an earlier driver; returns the rest of it."""
        found = await island.recover(work, anchored=True)
        if found.steps:
            self._told(member, work, found)
        elif found.reason:
            self._ignored(member, found.reason)
        return replace(work, done=found.steps)

    def _wait_no_more(self, name: str, wreck: Wreck) -> None:
        if wreck.awaited:
            wreck.awaited = False
            self._plans.keep_place(name, False)
            self._reconsider()

    def _told(self, member: Member, work: Work, found: Recovery) -> None:
        self._journal.event(
            "progress_taken_up",
            island=member.name,
            incarnation=member.incarnation,
            segment=work.segment,
            done=found.steps,
            steps=work.steps,
        )

    def _ignored(self, member: Member, reason: str) -> None:
        self._journal.event("progress_ignored", island=member.name, incarnation=member.incarnation, reason=reason)
