"""torch's optimisers without what keeps them out of torch.compile: the same steps, seconds less at the start of a rank.

torch wraps methods of its optimisers so that its compiler leaves them alone, and the wrappers import that compiler,
also where nothing is ever compiled: 3 to 4 s of CPU time in each rank that starts, or starts again.  Here only the
model is compiled (`model.compile`), never a step.  Models of transformers import the compiler themselves, and so does
DeepSpeed 0.19 from stage 1 on.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer


class Uncompiled(Optimizer):
    """The base of an optimiser whose methods are called directly; its `step` must be one too."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)


def _bare(step: Any) -> Any:
    """`step` of torch without its wrappers, one of which turns gradients off, as this does."""
    return torch.no_grad()(inspect.unwrap(step))


class AdamW(Uncompiled, torch.optim.AdamW):
    """`torch.optim.AdamW`."""

    step = _bare(torch.optim.AdamW.step)


class SGD(Uncompiled, torch.optim.SGD):
    """`torch.optim.SGD`."""

    step = _bare(torch.optim.SGD.step)
