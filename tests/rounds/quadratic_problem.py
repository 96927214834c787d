"""Heterogeneous quadratics: island `m` minimises ½(θ − c_m)ᵀ A_m (θ − c_m) over a few named tensors.

A block shifts `c_m`, so that a wrong lease changes the numbers.
"""

import math

import numpy as np
import torch

from ray_diloco.outer.layout import layout_of

BLOCKS = [(f"model.layers.{k}.{name}", shape) for k in range(4) for name, shape in (("w", (2, 2)), ("norm", (2,)))]
SHAPES = [("model.embed_tokens.weight", (2, 3)), *BLOCKS, ("lm_head.weight", (2, 3))]
LAYOUT = layout_of(SHAPES)
DIM = LAYOUT.numel
# 1 where weight decay applies: tensors of two or more dimensions.
DECAYED = np.concatenate([np.full(math.prod(shape), float(len(shape) > 1)) for _, shape in SHAPES])
TOKENS = 10
PER_STEP = 2


def _problem(name):
    rng = np.random.default_rng(1000 + int(name[1:]))
    root = rng.standard_normal((DIM, DIM)) / math.sqrt(DIM)
    return np.eye(DIM) / 2 + root @ root.T, rng.standard_normal(DIM) + 1.0


_PROBLEMS = {f"i{k}": _problem(f"i{k}") for k in range(6)}
_SHIFT = np.random.default_rng(7).standard_normal(DIM)
START = np.random.default_rng(8).standard_normal(DIM)


def gradient(theta, name, blocks):
    """The gradient of an island on some blocks, float64 [DIM]."""
    matrix, centre = _PROBLEMS[name]
    shift = np.mean([(block % 17 - 8) / 50 for block in blocks])
    return matrix @ (theta - centre - shift * _SHIFT)


def held_out(theta, block):
    """The loss of a held-out block: that of all islands together."""
    return block + sum(0.5 * (theta - c) @ A @ (theta - c) for A, c in _PROBLEMS.values())


def indices(ranges):
    return torch.cat([torch.arange(r.start, r.stop) for r in ranges])
