"""The inner optimisers: torch's own, each with the names of what it keeps per parameter.

Their state stays in the island and is never exchanged.  Fused AdamW is the fastest at every ZeRO stage
(../shared/ray-and-deepspeed.md Part 2).  A new one is one line in `OPTIMIZERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ray_diloco.config.schema import InnerConfig, InnerOptimizerConfig

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class InnerOptimizer:
    """An inner optimiser.

    Attributes:
      build: makes it from parameter groups, learning rate and settings.
      state_names: names of the tensors that it keeps per parameter, as torch calls them.
    """

    build: Callable[[Groups, float, InnerOptimizerConfig], torch.optim.Optimizer]
    state_names: Callable[[InnerOptimizerConfig], tuple[str, ...]]


def parameter_groups(model: nn.Module, inner: InnerConfig) -> Groups:
    """Two groups: weight decay on tensors of two or more dimensions, none on norms and biases.

    The decay is decoupled in AdamW (1711.05101) and added to the gradient in SGD, as torch has them.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": inner.optimizer.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(groups: Groups, lr: float, config: InnerOptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def _sgd(groups: Groups, lr: float, config: InnerOptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=lr, momentum=config.momentum)


# By `inner.optimizer.name`.
OPTIMIZERS: dict[str, InnerOptimizer] = {
    "adamw": InnerOptimizer(_adamw, lambda _: ("exp_avg", "exp_avg_sq")),
    "sgd": InnerOptimizer(_sgd, lambda config: ("momentum_buffer",) if config.momentum > 0 else ()),
}
