"""Which blocks of a corpus are held out, and how the others are numbered: arithmetic, the same for every run.

The held-out blocks are about √m runs of about √m neighbouring blocks each, evenly spread over the corpus.  A document
leaks from a run into training only at its two ends, so long runs leak less; many runs represent the corpus better.
The choice depends on the two counts alone: no seed, no stored list.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Split:
    """The `blocks` of a corpus, divided into training blocks 0..train-1 and held-out blocks 0..heldout-1."""

    blocks: int
    heldout: int

    @property
    def train(self) -> int:
        """Number of training blocks."""
        return self.blocks - self.heldout

    @cached_property
    def _runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Per held-out run: training blocks before it, held-out blocks before it (both ascending, int64)."""
        count = math.isqrt(self.heldout)
        run = np.arange(count, dtype=np.int64)
        # Run k stands in the middle of the k-th of `count` equal parts of the training blocks.
        return self.train * (2 * run + 1) // (2 * max(count, 1)), run * self.heldout // max(count, 1)

    def place_of_train(self, indices: np.ndarray) -> np.ndarray:
        """Places in the file of training blocks (int64, any shape).  Raises IndexError outside 0..train-1."""
        index = _checked(indices, self.train, "training")
        before, first = self._runs
        passed = np.searchsorted(before, index, side="right")
        place: np.ndarray = index + np.append(first, self.heldout)[passed]
        return place

    def place_of_heldout(self, indices: np.ndarray) -> np.ndarray:
        """Places in the file of held-out blocks (int64, any shape).  Raises IndexError outside 0..heldout-1."""
        index = _checked(indices, self.heldout, "held-out")
        before, first = self._runs
        place: np.ndarray = index + before[np.searchsorted(first, index, side="right") - 1]
        return place


def _checked(indices: np.ndarray, count: int, kind: str) -> np.ndarray:
    index = np.asarray(indices, dtype=np.int64)
    if index.size and not (int(index.min()) >= 0 and int(index.max()) < count):
        raise IndexError(f"{kind} blocks are 0..{count - 1}, asked for {int(index.min())}..{int(index.max())}")
    return index
