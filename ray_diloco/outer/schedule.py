"""When a fragment is emitted and when its merge is adopted, as a function of the run's global step.

Fragment `p` is emitted for its `k`-th time at step `k·H + offset_p` and adopted `delay` steps later
(Streaming DiLoCo, 2501.18512 §2, with the first round never shorter than `H`).  A boundary is a step at which
something is due; between two boundaries islands only train.  The order depends on the step alone, so all islands
agree on it without talking.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Due:
    """Round `round` of fragment `fragment`."""

    fragment: int
    round: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """What happens after `step` inner steps: emissions first, then adoptions."""

    step: int
    emits: tuple[Due, ...]
    adopts: tuple[Due, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """`H` steps between two emissions of a fragment, `rounds` in all, `offsets` in steps per fragment.

    Rounds are counted from `origin`, the round and global step at which these settings began to hold: a run that goes
    on with another `H` keeps its rounds and steps.
    """

    H: int
    rounds: int
    offsets: tuple[int, ...] = (0,)
    delay: int = 0
    origin: tuple[int, int] = (0, 0)

    def next(self, step: int) -> Boundary | None:
        """The first boundary after `step`, or None after the last."""
        steps = [
            at
            for p in range(len(self.offsets))
            for at in (self._next_due(p, step, 0), self._next_due(p, step, self.delay))
            if at is not None
        ]
        if not steps:
            return None
        at = min(steps)
        return Boundary(at, self._due(at), self._due(at - self.delay))

    def emission_step(self, due: Due) -> int:
        """The step at which a round's contributions are emitted."""
        return self._begin(due.fragment) + due.round * self.H

    def _due(self, step: int) -> tuple[Due, ...]:
        due = []
        for p in range(len(self.offsets)):
            k, rest = divmod(step - self._begin(p), self.H)
            if rest == 0 and self.origin[0] < k <= self.rounds:
                due.append(Due(p, k))
        return tuple(due)

    def _next_due(self, fragment: int, step: int, delay: int) -> int | None:
        k = max(self.origin[0] + 1, (step - delay - self._begin(fragment)) // self.H + 1)
        return self._begin(fragment) + k * self.H + delay if k <= self.rounds else None

    def _begin(self, fragment: int) -> int:
        """The step at which a round 0 of the fragment would be emitted."""
        round_, step = self.origin
        return step - round_ * self.H + self.offsets[fragment]
