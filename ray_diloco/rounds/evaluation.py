"""Held-out loss of one anchor version, shared by the islands that hold it.

Held-out blocks are cut into chunks of fixed composition; islands pull chunks until none is left and then wait until
all are back, so a chunk whose island died is taken over by one that is still here.  Results are summed in block
order: the figure does not depend on who evaluated what.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ray_diloco.rounds.ports import BlockLoss, Island, Update


class Evaluation:
    """The evaluation of one version over `blocks`, in chunks of `chunk` blocks.

    `at` are the anchors to evaluate under; None: the parameters of whoever takes part.
    """

    def __init__(self, blocks: Sequence[int], chunk: int, at: Sequence[Update] | None = None) -> None:
        self._at = at
        self._todo = [tuple(blocks[i : i + chunk]) for i in range(0, len(blocks), chunk)][::-1]
        self._missing = len(self._todo)
        self._losses: dict[int, BlockLoss] = {}
        self._changed = asyncio.Event()

    @property
    def done(self) -> bool:
        """True when every chunk is back."""
        return self._missing == 0

    def losses(self) -> list[BlockLoss]:
        """All losses in block order."""
        return [self._losses[b] for b in sorted(self._losses)]

    async def share(self, island: Island) -> bool:
        """Takes part until all is done.  Returns True to the island that brought the last chunk."""
        while not self.done:
            if not self._todo:
                waiting = self._changed
                await waiting.wait()
                continue
            chunk = self._todo.pop()
            try:
                losses = await island.evaluate(chunk, self._at)
            except BaseException:  # also where the island is cancelled: others wait for this chunk
                self._todo.append(chunk)
                self._pulse()
                raise
            self._losses.update({loss.block: loss for loss in losses})
            self._missing -= 1
            if self.done:
                self._at = None
                self._pulse()
                return True
        return False

    def _pulse(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
