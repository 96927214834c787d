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
    """`H` steps between two emissions of a fragment, `rounds` of them, `offsets` in steps per fragment."""

    H: int
    rounds: int
    offsets: tuple[int, ...] = (0,)
    delay: int = 0

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
        return due.round * self.H + self.offsets[due.fragment]

    def _due(self, step: int) -> tuple[Due, ...]:
        due = []
        for p, offset in enumerate(self.offsets):
            k, rest = divmod(step - offset, self.H)
            if rest == 0 and 1 <= k <= self.rounds:
                due.append(Due(p, k))
        return tuple(due)

    def _next_due(self, fragment: int, step: int, delay: int) -> int | None:
        k = max(1, (step - delay - self.offsets[fragment]) // self.H + 1)
        return k * self.H + self.offsets[fragment] + delay if k <= self.rounds else None
