"""Which blocks a rank trains on in which step: arithmetic on a lease, no iterator that has a state.

A lease is an ordered set of virtual block indices.  Step `k` of an island takes the k-th `world × accumulation ×
micro_batch` of them and rank `r` the r-th equal part of those, so the island trains on the same blocks in the same step
whatever its number of ranks, as long as that product is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ray_diloco.data.permutation import virtual_to_block
from ray_diloco.errors import InnerError
from ray_diloco.outer.layout import Ranges, total


class TrainingBlocks(Protocol):
    """Prepared blocks of one source."""

    def train(self, indices: np.ndarray) -> np.ndarray:
        """Token ids [n, sequence] of training blocks by number."""


@dataclass(frozen=True)
class Batches:
    """The micro-batches of one rank in one lease; call it with a step of the lease, from 0.

    Attributes:
      blocks: the prepared blocks.
      count: how many training blocks there are.
      lease: virtual block indices, consumed in ascending order.
      seed: of the order of blocks within an epoch.
      rank, world: the rank's place in its island.
      accumulation, micro_batch: micro-batches per step, and sequences in each.
    """

    blocks: TrainingBlocks
    count: int
    lease: Ranges
    seed: int
    rank: int
    world: int
    accumulation: int
    micro_batch: int

    @property
    def per_rank(self) -> int:
        """Sequences of this rank in one step."""
        return self.accumulation * self.micro_batch

    @property
    def steps(self) -> int:
        """Steps in the lease.

        Raises:
          InnerError: RD-750, the lease is no whole number of island batches.
        """
        blocks, batch = total(self.lease), self.world * self.per_rank
        if blocks % batch:
            raise InnerError(
                750,
                f"a lease of {blocks} blocks is no whole number of island batches of {batch} "
                f"({self.world} ranks × {self.accumulation} × {self.micro_batch})",
                "lease steps × ranks × gradient_accumulation × micro_batch blocks",
            )
        return blocks // batch

    def __call__(self, step: int) -> torch.Tensor:
        """Token ids of step `step` for this rank, int64 [accumulation, micro_batch, sequence]."""
        first = (step * self.world + self.rank) * self.per_rank
        numbers = virtual_to_block(self.seed, positions(self.lease, first, self.per_rank), self.count)
        ids = torch.from_numpy(np.ascontiguousarray(self.blocks.train(numbers), dtype=np.int64))
        return ids.view(self.accumulation, self.micro_batch, -1)


def positions(ranges: Ranges, first: int, count: int) -> np.ndarray:
    """Elements `first` to `first + count` of a set of ranges, counted over its packed form; int64.

    Raises:
      IndexError: the set has fewer elements.
    """
    if not 0 <= first <= first + count <= total(ranges):
        raise IndexError(f"elements {first} to {first + count} of a set of {total(ranges)}")
    packed, at = [], 0
    for r in ranges:
        lo, hi = max(first, at), min(first + count, at + r.numel)
        if lo < hi:
            packed.append(np.arange(r.start + lo - at, r.start + hi - at, dtype=np.int64))
        at += r.numel
    return np.concatenate(packed) if packed else np.empty(0, dtype=np.int64)
