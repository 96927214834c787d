"""Contributions that a commit keeps, because the round after it needs them once more (the eager swap).

Where every island has an anchor of its own, the shard of that anchor keeps what its island has sent.  The driver holds
references; a run that goes on from the commit asks the shards for the payloads when it first needs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray_diloco.cluster.calls import answers
from ray_diloco.cluster.keepers import Keeper
from ray_diloco.rounds.ports import Offer, Piece

Sent = Mapping[int, Sequence[tuple[Offer, float]]]
# Fragment, and which of its payloads.
Label = tuple[int, int]


def sent_by(islands: Sequence[str], sent: Sent) -> Iterator[tuple[Label, Any]]:
    """Payloads that some islands have sent, by label; those that nobody has recalled yet their shard holds already."""
    for fragment, contributions in sorted(sent.items()):
        for offer, _ in contributions:
            if offer.island in islands:
                for k, piece in enumerate(offer.emission.pieces):
                    if piece.handle is not None:
                        yield (fragment, k), piece.handle


async def recalled(keepers: Sequence[Keeper], offer: Offer, deadline_s: float) -> Offer:
    """An offer with references to its payloads."""
    (keeper,) = [keeper for keeper in keepers if offer.island in keeper.anchors]
    emission = offer.emission
    calls = [keeper.handle.recalled.remote(offer.fragment, k) for k in range(len(emission.pieces))]
    sizes = await answers([size for size, _ in calls], f"recalling what {offer.island} had sent", deadline_s)
    pieces = tuple(
        Piece(piece.shard, nbytes, payload)
        for piece, nbytes, (_, payload) in zip(emission.pieces, sizes, calls, strict=True)
    )
    return replace(offer, emission=replace(emission, pieces=pieces))
