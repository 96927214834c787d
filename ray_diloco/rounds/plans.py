"""Who trains which segment: planning and admission.

In step (`Plans`), a segment lies between two boundaries of the schedule.  The first island that asks for a segment has
it planned for all at once, in sorted order, so that data never depends on who was faster; islands that wait to join
are admitted by that same act.  If nobody is under way (at the start, or after every island was lost), the segment where
the run stands is planned for those who are ready.

An island that was lost in the midst of a segment and has left a wreck is planned for like the others: its successor may
come and go on (`salvage`).  How islands are planned for that train at their own pace says `own_pace`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from ray_diloco.outer.schedule import Boundary, Due, course_of
from ray_diloco.rounds.members import Member, State, Wreck
from ray_diloco.rounds.ports import Journal, Work
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rules import Rules


class Halt(NamedTuple):
    """What may be planned: nothing new, or nothing that begins a round of the whole model."""

    everything: bool = False
    rounds: bool = False


class Assignment(NamedTuple):
    """A segment of work and what is due after it; `skipped` are boundaries that the island will not reach."""

    work: Work
    boundary: Boundary
    skipped: tuple[Boundary, ...] = ()


class Planner(ABC):
    """What both ways of planning have in common."""

    def __init__(self, rules: Rules, position: Position, members: dict[str, Member], journal: Journal) -> None:
        self._rules, self._position, self._members, self._journal = rules, position, members, journal
        self._speeds: dict[str, float] = {}
        self._unlaunched = set(rules.initial)
        self._change = asyncio.Event()
        # Whether anybody was ever given a segment.
        self._opened = False

    @property
    def complete(self) -> bool:
        """True when every round is concluded."""
        return self._position.round >= self._rules.schedule.rounds

    @property
    def begun(self) -> bool:
        """True once the first launches of the islands that the run began with are over."""
        return not self._unlaunched

    @abstractmethod
    def over(self, member: Member) -> bool:
        """True if nothing is left to train for this island."""

    @abstractmethod
    def take(self, member: Member, halt: Halt) -> Assignment | None:
        """The island's next segment, or None if it has to wait."""

    @abstractmethod
    def expected(self, due: Due) -> set[str]:
        """Islands whose offer a round can still count on."""

    def expects(self, due: Due, name: str) -> bool:
        """Whether an island is one of those."""
        return name in self.expected(due)

    @abstractmethod
    def passed(self, due: Due) -> bool:
        """True if a round was over when the run went on from its commit."""

    @abstractmethod
    def place(self, due: Due) -> tuple[int, bool]:
        """Where a round stands in the order of emissions."""

    @abstractmethod
    def beyond(self, due: Due) -> set[str]:
        """Islands that have gone on since they were to offer to a round."""

    @abstractmethod
    def concluded(self, due: Due) -> bool:
        """Moves the position past a round, committed or void; True if that ends a round of the whole model."""

    @abstractmethod
    def withdraw(self, name: str) -> None:
        """Takes back the segments that a lost island had been given."""

    def unplan(self, name: str) -> None:
        """Takes back what was planned for an island that is to leave, and that it has not begun."""
        return

    def holds(self, wreck: Wreck) -> bool:
        """Whether a successor could still go on with what an island has left."""
        return True

    def keep_place(self, name: str, kept: bool) -> None:
        """Counts on a lost island's segment, or does so no more."""
        self.pulse()

    def forsake(self, name: str, reason: str) -> None:
        """Gives up what a lost island has left: its blocks are issued again, and nobody waits for its successor."""
        member = self._members[name]
        wreck, member.wreck = member.wreck, None
        if wreck is not None:
            self._position.release(wreck.member.leases)
            wreck.awaited = False
            if reason:
                self._journal.event("progress_ignored", island=name, incarnation=member.incarnation, reason=reason)
            self.withdraw(name)

    def numbered(self, due: Due, name: str) -> Due:
        """The round that an island's offer belongs to."""
        return due

    def measured(self, name: str, steps: int, seconds: float) -> None:
        """Notes how fast an island trained."""
        if seconds > 0:
            self._speeds[name] = steps / seconds

    def launched(self, name: str) -> None:
        """Notes that an island's first launch is over, well or not; nothing can be planned before all of them are."""
        self._unlaunched.discard(name)
        if self.begun:
            self.pulse()

    def pulse(self) -> None:
        """Wakes everybody in `changed`."""
        self._change.set()
        self._change = asyncio.Event()

    async def changed(self) -> None:
        """Waits until something changed that planning depends on."""
        await self._change.wait()

    def _work(self, member: Member, segment: int, start: int, steps: int) -> Work:
        self._opened = True
        island = self._rules.islands[member.name]
        lease = self._position.ledger(island.source).lease(steps * island.blocks_per_step)
        return Work(segment, start, steps, lease, self._rules.round_s)

    def present(self) -> list[Member]:
        """Islands that train or could, in sorted order."""
        return [m for _, m in sorted(self._members.items()) if (m.sailing or m.joiner) and not m.leaving]

    @property
    def under_way(self) -> bool:
        """True if somebody trains or has trained, who is still there and stays, or whose successor is awaited."""
        there = (m.awaited or (m.sailing and not m.leaving) for m in self._members.values())
        return self._opened and any(there)

    def at_least(self, count: int) -> bool:
        """True if so many islands train or could; it looks no further than it must."""
        missing = count
        for m in self._members.values() if missing > 0 else ():
            missing -= (m.sailing or m.joiner) and not m.leaving
            if missing <= 0:
                break
        return missing <= 0

    def _enough(self) -> bool:
        return self.begun and self.at_least(self._rules.min_islands)

    def _admitted(self, ready: Sequence[Member]) -> list[Member]:
        """Those of them that get a segment: joiners wait for one another if others are under way."""
        joiners = [m for m in ready if not m.sailing]
        kept_out = joiners[self._rules.joins or len(joiners) :] if len(joiners) < len(ready) else []
        wait = {m.name for m in kept_out}
        return [m for m in ready if m.name not in wait]


