"""Progress points of one rank: written while it trains, and taken up by who comes in its place.

A point is inner state, parameters, bases and what the exchange remembers, as in a commit, with the losses of the steps
until then.  It is copied between two steps and written in the background; where the storage has not finished the one
before, none is made.  A rank looks, reads and compares before anything is changed, so that an island takes up a point
as a whole or not at all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ray_diloco.checkpoint.points import KEPT, Mark, point_name
from ray_diloco.cluster.storage import Storage
from ray_diloco.errors import CheckpointError, DilocoError, InnerError
from ray_diloco.rounds.ports import Base, Recovery

if TYPE_CHECKING:
    import torch

    from ray_diloco.cluster.exchanges import Exchanges
    from ray_diloco.inner.rank import Earlier, InnerRank

LOSSES, TALLY = "progress|losses", "progress|tally"


@dataclass(frozen=True)
class Keeping:
    """How a rank keeps points of a segment: where, of what, and every how many steps."""

    storage: Storage
    mark: Mark
    every: int


class RankPoints:
    """The progress points of a rank.

    Args:
      inner, exchanges: of the rank.
      writer: what writes in the background.
    """

    def __init__(self, inner: InnerRank, exchanges: Exchanges, writer: ThreadPoolExecutor) -> None:
        self._inner, self._exchanges, self._writer = inner, exchanges, writer
        self._island, self._rank = inner.settings.island, inner.settings.rank
        self._names: deque[str] = deque(maxlen=KEPT)
        self._write: Future[str] | None = None
        # What was read and not yet taken up, with its name.
        self._read: tuple[str, dict[str, np.ndarray]] | None = None
        # Losses of the segment that is under way; seconds and skipped steps of the part that was taken up.
        self._losses: list[torch.Tensor] = []
        self._seconds, self._skipped = 0.0, 0
        self._began, self._skipped_before = 0.0, 0
        self._trouble = ""

    def begin(self, taken: int) -> Earlier:
        """A segment begins, after so many steps that were taken up; returns what those came to."""
        from ray_diloco.inner.rank import Earlier

        if len(self._losses) != taken:
            # What was taken up was not gone on with.
            self._losses, self._seconds, self._skipped = [], 0.0, 0
        self._began, self._skipped_before = time.perf_counter(), self._inner.skipped
        return Earlier(tuple(self._losses), self._seconds, self._skipped)

    def passed(self, keeping: Keeping | None, done: int, steps: int, loss: torch.Tensor) -> None:
        """A step is done: makes a point if it is time."""
        if keeping is None:
            return
        self._losses.append(loss)
        if done % keeping.every == 0 and done < steps and (self._write is None or self._write.done()):
            self._settle()
            import torch

            bases = {fragment: Base(*base) for fragment, *base in keeping.mark.bases}
            seconds = self._seconds + time.perf_counter() - self._began
            skipped = self._skipped + self._inner.skipped - self._skipped_before
            state = self._inner.inner_state() | self._exchanges.state(bases)
            state[LOSSES] = torch.stack(self._losses).float().cpu().numpy()
            state[TALLY] = np.array([seconds, skipped], dtype=np.float64)
            self._write = self._writer.submit(self._written, keeping, done, state)

    def written(self) -> None:
        """Waits for the point that is being written."""
        if self._write is not None:
            wait([self._write])

    def end(self) -> str:
        """The segment has ended; returns what went wrong with its points, empty if nothing."""
        self._losses, self._seconds, self._skipped = [], 0.0, 0
        if self._write is not None and self._write.done():
            self._settle()
        trouble, self._trouble = self._trouble, ""
        return trouble

    def look(self, keeping: Keeping, anchored: bool) -> tuple[list[int], str]:
        """How many steps are done in those points that belong to a work; if there are none, why not.

        `anchored`: the driver that gave the work need not be the same.
        """
        self._read, mark = None, keeping.mark
        try:
            found = keeping.storage.open().points.found(self._island, self._rank)
        except CheckpointError as error:
            return [], error.what
        wanted = {name: value for name, value in mark.json.items() if name != "epoch"}
        same_work = [one for one in found.values() if wanted.items() <= one["mark"].items()]
        good = [int(one["done"]) for one in same_work if anchored or one["mark"]["epoch"] == mark.epoch]
        reason = "its point was made under another driver" if same_work else "its point is of other work"
        return sorted(good), reason if found and not good else ""

    def read(self, keeping: Keeping, done: int, anchored: bool) -> str:
        """Reads a point without taking it up; returns why it cannot be, empty if it can."""
        self._read, mark = None, keeping.mark
        state: dict[str, np.ndarray] = {}
        # At stage 0 each rank needs the optimiser's state of all, which is cut evenly; the rest is its own.
        others = range(mark.world) if self._inner.settings.inner.zero_stage == 0 else ()
        try:
            points = keeping.storage.open().points
            for rank in [*(rank for rank in others if rank != self._rank), self._rank]:
                part = points.read(self._island, point_name(rank, mark.start_step + done))
                if part is None:
                    return f"the file of rank {rank} is not whole"
                state |= part if rank == self._rank else self._exchanges.split(part)[1]
        except CheckpointError as error:
            return error.what
        self._read = point_name(self._rank, mark.start_step + done), state
        return self._exchanges.misfit(state, anchored)

    def take_up(self) -> bool:
        """Takes up what was read; False: it does not fit, and nothing has been changed.  Collective."""
        import torch

        if self._read is None:
            return False
        (name, state), self._read = self._read, None
        losses, (seconds, skipped) = state.pop(LOSSES), state.pop(TALLY)
        mine, inner = self._exchanges.split(state)
        try:
            self._inner.load_inner_state(inner)
        except InnerError:
            return False
        fitted, _ = self._exchanges.load_state(mine, parameters=True)
        if not fitted:
            raise ValueError(f"point {name} does not fit, though it seemed to")
        self._names.append(name)
        self._losses = list(torch.from_numpy(losses.copy()).to(self._inner.device))
        self._seconds, self._skipped = float(seconds), int(skipped)
        return True

    def _written(self, keeping: Keeping, done: int, state: dict[str, np.ndarray]) -> str:
        points = keeping.storage.open().points
        name = points.write(self._island, self._rank, done, keeping.mark, state)
        self._names.append(name)
        points.keep_only(self._island, self._rank, list(self._names))
        return name

    def _settle(self) -> None:
        write, self._write = self._write, None
        error = None if write is None else write.exception()
        if error is not None:
            what = error.what if isinstance(error, DilocoError) else str(error)
            self._trouble = f"a progress point could not be written: {what}"


async def recover(ask: Callable[..., Awaitable[list[Any]]], keeping: Keeping, beyond: int, anchored: bool) -> Recovery:
    """Lets all ranks of an island take up the newest point that each of them has whole.

    Args:
      ask: calls a method of all ranks.
      keeping: of which work.
      beyond: how many steps must be done at least, less one.
      anchored: see `rounds.ports.Island.recover`.
    """
    looked = await ask("look_for_points", keeping, anchored)
    reason = next((why for _, why in looked if why), "")
    common = set.intersection(*(set(done) for done, _ in looked))
    if not common and not reason and any(done for done, _ in looked):
        reason = "its ranks have not kept the same point"
    for done in sorted(common, reverse=True):
        if done <= beyond:
            return Recovery(reason="it had got no further than the one before it")
        reason = next((why for why in await ask("read_point", keeping, done, anchored) if why), "")
        if not reason:
            if all(await ask("take_up_point")):
                return Recovery(done)
            reason = "its point does not fit what its ranks hold"
    return Recovery(reason=reason)
