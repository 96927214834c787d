"""Outer optimisers that are linear in `Δ`: plain SGD and the forms of momentum that are met in the wild.

The same `η` and `μ` mean different things in them.  Under a constant `Δ` the step tends to `η/(1−μ) Δ` in torch's
Nesterov and in heavy ball, to `η(1+μ) Δ` in the form with a moving average, and to `(η + μ/(1−μ)) Δ` in the survey's
(../shared/algorithms.md §1, §5.1, §5.2, §13).  Where torch has the same optimiser, the bits are its.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ray_diloco.errors import SyncError
from ray_diloco.outer.optimizer_protocol import OuterOptimizer


@dataclass(frozen=True)
class Sgd(OuterOptimizer):
    """`A ← A − η Δ`."""

    lr: float

    order_sensitive: ClassVar[bool] = False

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
class Nesterov(OuterOptimizer):
    """`u ← μ u + Δ; A ← A − η (Δ + μ u)`, with the new `u`: torch's form, and DiLoCo's (2311.08105)."""

    lr: float
    momentum: float

    state_names: ClassVar[tuple[str, ...]] = ("momentum",)
    # torch's first step copies Δ into u.  −0 + Δ has the bits of Δ; 0 + Δ would turn a −0 in Δ into 0.
    initial: ClassVar[float] = -0.0
    momentum_state: ClassVar[str | None] = "momentum"
    compounds_when_async: ClassVar[bool] = True

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

    def lookahead(
        self, anchor: torch.Tensor, state: Sequence[torch.Tensor], out: torch.Tensor, lr: float | None = None
    ) -> None:
        """`A − η μ u`."""
        torch.add(anchor, state[0], alpha=-(self.lr if lr is None else lr) * self.momentum, out=out)


@dataclass(frozen=True)
class HeavyBall(OuterOptimizer):
    """`u ← μ u + Δ; A ← A − η u`: FedAvgM, SlowMo at a constant inner rate (1910.00643), NoLoCo (2506.10911)."""

    lr: float
    momentum: float

    state_names: ClassVar[tuple[str, ...]] = ("momentum",)
    initial: ClassVar[float] = -0.0
    momentum_state: ClassVar[str | None] = "momentum"
    compounds_when_async: ClassVar[bool] = True

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
        torch.add(anchor, u_out, alpha=-(self.lr if lr is None else lr), out=anchor_out)

    def lookahead(
        self, anchor: torch.Tensor, state: Sequence[torch.Tensor], out: torch.Tensor, lr: float | None = None
    ) -> None:
        """`A − η μ u`."""
        torch.add(anchor, state[0], alpha=-(self.lr if lr is None else lr) * self.momentum, out=out)


@dataclass(frozen=True)
class LookaheadNesterov(OuterOptimizer):
    """`A ← (A − μ m) − η Δ; m ← μ m + Δ`, with the old `m`: the form of the survey.

    It is not Nesterov's: the momentum is not scaled by `η`, so that at (0.7, 0.9) a constant `Δ` moves the anchor by
    9.7 Δ a step in the end, not by 7 Δ (../shared/algorithms.md §13).  It is here for comparison, under its own name.
    """

    lr: float
    momentum: float

    state_names: ClassVar[tuple[str, ...]] = ("momentum",)
    initial: ClassVar[float] = -0.0
    momentum_state: ClassVar[str | None] = "momentum"
    compounds_when_async: ClassVar[bool] = True

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
        (m,), (m_out,) = state, state_out
        self.lookahead(anchor, state, anchor_out)
        anchor_out.add_(delta, alpha=-(self.lr if lr is None else lr))
        torch.mul(m, self.momentum, out=m_out).add_(delta)

    def lookahead(
        self, anchor: torch.Tensor, state: Sequence[torch.Tensor], out: torch.Tensor, lr: float | None = None
    ) -> None:
        """`A − μ m`: the rate does not scale it."""
        torch.add(anchor, state[0], alpha=-self.momentum, out=out)


@dataclass(frozen=True)
class EmaNesterov(OuterOptimizer):
    """`u ← μ u + (1 − μ) Δ; A ← A − η (Δ + μ u)`, with the new `u`: HeLoCo (2606.00271) and MLA."""

    lr: float
    momentum: float

    state_names: ClassVar[tuple[str, ...]] = ("momentum",)
    momentum_state: ClassVar[str | None] = "momentum"

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
        (u,), (u_out,) = state, state_out
        torch.mul(u, self.momentum, out=u_out).add_(delta, alpha=1 - self.momentum)
        torch.add(delta, u_out, alpha=self.momentum, out=anchor_out)
        torch.add(anchor, anchor_out, alpha=-(self.lr if lr is None else lr), out=anchor_out)

    def lookahead(
        self, anchor: torch.Tensor, state: Sequence[torch.Tensor], out: torch.Tensor, lr: float | None = None
    ) -> None:
        """`A − η μ u`."""
        torch.add(anchor, state[0], alpha=-(self.lr if lr is None else lr) * self.momentum, out=out)


@dataclass(frozen=True)
class DelayedNesterov(OuterOptimizer):
    """Momentum that moves once in `N` contributions, which are applied one after the other (2401.09135, algorithm 3).

        b ← b + Δ
        every N-th:  m ← μ m + b/N;  A ← A − η [(1 − c N + c) μ m + Δ/N];  b ← 0
        else:        A ← A − η [c μ m + Δ/N]

    With `c = 0`, `N` contributions from one base make one step of Nesterov on their mean; `N = 1` has its bits.  The
    version of the anchor is the counter.

    Attributes:
      lr: `η`.
      momentum: `μ`.
      buffer: `N`, usually the number of islands.
      c: part of the momentum that every contribution applies, 0 to `1/N`.

    Raises:
      SyncError: RD-433, `N` or `c` is outside its range.
    """

    lr: float
    momentum: float
    buffer: int
    c: float = 0.0

    state_names: ClassVar[tuple[str, ...]] = ("momentum", "buffer")
    initial: ClassVar[float] = -0.0
    momentum_state: ClassVar[str | None] = "momentum"

    def __post_init__(self) -> None:
        if self.buffer < 1:
            what = f"delayed_nesterov has a buffer of {self.buffer} contributions"
            raise SyncError(433, what, "set outer.buffer to the number of islands")
        if not 0 <= self.c * self.buffer <= 1:
            what = f"delayed_nesterov with c={self.c} and a buffer of {self.buffer} applies more momentum than there is"
            raise SyncError(433, what, f"set outer.c from 0 to {1 / self.buffer:g}")

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
        (m, b), (m_out, b_out) = state, state_out
        N, c = self.buffer, self.c
        torch.add(b, delta, out=b_out)
        if (version + 1) % N == 0:
            torch.mul(m, self.momentum, out=m_out).add_(b_out, alpha=1 / N)
            b_out.fill_(self.initial)
            part = 1 - c * N + c
        else:
            m_out.copy_(m)
            part = c
        torch.div(delta, N, out=anchor_out).add_(m_out, alpha=part * self.momentum)
        torch.add(anchor, anchor_out, alpha=-(self.lr if lr is None else lr), out=anchor_out)

    def lookahead(
        self, anchor: torch.Tensor, state: Sequence[torch.Tensor], out: torch.Tensor, lr: float | None = None
    ) -> None:
        """`A − η μ m`."""
        torch.add(anchor, state[0], alpha=-(self.lr if lr is None else lr) * self.momentum, out=out)
