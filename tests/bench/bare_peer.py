"""The least that a round takes in Ray: three calls that return what they must, and numpy on one buffer each.

No digests, no checks, no second buffer to swap, no commit, no deadlines: what Ray's calls and its store cost, and the
arithmetic.  Payloads go by reference in a list, in runs that Ray copies at once, as ours do.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import ray

from ray_diloco.cluster.calls import actor
from ray_diloco.cluster.runs import in_runs

LR, MOMENTUM = np.float32(0.7), np.float32(0.9)
# Elements of a pass that stays in the cache.
CHUNK = 1 << 18


class BareRank:
    """Parameters, base and one payload."""

    def __init__(self, numel: int, training_s: float, step: float) -> None:
        self.theta, self.base = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
        self.payload, self.training_s, self.step = np.zeros(numel, np.float32), training_s, np.float32(step)

    def train(self) -> float:
        """The time when it ends."""
        self.theta -= self.step
        until = time.perf_counter() + self.training_s
        while time.perf_counter() < until:
            pass
        return time.perf_counter()

    def emit(self) -> tuple[int, np.ndarray]:
        np.subtract(self.base, self.theta, out=self.payload)
        return self.payload.nbytes, in_runs(self.payload.view(np.uint8))

    def adopt(self, payload: list[Any]) -> tuple[float, float]:
        """A parameter, and the time when they are there."""
        (anchor,) = ray.get(payload)
        np.copyto(self.theta, anchor.view(np.float32))
        np.copyto(self.base, self.theta)
        return float(self.theta[0]), time.perf_counter()


class BareShard:
    """Anchor and momentum, in place."""

    def __init__(self, numel: int) -> None:
        self.anchor, self.u, self.delta = (np.zeros(numel, np.float32) for _ in range(3))
        self.scratch = np.zeros(CHUNK, np.float32)

    def prepare(self, payloads: list[Any]) -> tuple[int, np.ndarray]:
        given = [payload.view(np.float32) for payload in ray.get(payloads)]
        part = np.float32(1 / len(given))
        for start in range(0, len(self.anchor), CHUNK):
            at = slice(start, min(start + CHUNK, len(self.anchor)))
            u, scratch = self.u[at], self.scratch[: at.stop - at.start]
            delta = np.multiply(given[0][at], part, out=self.delta[at])
            for one in given[1:]:
                delta += np.multiply(one[at], part, out=scratch)
            u *= MOMENTUM
            u += delta
            delta += np.multiply(u, MOMENTUM, out=scratch)
            delta *= LR
            self.anchor[at] -= delta
        return self.anchor.nbytes, in_runs(self.anchor.view(np.uint8))


BareRankActor = actor(BareRank, num_cpus=0)
BareShardActor = actor(BareShard, num_cpus=0)


class BarePeer:
    """The actors, and a driver that only waits for them."""

    def __init__(self, numel: int, islands: int, training_s: float, step: float) -> None:
        self.ranks = [BareRankActor.remote(numel, training_s, step) for _ in range(islands)]
        self.shard = BareShardActor.remote(numel)

    async def round(self) -> tuple[list[float], float]:
        """Each island's parameter, and the seconds from the end of training until the last one has its own."""
        trained = [rank.train.remote() for rank in self.ranks]
        sent = [rank.emit.options(num_returns=2).remote() for rank in self.ranks]
        await asyncio.gather(*(size for size, _ in sent))
        size, anchor = self.shard.prepare.options(num_returns=2).remote([payload for _, payload in sent])
        await size
        values, ends = zip(*await asyncio.gather(*(rank.adopt.remote([anchor]) for rank in self.ranks)), strict=True)
        return list(values), max(ends) - max(await asyncio.gather(*trained))

    def end(self) -> None:
        for one in (*self.ranks, self.shard):
            ray.kill(one)
