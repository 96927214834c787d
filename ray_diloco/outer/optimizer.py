"""The outer optimiser: `(A, u) ← Outer(A, u, Δ)`, on one chunk at a time.

Pure with respect to its inputs, so that a round that is given up leaves no trace.  Nesterov is
`torch.optim.SGD(nesterov=True)` fed with `Δ`, bit for bit in fp32 and for any chunks (../shared/algorithms.md §1;
DiLoCo, arXiv 2311.08105).  A new one is one class and one line in `OPTIMIZERS`.
"""

from __future__ import annotations

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


OPTIMIZERS: dict[str, Callable[[float, float], OuterOptimizer]] = {
    "nesterov": Nesterov,
    "sgd": lambda lr, momentum: Sgd(lr),
}


def outer_optimizer(kind: str, lr: float, momentum: float) -> OuterOptimizer:
    """Builds an outer optimiser from the `outer` section of a configuration.

    Raises:
      SyncError: RD-415, there is none of that name.
    """
    if kind not in OPTIMIZERS:
        known = ", ".join(sorted(OPTIMIZERS))
        raise SyncError(415, f"there is no outer optimiser {kind!r}", f"use one of {known}")
    return OPTIMIZERS[kind](lr, momentum)
