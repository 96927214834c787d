"""From contributions to one outer gradient: `Δ = Σ w_m Δ_m / Σ w_m`.

Weights come from what each island did; sums run in sorted island order, in fp32, so that the order of arrival never
changes a bit (../shared/algorithms.md §1 and §9.4, items 38, 39).  A merge is a function of one chunk of each
contribution.  A new one is one function and one line in `MERGES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ray_diloco.errors import SyncError

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


@dataclass(frozen=True, slots=True)
class Work:
    """What an island did for a contribution: inner optimiser steps taken and tokens trained on."""

    steps: int
    tokens: int


def mean(contributions: Sequence[torch.Tensor], factors: Sequence[float], out: torch.Tensor) -> None:
    """`Σ w_m Δ_m`, in the order given.  One, two or four equal contributions of equal weight give back their bits."""
    torch.mul(contributions[0], factors[0], out=out)
    for contribution, factor in zip(contributions[1:], factors[1:], strict=True):
        out.add_(contribution, alpha=factor)


MERGES: dict[str, Merge] = {"mean": Merge(mean)}

WEIGHTS: dict[str, Callable[[Work], float]] = {
    "tokens": lambda work: work.tokens,
    "steps": lambda work: work.steps,
    "uniform": lambda work: 1.0,
}


def weights(kind: str, work: Mapping[str, Work]) -> dict[str, float]:
    """Normalised weights of contributions, by island, in sorted order.

    An island that took no step is left out: its difference is no statement about the model.

    Args:
      kind: key of `WEIGHTS`.
      work: what each island did.

    Returns:
      Weights above 0 that sum to 1.

    Raises:
      SyncError: RD-414 unknown kind, RD-413 nobody did anything.
    """
    if kind not in WEIGHTS:
        raise SyncError(414, f"there are no weights by {kind!r}", f"use one of {', '.join(sorted(WEIGHTS))}")
    raw = {island: WEIGHTS[kind](done) for island, done in sorted(work.items()) if done.steps > 0}
    raw = {island: weight for island, weight in raw.items() if weight > 0}
    return dict(zip(raw, normalised(list(raw.values())), strict=True))


def normalised(raw: Sequence[float]) -> list[float]:
    """Weights divided by their sum, in float64.

    Weights that sum to one already are kept as they are, so that who normalises first and how often changes no bit.

    Raises:
      SyncError: RD-413 the sum is zero, or there are none.
    """
    whole = math.fsum(raw)
    if not whole > 0:
        raise SyncError(413, f"{len(raw)} contributions have weight {whole} together", "let an island train")
    return list(raw) if abs(whole - 1) < 1e-12 else [weight / whole for weight in raw]


def factors(raw: Sequence[float]) -> list[float]:
    """Normalised weights, rounded to fp32 as the sums need them.  Raises as `normalised`."""
    return [float(np.float32(weight)) for weight in normalised(raw)]
