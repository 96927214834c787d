"""What is done to contributions that come late, or from somewhere else, before they are merged.

Weights by age and loss multiply a contribution's weight.  Where weights are normalised afterwards, as in a round of
one contribution, they say nothing: there they have to stay factors.  The correction by direction is linear in the
vectors: factors from inner products.  Sources: ../shared/algorithms.md §5.1 (age), §5.2 (HeLoCo).  The eager swap is a
topology, measuring anew is done in `moves.py`, and delay compensation is a rule of `adopt.py`.  Torch is not imported:
the driver weighs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def age_weight(age: int, power: float) -> float:
    """`(1 + age)^−power`; `age` is how often the anchor has moved since the island adopted it (2401.09135)."""
    return float((1 + age) ** -power)


def wall_clock_weight(age_s: float, half_life_s: float) -> float:
    """A half for each half-life that has passed since the contribution was emitted; half-life 0: always 1."""
    return float(0.5 ** (max(age_s, 0.0) / half_life_s)) if half_life_s > 0 else 1.0


def divergence_weights(losses: Sequence[float], strength: float) -> list[float]:
    """`exp(−strength · max(0, loss − median loss))` for each contribution of a round; strength 0: all 1.

    A loss that is not finite weighs 0 and takes no part in the median.
    """
    if not strength:
        return [1.0] * len(losses)
    finite = [loss for loss in losses if math.isfinite(loss)]
    middle = float(np.median(finite)) if finite else 0.0
    return [math.exp(-strength * max(0.0, loss - middle)) if math.isfinite(loss) else 0.0 for loss in losses]


# By `stale.scale`: what every contribution of a run with `K` islands is multiplied by, `ρ`.
ISLAND_SCALES: dict[str, Callable[[int], float]] = {
    "none": lambda islands: 1.0,
    "inverse_sqrt_islands": lambda islands: 1 / math.sqrt(islands),
}


@dataclass(frozen=True, slots=True)
class DirectionSettings:
    """Of HeLoCo's correction (2606.00271), with its defaults.

    Attributes:
      c_ok: cosine from which a contribution passes as it is.
      k_s: how strongly an opposing component is shrunk.
      k_d: how strongly another direction is turned.
      kappa: how much longer than the momentum a contribution has to be for half of the confidence.
      beta_max: most of an opposing component that is taken away.
      eps: norms below count as zero.
    """

    c_ok: float = 0.2
    k_s: float = 0.5
    k_d: float = 1.0
    kappa: float = 3.0
    beta_max: float = 0.5
    eps: float = 1e-8


def direction_factors(gram: NDArray[np.float64], settings: DirectionSettings) -> tuple[float, float]:
    """HeLoCo: a tensor of a contribution, corrected by its direction against the momentum of the anchor.

    With `c` their cosine, `û`, `v̂` their directions and `conf = ‖Δ_b‖ / (‖Δ_b‖ + κ‖m_b‖ + ε)`:

        c ≥ c_ok, or no direction   Δ_b
        c < 0                       Δ_b − β c ‖Δ_b‖ v̂,   β = min(k_s (−c) conf, β_max): shrinks, never flips
        else                        ‖Δ_b‖ φ((1−λ) û + λ v̂),   λ = min(k_d (1 − c) conf, 1): turns, keeps the norm

    Args:
      gram: [2, 2], inner products of `Δ_b` and `m_b`, in this order.
      settings: its constants.

    Returns:
      Factors of `Δ_b` and of `m_b` whose sum is the corrected contribution.
    """
    norm, momentum = math.sqrt(max(gram[0, 0], 0)), math.sqrt(max(gram[1, 1], 0))
    if norm < settings.eps or momentum < settings.eps:
        return 1.0, 0.0
    c = min(1.0, max(-1.0, float(gram[0, 1]) / (norm * momentum)))
    confidence = norm / (norm + settings.kappa * momentum + settings.eps)
    if c >= settings.c_ok:
        return 1.0, 0.0
    if c < 0:
        beta = min(settings.k_s * -c * confidence, settings.beta_max)
        return 1.0, -beta * c * norm / momentum
    turn = min(settings.k_d * (1 - c) * confidence, 1.0)
    length = math.sqrt((1 - turn) ** 2 + turn**2 + 2 * (1 - turn) * turn * c)
    return (1 - turn) / length, norm * turn / (momentum * length)
