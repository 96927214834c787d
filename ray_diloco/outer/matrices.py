"""Tensors as matrices, for codecs that take whole tensors (`dct`, `low_rank`).

A tensor with more than two dimensions counts as a matrix whose rows are all but the last; one with fewer has one row.
The numbers that stand for a matrix travel in a codec of elements.
"""

from __future__ import annotations

import math

import torch

from ray_diloco.outer.codec import Codec

Shape = tuple[int, ...]
# What a sender keeps of a tensor between rounds.
Memory = torch.Tensor | None


def matrix_sides(shape: Shape) -> tuple[int, int]:
    """Rows and columns."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def put_values(codec: Codec, values: torch.Tensor, target: torch.Tensor, nonce: int) -> None:
    """Encodes by way of memory of its own: a codec may view its bytes as wider numbers, `target` may lie anywhere."""
    aligned = torch.empty(target.numel(), dtype=torch.uint8)
    codec.encode(values, aligned, nonce=nonce)
    target.copy_(aligned)


def get_values(codec: Codec, source: torch.Tensor, numel: int, nonce: int) -> torch.Tensor:
    """Decodes what `put_values` wrote: fp32 [numel]."""
    values = torch.empty(numel)
    codec.decode(source.clone(), values, nonce=nonce)
    return values
