"""When a fragment is emitted and when its merge is adopted, as a function of the run's global step.

Fragment `p` is emitted for its `k`-th time at step `k·H + offset_p` and adopted `delay` steps later, but not after the
last emission, since later steps would reach no round (Streaming DiLoCo, 2501.18512 §2, with the first round never
shorter than `H`); what is adopted early for that reason comes behind all that a longer run does at this step.  A
boundary is a step at which something is due; between two boundaries islands only train.  The order depends on the step
alone, so all islands agree on it without talking.

Further channels over the same parameters have lanes of their own.  At a common step the faster channel goes first, so
that the slower one regards it as a part of its inner steps (../shared/algorithms.md §10.6).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ray_diloco.outer.pace import Leg, Note, Pace


@dataclass(frozen=True, slots=True)
class Due:
    """Round `round` of fragment `fragment`."""

    fragment: int
    round: int


@dataclass(frozen=True, slots=True)
class Stage:
    """What one channel does at a boundary: emissions first, then adoptions."""

    emits: tuple[Due, ...]
    adopts: tuple[Due, ...]


@dataclass(frozen=True, slots=True)
class Boundary:
    """What happens after `step` inner steps, channel by channel.

    `early`: at the last boundary, adoptions that a longer run makes later; a commit is taken before them.
    """

    step: int
    stages: tuple[Stage, ...]
    early: tuple[Due, ...] = ()

    @property
    def emits(self) -> tuple[Due, ...]:
        """All emissions, in order."""
        return tuple(due for stage in self.stages for due in stage.emits)

    @property
    def adopts(self) -> tuple[Due, ...]:
        """All adoptions, in order."""
        return (*(due for stage in self.stages for due in stage.adopts), *self.early)


@dataclass(frozen=True, slots=True)
class Lane:
    """A further channel: its fragments are emitted every `H` steps, counted from the start of the run."""

    H: int
    offsets: tuple[int, ...] = (0,)
    delay: int = 0


@dataclass(frozen=True)
class Schedule:
    """`H` steps between two emissions of a fragment, `rounds` in all, `offsets` in steps per fragment.

    Rounds are counted from `origin`, the round and global step at which these settings began to hold: a run that goes
    on with another `H` keeps its rounds and steps.  The fragments of `lanes`, in the order in which their channels act,
    are numbered behind those of the main channel, which is the slowest and acts last.
    """

    H: int
    rounds: int
    offsets: tuple[int, ...] = (0,)
    delay: int = 0
    origin: tuple[int, int] = (0, 0)
    lanes: tuple[Lane, ...] = ()
    # Length of rounds and order of fragments are found as the run goes; there are no lanes then.
    pace: Pace | None = None

    @property
    def fragments(self) -> int:
        """Number of fragments of all channels."""
        return len(self.offsets) + sum(len(lane.offsets) for lane in self.lanes)

    @property
    def main(self) -> int:
        """Number of fragments of the main channel, which come first."""
        return len(self.offsets)

    @cached_property
    def end(self) -> int:
        """The step of the last emission, at which what is still under way is adopted too."""
        return max(track.emission(track.last) for track in self._tracks.values())

    def boundaries(self, step: int = 0) -> list[Boundary]:
        """All boundaries after `step`."""
        due: defaultdict[int, list[tuple[list[Due], list[Due]]]] = defaultdict(
            lambda: [([], []) for _ in self._channels]
        )
        early = []
        for number, channel in enumerate(self._channels):
            for track in channel:
                for round_ in range(track.first, track.last + 1):
                    emitted = track.emission(round_)
                    due[emitted][number][0].append(Due(track.fragment, round_))
                    if emitted + track.delay > self.end:
                        early.append(Due(track.fragment, round_))
                    else:
                        due[emitted + track.delay][number][1].append(Due(track.fragment, round_))
        found = [
            Boundary(at, tuple(Stage(tuple(emits), tuple(adopts)) for emits, adopts in stages if emits or adopts))
            for at, stages in sorted(due.items())
            if at > step
        ]
        return [*found[:-1], *(replace(last, early=tuple(early)) for last in found[-1:])]

    def emission_step(self, due: Due) -> int:
        """The step at which a round's contributions are emitted."""
        return self._tracks[due.fragment].emission(due.round)

    @cached_property
    def _channels(self) -> tuple[tuple[_Track, ...], ...]:
        """The tracks of each channel, in the order in which channels act."""
        round_, step = self.origin
        begin = step - round_ * self.H
        main = tuple(
            _Track(p, self.H, begin + offset, self.delay, round_ + 1, self.rounds)
            for p, offset in enumerate(self.offsets)
        )
        last, number, channels = begin + self.rounds * self.H + max(self.offsets), len(main), []
        for lane in self.lanes:
            channels.append(
                tuple(
                    _Track(number + k, lane.H, offset, lane.delay, 1, (last - offset) // lane.H)
                    for k, offset in enumerate(lane.offsets)
                )
            )
            number += len(lane.offsets)
        return (*channels, main)

    @cached_property
    def _tracks(self) -> dict[int, _Track]:
        return {track.fragment: track for channel in self._channels for track in channel}


@dataclass(frozen=True, slots=True)
class _Track:
    """One fragment: rounds `first` to `last`, round `k` emitted at step `begin + k·H`."""

    fragment: int
    H: int
    begin: int
    delay: int
    first: int
    last: int

    def emission(self, round_: int) -> int:
        return self.begin + round_ * self.H


class Course:
    """The boundaries of a schedule after a step, found by number (from 1) or by round."""

    def __init__(self, schedule: Schedule, step: int) -> None:
        self.schedule, self.start = schedule, step
        self._boundaries = self._laid_out()
        self._steps = [boundary.step for boundary in self._boundaries]

    def _laid_out(self) -> list[Boundary]:
        """The boundaries that are known from the start."""
        return self.schedule.boundaries(self.start)

    def reaches(self, number: int) -> bool:
        """Whether there is a boundary of this number, now that islands have come to the one before it."""
        return number <= len(self._boundaries)

    def over(self, number: int) -> bool:
        """Whether there never will be."""
        return not self.reaches(number)

    def boundary(self, number: int) -> Boundary:
        """Boundary `number`, which ends segment `number`; there must be one."""
        return self._boundaries[number - 1]

    def begin(self, number: int) -> int:
        """The step at which segment `number` begins."""
        return self._steps[number - 2] if number > 1 else self.start

    def emission(self, due: Due) -> int:
        """Number of the boundary at which a round is emitted; 0 if that was before the start."""
        step = self.emission_step(due)
        return bisect_left(self._steps, step) + 1 if step > self.start else 0

    def emission_step(self, due: Due) -> int:
        """The step at which a round is emitted; for one that was emitted before the start, any step before it."""
        return self.schedule.emission_step(due)


class PacedCourse(Course):
    """A course whose rounds are laid out when they begin.

    Args:
      schedule: `H` is that of the first round.
      pace: how rounds are laid out.
      step: where the course begins.
      round_: rounds that are over by then.
      legs: rounds that have been laid out, oldest first; what is laid out is added here, and what is long past removed.
      notes: what committed rounds came to, oldest first; read when a round is laid out.
    """

    def __init__(
        self, schedule: Schedule, pace: Pace, step: int, round_: int, legs: list[Leg], notes: Sequence[Note]
    ) -> None:
        super().__init__(schedule, step)
        self._pace, self._legs, self._notes = pace, legs, notes
        self._lag, self._delay = divmod(schedule.delay, schedule.H)
        if not legs:
            # Until now rounds were those of the schedule; before the first there was nothing.
            last = max(schedule.offsets)
            legs.append(Leg(round_, tuple(step + (each - last if round_ else 0) for each in schedule.offsets)))
        self._emissions: dict[Due, int] = {}
        self._pending: defaultdict[int, tuple[list[Due], list[Due]]] = defaultdict(lambda: ([], []))
        self._early: list[Due] = []
        for leg in legs:
            self._announce(leg)

    def reaches(self, number: int) -> bool:
        """See `Course.reaches`; lays out what is needed to know."""
        while len(self._boundaries) < number:
            here, last = self.begin(len(self._boundaries) + 1), self._legs[-1]
            if last.end <= here and last.round < self.schedule.rounds:
                self._announce(self._lay(last, here))
            if not self._pending:
                return False
            step = min(self._pending)
            emits, adopts = (tuple(sorted(each, key=_by_fragment)) for each in self._pending.pop(step))
            ends = not self._pending and self._legs[-1].round >= self.schedule.rounds
            early = tuple(sorted(self._early, key=_by_fragment)) if ends else ()
            self._boundaries.append(Boundary(step, (Stage(emits, adopts),), early))
            self._steps.append(step)
        return True

    def emission_step(self, due: Due) -> int:
        """See `Course.emission_step`."""
        return self._emissions.get(due, self.start)

    def over(self, number: int) -> bool:
        """See `Course.over`."""
        known = len(self._boundaries) + len(self._pending)
        return self._legs[-1].round >= self.schedule.rounds and number > known

    def _laid_out(self) -> list[Boundary]:
        return []

    def _lay(self, last: Leg, here: int) -> Leg:
        """The next round, from what is known for sure when islands stand at step `here`: what they have adopted."""
        schedule, pace = self.schedule, self._pace
        known = [note for note in self._notes if self._is_adopted(note, last, here)]
        # A round is never over before what was emitted in the one before it is adopted.
        H = max(pace.H(schedule.H, known, here), self._delay + 1)
        # After a round has become shorter, the last fragments of the one before it still go first.
        begin = max(min(last.emissions) + H, last.end + 1)
        spread = max(schedule.offsets) > 0
        order = pace.order(schedule.main, known)
        emissions = {p: begin + (slot * H // schedule.main if spread else 0) for slot, p in enumerate(order)}
        leg = Leg(last.round + 1, tuple(emissions[p] for p in range(schedule.main)))
        self._legs.append(leg)
        del self._legs[: -3 - self._lag]
        return leg

    def _is_adopted(self, note: Note, last: Leg, here: int) -> bool:
        """True if islands that stand at step `here` have adopted what is noted: all know of it then."""
        after = Due(note.fragment, note.round + self._lag)
        return after.round <= last.round and self.emission_step(after) + self._delay <= here

    def _announce(self, leg: Leg) -> None:
        """Notes what is due by a round that has been laid out, so far as it lies ahead."""
        for p, step in enumerate(leg.emissions):
            due = Due(p, leg.round)
            self._emissions[due] = step
            if step > self.start:
                self._pending[step][0].append(due)
            self._adopts(Due(p, leg.round - self._lag), step + self._delay)
        if leg.round < self.schedule.rounds:
            return
        early = [due for step in [s for s in self._pending if s > leg.end] for due in self._pending.pop(step)[1]]
        rounds = range(max(1, leg.round - self._lag + 1), leg.round + 1)
        early += [Due(p, round_) for round_ in rounds for p in range(self.schedule.main)]
        self._early = early if leg.end > self.start else []

    def _adopts(self, due: Due, step: int) -> None:
        if due.round > 0 and step > self.start:
            self._pending[step][1].append(due)


def course_of(schedule: Schedule, step: int, round_: int, legs: list[Leg], notes: Sequence[Note]) -> Course:
    """The course of a run from where it stands; see `PacedCourse`."""
    pace = schedule.pace
    return Course(schedule, step) if pace is None else PacedCourse(schedule, pace, step, round_, legs, notes)


def _by_fragment(due: Due) -> tuple[int, int]:
    return due.fragment, due.round
