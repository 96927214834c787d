"""One move of a fragment's anchor, from the live side into the spare one.

Contributions, and the anchors of neighbours where a rule pulls towards them, are opened as vectors, late ones with the
anchor that they were measured from; then `step.OuterStep` does the rest, of all elements or of those that are drawn.
Source: ../shared/algorithms.md §10.1 (merge, outer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from ray_diloco.errors import TooOld
from ray_diloco.outer.chunks import pieces
from ray_diloco.outer.contribution import Offer, not_finite
from ray_diloco.outer.merge import mean_over_senders
from ray_diloco.outer.payload import Bytes, Meta, open_payload, require_purpose, require_whole
from ray_diloco.outer.publication import average, sent, squared_norm_of, write
from ray_diloco.outer.random_fragments import RandomFragments
from ray_diloco.outer.recipe import Recipe
from ray_diloco.outer.sides import Fragment
from ray_diloco.outer.sources import Message, Scratch, Source, merged_coefficients, source_of, transform_of
from ray_diloco.outer.step import Arrays, Norms, NotFinite, OuterStep, room


class Mover:
    """Moves anchors by a recipe.

    Args:
      recipe: how.
      drawn: random fragments; None: all elements travel.
    """

    def __init__(self, recipe: Recipe, drawn: RandomFragments | None) -> None:
        self._recipe, self._drawn = recipe, drawn
        self._rooms: list[Scratch] = []

    def rooms(self, count: int) -> list[Scratch]:
        """Scratch memory, at least so many."""
        while len(self._rooms) < count:
            self._rooms.append(room())
        return self._rooms

    def stay(self, part: Fragment, lr: float | None, meta: Meta) -> Norms:
        """Moves nothing but the version: the spare side becomes what the live one is."""
        live, spare = part.live, part.spare
        spare.anchor.copy_(live.anchor)
        for before, after in zip(live.state, spare.state, strict=True):
            after.copy_(before)
        average(self._recipe, part)
        if self._drawn is not None:
            spare.selected = selected = self._drawn.room(part)
            selected.anchor.copy_(spare.anchor[selected.at])
            write(selected.writer, selected.anchor, meta)
        else:
            write(spare.writer, sent(self._recipe, spare, self._recipe.lr(part.version, lr)), meta)
        return Norms(anchor=squared_norm_of(spare.anchor))

    def move(
        self,
        part: Fragment,
        offers: Sequence[Offer],
        weights: Sequence[float],
        neighbours: Sequence[Sequence[Bytes]],
        own: int,
        lr: float | None,
        meta: Meta,
    ) -> Norms:
        """Steps into the spare side."""
        part.spare.writer.begin(meta)
        opened = [[open_payload(array) for array in arrays] for arrays in neighbours]
        around: list[Source] = []
        for payloads in opened:
            for payload in payloads:
                require_purpose(payload, "anchor")
                require_whole(payload)
            found = pieces(part.ranges, [(payload, payload.header.ranges) for payload in payloads], "neighbour")
            around.append(Message(found, part.numel))
        step = self.step(part, offers, weights, around, own, lr)
        try:
            norms = step.run()
        except NotFinite as bad:
            raise not_finite(offers, bad.received) from None
        return norms if self._drawn is None else replace(norms, anchor=self._drawn.spread(part))

    def step(
        self,
        part: Fragment,
        offers: Sequence[Offer],
        weights: Sequence[float],
        around: Sequence[Source],
        own: int,
        lr: float | None,
    ) -> OuterStep:
        """The step that `move` makes, not yet made."""
        recipe, live, spare = self._recipe, part.live, part.spare
        rooms = self.rooms(len(offers) + len(around) + 2)
        bases = [self._base_of(part, offer) for offer in offers]
        if self._drawn is not None:
            return self._drawn.step(part, offers, weights, bases, around, own, lr, rooms)
        step = partial(
            OuterStep,
            recipe,
            Arrays(live.anchor, live.state, spare.anchor, spare.state, spare.writer.put),
            part.version,
            weights,
            neighbours=around,
            own=own,
            spans=part.spans,
            lr=lr,
            rooms=rooms,
        )
        # Who sent a coefficient cannot be seen any more in elements, nor after a correction, which is not sparse.
        corrected = recipe.direction is not None or any(base is not None for base in bases)
        if recipe.rule.combine is mean_over_senders and not corrected and transform_of(offers) is not None:
            delta = merged_coefficients(offers, weights, part.ranges, part.numel, mean_over_senders)
            return step((), delta=delta)
        return step([source_of(offer, part.ranges, part.numel) for offer in offers], bases=bases)

    def remember(self, part: Fragment) -> None:
        """Keeps the anchor that is about to be replaced, for contributions that will have been measured from it."""
        if not self._recipe.reanchor:
            return
        kept = self._recipe.past
        oldest = part.past.pop(part.version - kept, None)
        if kept:
            # A commit of a run at their own pace that is still being written may read the oldest.
            memory = torch.empty(part.numel) if oldest is None or self._recipe.free else oldest
            part.past[part.version] = memory.copy_(part.live.anchor)

    def _base_of(self, part: Fragment, offer: Offer) -> torch.Tensor | None:
        """The anchor that a contribution was measured from, if it is to be measured anew."""
        if not self._recipe.reanchor or offer.base_version == part.version:
            return None
        if offer.base_version not in part.past:
            what = f"island {offer.island}: measured from version {offer.base_version}, which is not kept any more"
            raise TooOld(offer.island, 412, what, "inner.work=by_speed gives slow islands fewer steps")
        return part.past[offer.base_version]
