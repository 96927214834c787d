"""The part of a fragment that a shard keeps: two copies of its anchor and state, of which one is committed.

A preparation writes the spare side; a commit swaps the two.  Every buffer is written once at the start, as new pages
cost ten times a copy (../shared/numbers.md).  Where the codec towards the islands is plain, the anchor lives inside its
own payload, so sending it costs no copy: 16 bytes a parameter for Nesterov.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ray_diloco.errors import SyncError
from ray_diloco.outer.chunks import pieces
from ray_diloco.outer.codec import Codec
from ray_diloco.outer.layout import Layout, Ranges, total
from ray_diloco.outer.payload import Bytes, Meta, Writer
from ray_diloco.outer.recipe import Recipe
from ray_diloco.outer.step import Span


@dataclass(frozen=True)
class Prepared:
    """Figures of a prepared outer step, over the elements of this shard.

    Attributes:
      key: key of the preparation.
      fragment: number of the fragment.
      version: version that a commit makes.
      squared_anchor_norm: `‖A‖²` after the step.
      squared_update_norm: `‖A after − A before‖²`.
      squared_delta_norm: `‖Δ‖²` of the merged outer gradient.
      bytes_in: bytes of all payloads received.
      bytes_out: bytes of the payload that goes to each rank.
      digest: digest of that payload.
    """

    key: str
    fragment: int
    version: int
    squared_anchor_norm: float
    squared_update_norm: float
    squared_delta_norm: float
    bytes_in: int
    bytes_out: int
    digest: str


@dataclass(eq=False)
class Selected:
    """The elements of a round of random fragments: where they lie, what they become, and the message of them."""

    at: torch.Tensor
    writer: Writer
    anchor: torch.Tensor
    state: tuple[torch.Tensor, ...]


class Side:
    """One of the two copies of a fragment: anchor, state, and the payload made from them."""

    def __init__(self, ranges: Ranges, fragment: int, recipe: Recipe, codec: Codec) -> None:
        self.writer = Writer(codec, ranges, Meta("anchor", {fragment: 0}))
        plain = None if recipe.lookahead else self.writer.elements
        self.anchor = torch.empty(total(ranges)).fill_(0) if plain is None else plain
        self.state = tuple(torch.empty(total(ranges)).fill_(initial) for initial in recipe.initials)
        self.payload: Bytes | None = None
        # Where only a selection of elements travels, a message is as large as what it holds.
        self.selected: Selected | None = None


@dataclass(eq=False)
class Fragment:
    """What a shard keeps of a fragment, and what it has prepared of it."""

    index: int
    ranges: Ranges
    live: Side
    spare: Side
    spans: tuple[Span, ...]
    version: int = 0
    open: Prepared | None = None
    last: Prepared | None = None
    # Anchors by version, for contributions that were measured from them.
    past: dict[int, torch.Tensor] = field(default_factory=dict)
    # What was sent of replaced anchors, by version, for islands that have still to adopt them.
    passed: dict[int, torch.Tensor] = field(default_factory=dict)
    # For what is evaluated, where that is not what is sent; None until it is asked for.
    published: Writer | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.live.writer.numel


def live_anchor(part: Fragment) -> torch.Tensor:
    """The committed anchor."""
    return part.live.anchor


def live_state(k: int) -> Callable[[Fragment], torch.Tensor]:
    """Gives state number `k` of a fragment as it is committed."""
    return lambda part: part.live.state[k]


def spans_of(layout: Layout, ranges: Ranges, recipe: Recipe) -> tuple[Span, ...]:
    """The tensors of a fragment, where a rule needs to know them; they have to be whole then."""
    if recipe.rule.scope != "tensor" and recipe.direction is None:
        return ()
    found = pieces(ranges, [(spec, (spec.range,)) for spec in layout.tensors], "tensors of the layout")
    for piece in found:
        if piece.numel != piece.source.numel:
            what = f"a fragment cuts tensor {piece.source.name}, but a rule works on whole tensors"
            raise SyncError(421, what, "cut fragments along tensors")
    return tuple(Span(piece.source.name, piece.at, piece.at + piece.numel) for piece in found)
