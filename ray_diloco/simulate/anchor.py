"""The simulated keepers: the port `Anchor` with the outer steps of the package on small float64 vectors.

Committed anchors are never written to: a step makes new ones, so a copy of the table is a snapshot.  Everything that
moved an anchor is kept in `movements`, for whoever replays the run afterwards.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ray_diloco.errors import SyncError
from ray_diloco.outer.merge import factors_of
from ray_diloco.outer.recipe import AVERAGE
from ray_diloco.outer.sources import Decoded
from ray_diloco.outer.step import Arrays, NotFinite, OuterStep, Span
from ray_diloco.rounds.faults import AFTER_COMMIT, BEFORE_COMMIT, DROP_LINK, EXIT, FREEZE, MID_SEND, SLOW_LINK
from ray_diloco.rounds.ports import SHARED, ContributionRefused, Movement, Offer, Piece, Prepared, Step, TooFew, Update
from ray_diloco.simulate.island import part
from ray_diloco.simulate.payload import Contribution, Published
from ray_diloco.simulate.problem import finite
from ray_diloco.simulate.setup import WIDTH

if TYPE_CHECKING:
    from ray_diloco.simulate.world import World


class ShardLostError(SyncError):
    """A shard of the anchor is gone: the process that keeps the run ends, and goes on from the newest commit."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """One anchor of one fragment at one version."""

    anchor: np.ndarray
    state: tuple[np.ndarray, ...]
    sent: np.ndarray
    version: int = 0
    round: int = 0
    past: dict[int, np.ndarray] = field(default_factory=dict)
    passed: dict[int, np.ndarray] = field(default_factory=dict)


Table = dict[tuple[int, str], Kept]


class SimAnchor:
    """All anchors of a run."""

    def __init__(self, world: World, table: Table | None) -> None:
        self._world, self._setup = world, world.setup
        # Of anchors that contributions were measured from, a commit holds those of a run at its own pace.
        recipes = self._setup.recipes
        self.table: Table = {
            key: kept if recipes[key[0]].free else replace(kept, past={}) for key, kept in (table or {}).items()
        }
        self.founded = table is not None
        self._spare: dict[str, tuple[Step, dict[str, Kept]]] = {}
        self._room = (torch.zeros(WIDTH).double(), torch.zeros(WIDTH).double())
        self._spans = [(Span(f"fragment.{number}", 0, WIDTH),) for number in range(self._setup.fragments)]

    def names(self, fragment: int) -> tuple[str, ...]:
        """The anchors of a fragment."""
        return self._setup.anchors if fragment in self._setup.main else (SHARED,)

    async def found(self, pieces: Sequence[Piece]) -> None:
        """See `Anchor.found`."""
        self._world.founding()
        whole: np.ndarray = pieces[0].handle
        for fragment in range(self._setup.fragments):
            recipe, values = self._setup.recipes[fragment], whole[part(fragment)].copy()
            state = [np.full(WIDTH, initial) for initial in recipe.initials]
            if AVERAGE in recipe.state_names:
                state[recipe.state_names.index(AVERAGE)] = values.copy()
            for name in self.names(fragment):
                self.table[fragment, name] = Kept(values, tuple(state), values)
        self.founded = True
        self._world.anchors_are(self.table)

    async def prepare(self, step: Step) -> Prepared:
        """See `Anchor.prepare`."""
        world, conditions = self._world, self._world.conditions
        contributions = sum(len(movement.contributions) for movement in step.movements)
        round_ = world.round_of(step.fragment, step.round)
        await self._shards(round_, MID_SEND)
        await asyncio.sleep(conditions.merge_s + conditions.merge_each_s * contributions)
        for movement in step.movements:
            for offer, _ in movement.contributions:
                self._check(offer, step)
        moved = {movement.anchor: self._move(step, movement) for movement in step.movements}
        self._spare[step.key] = (step, moved)
        await self._shards(round_, BEFORE_COMMIT)
        world.pass_driver(round_, BEFORE_COMMIT)
        norms = [float(kept.anchor @ kept.anchor) for kept in moved.values()]
        updates = {name: self._update(step.fragment, name, kept) for name, kept in moved.items()}
        return Prepared(step.key, updates, math.sqrt(math.fsum(norms) / len(norms)), 0.0)

    def _check(self, offer: Offer, step: Step) -> None:
        """What a shard sees of a message: header, digest and values."""
        message = offer.emission.pieces[0].handle
        assert isinstance(message, Contribution)
        if (message.sender, message.incarnation) != (offer.island, offer.incarnation):
            raise ContributionRefused(offer.island, f"it comes from incarnation {message.incarnation}")
        if (message.fragment, message.base_version) != (step.fragment, offer.base_version):
            raise ContributionRefused(offer.island, "it is of another fragment or version")
        if message.broken:
            raise ContributionRefused(offer.island, "its digest is wrong")
        if not finite(message.values):
            raise ContributionRefused(offer.island, "it is not finite")
        recipe, age = self._setup.recipes[step.fragment], step.version - offer.base_version
        if age < 0 or (recipe.max_age is not None and age > recipe.max_age):
            raise ContributionRefused(offer.island, f"it was measured {age} versions ago")

    def _move(self, step: Step, movement: Movement) -> Kept:
        """An anchor after a movement."""
        recipe, kept = self._setup.recipes[step.fragment], self.table[step.fragment, movement.anchor]
        if kept.version != step.version:
            raise SyncError(458, f"a step of version {step.version} meets an anchor of {kept.version}", "report it")
        if not movement.contributions:
            return replace(kept, version=kept.version + 1, round=step.round)
        bases = []
        for offer, _ in movement.contributions:
            late = recipe.reanchor and offer.base_version < kept.version
            if late and offer.base_version not in kept.past:
                raise ContributionRefused(offer.island, f"version {offer.base_version} is not kept any more")
            bases.append(torch.from_numpy(kept.past[offer.base_version]) if late else None)
        values = [offer.emission.pieces[0].handle.values for offer, _ in movement.contributions]
        factors = [factor for _, factor in movement.contributions]
        anchor, sent = np.empty(WIDTH), np.empty(WIDTH)
        state = tuple(np.empty(WIDTH) for _ in kept.state)

        def put(start: int, chunk: torch.Tensor) -> None:
            sent[:] = chunk.numpy()

        arrays = Arrays(
            torch.from_numpy(kept.anchor),
            [torch.from_numpy(one) for one in kept.state],
            torch.from_numpy(anchor),
            [torch.from_numpy(one) for one in state],
            put,
        )
        near = [self.table[step.fragment, name] for name in movement.neighbours] if recipe.consensus else []
        sources = [Decoded(torch.from_numpy(one)) for one in values]

        def outer_step(factors: Sequence[float]) -> OuterStep:
            return OuterStep(
                recipe,
                arrays,
                kept.version,
                factors,
                sources,
                bases=bases,
                neighbours=[Decoded(torch.from_numpy(one.anchor)) for one in near],
                own=movement.neighbours.index(movement.anchor) if near else 0,
                spans=self._spans[step.fragment],
                rooms=[self._room] * (len(sources) + len(near) + 2),
            )

        try:
            if recipe.rule.needs_whole_vector:
                gram = outer_step(factors).gram(recipe.rule.extras)
                factors = list(factors_of(recipe.rule, gram, factors, recipe.settings))
            outer_step(factors).run()
        except NotFinite:
            raise ContributionRefused(movement.contributions[0][0].island, "the merge is not finite") from None
        except SyncError as error:
            raise TooFew(error.what) from error
        past = kept.past
        if recipe.reanchor:
            past = {**past, kept.version: kept.anchor}
            past.pop(kept.version - recipe.past, None)
        return Kept(anchor, state, sent, kept.version + 1, step.round, past)

    async def commit(self, key: str) -> None:
        """See `Anchor.commit`."""
        step, moved = self._spare.pop(key)
        for name, kept in moved.items():
            before, count = self.table[step.fragment, name], self._setup.recipes[step.fragment].passed
            passed = {v: one for v, one in before.passed.items() if v >= kept.version - count}
            if count:
                passed[before.version] = before.sent
            self.table[step.fragment, name] = moved[name] = replace(kept, passed=passed)
        self._world.moved(step, moved)
        round_ = self._world.round_of(step.fragment, step.round)
        self._world.pass_driver(round_, AFTER_COMMIT)
        await self._shards(round_, AFTER_COMMIT)
        await asyncio.sleep(self._world.conditions.commit_s)

    async def abort(self, key: str) -> None:
        """See `Anchor.abort`."""
        self._spare.pop(key, None)

    async def current(self, island: str) -> Sequence[Update]:
        """See `Anchor.current`."""
        found = []
        for fragment in range(self._setup.fragments):
            names = self.names(fragment)
            name = SHARED if names == (SHARED,) else island
            found.append(self._update(fragment, name, self.table[fragment, name]))
        await asyncio.sleep(0)
        return found

    async def passed(self, island: str, fragment: int, version: int) -> Update | None:
        """See `Anchor.passed`."""
        names = self.names(fragment)
        name = SHARED if names == (SHARED,) else island
        kept = self.table[fragment, name]
        if version not in kept.passed:
            return None
        return self._update(fragment, name, replace(kept, sent=kept.passed[version], version=version))

    async def recalled(self, offer: Offer) -> Offer:
        """See `Anchor.recalled`: in memory, a commit keeps payloads with their offers."""
        return offer

    async def published(self) -> Sequence[Update]:
        """See `Anchor.published`."""
        found = []
        for fragment in self._setup.main:
            recipe = self._setup.recipes[fragment]
            whole = np.zeros(WIDTH)
            for name in self.names(fragment):
                kept = self.table[fragment, name]
                averaged = recipe.average.count(kept.version) > 0
                values = kept.state[recipe.state_names.index(AVERAGE)] if averaged else kept.anchor
                whole += values / len(self.names(fragment))
            published = Published(fragment, SHARED, 0, whole)
            found.append(Update(fragment, 0, (Piece(0, self._down(fragment), published),)))
        return found

    def _update(self, fragment: int, name: str, kept: Kept) -> Update:
        published = Published(fragment, name, kept.version, kept.sent)
        return Update(fragment, kept.version, (Piece(0, self._down(fragment), published),), kept.round)

    def _down(self, fragment: int) -> int:
        return self._setup.sizes.down.get(fragment, self._setup.sizes.default)

    async def _shards(self, round_: int, phase: str) -> None:
        """Lets shards pass a point."""
        plan, conditions = self._world.plan, self._world.conditions
        for target in self._world.shards if plan else ():
            fault = plan.at(target, round_, phase)
            if fault is None:
                continue
            if fault.kind == EXIT:
                await asyncio.sleep(conditions.detect_s)
                raise ShardLostError(456, f"{target} of the anchor died in round {round_}", "it is started again")
            if fault.kind in (FREEZE, DROP_LINK, SLOW_LINK):
                lasts = fault.seconds or conditions.exchange_s
                await asyncio.sleep(min(lasts, conditions.exchange_s))
                if lasts >= conditions.exchange_s:
                    raise ShardLostError(
                        456, f"{target} of the anchor was silent in round {round_}", "it is started again"
                    )
