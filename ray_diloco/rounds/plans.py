"""Who trains which segment: planning and admission at segment boundaries.

A segment lies between two boundaries of the schedule.  The first island that asks for a segment has it planned for
all at once, in sorted order, so that data never depends on who was faster; islands that wait to join are admitted by
that same act.  If nobody is under way (at the start, or after every island was lost), the segment where the run
stands is planned for those who are ready.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from ray_diloco.outer.schedule import Boundary, Due, Schedule
from ray_diloco.rounds.members import Member
from ray_diloco.rounds.ports import Journal, Work
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rules import Rules


class Assignment(NamedTuple):
    """A segment of work and what is due after it."""

    work: Work
    boundary: Boundary


class Plans:
    """The segments of a run, from where its position stands.  Index 1 is the first."""

    def __init__(self, rules: Rules, position: Position, members: dict[str, Member], journal: Journal) -> None:
        self._rules, self._position, self._members, self._journal = rules, position, members, journal
        self._boundaries = _boundaries(rules.schedule, position.step)
        self._start = position.step
        self._frontier = 1
        self._work: dict[int, dict[str, Work]] = {}
        self._unlaunched = set(rules.islands)
        self._change = asyncio.Event()

    @property
    def complete(self) -> bool:
        """True when every segment is concluded."""
        return self._frontier > len(self._boundaries)

    def over(self, member: Member) -> bool:
        """True if nothing is left to train for this island."""
        return self._next(member) > len(self._boundaries)

    def take(self, member: Member, halted: bool) -> Assignment | None:
        """The island's next segment, or None if it has to wait.  `halted`: plan nothing new."""
        index = self._next(member)
        if member.name not in self._work.get(index, {}) and not halted and self._may_plan(member, index):
            self._plan(index)
            index = self._next(member)
        work = self._work.get(index, {}).pop(member.name, None)
        if work is None:
            return None
        member.segment = index
        return Assignment(work, self._boundaries[index - 1])

    def expected(self, due: Due) -> set[str]:
        """Islands whose offer a round can still count on."""
        step = self._rules.schedule.emission_step(due)
        last = next(i for i, b in enumerate(self._boundaries, start=1) if b.step >= step)
        return {m.name for m in self._members.values() if m.sailing and (m.segment or 0) <= last}

    def concluded(self, due: Due) -> None:
        """Moves the position past a round that was committed or voided."""
        index = next(i for i, b in enumerate(self._boundaries, start=1) if due in b.adopts)
        self._frontier = max(self._frontier, index + 1)
        self._position.round = max(self._position.round, due.round)
        self._position.step = max(self._position.step, self._boundaries[index - 1].step)
        for old in [i for i in self._work if i < index]:
            for name in list(self._work[old]):
                self._position.release([self._work[old].pop(name).lease])
            del self._work[old]
        self.pulse()

    def withdraw(self, name: str) -> None:
        """Takes back the segments that a lost island had been given and not begun."""
        for plan in self._work.values():
            if name in plan:
                self._position.release([plan.pop(name).lease])
        self.pulse()

    def launched(self, name: str) -> None:
        """Notes that an island's first launch is over, well or not."""
        self._unlaunched.discard(name)
        self.pulse()

    def pulse(self) -> None:
        """Wakes everybody in `changed`."""
        self._change.set()
        self._change = asyncio.Event()

    async def changed(self) -> None:
        """Waits until something changed that planning depends on."""
        await self._change.wait()

    def _next(self, member: Member) -> int:
        return self._frontier if member.segment is None else max(member.segment + 1, self._frontier)

    def _may_plan(self, member: Member, index: int) -> bool:
        ready = self._ready()
        if self._unlaunched or len(ready) < self._rules.min_islands:
            return False
        if member.sailing:
            return index not in self._work
        return not any(m.sailing for m in ready)

    def _plan(self, index: int) -> None:
        boundary = self._boundaries[index - 1]
        start = self._boundaries[index - 2].step if index > 1 else self._start
        plan = self._work[index] = {}
        for member in self._ready():
            if member.segment is None:
                member.segment = index - 1
            island = self._rules.islands[member.name]
            steps = boundary.step - start
            lease = self._position.ledgers[island.source].lease(steps * island.blocks_per_step)
            plan[member.name] = Work(index, start, steps, lease)
        self._journal.event("round_opened", segment=index, step=start, until=boundary.step, islands=sorted(plan))
        self.pulse()

    def _ready(self) -> list[Member]:
        """Islands that train or could, in sorted order."""
        return [m for _, m in sorted(self._members.items()) if m.sailing or m.joiner]


def _boundaries(schedule: Schedule, step: int) -> list[Boundary]:
    found = []
    while (boundary := schedule.next(step)) is not None:
        found.append(boundary)
        step = boundary.step
    return found
