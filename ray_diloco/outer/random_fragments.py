"""Random fragments: of each round only some elements travel and move, the others stay.

They are drawn anew for each version of the anchor, by islands and shards alike.  The step is an ordinary one over the
selected elements, packed; what it gives is put beside what stayed.  Source: ../shared/algorithms.md §6.5 (SPARTA).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ray_diloco.outer.codec import Codec
from ray_diloco.outer.contribution import Offer
from ray_diloco.outer.payload import Meta, Writer
from ray_diloco.outer.publication import average, squared_norm_of
from ray_diloco.outer.recipe import Recipe
from ray_diloco.outer.selection import Selection
from ray_diloco.outer.sides import Fragment, Selected
from ray_diloco.outer.sources import Scratch, Source, picked, selected_source
from ray_diloco.outer.step import Arrays, OuterStep


@dataclass(frozen=True)
class Draw:
    """How elements are drawn; see `selection.Selection`."""

    draw: str
    p: float
    seed: int

    def of(self, version: int) -> Selection:
        """What travels in the round that moves an anchor of this version."""
        return Selection(self.draw, self.p, self.seed, version)


@dataclass(frozen=True)
class RandomFragments:
    """Steps of the elements that are drawn.

    Attributes:
      draw: which they are.
      recipe: how anchors move.
      codec: how anchors travel to the islands.
    """

    draw: Draw
    recipe: Recipe
    codec: Codec

    def room(self, part: Fragment) -> Selected:
        """Room for the selected elements of a round."""
        selection = self.draw.of(part.version)
        at = torch.from_numpy(selection.packed(part.ranges))
        meta = Meta("anchor", {part.index: part.version + 1})
        writer = Writer(self.codec, part.ranges, meta, selection, numel=len(at))
        return Selected(at, writer, torch.empty(len(at)), tuple(torch.empty(len(at)) for _ in part.live.state))

    def step(
        self,
        part: Fragment,
        offers: Sequence[Offer],
        weights: Sequence[float],
        bases: Sequence[torch.Tensor | None],
        around: Sequence[Source],
        own: int,
        lr: float | None,
        rooms: Sequence[Scratch],
    ) -> OuterStep:
        """A step of the selected elements alone, into the spare side."""
        live = part.live
        part.spare.selected = selected = self.room(part)
        at, state = selected.at, tuple(one[selected.at] for one in live.state)
        selection = self.draw.of(part.version)
        positions = selection.positions(part.ranges)
        return OuterStep(
            self.recipe,
            Arrays(live.anchor[at], state, selected.anchor, selected.state, selected.writer.put),
            part.version,
            weights,
            [selected_source(offer, selection, positions) for offer in offers],
            bases=[None if base is None else base[at] for base in bases],
            neighbours=[picked(source, part.numel, at) for source in around],
            own=own,
            lr=lr,
            rooms=rooms,
        )

    def spread(self, part: Fragment) -> float:
        """Puts stepped elements of a selection beside what stayed, into the spare side; squared norm of its anchor."""
        live, spare, selected = part.live, part.spare, part.spare.selected
        if selected is None:
            raise ValueError("all elements travel")
        for before, after, moved in zip(
            (live.anchor, *live.state), (spare.anchor, *spare.state), (selected.anchor, *selected.state), strict=True
        ):
            after.copy_(before)
            after[selected.at] = moved
        average(self.recipe, part)
        return squared_norm_of(spare.anchor)
