"""The outer learning rate as a pure function of the round.

No scheduler object: a run that is resumed is at once where it was.  The rates that were found best are constant
(DiLoCo, 2311.08105: a cosine gained nothing); warm-up is linear and begins above zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ray_diloco.errors import SyncError


@dataclass(frozen=True, slots=True)
class OuterRate:
    """What `outer.lr` is multiplied by.

    Attributes:
      kind: key of `SHAPES`.
      rounds: rounds of the run, of each fragment.
      warmup_rounds: rounds in which the factor rises to 1.
      final_ratio: the factor after the last round (cosine).

    Raises:
      SyncError: RD-434, there is no shape of that name.
    """

    kind: str = "constant"
    rounds: int = 0
    warmup_rounds: int = 0
    final_ratio: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in SHAPES:
            known = ", ".join(sorted(SHAPES))
            raise SyncError(434, f"there is no outer schedule {self.kind!r}", f"use one of {known}")

    def factor(self, version: int) -> float:
        """The factor of the step that moves an anchor which has moved `version` times before."""
        warm_up = min(1.0, (version + 1) / self.warmup_rounds) if self.warmup_rounds > 0 else 1.0
        return min(warm_up, SHAPES[self.kind](self, version))


def _constant(rate: OuterRate, version: int) -> float:
    return 1.0


def _cosine(rate: OuterRate, version: int) -> float:
    length = rate.rounds - rate.warmup_rounds
    progress = min(1.0, max(0.0, (version - rate.warmup_rounds) / length)) if length > 0 else 0.0
    return rate.final_ratio + (1 - rate.final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


# By `outer.schedule.kind`: the factor beside warm-up.
SHAPES: dict[str, Callable[[OuterRate, int], float]] = {"constant": _constant, "cosine": _cosine}
