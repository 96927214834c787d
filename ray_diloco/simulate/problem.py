"""What simulated islands train: a small vector in float64, pulled towards a point of the island's own.

A segment of `n` steps goes the way that gradient descent on `½‖θ − c‖²` goes in `n` steps, where `c` depends on the
island and on every block of its lease: a wrong lease, base or anchor changes the numbers.  It costs the same whatever
`n` is.  The tensors are those of a small model, so that every kind of fragment cuts it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ray_diloco.outer.layout import Layout, Range, Ranges, layout_of, total

# Blocks repeat their pull with this period.
PERIOD = 17

_RATE = 0.05


def small_layout(blocks: int = 4) -> Layout:
    """A model of so many transformer blocks, with 2 × 2 matrices."""
    layers = [(f"model.layers.{k}.mlp.weight", (2, 2)) for k in range(blocks)]
    return layout_of([("model.embed_tokens.weight", (2, 2)), *layers, ("lm_head.weight", (2, 2))])


@lru_cache(maxsize=200_000)
def centre(name: str, dim: int) -> np.ndarray:
    """Where an island is pulled to, float64 [dim]."""
    rng = random.Random(name)
    point = np.array([1.0 + rng.uniform(-1, 1) for _ in range(min(dim, 6))])
    resized: np.ndarray = np.resize(point, dim)
    return resized


@lru_cache
def start(dim: int) -> np.ndarray:
    """The initialisation, float64 [dim]."""
    values: np.ndarray = np.cos(np.arange(dim) * 1.7)
    return values


@lru_cache
def _direction(dim: int) -> np.ndarray:
    values: np.ndarray = np.sin(np.arange(dim) * 0.9 + 0.3)
    return values


def pull(blocks: Ranges) -> float:
    """The mean pull of some blocks, from −½ to ½; every block counts."""
    count = total(blocks)
    return sum(_until(r.stop) - _until(r.start) for r in blocks) / count if count else 0.0


def _until(block: int) -> float:
    """Sum of the pulls of all blocks below one."""
    whole, left = divmod(block, PERIOD)
    return (whole * _SUMS[PERIOD] + _SUMS[left]) / PERIOD


_SUMS = [sum((7 * block) % PERIOD - PERIOD // 2 for block in range(n)) for n in range(PERIOD + 1)]


def trained(theta: np.ndarray, name: str, steps: int, blocks: Ranges) -> tuple[np.ndarray, float]:
    """Parameters after some steps on some blocks, and the mean loss on the way."""
    target = centre(name, len(theta)) + pull(blocks) * _direction(len(theta))
    gap = theta - target
    after = target + gap * (1 - _RATE) ** steps
    return after, float(gap @ gap) / 2


def held_out(theta: np.ndarray, block: int) -> float:
    """The loss of a held-out block, in nats."""
    return float(theta @ theta) / 2 + (block % PERIOD) / PERIOD


def first(blocks: Ranges, count: int) -> Ranges:
    """The first so many blocks."""
    found: list[Range] = []
    for r in blocks:
        if count <= 0:
            break
        found.append(Range(r.start, min(r.stop, r.start + count)))
        count -= found[-1].numel
    return tuple(found)


def joined(parts: Sequence[Ranges]) -> Ranges:
    """All blocks of several ranges, sorted; two ranges that touch stay two."""
    return tuple(sorted((r for part in parts for r in part), key=lambda r: r.start))


def finite(values: np.ndarray) -> bool:
    """Whether no element is NaN or infinite."""
    return math.isfinite(float(values @ values))
