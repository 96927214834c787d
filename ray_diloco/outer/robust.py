"""Merges that bear `f` contributions which are arbitrarily wrong (../shared/algorithms.md §8.1).

Two kinds.  What is a linear combination is found as factors from the Gram matrix of the whole contributions (float64,
of inner products): Krum, Multi-Krum, the geometric median (RFA, 1912.13445) and centred clipping (2012.10333).  What
is not works coordinate by coordinate on one chunk: median, trimmed mean, and the second stage of Bulyan (1802.07927).
Guarantees are for enough contributions (`merge.Merge.minimum`) and for one-step gradients; for differences of hundreds
of steps they are experience only.  Contributions that are not finite have to be refused before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

Gram = NDArray[np.float64]

# Distances below this part of the mean distance count as this part, so that a weight of Weiszfeld's step stays finite.
SMOOTHING = 1e-6


def squared_distances(gram: Gram) -> Gram:
    """`‖x_i − x_j‖²` from inner products, never below 0; infinite where a contribution is not finite."""
    squares = np.diag(gram)
    distances = squares[:, None] + squares[None, :] - 2 * gram
    return np.nan_to_num(np.maximum(distances, 0), nan=np.inf, posinf=np.inf)


def krum_ranking(distances: Gram, byzantine: int) -> list[int]:
    """Numbers of the contributions by their score: the sum of squared distances to the `n − f − 2` nearest others.

    At least one other counts.  Others are told by their number, not by their distance: with duplicates the nearest need
    not be oneself.  With one other, two that are nearest to each other always have the same score, so that equal ones
    are ranked by the sums to one more other, and so on: the order of arrival must not decide.
    """
    n = len(distances)
    neighbours = max(n - byzantine - 2, 1)
    others = np.sort(distances[~np.eye(n, dtype=bool)].reshape(n, n - 1), axis=1)
    sums = np.cumsum(others, axis=1)[:, min(neighbours, n - 1) - 1 :] if n > 1 else np.zeros((1, 1))
    return [int(k) for k in np.lexsort(sums.T[::-1])]


def krum(gram: Gram, byzantine: int) -> list[float]:
    """Factor 1 for the contribution with the least score, 0 for the others."""
    return _one_each(len(gram), krum_ranking(squared_distances(gram), byzantine)[:1])


def multi_krum(gram: Gram, byzantine: int, keep: int) -> list[float]:
    """The mean of the `m` contributions with the least scores; 0 keeps as many as there are honest ones, `n − f`."""
    keep = keep or len(gram) - byzantine
    best = krum_ranking(squared_distances(gram), byzantine)[:keep]
    return [chosen / keep for chosen in _one_each(len(gram), best)]


def bulyan_selection(gram: Gram, byzantine: int) -> list[float]:
    """Factor 1 for `θ = n − 2f` contributions: Krum's choice, taken out, and again among those that are left."""
    distances = squared_distances(gram)
    left = list(range(len(gram)))
    chosen = []
    for _ in range(len(gram) - 2 * byzantine):
        chosen.append(left.pop(krum_ranking(distances[np.ix_(left, left)], byzantine)[0]))
    return _one_each(len(gram), chosen)


def geometric_median(gram: Gram, weights: Sequence[float], iterations: int) -> list[float]:
    """Factors, which sum to one, of the point with the least `Σ w_i ‖z − x_i‖`, by so many steps of Weiszfeld.

    `z ← Σ β_i x_i / Σ β_i` with `β_i = w_i / max(‖z − x_i‖, ν)`, beginning at the mean; `ν` is a millionth of the mean
    distance there, so that scaling and moving all contributions scales and moves the result.
    """
    w = np.asarray(weights, dtype=np.float64) / np.sum(weights)
    z = w
    distances = _distances(gram, z)
    least = SMOOTHING * float(w @ distances)
    for _ in range(iterations if least > 0 else 0):
        beta = w / np.maximum(distances, least)
        z = beta / beta.sum()
        distances = _distances(gram, z)
    return list(map(float, z))


