"""Outer optimisers that scale `Δ` element by element: AdamW, FedOpt's Adam, Yogi and Adagrad, and the sign.

FedOpt (2003.00295): `m ← β₁ m + (1 − β₁) Δ`, a second moment `v` that begins at `τ²`, `A ← A − η m / (√v + τ)`, without
correction of the bias (../shared/algorithms.md §2.4; the paper adds the opposite sign).  Flower differs: its `v` begins
at 0, and its Adam corrects the bias.  The outer rate and `τ` are of the size of one element of a `Δ`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ray_diloco.outer.optimizer_protocol import OuterOptimizer


@dataclass(frozen=True)
class AdamW(OuterOptimizer):
    """`m ← β₁ m + (1 − β₁) Δ; v ← β₂ v + (1 − β₂) Δ²; A ← (1 − η λ) A − η m̂ / (√v̂ + ε)`, bias-corrected by `version`.

    It is `torch.optim.AdamW`, bit for bit.  With inner SGD at rate 1 and one inner step it is synchronous AdamW
    (../shared/algorithms.md §2.1).  DiLoCo found it unstable on longer rounds unless ε is 0.1.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

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


@dataclass(frozen=True)
class Adam(OuterOptimizer):
    """FedAdam: `v ← β₂ v + (1 − β₂) Δ²`."""

    lr: float
    beta1: float
    beta2: float
    tau: float

    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    @property
    def initials(self) -> tuple[float, ...]:
        """`m` begins at 0, `v` at `τ²`."""
        return (0.0, self.tau**2)

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
        (m, v), (m_out, v_out) = state, state_out
        torch.lerp(m, delta, 1 - self.beta1, out=m_out)
        torch.mul(v, self.beta2, out=v_out).addcmul_(delta, delta, value=1 - self.beta2)
        _move(anchor, m_out, v_out, self.tau, self.lr if lr is None else lr, anchor_out)


@dataclass(frozen=True)
class Yogi(OuterOptimizer):
    """FedYogi: `v ← v − (1 − β₂) Δ² sign(v − Δ²)`, which grows and shrinks by no more than `Δ²` allows."""

    lr: float
    beta1: float
    beta2: float
    tau: float

    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    @property
    def initials(self) -> tuple[float, ...]:
        """`m` begins at 0, `v` at `τ²`."""
        return (0.0, self.tau**2)

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
        (m, v), (m_out, v_out) = state, state_out
        torch.lerp(m, delta, 1 - self.beta1, out=m_out)
        square = torch.mul(delta, delta, out=anchor_out)
        torch.sub(v, square, out=v_out).sign_().mul_(square)
        torch.add(v, v_out, alpha=-(1 - self.beta2), out=v_out)
        _move(anchor, m_out, v_out, self.tau, self.lr if lr is None else lr, anchor_out)


@dataclass(frozen=True)
class Adagrad(OuterOptimizer):
    """FedAdagrad: `v ← v + Δ²`; the paper and Flower set `β₁` to 0."""

    lr: float
    beta1: float
    tau: float

    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "sum_sq")

    @property
    def initials(self) -> tuple[float, ...]:
        """`m` begins at 0, `v` at `τ²`."""
        return (0.0, self.tau**2)

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
        (m, v), (m_out, v_out) = state, state_out
        torch.lerp(m, delta, 1 - self.beta1, out=m_out)
        torch.addcmul(v, delta, delta, out=v_out)
        _move(anchor, m_out, v_out, self.tau, self.lr if lr is None else lr, anchor_out)


@dataclass(frozen=True)
class Sign(OuterOptimizer):
    """`A ← (1 − η λ) A − η sign(Δ)`: DeMo and signSGD (2411.19870); with decay `λ` the order of steps matters."""

    lr: float
    weight_decay: float = 0.0

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
        lr = self.lr if lr is None else lr
        torch.sign(delta, out=anchor_out).mul_(-lr)
        anchor_out.add_(anchor, alpha=1 - lr * self.weight_decay)


def _move(
    anchor: torch.Tensor, m: torch.Tensor, v: torch.Tensor, tau: float, lr: float, anchor_out: torch.Tensor
) -> None:
    """`A − η m / (√v + τ)`."""
    torch.addcdiv(anchor, m, torch.sqrt(v, out=anchor_out).add_(tau), value=-lr, out=anchor_out)
