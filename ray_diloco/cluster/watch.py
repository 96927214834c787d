"""The watch over the ranks of one island: heartbeats, from its birth to its end, whatever it is doing.

A thread of each rank answers; training cannot starve it, since Python hands the interpreter on every few milliseconds
and kernels run without it.  What is found is one of four things: a rank `died` (its process is gone), is `frozen` (the
process lives and no thread of it answers), is `stalled` (it answers, and makes no step while it should, or is not done
with encoding what it sends), or a call `failed`.  Each has a bound: the next beat, `heartbeat_s`, `silence_s` (where it
sends, `exchange_s`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from ray.exceptions import RayActorError

from ray_diloco.cluster.calls import ActorFailed, Heard, answer
from ray_diloco.cluster.said import Progress
from ray_diloco.config.schema import DeadlinesConfig
from ray_diloco.errors import DilocoError
from ray_diloco.rounds.clock import now
from ray_diloco.rounds.ports import IslandLost

# Seconds between two beats of a rank; a far one is asked less often, since each beat is some kilobytes on a long way.
BEAT_S, FAR_BEAT_S = 1.0, 2.0
# So many times what a beat took go by before the next.
PAUSE = 10
# How long a failed call waits to hear which rank died: the one that lives may be the first to complain.
DIAGNOSIS_S = 1.0


class Watch:
    """Listens to the ranks of an island.

    Args:
      name: of the island.
      ranks: their actors.
      deadlines: how long what may take.

    Attributes:
      lost: fails with `IslandLost` when a rank is lost; nothing else ends it.
      progress: of rank 0.
      leaving: a rank has said that its machine is about to go.
      noticed: called when that happens.
      listener: called with what a rank says of itself.
    """

    def __init__(self, name: str, ranks: Sequence[Any], deadlines: DeadlinesConfig) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # An island may end before anybody asks what became of it.
        self.lost.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.progress = Progress(0, 0, 0, math.nan, 0.0)
        self.leaving = False
        self.noticed: Callable[[], None] | None = None
        self.listener: Callable[[Progress], None] | None = None
        self._name, self._ranks, self._deadlines = name, ranks, deadlines
        # Since when each rank has been expected to make steps.
        self._stepping: list[float | None] = [None] * len(ranks)
        self._beats = [0] * len(ranks)
        # When each rank was last heard, and last seen to have made a step.
        self._heard, self._stepped = [now()] * len(ranks), [now()] * len(ranks)
        self._tasks = [asyncio.create_task(self._listen(k)) for k in range(len(ranks))]

    @contextmanager
    def stepping(self) -> Iterator[Heard]:
        """Inside, ranks are expected to make steps; who has made them is named to what this gives."""
        self._stepping = [now()] * len(self._ranks)

        def ended(rank: int) -> None:
            self._stepping[rank] = None

        try:
            yield ended
        finally:
            self._stepping = [None] * len(self._ranks)

    async def guarded(self, work: asyncio.Future[list[Any]]) -> list[Any]:
        """What calls to the ranks returned.

        Raises:
          IslandLost: a rank was lost, or a call failed.
          DilocoError: what a rank raised and a user can mend.
        """
        try:
            waiting: set[asyncio.Future[Any]] = {work, self.lost}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            return self.lost.result()  # type: ignore[return-value]
        except IslandLost as failed:
            if not self.lost.done():
                await self._ask_all()
            if self.lost.done():
                self.lost.result()
            raise failed
        finally:
            work.cancel()

    async def stacks(self) -> list[str]:
        """Where the ranks stand, in words, of those that answer at once."""
        asked = [answer(rank.stacks.remote(), "asking where it stands", DIAGNOSIS_S) for rank in self._ranks]
        said = await asyncio.gather(*asked, return_exceptions=True)
        return [f"rank {k} of {self._name}\n{text}" for k, text in enumerate(said) if isinstance(text, str)]

    def end(self) -> None:
        """Listens no more."""
        for task in self._tasks:
            task.cancel()

    async def _ask_all(self) -> None:
        """Asks every rank now: one of them may be dead."""
        await asyncio.gather(*(self._beat(k, DIAGNOSIS_S, silence=False) for k in range(len(self._ranks))))

    async def _listen(self, rank: int) -> None:
        while not self.lost.done():
            began = now()
            await self._beat(rank, self._deadlines.heartbeat_s, silence=True)
            await asyncio.sleep(max(BEAT_S, min(FAR_BEAT_S, PAUSE * (now() - began))))

    async def _beat(self, rank: int, deadline_s: float, *, silence: bool) -> None:
        """One beat; `silence`: an answer that does not come means that the rank is frozen."""
        try:
            progress: Progress = await answer(
                self._ranks[rank].progress.remote(), f"the heartbeat of rank {rank} of {self._name}", deadline_s
            )
        except ActorFailed as failed:
            silent_s = now() - self._heard[rank]
            if isinstance(failed.cause, RayActorError):
                self._lose("died", silent_s, f"rank {rank} of {self._name} died: {failed}")
            elif silence:
                what = f"rank {rank} of {self._name} is frozen: its process lives and was silent for {silent_s:.1f} s"
                self._lose("frozen", silent_s, what)
            return
        except DilocoError as superseded:
            # Another driver has taken over; whoever waits for these ranks here is to know.
            if not self.lost.done():
                self.lost.set_exception(superseded)
            return
        at, stepping = now(), self._stepping[rank]
        self._heard[rank] = at
        if rank == 0:
            self.progress = progress
        if self.listener is not None:
            self.listener(progress)
        if progress.leaving and not self.leaving and self.noticed is not None:
            self.leaving = True
            self.noticed()
        if progress.beats != self._beats[rank] or stepping is None:
            self._beats[rank], self._stepped[rank] = progress.beats, at
            return
        stalled_s = at - max(stepping, self._stepped[rank])
        if stalled_s > (self._deadlines.exchange_s if progress.sending else self._deadlines.silence_s):
            did = "has been encoding what it sends" if progress.sending else "made no step"
            what = f"rank {rank} of {self._name} {did} for {stalled_s:.1f} s, though it answers"
            self._lose("stalled", stalled_s, what, await self.stacks())

    def _lose(
        self, how: Literal["died", "frozen", "stalled"], silent_s: float, what: str, stacks: Sequence[str] = ()
    ) -> None:
        if not self.lost.done():
            self.lost.set_exception(IslandLost(what, how, silent_s, stacks))
