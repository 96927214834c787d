"""Averages of outer iterates: what is evaluated and exported may be a mean of the last anchors, not the last one.

One buffer as large as the anchor, updated in place, chunk by chunk, once for each commit from some version on.
Islands never see it.  Uniform is the mean of Polyak and Ruppert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ray_diloco.errors import SyncError


@dataclass(frozen=True, slots=True)
class OuterAverage:
    """Which anchors are averaged, and how.

    Attributes:
      kind: key of `AVERAGES`, or `none`.
      rounds: rounds of the run, of each fragment.
      start: part of the run after which anchors are averaged.
      decay: what an average keeps of itself at each further anchor (ema).

    Raises:
      SyncError: RD-434, there is no average of that name.
    """

    kind: str = "none"
    rounds: int = 0
    start: float = 0.8
    decay: float = 0.9

    def __post_init__(self) -> None:
        if self.kind != "none" and self.kind not in AVERAGES:
            known = ", ".join(sorted([*AVERAGES, "none"]))
            raise SyncError(434, f"there is no average of outer iterates {self.kind!r}", f"use one of {known}")

    @property
    def first(self) -> int:
        """The first version, counted from 1 after the first outer step, that is averaged."""
        return math.floor(self.start * self.rounds + 1e-9) + 1

    def count(self, version: int) -> int:
        """How many anchors are in the average when that of `version` is; 0: there is none yet."""
        return max(0, version - self.first + 1) if self.kind != "none" else 0

    def update(self, average: torch.Tensor, anchor: torch.Tensor, version: int) -> None:
        """Takes the anchor of a version, counted after its step, into the average.

        Args:
          average: fp32 [n], the average up to the version before; written.  What it holds before the first version
            that is averaged does not matter.
          anchor: fp32 [n].
          version: of the anchor; nothing happens before the first that is averaged.
        """
        count = self.count(version)
        if count == 1:
            average.copy_(anchor)
        elif count > 1:
            average.lerp_(anchor, AVERAGES[self.kind](self, count))


# By `outer.average.kind`: the weight of the newest of `count` anchors.
AVERAGES: dict[str, Callable[[OuterAverage, int], float]] = {
    "uniform": lambda average, count: 1 / count,
    "ema": lambda average, count: 1 - average.decay,
}
