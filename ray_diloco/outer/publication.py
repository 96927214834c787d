"""What goes out of a fragment: its anchor or where momentum takes it to islands, an average to those who evaluate.

`Side.payload` is what was sent last, kept so that it can be sent again.  An average of outer iterates is a state beside
those of the outer optimiser: a step takes its chunks into it, and `average` takes a whole anchor where no step did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ray_diloco.errors import SyncError
from ray_diloco.outer import chunks
from ray_diloco.outer.chunks import in_chunks, pieces, quiet, squared_norm
from ray_diloco.outer.codec import Fp32
from ray_diloco.outer.payload import Bytes, Meta, Payload, Writer, require_purpose, require_whole
from ray_diloco.outer.recipe import AVERAGE, Recipe
from ray_diloco.outer.sides import Fragment, Side


def publish(recipe: Recipe, part: Fragment) -> None:
    """Makes the live anchor, as it is, what was sent last."""
    part.live.payload = encode(recipe, part)
    part.live.selected = None


def encode(recipe: Recipe, part: Fragment) -> Bytes:
    """Encodes the whole live anchor as it is."""
    meta = Meta("anchor", {part.index: part.version})
    # The learning rate of the step that made it.
    lr = recipe.lr(max(part.version - 1, 0), None)
    square = write(part.live.writer, sent(recipe, part.live, lr), meta)
    if not math.isfinite(square):
        what = f"the anchor of fragment {part.index} has squared norm {square}"
        raise SyncError(417, what, "start from parameters that are finite")
    return part.live.writer.seal(meta)


def encode_published(recipe: Recipe, part: Fragment, averaged: bool) -> Bytes:
    """Encodes, in fp32, what is evaluated where that is not what was sent: the average, or else the live anchor."""
    meta = Meta("anchor", {part.index: part.version})
    if part.published is None:
        part.published = Writer(Fp32(), part.ranges, meta)
    values = part.live.state[recipe.state_names.index(AVERAGE)] if averaged else part.live.anchor
    write(part.published, values, meta)
    return part.published.seal(meta)


def rewrite(recipe: Recipe, part: Fragment, opened: Sequence[Payload], scratch: torch.Tensor) -> None:
    """Sets elements of the live anchor to those of another channel's anchor; see `shard.AnchorShard.rewrite`.

    Args:
      recipe: how anchors move.
      part: the fragment.
      opened: payloads of the other anchor; they may have elements beyond the fragment.
      scratch: fp32 [chunk].
    """
    for payload in opened:
        require_purpose(payload, "anchor")
        require_whole(payload)
        payload.verify()
    sources = [(payload, payload.header.ranges) for payload in opened]
    for _, _, inside in in_chunks(pieces(part.ranges, sources, "anchors", partial=True), part.numel):
        for piece in inside:
            values = piece.source.read(piece.position, piece.position + piece.numel, scratch)
            part.live.anchor[piece.at : piece.at + piece.numel].copy_(values)
    publish(recipe, part)


def sent(recipe: Recipe, side: Side, lr: float | None) -> torch.Tensor:
    """What islands get of a side: its anchor, or where its momentum takes it."""
    if not recipe.lookahead:
        return side.anchor
    optimizer, ahead = recipe.optimizer, torch.empty_like(side.anchor)
    optimizer.lookahead(side.anchor, side.state[: len(optimizer.state_names)], ahead, lr)
    return ahead


def average(recipe: Recipe, part: Fragment) -> None:
    """Takes the whole spare anchor into the average, where no step has."""
    if recipe.average.kind != "none":
        k = recipe.state_names.index(AVERAGE)
        before, after = part.live.state[k], part.spare.state[k]
        recipe.take_average(before, after, part.spare.anchor, part.version + 1)


def begin_average(recipe: Recipe, part: Fragment) -> None:
    """Before anchors are averaged, the average is the anchor itself."""
    if recipe.average.kind != "none" and not recipe.average.count(part.version):
        part.live.state[recipe.state_names.index(AVERAGE)].copy_(part.live.anchor)


def write(writer: Writer, values: torch.Tensor, meta: Meta) -> float:
    """Encodes a whole vector; returns its squared norm."""
    square = 0.0
    writer.begin(meta)
    with quiet():
        for start in range(0, values.numel(), chunks.CHUNK):
            square += squared_norm(values[start : start + chunks.CHUNK])
            writer.put(start, values[start : start + chunks.CHUNK])
    return square


def squared_norm_of(values: torch.Tensor) -> float:
    """Sum of squares of a vector, chunk by chunk."""
    return math.fsum(
        squared_norm(values[start : start + chunks.CHUNK]) for start in range(0, values.numel(), chunks.CHUNK)
    )
