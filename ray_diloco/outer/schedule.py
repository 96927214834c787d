"""When a fragment is emitted and when its merge is adopted, as a function of the run's global step.

Fragment `p` is emitted for its `k`-th time at step `k·H + offset_p` and adopted `delay` steps later, but not after the
last emission, since later steps would reach no round (Streaming DiLoCo, 2501.18512 §2, with the first round never
shorter than `H`).  A boundary is a step at which
something is due; between two boundaries islands only train.  The order depends on the step alone, so all islands
agree on it without talking.

Further channels over the same parameters have lanes of their own.  At a common step the faster channel goes first, so
that the slower one regards it as a part of its inner steps (../shared/algorithms.md §10.6).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property


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
    """What happens after `step` inner steps, channel by channel."""

    step: int
    stages: tuple[Stage, ...]

    @property
    def emits(self) -> tuple[Due, ...]:
        """All emissions, in order."""
        return tuple(due for stage in self.stages for due in stage.emits)

    @property
    def adopts(self) -> tuple[Due, ...]:
        """All adoptions, in order."""
        return tuple(due for stage in self.stages for due in stage.adopts)


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
        for number, channel in enumerate(self._channels):
            for track in channel:
                for round_ in range(track.first, track.last + 1):
                    emitted = track.emission(round_)
                    due[emitted][number][0].append(Due(track.fragment, round_))
                    due[min(emitted + track.delay, self.end)][number][1].append(Due(track.fragment, round_))
        return [
            Boundary(at, tuple(Stage(tuple(emits), tuple(adopts)) for emits, adopts in stages if emits or adopts))
            for at, stages in sorted(due.items())
            if at > step
        ]

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
        self._boundaries = schedule.boundaries(step)
        self._steps = [boundary.step for boundary in self._boundaries]

    def __len__(self) -> int:
        return len(self._boundaries)

    def boundary(self, number: int) -> Boundary:
        """Boundary `number`, which ends segment `number`."""
        return self._boundaries[number - 1]

    def begin(self, number: int) -> int:
        """The step at which segment `number` begins."""
        return self._steps[number - 2] if number > 1 else self.start

    def emission(self, due: Due) -> int:
        """Number of the boundary at which a round is emitted; 0 if that was before the start."""
        step = self.schedule.emission_step(due)
        return bisect_left(self._steps, step) + 1 if step > self.start else 0
