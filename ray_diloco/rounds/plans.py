"""Who trains which segment: planning and admission.

In step (`Plans`), a segment lies between two boundaries of the schedule.  The first island that asks for a segment has
it planned for all at once, in sorted order, so that data never depends on who was faster; islands that wait to join
are admitted by that same act.  If nobody is under way (at the start, or after every island was lost), the segment where
the run stands is planned for those who are ready.

At their own pace (`FreePlans`), islands get a segment whenever they ask for one, until so many are contributed or under
way that the run will be complete.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from ray_diloco.outer.schedule import Boundary, Due, Stage, course_of
from ray_diloco.rounds.members import Member, State
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
        """True if somebody trains or has trained, who is still there and stays."""
        return self._opened and any(m.sailing and not m.leaving for m in self._members.values())

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
        if not member.sailing and self.under_way:
            return False
        return self._enough()

    def _plan(self, index: int) -> None:
        start, until = self._course.begin(index), self._course.boundary(index).step
        crew = self._admitted(self.present())
        if not any(m.sailing for m in crew):
            # Those for whom more had been planned are lost.
            self._position.release([work.lease for plan in self._planned.values() for work in plan.values()])
            self._planned.clear()
        plan = self._planned[index] = {}
        for member in crew:
            if member.segment is None:
                member.segment, member.first = index - 1, index
            plan[member.name] = self._work(member, index, start, until - start)
        self._journal.event("round_opened", segment=index, step=start, until=until, islands=sorted(plan))
        self.pulse()


def _comes_to(member: Member, index: int) -> bool:
    """Whether an island is under way to the end of a segment, or at it."""
    gone = bool(member.leaving) and member.state is State.READY and not member.leases
    return member.sailing and not gone and (member.segment or 0) <= index and member.first <= index


class FreePlans(Planner):
    """Segments of a run in which every contribution is a round of its own."""

    def __init__(self, rules: Rules, position: Position, members: dict[str, Member], journal: Journal) -> None:
        super().__init__(rules, position, members, journal)
        self._resumed = position.round
        self._numbers = dict.fromkeys(range(rules.schedule.main), position.round)
        # Islands that train for a round which has no number yet.
        self._under_way: set[str] = set()
        self._segments = 0

    def over(self, member: Member) -> bool:
        """See `Planner.over`."""
        return self.complete

    def take(self, member: Member, halt: Halt) -> Assignment | None:
        """See `Planner.take`."""
        self._under_way.discard(member.name)
        rules, position = self._rules, self._position
        if halt.everything or halt.rounds or not self._enough():
            return None
        if self._numbers[rules.last_fragment] + len(self._under_way) >= rules.schedule.rounds:
            return None
        self._segments += 1
        member.segment = self._segments
        self._under_way.add(member.name)
        start = self._step(position.round)
        work = self._work(member, self._segments, start, self._steps(member.name))
        self._journal.event(
            "round_opened", segment=self._segments, step=start, until=start + work.steps, islands=[member.name]
        )
        due = tuple(Due(fragment, 0) for fragment in range(rules.schedule.main))
        return Assignment(work, Boundary(start + work.steps, (Stage(due, due),)))

    def unplan(self, name: str) -> None:
        """Takes back what was planned for an island that is to leave, and that it has not begun."""
        return

    def numbered(self, due: Due, name: str) -> Due:
        """A round of its own."""
        self._numbers[due.fragment] += 1
        if due.fragment == self._rules.last_fragment:
            # From here on it is a round, which ends whatever becomes of the island.
            self._under_way.discard(name)
        return Due(due.fragment, self._numbers[due.fragment])

    def expected(self, due: Due) -> set[str]:
        """See `Planner.expected`: nobody but the one who has offered."""
        return set()

    def passed(self, due: Due) -> bool:
        """See `Planner.passed`."""
        return due.round <= self._resumed

    def place(self, due: Due) -> tuple[int, bool]:
        """See `Planner.place`."""
        return due.round, due.fragment < self._rules.schedule.main

    def beyond(self, due: Due) -> set[str]:
        """See `Planner.beyond`: they hand over where they stand."""
        return set()

    def concluded(self, due: Due) -> bool:
        """See `Planner.concluded`."""
        ended = due.fragment == self._rules.last_fragment and due.round > self._position.round
        if ended:
            self._position.round, self._position.step = due.round, self._step(due.round)
        if self.complete or self._rules.durable(due.round) or due.round % len(self._rules.islands) == 0:
            # Others would find nothing changed: what one has contributed, another must not train again.
            self.pulse()
        return ended

    def withdraw(self, name: str) -> None:
        """See `Planner.withdraw`."""
        self._under_way.discard(name)
        self.pulse()

    def _step(self, round_: int) -> int:
        """How far the run has come after so many contributions, in steps of every island."""
        return round_ * self._rules.schedule.H // len(self._rules.initial)

    def _steps(self, name: str) -> int:
        """`⌊H · v / max v⌋`, at least one; H where speeds do not count or are not known."""
        H = self._rules.schedule.H
        if not self._rules.by_speed or name not in self._speeds:
            return H
        return max(1, int(H * self._speeds[name] / max(self._speeds.values())))