class Plans(Planner):
    """The segments of a run in step, from where its position stands.  Index 1 is the first."""

    def __init__(self, rules: Rules, position: Position, members: dict[str, Member], journal: Journal) -> None:
        super().__init__(rules, position, members, journal)
        self._course = course_of(rules.schedule, position.step, position.round, position.legs, position.notes)
        self._frontier = 1
        self._planned: dict[int, dict[str, Work]] = {}
        # By segment: what is emitted after it and not concluded.
        self._left: dict[int, set[Due]] = {}
        self._concluded = dict.fromkeys(range(rules.schedule.main), position.round)

    def over(self, member: Member) -> bool:
        """See `Planner.over`."""
        return self._course.over(self._next(member))

    def take(self, member: Member, halt: Halt) -> Assignment | None:
        """See `Planner.take`."""
        index = self._next(member)
        halted = halt.everything or (halt.rounds and self._begins_a_round(index))
        if (
            member.name not in self._planned.get(index, {})
            and not halted
            and self._may_plan(member, index)
            and self._reaches(index)
        ):
            self._plan(index)
            index = self._next(member)
        work = self._planned.get(index, {}).pop(member.name, None)
        if work is None:
            return None
        before = index - 1 if member.segment is None else member.segment
        skipped = tuple(self._course.boundary(i) for i in range(before + 1, index))
        member.segment = index
        return Assignment(work, self._course.boundary(index), skipped)

    def expected(self, due: Due) -> set[str]:
        """See `Planner.expected`."""
        last = self._course.emission(due)
        return {m.name for m in self._members.values() if _comes_to(m, last)}

    def expects(self, due: Due, name: str) -> bool:
        """See `Planner.expects`."""
        return _comes_to(self._members[name], self._course.emission(due))

    def passed(self, due: Due) -> bool:
        """See `Planner.passed`."""
        return self._course.emission(due) == 0

    def place(self, due: Due) -> tuple[int, bool]:
        """See `Planner.place`: by boundary, and there faster channels first."""
        return self._course.emission(due), due.fragment < self._rules.schedule.main

    def holds(self, wreck: Wreck) -> bool:
        """See `Planner.holds`: until all that is emitted after the segment is concluded."""
        return (wreck.member.segment or 0) >= self._frontier

    def beyond(self, due: Due) -> set[str]:
        """See `Planner.beyond`."""
        last = self._course.emission(due)
        return {m.name for m in self._members.values() if m.sailing and (m.segment or 0) > last}

    def concluded(self, due: Due) -> bool:
        """See `Planner.concluded`."""
        index = self._course.emission(due)
        # A segment is over when all that is emitted after it is: whoever comes may be needed for the rest.
        left = self._left.setdefault(index, set(self._course.boundary(index).emits))
        left.discard(due)
        if not left:
            self._frontier = max(self._frontier, index + 1)
        if self._rules.points:
            for name in [n for n, m in self._members.items() if m.wreck is not None and not self.holds(m.wreck)]:
                self.forsake(name, "the others have concluded its segment without it")
        for old in [i for i in self._planned if i < self._frontier]:
            for name in list(self._planned[old]):
                self._position.release([self._planned[old].pop(name).lease])
            del self._planned[old]
        ended = False
        if due.fragment in self._concluded:
            self._concluded[due.fragment] = max(due.round, self._concluded[due.fragment])
            round_ = min(self._concluded.values())
            if round_ > self._position.round:
                ended = True
                last = Due(self._position.closing(round_, self._rules.last_fragment), round_)
                self._position.round, self._position.step = round_, self._course.emission_step(last)
                if self._rules.schedule.pace is not None:
                    # Whoever goes on with rounds of equal length counts them from here.
                    self._position.origin = (0, round_, self._position.step)
        self.pulse()
        return ended

    def withdraw(self, name: str) -> None:
        """See `Planner.withdraw`."""
        self.unplan(name)
        self.pulse()

    def unplan(self, name: str) -> None:
        """See `Planner.unplan`."""
        for plan in self._planned.values():
            if name in plan:
                self._position.release([plan.pop(name).lease])

    def _next(self, member: Member) -> int:
        return self._frontier if member.segment is None else max(member.segment + 1, self._frontier)

    def _begins_a_round(self, index: int) -> bool:
        before = self._course.boundary(index - 1).emits if index > 1 else ()
        usual = self._rules.last_fragment
        return index == 1 or any(due.fragment == self._position.closing(due.round, usual) for due in before)

    def _reaches(self, index: int) -> bool:
        """Whether there is a segment `index`; rounds that are laid out to know it are told to the tape."""
        legs = self._position.legs
        before = legs[-1].round if legs else 0
        there = self._course.reaches(index)
        for leg in [leg for leg in legs if leg.round > before]:
            self._journal.event("round_laid_out", round=leg.round, emissions=list(leg.emissions))
        return there

    def _may_plan(self, member: Member, index: int) -> bool:
        if member.sailing and index in self._planned:
            return False
        if not member.sailing and (self.under_way or self._offering(index)):
            return False
        return self._enough()

    def _offering(self, index: int) -> set[str]:
        """Slots that have offered to a round at the end of a segment or a later one; none may do so twice."""
        claims = self._position.claims
        return {name for due, name, _ in claims if self._course.emission(due) >= index and self._is_open(due)}

    def _is_open(self, due: Due) -> bool:
        """Whether a round is not concluded; one that is may still have claims, of what is carried on from it."""
        return due in self._left.get(self._course.emission(due), {due})

    def _plan(self, index: int) -> None:
        start, until = self._course.begin(index), self._course.boundary(index).step
        offering = self._offering(index)
        crew = self._admitted([m for m in self.present() if m.sailing or m.name not in offering])
        if not any(m.sailing for m in crew):
            # Those for whom more had been planned are lost.
            self._position.release([work.lease for plan in self._planned.values() for work in plan.values()])
            self._planned.clear()
        plan = self._planned[index] = {}
        for member in crew:
            if member.segment is None:
                member.segment, member.first = index - 1, index
        wrecked = [m for m in self._members.values() if m.wreck is not None] if self._rules.points else []
        for member in sorted([*crew, *wrecked], key=lambda member: member.name):
            if member.wreck is None or (member.wreck.member.segment or 0) < index:
                plan[member.name] = self._work(member, index, start, until - start)
        self._journal.event("round_opened", segment=index, step=start, until=until, islands=sorted(plan))
        self.pulse()


def _comes_to(member: Member, index: int) -> bool:
    """Whether an island is under way to the end of a segment, or at it."""
    if member.wreck is not None and member.awaited:
        member = member.wreck.member
        return (member.segment or 0) <= index and member.first <= index
    gone = bool(member.leaving) and member.state is State.READY and not member.leases
    return member.sailing and not gone and (member.segment or 0) <= index and member.first <= index
