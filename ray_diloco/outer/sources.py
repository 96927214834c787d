"""Contributions as vectors over a fragment, whatever form they travelled in.

A message in the codec of elements is decoded chunk by chunk, in the pass that uses it.  A codec of whole tensors is
decoded at once, and a selection holds few elements; both become one fp32 array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch

from ray_diloco.errors import SyncError
from ray_diloco.outer import chunks
from ray_diloco.outer.chunks import Piece, in_chunks
from ray_diloco.outer.contribution import Offer, blamed
from ray_diloco.outer.layout import Ranges, overlaps
from ray_diloco.outer.merge import Combine
from ray_diloco.outer.payload import Payload, gather
from ray_diloco.outer.selection import Positions, Selection
from ray_diloco.outer.shaped import Dct, Shape

Scratch = tuple[torch.Tensor, torch.Tensor]


class Source(Protocol):
    """A vector over a fragment, fp32."""

    def chunk(self, k: int, scratch: Scratch) -> torch.Tensor:
        """Elements of chunk `k`; a view that must not be written, or of `scratch`."""
        ...


@dataclass(frozen=True, eq=False)
class Decoded:
    """A vector that lies in memory."""

    values: torch.Tensor

    def chunk(self, k: int, scratch: Scratch) -> torch.Tensor:
        """See `Source.chunk`."""
        return self.values[k * chunks.CHUNK : (k + 1) * chunks.CHUNK]


@dataclass(frozen=True, eq=False)
class Message:
    """A vector in payloads; `island` is blamed for what is wrong with them."""

    pieces: Sequence[Piece[Payload]]
    numel: int
    island: str | None = None
    _chunks: list[tuple[int, int, list[Piece[Payload]]]] = field(default_factory=list)

    def chunk(self, k: int, scratch: Scratch) -> torch.Tensor:
        """See `Source.chunk`.  Raises BadContribution or SyncError RD-405."""
        if not self._chunks:
            self._chunks.extend(in_chunks(self.pieces, self.numel))
        try:
            return gather(*self._chunks[k], scratch)
        except SyncError as error:
            if self.island is None:
                raise
            raise blamed(self.island, error) from None


def source_of(offer: Offer, ranges: Ranges, numel: int) -> Source:
    """A contribution to a fragment as a vector.

    Args:
      offer: with checked headers.
      ranges: elements of the fragment here; `numel` of them.

    Raises:
      BadContribution: its payload is damaged.
    """
    if all(payload.dense for payload in offer.payloads):
        return Message(offer.pieces, numel, offer.island)
    values = torch.zeros(numel)

    def decode(payload: Payload, shape: Shape, data: torch.Tensor, out: torch.Tensor, nonce: int) -> None:
        payload.shaped_codec.decode(data, shape, out, nonce)

    _each_tensor(offer, ranges, values, decode)
    return Decoded(values)


def merged_coefficients(
    offers: Sequence[Offer], factors: Sequence[float], ranges: Ranges, numel: int, combine: Combine
) -> torch.Tensor:
    """Merges contributions in the domain of a cosine transform, and transforms back once.

    For rules that are not linear, such as the mean over those who sent a coefficient (DeMo, 2411.19870).

    Returns:
      fp32 [numel].

    Raises:
      BadContribution: a payload is damaged, or of tensors that are cut in another way than the first island's.
    """
    tensors: list[list[tuple[int, Shape]]] = []
    domain = []
    codec: Dct | None = None
    for offer in offers:
        values = torch.zeros(numel)
        found: list[tuple[int, Shape]] = []

        _each_tensor(offer, ranges, values, partial(_coefficients, found))
        codec = codec or offer.payloads[0].shaped_codec  # type: ignore[assignment]
        tensors.append(sorted(found))
        domain.append(values)
        if tensors[-1] != tensors[0]:
            error = SyncError(412, "tensors cut in another way than the first island's", "give islands equal ranks")
            raise blamed(offer.island, error)
    merged = torch.empty(numel)
    combine(domain, factors, merged)
    for at, shape in tensors[0]:
        part = merged[at : at + math.prod(shape)]
        codec.inverse(part.clone(), shape, part)  # type: ignore[union-attr]
    return merged


def selected_source(offer: Offer, selection: Selection, positions: Positions) -> Source:
    """A contribution to a round of random fragments: the elements at the selected positions, ascending.

    Raises:
      BadContribution: RD-405 damaged, RD-412 of another selection.
    """
    values = torch.empty(len(positions))
    for payload in offer.payloads:
        try:
            header = payload.header
            if header.selection != selection:
                raise SyncError(412, f"elements of {header.selection}, not of {selection}", "run one configuration")
            at = torch.from_numpy(np.searchsorted(positions, selection.positions(header.ranges)))
            for start in range(0, payload.numel, chunks.CHUNK):
                stop = min(start + chunks.CHUNK, payload.numel)
                values[at[start:stop]] = payload.read(start, stop, torch.empty(stop - start))
        except SyncError as error:
            raise blamed(offer.island, error) from None
    return Decoded(values)


_Decode = Callable[[Payload, Shape, torch.Tensor, torch.Tensor, int], None]


def _coefficients(
    found: list[tuple[int, Shape]], payload: Payload, shape: Shape, data: torch.Tensor, out: torch.Tensor, nonce: int
) -> None:
    """Decodes a tensor in the domain of its transform, and notes where it lies."""
    found.append((int(out.storage_offset()), shape))
    payload.shaped_codec.decode_coefficients(data, shape, out, nonce=nonce)  # type: ignore[attr-defined]


def _each_tensor(offer: Offer, ranges: Ranges, values: torch.Tensor, decode: _Decode) -> None:
    """Decodes every tensor of a contribution to where it lies in the fragment."""
    for payload in offer.payloads:
        places = overlaps(payload.header.ranges, ranges)
        try:
            for at, shape, data, nonce in payload.read_tensors():
                position = next(there + at - here for here, there, n in places if here <= at < here + n)
                decode(payload, shape, data, values[position : position + math.prod(shape)], nonce)
        except SyncError as error:
            raise blamed(offer.island, error) from None
