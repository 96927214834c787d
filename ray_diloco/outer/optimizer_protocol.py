"""What an outer optimiser is: `(A, o) ← Outer(A, o, Δ)`, one chunk at a time, and what it says of itself.

Implementations inherit the defaults below, and nothing else (`momentum.py`, `adaptive.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch


class OuterOptimizer(Protocol):
    """Moves an anchor.  Pure with respect to its inputs, so that a round that is given up leaves no trace.

    Attributes:
      state_names: names of the tensors it remembers, each as large as the anchor, in the order of `state`.
      initial: value of the elements of new states; see `initials` where they differ.
      momentum_state: the state that says where the anchor is going, for corrections by direction and for islands that
        start at the look-ahead point; None: there is none.
      compounds_when_async: `K` contributions that are applied one after the other move the anchor by about `K` times
        what their mean does, as each of them raises the momentum (../shared/algorithms.md §5.1).
      order_sensitive: contributions that are applied one after the other do not commute.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    initial: ClassVar[float] = 0.0
    momentum_state: ClassVar[str | None] = None
    compounds_when_async: ClassVar[bool] = False
    order_sensitive: ClassVar[bool] = True

    @property
    def initials(self) -> tuple[float, ...]:
        """Value of the elements of each new state, in the order of `state_names`."""
        return (self.initial,) * len(self.state_names)

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

    def lookahead(
        self, anchor: torch.Tensor, state: Sequence[torch.Tensor], out: torch.Tensor, lr: float | None = None
    ) -> None:
        """Writes where the momentum alone would take the anchor; without momentum the anchor itself."""
        out.copy_(anchor)
