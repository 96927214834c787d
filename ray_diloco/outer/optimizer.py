"""The outer optimiser: `(A, u) ← Outer(A, u, Δ)`, on one chunk at a time.

Pure with respect to its inputs, so that a round that is given up leaves no trace.  Nesterov is
`torch.optim.SGD(nesterov=True)` fed with `Δ`, bit for bit in fp32 and for any chunks (../shared/algorithms.md §1;
DiLoCo, arXiv 2311.08105), AdamW is `torch.optim.AdamW`.  A new one is one class and one line in `OPTIMIZERS`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from ray_diloco.errors import SyncError


class OuterOptimizer(Protocol):
    """Moves an anchor."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the tensors it remembers, each as large as the anchor, in the order of `state`."""
        ...

    @property
    def initial(self) -> float:
        """Value of the elements of a new state."""
        ...

    def step(
        self,
        anchor: torch.Tensor,
        state: Sequence[torch.Tensor],
        delta: torch.Tensor,
        anchor_out: torch.Tensor,
        state_out: Sequence[torch.Tensor],
        *,
        version: int,
        lr: float | None = None,
    ) -> None:
        """Moves one chunk of `n` elements; all tensors are fp32 [n].

        Args:
          anchor: `A`; not written.
          state: tensors in the order of `state_names`; not written.
          delta: merged outer gradient `Δ`; not written.
          anchor_out: where the new anchor goes.
          state_out: where the new state goes.
          version: how often this anchor has moved before.
          lr: learning rate of this step; None: the optimiser's own.
        """
        ...


@dataclass(frozen=True)
class Sgd:
    """`A ← A − η Δ`."""

    lr: float

    state_names: ClassVar[tuple[str, ...]] = ()
    initial: ClassVar[float] = 0.0

    def step(
        self,
        anchor: torch.Tensor,
        state: Sequence[torch.Tensor],
        delta: torch.Tensor,
        anchor_out: torch.Tensor,
        state_out: Sequence[torch.Tensor],
        *,
        version: int,
        lr: float | None = None,
    ) -> None:
        """See `OuterOptimizer.step`."""
        torch.add(anchor, delta, alpha=-(self.lr if lr is None else lr), out=anchor_out)


@dataclass(frozen=True)
class Nesterov:
    """`u ← μ u + Δ; A ← A − η (Δ + μ u)`, with the new `u`: torch's form."""

    lr: float
    momentum: float

    state_names: ClassVar[tuple[str, ...]] = ("momentum",)
    # torch's first step copies Δ into u.  −0 + Δ has the bits of Δ; 0 + Δ would turn a −0 in Δ into 0.
    initial: ClassVar[float] = -0.0

    def step(
        self,
        anchor: torch.Tensor,
        state: Sequence[torch.Tensor],
        delta: torch.Tensor,
        anchor_out: torch.Tensor,
        state_out: Sequence[torch.Tensor],
        *,
        version: int,
        lr: float | None = None,
    ) -> None:
        """See `OuterOptimizer.step`.  The operations and their order are those of torch.optim.SGD."""
        (u,), (u_out,) = state, state_out
        torch.mul(u, self.momentum, out=u_out).add_(delta)
        torch.add(delta, u_out, alpha=self.momentum, out=anchor_out)
        torch.add(anchor, anchor_out, alpha=-(self.lr if lr is None else lr), out=anchor_out)


@dataclass(frozen=True)
class AdamW:
    """`m ← β₁ m + (1 − β₁) Δ; v ← β₂ v + (1 − β₂) Δ²; A ← (1 − η λ) A − η m̂ / (√v̂ + ε)`, bias-corrected by `version`.

    With inner SGD at rate 1 and one inner step it is synchronous AdamW (../shared/algorithms.md §2.1).  On longer
    rounds it is FedOpt's server Adam (2003.00295); DiLoCo found it unstable unless ε is 0.1.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    initial: ClassVar[float] = 0.0

    def step(
        self,
        anchor: torch.Tensor,
        state: Sequence[torch.Tensor],
        delta: torch.Tensor,
        anchor_out: torch.Tensor,
        state_out: Sequence[torch.Tensor],
        *,
        version: int,
        lr: float | None = None,
    ) -> None:
        """See `OuterOptimizer.step`.  The operations and their order are those of torch.optim.AdamW, one tensor."""
        (m, v), (m_out, v_out) = state, state_out
        lr, steps = self.lr if lr is None else lr, version + 1
        torch.lerp(m, delta, 1 - self.beta1, out=m_out)
        torch.mul(v, self.beta2, out=v_out).addcmul_(delta, delta, value=1 - self.beta2)
        denominator = torch.sqrt(v_out, out=anchor_out)
        denominator.div_(math.sqrt(1 - self.beta2**steps)).add_(self.eps)
        decayed = anchor * (1 - lr * self.weight_decay) if self.weight_decay else anchor
        torch.addcdiv(decayed, m_out, denominator, value=-lr / (1 - self.beta1**steps), out=anchor_out)


# By `outer.kind`; each takes the keys of the `outer` section that are its own fields.
OPTIMIZERS: dict[str, Callable[..., OuterOptimizer]] = {"nesterov": Nesterov, "sgd": Sgd, "adamw": AdamW}


def outer_optimizer(kind: str, **settings: float) -> OuterOptimizer:
    """Builds an outer optimiser from the `outer` section of a configuration; the keys of other kinds are left alone.

    Raises:
      SyncError: RD-415, there is none of that name.
    """
    if kind not in OPTIMIZERS:
        known = ", ".join(sorted(OPTIMIZERS))
        raise SyncError(415, f"there is no outer optimiser {kind!r}", f"use one of {known}")
    own = inspect.signature(OPTIMIZERS[kind]).parameters
    return OPTIMIZERS[kind](**{key: value for key, value in settings.items() if key in own})
