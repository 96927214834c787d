"""From contributions to one outer gradient: `Δ = Σ w_m Δ_m / Σ w_m`.

Sums run in sorted island order, in fp32, so that the order of arrival never changes a bit (../shared/algorithms.md §1
and §9.4, items 38, 39).  A merge is a function of one chunk of each contribution.  A new one is one function and one
line in `MERGES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# (contributions in island order, fp32 [n] each; their factors, which sum to one; output, fp32 [n]).  The
# contributions may be views of received messages and must not be written.
Combine = Callable[[Sequence[torch.Tensor], Sequence[float], torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge rule with what it needs, for the checker of combinations (../shared/algorithms.md §10.3).

    Attributes:
      combine: merges one chunk.
      needs_individuals: the sum of the contributions is not enough.
      needs_whole_vector: the factors depend on distances between whole contributions; they have to be found, over all
        fragments and shards, before the pass.
    """

    combine: Combine
    needs_individuals: bool = False
    needs_whole_vector: bool = False


def mean(contributions: Sequence[torch.Tensor], factors: Sequence[float], out: torch.Tensor) -> None:
    """`Σ w_m Δ_m`, in the order given.  One, two or four equal contributions of equal weight give back their bits."""
    torch.mul(contributions[0], factors[0], out=out)
    for contribution, factor in zip(contributions[1:], factors[1:], strict=True):
        out.add_(contribution, alpha=factor)


MERGES: dict[str, Merge] = {"mean": Merge(mean)}
