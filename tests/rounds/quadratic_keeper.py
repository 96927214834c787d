"""Anchors in float64: rules and recipes are those of the package, what travels are float64 tensors."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from quadratic_codecs import Dct
from quadratic_problem import DIM, LAYOUT, indices

from ray_diloco.blocks import (
    CONTROL,
    draw_of,
    recipe_of,
)
from ray_diloco.outer.merge import factors_of
from ray_diloco.outer.recipe import AVERAGE
from ray_diloco.outer.sources import Decoded
from ray_diloco.outer.step import Arrays, NotFinite, OuterStep, Span
from ray_diloco.rounds.ports import (
    SHARED,
    ContributionRefused,
    Piece,
    Prepared,
    Update,
)


@dataclass
class Kept:
    """One anchor of one fragment."""

    where: torch.Tensor
    spans: tuple[Span, ...]
    anchor: torch.Tensor
    state: list[torch.Tensor]
    sent: torch.Tensor
    version: int = 0
    past: dict[int, torch.Tensor] = field(default_factory=dict)
    passed: dict[int, torch.Tensor] = field(default_factory=dict)


class Keeper:
    """The anchor port: as many anchors as the configuration asks for, in float64."""

    def __init__(self, world):
        self.world = world
        self.recipes = [recipe_of(channel) for channel in world.channels]
        self.draws = [draw_of(channel) for channel in world.channels]
        self.kept: dict[tuple[int, str], Kept] = {}
        self.founded = False
        self.spare: dict[str, tuple[int, dict[str, Kept]]] = {}
        self.rooms = [(torch.empty(DIM).double(), torch.empty(DIM).double()) for _ in range(40)]

    def channel(self, fragment):
        return next(k for k, cut in enumerate(self.world.cuts) if fragment in cut.numbers)

    def names(self, k):
        return self.world.anchors if k == 0 else (SHARED,)

    def of(self, fragment, name):
        return self.kept[fragment, name if self.channel(fragment) == 0 else SHARED]

    async def found(self, pieces):
        assert not self.founded
        self.founded = True
        whole = pieces[0].handle
        for k, cut in enumerate(self.world.cuts):
            for number, ranges in zip(cut.numbers, cut.fragments, strict=True):
                where = indices(ranges)
                start = torch.zeros(len(where)).double() if cut.channel.signal == CONTROL else whole[where]
                state = [torch.full((len(where),), initial).double() for initial in self.recipes[k].initials]
                spans, at = [], 0
                for spec in LAYOUT.tensors:
                    if spec.offset in where:
                        spans.append(Span(spec.name, at, at + spec.numel))
                        at += spec.numel
                assert at == len(where)
                if AVERAGE in self.recipes[k].state_names:
                    state[self.recipes[k].state_names.index(AVERAGE)] = start.clone()
                for name in self.names(k):
                    clones = [one.clone() for one in state]
                    self.kept[number, name] = Kept(where, tuple(spans), start.clone(), clones, start.clone())

    async def prepare(self, step):
        assert self.world.alive
        await asyncio.sleep(self.world.merge_s)
        for movement in step.movements:
            for offer, _ in movement.contributions:
                if (offer.island, offer.round) in self.world.refuse:
                    raise ContributionRefused(offer.island, "refused by the test")
        self.world.movements[step.fragment, step.round] = {
            m.anchor: [(offer.island, offer.round, factor) for offer, factor in m.contributions] for m in step.movements
        }
        moved, updates, norms, updated = {}, {}, [], []
        for movement in step.movements:
            moved[movement.anchor], norm, sent = self.move(step, movement)
            norms.append(norm)
            step_of = moved[movement.anchor].anchor - self.of(step.fragment, movement.anchor).anchor
            updated.append(float(step_of @ step_of))
            piece = Piece(0, 8 * len(sent[1]), sent)
            updates[movement.anchor] = Update(step.fragment, step.version + 1, (piece,), step.round)
        assert step.key not in self.spare
        self.spare[step.key] = (step.fragment, moved)
        return Prepared(step.key, updates, *(math.sqrt(math.fsum(each) / len(each)) for each in (norms, updated)))

    def move(self, step, movement):
        """An anchor after a movement: what is kept, its squared norm, and what is sent."""
        k = self.channel(step.fragment)
        recipe, draw, kept = self.recipes[k], self.draws[k], self.of(step.fragment, movement.anchor)
        assert kept.version == step.version
        new = copy.deepcopy(kept)
        new.version += 1
        if not movement.contributions:
            return new, float(kept.anchor @ kept.anchor), (None, new.sent)
        at = torch.arange(len(kept.where))
        if draw is not None:
            at = torch.from_numpy(draw.of(kept.version).packed(self.world.ranges[step.fragment]))
        bases = []
        for offer, _ in movement.contributions:
            age = kept.version - offer.base_version
            if age < 0 or (recipe.max_age is not None and age > recipe.max_age) or (draw is not None and age):
                raise ContributionRefused(offer.island, f"measured {age} versions ago")
            late = recipe.reanchor and age > 0
            if late and offer.base_version not in kept.past:
                raise ContributionRefused(offer.island, "its base is not kept any more")
            bases.append(kept.past[offer.base_version][at] if late else None)
        values = [offer.emission.pieces[0].handle for offer, _ in movement.contributions]
        factors = [factor for _, factor in movement.contributions]
        moved, states = torch.empty(len(at)).double(), [torch.empty(len(at)).double() for _ in kept.state]
        sent = torch.empty(len(at)).double()

        def put(start, chunk):
            sent[start : start + len(chunk)] = chunk

        arrays = Arrays(kept.anchor[at], [one[at] for one in kept.state], moved, states, put)
        near = [self.of(step.fragment, name).anchor[at] for name in movement.neighbours] if recipe.consensus else []
        codec, number = self.world.codecs[k], self.world.number(step.fragment)
        delta, sources = None, [Decoded(one) for one in values]
        if isinstance(codec, Dct):
            combined = torch.empty(len(at)).double()
            recipe.rule.bind(recipe.settings)(values, factors, combined)
            delta, sources = codec.inverse(combined, number), []

        def outer_step(factors):
            return OuterStep(
                recipe,
                arrays,
                kept.version,
                factors,
                sources,
                bases=bases if sources else (),
                neighbours=[Decoded(one) for one in near],
                own=movement.neighbours.index(movement.anchor) if near else 0,
                spans=kept.spans if draw is None else (),
                delta=delta,
                rooms=self.rooms,
            )

        try:
            if recipe.rule.needs_whole_vector:
                gram = outer_step(factors).gram(recipe.rule.extras)
                factors = factors_of(recipe.rule, gram, factors, recipe.settings)
            outer_step(factors).run()
        except NotFinite:
            bad = [not bool(torch.isfinite(one).all()) for one in values]
            raise ContributionRefused(movement.contributions[bad.index(True)][0].island, "not finite") from None
        new.anchor[at] = moved
        for one, after in zip(new.state, states, strict=True):
            one[at] = after
        new.sent = new.anchor.clone() if draw is not None else sent
        if recipe.reanchor:
            new.past[kept.version] = kept.anchor
        return new, float(new.anchor @ new.anchor), (kept.where[at], sent)

    async def commit(self, key):
        fragment, moved = self.spare.pop(key)
        k = self.channel(fragment)
        for name, new in moved.items():
            old = self.kept[fragment, name]
            # As many as the recipe says that a commit needs, and not one more.
            new.passed = {**old.passed, old.version: old.sent.clone()}
            new.passed = {v: sent for v, sent in new.passed.items() if v >= new.version - self.recipes[k].passed}
            self.kept[fragment, name] = new
        if self.world.channels[k].signal != CONTROL:
            for j in range(1, len(self.world.cuts)):
                if (k == 0 or j < k) and self.world.channels[j].signal != CONTROL:
                    self.rewrite(j, self.kept[fragment, SHARED])
        self.world.anchors_after.append((fragment, {name: new.anchor.numpy().copy() for name, new in moved.items()}))
        await asyncio.sleep(self.world.commit_s)

    def rewrite(self, j, slower):
        """A faster channel goes on from what a slower one has moved to."""
        flat = dict(zip(slower.where.tolist(), slower.anchor.tolist(), strict=True))
        for number in self.world.cuts[j].numbers:
            kept = self.kept[number, SHARED]
            for place, element in enumerate(kept.where.tolist()):
                if element in flat:
                    kept.anchor[place] = kept.sent[place] = flat[element]

    async def abort(self, key):
        self.spare.pop(key, None)

    async def current(self, island):
        name = SHARED if self.world.anchors == (SHARED,) else island
        found = []
        for number in range(self.world.fragments):
            kept = self.of(number, name)
            found.append(Update(number, kept.version, (Piece(0, 8 * len(kept.sent), (kept.where, kept.sent)),)))
        await asyncio.sleep(0.001)
        return found

    async def passed(self, island, fragment, version):
        kept = self.of(fragment, SHARED if self.world.anchors == (SHARED,) else island)
        sent = kept.passed.get(version)
        return None if sent is None else Update(fragment, version, (Piece(0, 8 * len(sent), (kept.where, sent)),))

    async def recalled(self, offer):
        sent = self.world.saved[self.world.began - 1].snapshot.sent[offer.fragment]
        (kept,) = [one for one, _ in sent if one.island == offer.island]
        assert (kept.round, kept.base_version) == (offer.round, offer.base_version)
        return dataclasses.replace(offer, emission=kept.emission)

    async def published(self):
        whole = torch.from_numpy(self.model())
        return [Update(0, 0, (Piece(0, 8 * DIM, (torch.arange(DIM), whole)),))]

    def model(self):
        """What is evaluated: the mean of anchors, or the average of outer iterates."""
        recipe, whole = self.recipes[0], np.zeros(DIM)
        for number in self.world.cuts[0].numbers:
            for name in self.world.anchors:
                kept = self.kept[number, name]
                values = kept.anchor
                if recipe.average.count(kept.version) > 0:
                    values = kept.state[recipe.state_names.index(AVERAGE)]
                whole[kept.where] += values.numpy() / len(self.world.anchors)
        return whole
