"""The order of blocks within an epoch: a seeded permutation of 0..n-1, computed in O(1) per index.

A Feistel network over the smallest domain of 2^(2k) ≥ n numbers is a bijection whatever its round function is; numbers
outside 0..n-1 are sent through it again until they fall inside ("cycle walking", Black & Rogaway 2002), which keeps it
a bijection of 0..n-1.  Nothing is stored and nothing is advanced, so any position of any epoch can be read at any time:
resuming is arithmetic.  The values are part of the ledger's meaning and must never change.
"""

from __future__ import annotations

import numpy as np

_ROUNDS = 6
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def virtual_to_block(seed: int, virtual: np.ndarray, n: int) -> np.ndarray:
    """Blocks behind virtual indices: index `e·n + i` is the i-th block of epoch e's permutation.

    Args:
      seed: the run's seed; taken modulo 2^64.
      virtual: non-negative integers of any shape and integer dtype.
      n: number of training blocks, 1 ≤ n ≤ 2^62.

    Returns:
      int64 array of `virtual`'s shape with values in 0..n-1.

    Raises:
      ValueError: n out of range, or a virtual index that is negative or no integer.
    """
    if not 1 <= n <= 1 << 62:
        raise ValueError(f"a permutation needs 1 ≤ n ≤ 2^62, got {n}")
    index = np.asarray(virtual)
    if index.dtype.kind not in "iu":
        raise ValueError(f"virtual indices must be integers, got dtype {index.dtype}")
    if index.size and int(index.min()) < 0:
        raise ValueError(f"virtual indices must not be negative, got {int(index.min())}")
    epoch, position = np.divmod(index.ravel().astype(np.uint64), np.uint64(n))
    seed_key = np.array([seed & _MASK], dtype=np.uint64)
    block = _permute(position, _mix(_mix(seed_key) + epoch), n)
    return block.astype(np.int64).reshape(index.shape)


def _permute(position: np.ndarray, key: np.ndarray, n: int) -> np.ndarray:
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    block = _feistel(position, key, half)
    outside = np.flatnonzero(block >= n)
    while outside.size:
        block[outside] = _feistel(block[outside], key[outside], half)
        outside = outside[block[outside] >= n]
    return block


def _feistel(x: np.ndarray, key: np.ndarray, half: int) -> np.ndarray:
    """A bijection of 0..2^(2·half)-1 for every key; uint64 in and out."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> shift, x & mask
    for number in range(1, _ROUNDS + 1):
        round_key = _mix(key + np.uint64(number * _GOLDEN & _MASK))
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    joined: np.ndarray = left << shift | right
    return joined


def _mix(x: np.ndarray) -> np.ndarray:
    """Finaliser of splitmix64 (Steele, Lea & Flood 2014): every bit of x moves every bit of the result."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
