"""How an anchor moves: the blocks of an outer step, put together.

Source: ../shared/algorithms.md §10.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ray_diloco.outer.average import OuterAverage
from ray_diloco.outer.codec import Codec
from ray_diloco.outer.merge import Merge, MergeSettings, merge_rule
from ray_diloco.outer.optimizer import OuterOptimizer
from ray_diloco.outer.rate import OuterRate
from ray_diloco.outer.stale import DirectionSettings

# Names of the states that a recipe may add to those of its optimiser.
MERGED, AVERAGE = "merged", "average"


@dataclass(frozen=True)
class Recipe:
    """How an anchor moves.

    Attributes:
      optimizer: the outer optimiser.
      merge: key of `merge.MERGES`; `settings` are its own.
      max_age: versions that a contribution may be behind; None: any number.
      reanchor: measure late contributions from the newest anchor: `q + (A − B)`.
      direction: correct contributions by their direction against the momentum (HeLoCo).
      consensus: pull towards the neighbours' anchors, a part per round (NoLoCo).
      recode: requantise the running sum after each contribution, as a ring does at every hop.
      rate: factor of the learning rate by version.
      average: average of outer iterates.
      lookahead: send `A − ημu` in place of the anchor.
      passed: anchors before the newest that islands under way have still to adopt when a round ends.
      free: islands train at their own pace, so that a commit may hold bases of any age.
      remembered: how many anchors are kept for contributions of any age to be measured anew from.
    """

    optimizer: OuterOptimizer
    merge: str = "mean"
    settings: MergeSettings = field(default_factory=MergeSettings)
    max_age: int | None = 0
    reanchor: bool = False
    direction: DirectionSettings | None = None
    consensus: float = 0.0
    recode: Codec | None = None
    rate: OuterRate = field(default_factory=OuterRate)
    average: OuterAverage = field(default_factory=OuterAverage)
    lookahead: bool = False
    passed: int = 0
    free: bool = False
    remembered: int = 8

    @property
    def past(self) -> int:
        """How many anchors before the newest are kept for late contributions to be measured anew from."""
        if not self.reanchor:
            return 0
        return self.remembered if self.max_age is None else self.max_age

    @property
    def rule(self) -> Merge:
        """The merge rule."""
        return merge_rule(self.merge)

    @property
    def state_names(self) -> tuple[str, ...]:
        """What is remembered beside the anchor: of the optimiser, the last merged `Δ`, the average of iterates."""
        names = self.optimizer.state_names
        names += (MERGED,) if self.rule.extras else ()
        return (*names, AVERAGE) if self.average.kind != "none" else names

    @property
    def initials(self) -> tuple[float, ...]:
        """Value of the elements of each new state."""
        own = self.optimizer.initials
        return (*own, *(0.0 for _ in self.state_names[len(own) :]))

    def take_average(self, before: torch.Tensor, after: torch.Tensor, anchor: torch.Tensor, version: int) -> None:
        """The average of iterates with the anchor of a version; that anchor itself as long as there is none."""
        after.copy_(before if self.average.count(version) > 1 else anchor)
        if self.average.count(version) > 1:
            self.average.update(after, anchor, version)

    def lr(self, version: int, lr: float | None) -> float | None:
        """The rate of the step that moves an anchor which has moved `version` times; None: the optimiser's own."""
        factor = self.rate.factor(version)
        if factor == 1.0:
            return lr
        return factor * (self.optimizer.lr if lr is None else lr)  # type: ignore[attr-defined]
