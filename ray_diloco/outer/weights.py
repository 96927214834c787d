"""What a contribution weighs in its round, from what its island did for it.

Normalised in float64, in sorted island order (../shared/algorithms.md §9.4, items 38 and 39).  No import of torch:
the driver weighs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ray_diloco.errors import SyncError


@dataclass(frozen=True, slots=True)
class Work:
    """What an island did for a contribution.

    Attributes:
      steps: inner optimiser steps taken.
      tokens: tokens trained on.
      shard: blocks of the island's own part of the data; 0 where it has none of its own.
    """

    steps: int
    tokens: int
    shard: int = 0


# Asked only of islands that took a step.
WEIGHTS: dict[str, Callable[[Work], float]] = {
    "tokens": lambda work: work.tokens,
    "steps": lambda work: work.steps,
    "uniform": lambda work: 1.0,
    # Decoupled DiLoCo (2604.21428): uniform where all did the same, more for who trained on more tokens a step.
    "tokens2_per_step": lambda work: work.tokens * (work.tokens / work.steps),
    "shard_size": lambda work: work.shard,
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
