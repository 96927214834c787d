"""Who trains what where islands train at their own pace: every contribution is a round of its own.

Islands get a segment whenever they ask for one, until so many are contributed or under way that the run will be
complete.
"""

from __future__ import annotations

from ray_diloco.outer.schedule import Boundary, Due, Stage
from ray_diloco.rounds.members import Member, Wreck
from ray_diloco.rounds.plans import Assignment, Halt, Planner
from ray_diloco.rounds.ports import Journal
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rules import Rules


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

    def holds(self, wreck: Wreck) -> bool:
        """See `Planner.holds`: while its round may still be one of the run's."""
        taken = len(self._under_way - {wreck.member.name})
        return self._numbers[self._rules.last_fragment] + taken < self._rules.schedule.rounds

    def keep_place(self, name: str, kept: bool) -> None:
        """See `Planner.keep_place`."""
        if kept:
            self._under_way.add(name)
        else:
            self.withdraw(name)

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
