"""The inner optimisers: torch's own and Muon, each with the names of what it keeps per parameter.

Their state stays in the island and is never exchanged.  Every parameter group has a `base_lr`, which the schedule
multiplies, so that rates that differ keep their ratio.  Fused AdamW is the fastest at every ZeRO stage
(../shared/ray-and-deepspeed.md Part 2).  A new one is one line in `OPTIMIZERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ray_diloco.config.schema import InnerConfig
from ray_diloco.inner.muon import HIDDEN, MuonAdamW, hidden_matrices
from ray_diloco.inner.uncompiled import SGD, AdamW

Groups = list[dict[str, Any]]
# Names of the tensors that an optimiser keeps for each parameter, by the parameter's name.
StateNames = dict[str, tuple[str, ...]]

_ADAMW = ("exp_avg", "exp_avg_sq")
_MOMENTUM = ("momentum_buffer",)


@dataclass(frozen=True)
class InnerOptimizer:
    """An inner optimiser.

    Attributes:
      build: makes it for a model.
      state_names: names of the tensors that it keeps per parameter, as torch calls them.
      base_lr: rate of the first phase of the schedule, of all parameters that have no other.
      scheduled: whether the rate follows the schedule.
    """

    build: Callable[[nn.Module, InnerConfig], torch.optim.Optimizer]
    state_names: Callable[[nn.Module, InnerConfig], StateNames]
    base_lr: Callable[[InnerConfig], float] = lambda inner: inner.lr
    scheduled: bool = True


def parameter_groups(parameters: Iterable[nn.Parameter], lr: float, weight_decay: float) -> Groups:
    """Two groups: weight decay on tensors of two or more dimensions, none on norms and biases.

    The decay is decoupled in AdamW (1711.05101) and added to the gradient in SGD, as torch has them.
    """
    trainable = [p for p in parameters if p.requires_grad]
    return [
        {"params": chosen, "lr": lr, "base_lr": lr, "weight_decay": decay}
        for chosen, decay in (
            ([p for p in trainable if p.ndim >= 2], weight_decay),
            ([p for p in trainable if p.ndim < 2], 0.0),
        )
        if chosen
    ]


def _adamw(model: nn.Module, inner: InnerConfig) -> torch.optim.Optimizer:
    config = inner.optimizer
    groups = parameter_groups(model.parameters(), inner.lr, config.weight_decay)
    # From stage 1 on DeepSpeed imports the compiler itself, and warns of classes that it does not know.
    kind = AdamW if inner.zero_stage == 0 else torch.optim.AdamW
    return kind(groups, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def _sgd(model: nn.Module, inner: InnerConfig) -> torch.optim.Optimizer:
    groups = parameter_groups(model.parameters(), inner.lr, inner.optimizer.weight_decay)
    return SGD(groups, momentum=inner.optimizer.momentum)


def _raw(model: nn.Module, _: InnerConfig) -> torch.optim.Optimizer:
    """`θ ← θ − g`: the pseudo-gradient of one step is the gradient."""
    return SGD(parameter_groups(model.parameters(), 1.0, 0.0))


def _muon(model: nn.Module, inner: InnerConfig) -> torch.optim.Optimizer:
    config, names = inner.optimizer, hidden_matrices(model)
    hidden = [p for name, p in model.named_parameters() if name in names]
    others = [p for name, p in model.named_parameters() if name not in names]
    groups = [
        group | {HIDDEN: True, "momentum": config.muon_momentum}
        for group in parameter_groups(hidden, config.muon_lr, config.muon_weight_decay)
    ] + [
        group | {HIDDEN: False, "betas": (config.beta1, config.beta2), "eps": config.eps}
        for group in parameter_groups(others, inner.lr, config.weight_decay)
    ]
    return MuonAdamW(groups, torch.bfloat16 if inner.precision == "bf16" else torch.float32)


def _muon_state(model: nn.Module, _: InnerConfig) -> StateNames:
    hidden = hidden_matrices(model)
    return {name: _MOMENTUM if name in hidden else _ADAMW for name, _ in model.named_parameters()}


def _same(model: nn.Module, names: tuple[str, ...]) -> StateNames:
    return dict.fromkeys((name for name, _ in model.named_parameters()), names)


# By `inner.optimizer.name`.
OPTIMIZERS: dict[str, InnerOptimizer] = {
    "adamw": InnerOptimizer(_adamw, lambda model, _: _same(model, _ADAMW)),
    "sgd": InnerOptimizer(_sgd, lambda model, inner: _same(model, _MOMENTUM if inner.optimizer.momentum > 0 else ())),
    "muon": InnerOptimizer(_muon, _muon_state),
    "raw": InnerOptimizer(_raw, lambda model, _: _same(model, ()), base_lr=lambda _: 1.0, scheduled=False),
}
