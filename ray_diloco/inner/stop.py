"""Ranks of an island agree to stop after the same step: one that stopped alone would leave the others in a collective.

Each step every rank casts a vote in a small all-reduce that runs beside the next step and is read at its end, so
agreeing costs no waiting and takes effect one step later.  A single rank decides at once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class StopVote:
    """The votes of one segment of training.

    Args:
      group: gloo group of the island; None for a single rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._ballot: torch.Tensor | None = None
        self._pending: dist.Work | None = None

    def decided(self, wants_stop: bool) -> bool:
        """Casts this step's vote and says whether any rank wanted to stop in the step before; collective."""
        if self._group is None:
            return wants_stop
        stop = self._count()
        self._ballot = torch.tensor([int(wants_stop)], dtype=torch.int32)
        self._pending = dist.all_reduce(self._ballot, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return stop

    def close(self) -> None:
        """Waits for the last vote, which nobody needs any more."""
        self._count()

    def _count(self) -> bool:
        if self._pending is None or self._ballot is None:
            return False
        self._pending.wait()
        self._pending = None
        return bool(self._ballot.item())
