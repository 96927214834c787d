"""Loss of held-out blocks, block by block, so that a sum in block order does not depend on who evaluated what.

Micro-batches have a fixed composition: blocks are taken in the order given, `micro_batch` at a time, and the last
one is filled up, because a matrix product may round differently for another number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ray_diloco.inner.builder import output_field

Forward = Callable[[torch.Tensor], Any]


def block_losses(
    forward: Forward, blocks: np.ndarray, micro_batch: int, device: torch.device
) -> list[tuple[float, int]]:
    """Sum of nats (added up in float64) and number of predicted tokens of each block.

    Args:
      forward: the model's output for token ids [batch, sequence], with labels equal to them.
      blocks: token ids [n, sequence] of any integer type.
      micro_batch: blocks per forward pass.
      device: where the model is.
    """
    losses: list[tuple[float, int]] = []
    for first in range(0, len(blocks), micro_batch):
        part = blocks[first : first + micro_batch]
        filled = np.concatenate([part, np.repeat(part[-1:], micro_batch - len(part), axis=0)])
        ids = torch.from_numpy(np.ascontiguousarray(filled, dtype=np.int64)).to(device)
        losses += _losses_of(forward, ids)[: len(part)]
    return losses


def _losses_of(forward: Forward, ids: torch.Tensor) -> list[tuple[float, int]]:
    predicted = ids.shape[1] - 1
    output = forward(ids)
    logits = output_field(output, "logits")
    if logits is None:
        if len(ids) == 1:
            return [(float(output_field(output, "loss")) * predicted, predicted)]
        return [loss for row in ids.unsqueeze(1) for loss in _losses_of(forward, row)]
    return [
        (float(functional.cross_entropy(row[:-1].float(), own[1:], reduction="none").double().sum()), predicted)
        for row, own in zip(logits, ids, strict=True)
    ]