def centred_clipping(
    gram: Gram, weights: Sequence[float], iterations: int, tau: float, relative_tau: float
) -> list[float]:
    """Factors, which sum to one, of `v ← v + Σ w_i (x_i − v) · min(1, τ / ‖x_i − v‖)`, repeated.

    Args:
      gram: of the contributions and, last, of the point `v` to begin at: the merged `Δ` of the last round, or zeros.
      weights: of the contributions.
      iterations: how often; 1 to 3 are usual.
      tau: `τ`, an absolute length; 0: `relative_tau` times the median of `‖x_i − v‖` at the beginning, as the length of
        an honest difference changes with `H` and the inner rate.
      relative_tau: see `tau`.

    Returns:
      One factor for each contribution, then that of the point.
    """
    w = np.asarray(weights, dtype=np.float64) / np.sum(weights)
    v = np.zeros(len(gram))
    v[-1] = 1.0
    radius = tau
    for k in range(iterations):
        distances = _distances(gram, v)[:-1]
        if k == 0 and not tau:
            radius = relative_tau * float(np.median(distances))
        with np.errstate(divide="ignore", invalid="ignore"):
            pull = w * np.where(distances <= radius, 1.0, radius / distances)
        v *= 1 - pull.sum()
        v[:-1] += pull
    return list(map(float, v))


def sorted_rows(contributions: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values of each coordinate in ascending order: the least of all, the second, and so on; fp32 [n] each.

    By exchanges of whole rows: for eight rows twelve times as fast as `torch.sort` over them.  NaN spreads to all rows.
    """
    rows = [contribution.clone() for contribution in contributions]
    spare = torch.empty_like(rows[0])
    for i in range(1, len(rows)):
        for j in range(i, 0, -1):
            torch.minimum(rows[j - 1], rows[j], out=spare)
            torch.maximum(rows[j - 1], rows[j], out=rows[j])
            rows[j - 1], spare = spare, rows[j - 1]
    return rows


def median(contributions: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """The middle value of each coordinate, the mean of the two middle ones where their number is even."""
    _middle(sorted_rows(contributions), out)


def trimmed_mean(contributions: Sequence[torch.Tensor], trim: int, out: torch.Tensor) -> None:
    """Per coordinate the mean of what is left when `trim` values are dropped at both ends."""
    rows = sorted_rows(contributions)
    _mean_of_sorted(rows[trim : len(rows) - trim], out)


def mean_near_median(contributions: Sequence[torch.Tensor], drop: int, out: torch.Tensor) -> None:
    """Per coordinate the mean of all values but the `drop` that are farthest from the median.

    Among sorted values those nearest to the median stand side by side: the window begins at the first one and moves
    up as long as the value that it would lose is farther away than the one that it would gain.
    """
    rows = sorted_rows(contributions)
    keep = len(rows) - drop
    middle, window = torch.empty_like(out), torch.empty_like(out)
    _middle(rows, middle)
    _mean_of_sorted(rows[:keep], out)
    for i in range(drop):
        farther = (middle - rows[i]) > (rows[i + keep] - middle)
        _mean_of_sorted(rows[i + 1 : i + 1 + keep], window)
        torch.where(farther, window, out, out=out)


def _one_each(n: int, chosen: Sequence[int]) -> list[float]:
    inside = set(chosen)
    return [1.0 if i in inside else 0.0 for i in range(n)]


def _distances(gram: Gram, z: NDArray[np.float64]) -> NDArray[np.float64]:
    """`‖x_i − Σ z_j x_j‖` for each vector of the Gram matrix."""
    towards = gram @ z
    return np.sqrt(np.maximum(np.diag(gram) - 2 * towards + z @ towards, 0))


def _middle(rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    half = len(rows) // 2
    if len(rows) % 2:
        out.copy_(rows[half])
    else:
        torch.add(rows[half - 1], rows[half], out=out).mul_(0.5)


def _mean_of_sorted(rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """The mean of rows in ascending order; the clamp takes back what rounding put outside of them."""
    out.copy_(rows[0])
    for row in rows[1:]:
        out.add_(row)
    torch.clamp(out.div_(len(rows)), rows[0], rows[-1], out=out)
