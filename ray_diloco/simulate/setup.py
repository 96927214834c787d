"""What a simulation is built from: a configuration, translated once for all runs of it.

Each fragment of the real cut stands for `WIDTH` numbers of a small float64 vector, whatever its size; how many bytes
it would have is said beside it.  Recipes and rules of adoption are those that ranks and shards use.  Random fragments
and codecs change the bytes here, not the numbers: their mathematics is tested where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ray_diloco.blocks import Cut, adopt_of, anchor_names, channels_of, cuts_of, recipe_of
from ray_diloco.config.schema import Config, island_names
from ray_diloco.outer.adopt import Adopt
from ray_diloco.outer.layout import Layout
from ray_diloco.outer.recipe import Recipe
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rules import Rules
from ray_diloco.rules import Supply, rules_of

# Elements that a fragment has in a simulation.
WIDTH = 4


@dataclass(frozen=True)
class Sizes:
    """Bytes of each fragment, up from an island and down to it; `default` where nothing is said."""

    up: Mapping[int, int] = field(default_factory=dict)
    down: Mapping[int, int] = field(default_factory=dict)
    default: int = 8 * WIDTH


@dataclass(frozen=True)
class Setup:
    """A configuration, ready to be simulated.

    Attributes:
      layout: of the model, for the number of fragments.
      sizes: of what travels.
      tokens_per_block: of a training sequence.
      blocks: training blocks of an island's data.
      heldout: held-out blocks.
    """

    config: Config
    layout: Layout
    sizes: Sizes = Sizes()
    tokens_per_block: int = 1
    blocks: int = 1000
    heldout: int = 0

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The islands, sorted."""
        return tuple(island_names(self.config))

    @cached_property
    def anchors(self) -> tuple[str, ...]:
        """The anchors of the main channel."""
        return anchor_names(self.config)

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """Channels with their fragments."""
        return cuts_of(channels_of(self.config), self.layout)

    @cached_property
    def fragments(self) -> int:
        """Number of fragments, over all channels."""
        return sum(len(cut.fragments) for cut in self.cuts)

    @cached_property
    def recipes(self) -> Sequence[Recipe]:
        """How the anchor of each fragment moves."""
        each = [recipe_of(cut.channel) for cut in self.cuts]
        return [each[k] for k, cut in enumerate(self.cuts) for _ in cut.fragments]

    @cached_property
    def adopts(self) -> Sequence[Adopt | None]:
        """How islands adopt each fragment; None: they overwrite."""
        kinds = {k: None if cut.channel.adopt.kind == "overwrite" else adopt_of(cut.channel) for k, cut in self._each}
        return [kinds[k] for k, cut in self._each for _ in cut.fragments]

    @cached_property
    def keeps_own(self) -> Sequence[bool]:
        """Of each fragment, whether an island's base is what it has, not the anchor."""
        return [cut.channel.adopt.kind == "keep_own" for cut in self.cuts for _ in cut.fragments]

    @cached_property
    def main(self) -> range:
        """Fragments of the main channel."""
        return self.cuts[0].numbers

    def rules(self, position: Position) -> Rules:
        """The rules of a run from a position on."""
        supplies = {name: Supply("blocks", self.blocks) for name in self.names}
        return rules_of(self.config, supplies, self.heldout, position, self.cuts)

    @property
    def _each(self) -> list[tuple[int, Cut]]:
        return list(enumerate(self.cuts))
