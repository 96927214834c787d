"""Codecs in float64: what the bytes would say of a vector."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from quadratic_problem import LAYOUT


def cosines(n):
    """The orthonormal DCT-II of n values as a matrix."""
    k, x = np.arange(n)[:, None], np.arange(n)[None, :]
    matrix = math.sqrt(2 / n) * np.cos(math.pi * (2 * x + 1) * k / (2 * n))
    matrix[0] /= math.sqrt(2)
    return torch.from_numpy(matrix)


def tiles(shape, block):
    """Height and width of a tile of a tensor."""
    rows, columns = (1, shape[0]) if len(shape) == 1 else shape
    return rows, columns, *(max(d for d in range(1, block + 1) if n % d == 0) for n in (rows, columns))


def largest(rows, k):
    """Rows in which all but the `k` largest of each are 0."""
    at = rows.abs().topk(min(k, rows.shape[1]), dim=1).indices
    return torch.zeros_like(rows).scatter_(1, at, rows.gather(1, at))


@dataclass
class Dct:
    """Whole tensors as cosine coefficients of tiles, tile after tile."""

    block: int
    k: int

    def each(self, values, number, do):
        at = 0
        for spec in [s for s in LAYOUT.tensors if s.range.numel and number(s)]:
            do(values[at : at + spec.numel], *tiles(spec.shape, self.block))
            at += spec.numel

    def transform(self, values, number):
        def one(part, rows, columns, high, wide):
            cut = part.view(rows // high, high, columns // wide, wide).transpose(1, 2)
            part.copy_((cosines(high) @ (cut @ cosines(wide).T)).reshape(-1))

        self.each(out := values.clone(), number, one)
        return out

    def inverse(self, values, number):
        def one(part, rows, columns, high, wide):
            cut = part.clone().view(rows // high, columns // wide, high, wide)
            back = cosines(high).T @ (cut @ cosines(wide))
            part.view(rows // high, high, columns // wide, wide).copy_(back.transpose(1, 2))

        self.each(out := values.clone(), number, one)
        return out

    def kept(self, coefficients, number):
        def one(part, rows, columns, high, wide):
            part.copy_(largest(part.view(-1, high * wide).clone(), self.k).view(-1))

        self.each(out := coefficients.clone(), number, one)
        return out


@dataclass
class TopK:
    """The `k` largest of each run of `block` elements."""

    block: int
    k: int

    def kept(self, values):
        out = values.clone()
        for start in range(0, len(out), self.block):
            part = out[start : start + self.block]
            part.copy_(largest(part.view(1, -1).clone(), self.k).view(-1))
        return out


def codec_in_float64(channel):
    up = channel.up
    if up.kind == "dct":
        return Dct(up.block or 64, up.k)
    if up.kind == "topk":
        return TopK(up.block or 4096, up.k)
    assert up.kind == "fp32", f"there is no {up.kind} in float64"
    return None
