"""Payloads of contributions, and who sent them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.exceptions import ObjectLostError

from ray_diloco.rounds.ports import Offer, Piece


def fragment_of(key: str) -> int:
    """The fragment that a key names; see `rounds.conclusions`."""
    return int(key.split(":", 1)[0].split(".")[1])


def pieces_of(pieces: Sequence[Piece], part: int) -> list[Piece]:
    """Those for the shards that keep a part."""
    return [piece for piece in pieces if piece.shard == part]


def handles_of(pieces: Sequence[Piece], part: int) -> list[Any]:
    """References to those."""
    return [piece.handle for piece in pieces_of(pieces, part)]


def owner_of_lost(error: BaseException | None, offers: Sequence[Offer]) -> str | None:
    """The island whose payload an error says is lost; None if it says nothing of the kind."""
    if not isinstance(error, ObjectLostError):
        return None
    return next((o.island for o in offers for p in o.emission.pieces if p.handle.hex() == error.object_ref_hex), None)
