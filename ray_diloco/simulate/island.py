"""Simulated islands: the port `Island` with a small vector, a pace, a link and misfortunes.

An island computes what a real one would, in closed form, and takes the time that a real one would.  The bytes of a
contribution travel while it is emitted, those of an anchor while it is adopted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ray_diloco.outer.adopt import AdoptChunk
from ray_diloco.outer.layout import Ranges
from ray_diloco.rounds.faults import (
    AFTER_COMMIT,
    BEFORE_COMMIT,
    BEFORE_INNER,
    BEFORE_SEND,
    CORRUPT_PAYLOAD,
    MID_INNER,
    MID_SEND,
    NAN_DELTA,
    STALE_EPOCH,
)
from ray_diloco.rounds.ports import Base, BlockLoss, Emission, IslandLost, Piece, Recovery, Report, Update, Work
from ray_diloco.simulate.links import DOWN, UP, Link
from ray_diloco.simulate.payload import Contribution, Published
from ray_diloco.simulate.points import Point, fits, reached
from ray_diloco.simulate.problem import first, held_out, start, trained
from ray_diloco.simulate.setup import WIDTH
from ray_diloco.simulate.trouble import Trouble

if TYPE_CHECKING:
    from ray_diloco.simulate.world import World


def part(fragment: int) -> slice:
    """Where a fragment lies in the vector."""
    return slice(fragment * WIDTH, (fragment + 1) * WIDTH)


class SimIsland:
    """One incarnation of an island."""

    def __init__(self, world: World, name: str, incarnation: int) -> None:
        self.name, self.incarnation = name, incarnation
        conditions = world.conditions
        self.region = conditions.region.get(name, "")
        self.restored: Mapping[int, Base] | None = None
        self._world, self._setup = world, world.setup
        dim = world.setup.fragments * WIDTH
        self._theta, self._base = start(dim).copy(), start(dim).copy()
        self._emitted = self._theta.copy()
        # Trained since the last emission of any fragment.
        self._blocks: list[Ranges] = []
        self._steps, self._tokens = 0, 0
        self._round = 0
        self._pace = conditions.pace(name)
        self._per_step = world.rules.islands[name].blocks_per_step
        self._H = world.rules.schedule.H
        link = Link(conditions.link_of(name), world.hub, conditions.exchange_s)
        now = asyncio.get_running_loop().time()
        self._link = link
        self._trouble = Trouble(name, incarnation, conditions, world.plan, link, world.pass_driver, now)
        self._jitter = conditions.luck("jitter", name, incarnation) if conditions.jitter else None

    async def train(self, work: Work) -> Report:
        """See `Island.train`."""
        await self._trouble.called()
        self._round = 1 + work.start_step // self._H
        await self._trouble.pass_(self._round, BEFORE_INNER)
        pace = self._pace
        if self._jitter is not None:
            pace *= max(0.1, 1.0 + self._jitter.gauss(0.0, self._world.conditions.jitter))
        steps = work.steps
        if work.seconds:
            steps = max(1, min(steps, int(work.seconds / pace)))
        begun = Point(
            work, self._world.life, 0, self._theta.copy(), self._base.copy(), self._emitted.copy(),
            tuple(self._blocks), self._steps, self._tokens,
        )  # fmt: skip
        began = asyncio.get_running_loop().time()
        try:
            await self._step((steps - work.done) * pace, max(0, steps // 2 - work.done) * pace, work.done <= steps // 2)
        except IslandLost:
            done = min(steps - work.done, int((self._trouble.lost_at - began) / pace))
            self._world.spent(done, done * self._per_step * self._setup.tokens_per_block, done * pace)
            self._leave(begun, self._trouble.lost_at - began, pace)
            raise
        except asyncio.CancelledError:
            self._leave(begun, asyncio.get_running_loop().time() - began, pace)
            raise
        blocks = work.lease.blocks if steps == work.steps else first(work.lease.blocks, steps * self._per_step)
        self._theta, loss = trained(self._theta, self.name, steps, blocks)
        tokens = steps * self._per_step * self._setup.tokens_per_block
        self._blocks.append(blocks)
        self._steps += steps
        self._tokens += tokens
        new = steps - work.done
        self._world.spent(new, new * self._per_step * self._setup.tokens_per_block, new * pace)
        return Report(steps, tokens, loss, steps * pace)

    def _leave(self, begun: Point, seconds: float, pace: float) -> None:
        """Leaves the newest progress point that was written in a time since the segment began."""
        every = self._setup.config.checkpoint.progress_every
        steps = reached(begun.work, every, seconds - self._world.conditions.write_s, pace)
        if begun.work.bases is not None and steps > begun.work.done:
            self._world.points[self.name] = replace(begun, steps=steps)

    async def recover(self, work: Work, anchored: bool) -> Recovery:
        """See `Island.recover`.  A point has where the segment began: what it comes to depends on nothing else."""
        await self._trouble.called()
        point = self._world.points.get(self.name)
        if point is None:
            return Recovery()
        reason = fits(point, work, self._base if anchored else None, self._world.life)
        if reason:
            return Recovery(reason=reason)
        await self._trouble.spend(self._world.conditions.write_s)
        self._theta, self._base, self._emitted = point.theta.copy(), point.base.copy(), point.emitted.copy()
        self._blocks, self._steps, self._tokens = list(point.blocks), point.trained_steps, point.trained_tokens
        return Recovery(point.steps)

    async def _step(self, seconds: float, half: float, passes: bool) -> None:
        """Lets the time of a segment pass, or of what is left of it."""
        if self._world.plan and passes:
            await self._trouble.spend(half)
            await self._trouble.pass_(self._round, MID_INNER)
            seconds -= half
        await self._trouble.spend(seconds)

    async def emit(self, fragment: int, base_version: int, round_: int) -> Emission:
        """See `Island.emit`."""
        trouble = self._trouble
        await trouble.called()
        await trouble.pass_(self._round, BEFORE_SEND)
        at = part(fragment)
        base = self._base[at].copy()
        values = base - self._theta[at]
        self._emitted[at] = self._theta[at]
        nbytes = self._setup.sizes.up.get(fragment, self._setup.sizes.default)
        await trouble.pass_(self._round, MID_SEND)
        await self._link.transfer(nbytes, UP)
        contribution = self._contribution(fragment, base_version, values, base, trouble.spoil())
        self._blocks, self._steps, self._tokens = [], 0, 0
        trouble.wait_at(self._round, BEFORE_COMMIT)
        norm = float(np.sqrt(values @ values))
        return Emission((Piece(0, nbytes, contribution),), norm, bool(np.isfinite(values).all()))

    def _contribution(
        self, fragment: int, base_version: int, values: np.ndarray, base: np.ndarray, damage: str
    ) -> Contribution:
        arrived, incarnation = values, self.incarnation
        if damage == CORRUPT_PAYLOAD:
            arrived = values[::-1] + 1.0
        elif damage == NAN_DELTA:
            arrived = np.full_like(values, np.nan)
        elif damage == STALE_EPOCH:
            incarnation -= 1
        return Contribution(
            self.name,
            incarnation,
            fragment,
            base_version,
            arrived,
            values,
            damage == CORRUPT_PAYLOAD,
            base,
            tuple(self._blocks),
            self._steps,
            self._tokens,
        )

    async def adopt(self, updates: Sequence[Update], merged: Mapping[int, bool]) -> None:
        """See `Island.adopt`."""
        await self._trouble.called()
        await self._trouble.pass_(self._round, AFTER_COMMIT)
        await self._receive(updates)
        for update in updates:
            self._take(update, self._setup.adopts[update.fragment] is not None)

    async def join(self, updates: Sequence[Update]) -> None:
        """See `Island.join`."""
        await self._trouble.called()
        await self._receive(updates)
        for update in updates:
            self._take(update, by_rule=False)

    async def _receive(self, updates: Sequence[Update]) -> None:
        await self._link.transfer(sum(update.nbytes for update in updates), DOWN)

    def _take(self, update: Update, by_rule: bool) -> None:
        at, published = part(update.fragment), update.pieces[0].handle
        assert isinstance(published, Published)
        self._world.seen(published)
        rule = self._setup.adopts[update.fragment] if by_rule else None
        if rule is None:
            self._theta[at] = self._base[at] = published.values
            return
        chunk = AdoptChunk(
            torch.from_numpy(self._theta[at]),
            torch.from_numpy(self._base[at]),
            torch.from_numpy(published.values),
            torch.from_numpy(self._emitted[at]),
        )
        rule.apply(chunk)

    async def found(self) -> Sequence[Piece]:
        """See `Island.found`."""
        await self._trouble.called()
        return (Piece(0, self._setup.sizes.default, self._theta.copy()),)

    async def evaluate(self, blocks: Sequence[int], at: Sequence[Update] | None) -> Sequence[BlockLoss]:
        """See `Island.evaluate`."""
        await self._trouble.called()
        theta = self._theta
        if at is not None:
            theta = theta.copy()
            for update in at:
                theta[part(update.fragment)] = update.pieces[0].handle.values
        await self._trouble.spend(len(blocks) * self._pace / (3 * self._per_step))
        return [BlockLoss(block, held_out(theta, block), self._setup.tokens_per_block) for block in blocks]

    async def reset(self) -> None:
        """See `Island.reset`: it has no moments."""
        await self._trouble.called()

    async def save(self, round_: int, bases: Mapping[int, Base] | None) -> Awaitable[Sequence[Any]]:
        """See `Island.save`."""
        await self._trouble.called()
        state = None
        if bases is not None:
            state = (self._theta.copy(), self._base.copy(), self._emitted.copy(), dict(bases))
        loop = asyncio.get_running_loop()
        written: asyncio.Future[Sequence[Any]] = loop.create_future()
        loop.call_later(self._world.conditions.write_s / 2, self._written, written, state)
        return written

    def _written(self, written: asyncio.Future[Sequence[Any]], state: Any) -> None:
        if not written.done():
            written.set_result([] if self._trouble.lost else [state])

    def restore(self, state: Any) -> None:
        """Takes up parameters and bases as a commit holds them."""
        theta, base, emitted, bases = state
        self._theta, self._base, self._emitted = theta.copy(), base.copy(), emitted.copy()
        self.restored = dict(bases)


__all__ = ["IslandLost", "SimIsland", "part"]
