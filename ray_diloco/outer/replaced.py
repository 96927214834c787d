"""Anchors that have been replaced and are still needed, and how a commit keeps them.

    passed    as they were sent, for islands that adopt rounds late: where a delay is longer than a round, an island
              that goes on from a commit has still to adopt anchors older than the newest
    past      as they were, for contributions that were measured from them (`moves.Mover.remember`)

Tensors of a commit are named by age, 1 for the anchor just before the newest, so that they fit any number of shards.
Source: ../shared/algorithms.md §9.3 item 36.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ray_diloco.outer import chunks
from ray_diloco.outer.codec import Fp32
from ray_diloco.outer.named import Array, Place
from ray_diloco.outer.payload import Bytes, Meta, Writer, open_payload
from ray_diloco.outer.recipe import Recipe
from ray_diloco.outer.sides import Fragment

Places = Mapping[str, Place[Fragment]]


def remember_sent(recipe: Recipe, part: Fragment) -> None:
    """Keeps what was sent of the anchor that is about to be replaced."""
    if not recipe.passed or part.live.payload is None:
        return
    payload = open_payload(part.live.payload)
    values, scratch = torch.empty(payload.numel), torch.empty(chunks.CHUNK)
    for start in range(0, payload.numel, chunks.CHUNK):
        stop = min(start + chunks.CHUNK, payload.numel)
        values[start:stop] = payload.read(start, stop, scratch)
    part.passed[part.version] = values
    part.passed.pop(part.version - recipe.passed, None)


def encode_passed(part: Fragment, version: int) -> Bytes | None:
    """The message of a replaced anchor, in fp32; None if it is not kept."""
    values = part.passed.get(version)
    if values is None:
        return None
    meta = Meta("anchor", {part.index: version})
    writer = Writer(Fp32(), part.ranges, meta)
    for start in range(0, part.numel, chunks.CHUNK):
        writer.put(start, values[start : start + chunks.CHUNK])
    return writer.seal(meta)


def kinds_of(recipe: Recipe) -> dict[str, tuple[str, int]]:
    """Names under which a commit keeps them: which of the two, and how many versions before the newest."""
    both = (("passed", recipe.passed), ("past", recipe.past if recipe.free else 0))
    return {f"{kind}{age}": (kind, age) for kind, count in both for age in range(1, count + 1)}


def replaced_tensors(recipe: Recipe, parts: Sequence[Fragment], places: Places) -> Iterator[tuple[str, str, Array]]:
    """What there is of them: under which name, of which tensor, fp32 arrays that are not written again."""
    for name, (kind, age) in kinds_of(recipe).items():
        held = {part.index: getattr(part, kind).get(part.version - age) for part in parts}
        for tensor, place in places.items():
            if all(held[piece.source.index] is not None for piece in place.pieces):
                yield name, tensor, place.gather(lambda part, held=held: held[part.index])  # type: ignore[misc]


def load_replaced(
    recipe: Recipe, parts: Sequence[Fragment], places: Places, saved: Mapping[str, Mapping[str, Array]]
) -> None:
    """Takes up what `replaced_tensors` gave of the tensors of this shard, by name; what is not there is not kept.

    Raises:
      SyncError: RD-424, a tensor has another shape or dtype.
    """
    for part in parts:
        part.passed.clear()
        part.past.clear()
    for name, (kind, age) in kinds_of(recipe).items():
        tensors = saved.get(name, {})
        whole = [p for p in parts if p.version >= age and _covered(p, places, tensors)]
        for part in whole:
            getattr(part, kind)[part.version - age] = torch.empty(part.numel)
        for tensor, place in places.items():
            if all(piece.source in whole for piece in place.pieces):
                place.scatter(tensors[tensor], lambda p, kind=kind, age=age: getattr(p, kind)[p.version - age])  # type: ignore[misc]


def _covered(part: Fragment, places: Places, tensors: Mapping[str, Array]) -> bool:
    mine = [name for name, place in places.items() if any(piece.source is part for piece in place.pieces)]
    return all(name in tensors for name in mine)
