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
from ray_diloco.outer.contribution import Offer, blamed, not_finite
from ray_diloco.outer.dct import Dct
from ray_diloco.outer.layout import Ranges, overlaps
from ray_diloco.outer.matrices import Shape
from ray_diloco.outer.merge import Combine
from ray_diloco.outer.payload import Payload, gather
from ray_diloco.outer.selection import Positions, Selection

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
      BadContribution: RD-405 its payload is damaged; RD-412 it holds a selection, or tensors that are not those here.
    """
    for payload in offer.payloads:
        if payload.header.selection is not None:
            error = SyncError(412, "a selection of elements where all are wanted", "run one configuration")
            raise blamed(offer.island, error)
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
      BadContribution: RD-405 a payload is damaged, RD-411 not finite, RD-412 of another transform or of tensors that
        are cut in another way than the first island's.
    """
    tensors: list[list[tuple[int, Shape]]] = []
    domain = []
    codec = transform_of(offers)
    for offer in offers:
        if not all(_same_transform(payload, codec) for payload in offer.payloads):
            error = SyncError(412, "elements in another codec than the first island's", "run one configuration")
            raise blamed(offer.island, error)
        values = torch.zeros(numel)
        found: list[tuple[int, Shape]] = []

        _each_tensor(offer, ranges, values, partial(_coefficients, found))
        if not math.isfinite(chunks.squared_norm(values)):
            raise not_finite([offer], [values])
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


def transform_of(offers: Sequence[Offer]) -> Dct | None:
    """The cosine transform by which the first island sent tensors; None if it used another codec."""
    payloads = offers[0].payloads if offers else ()
    codec = None if not payloads or payloads[0].dense else payloads[0].shaped_codec
    return codec if isinstance(codec, Dct) else None


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


def _same_transform(payload: Payload, codec: Dct | None) -> bool:
    """Whether a payload has coefficients of the same tiles; how many of them may differ."""
    if payload.dense or codec is None or not isinstance(payload.shaped_codec, Dct):
        return False
    return payload.shaped_codec.params["block"] == codec.params["block"]


def picked(source: Source, numel: int, at: torch.Tensor) -> Source:
    """The elements at some positions of a vector of `numel` elements."""
    values, scratch = torch.empty(numel), (torch.empty(chunks.CHUNK), torch.empty(chunks.CHUNK))
    for k, start in enumerate(range(0, numel, chunks.CHUNK)):
        values[start : start + chunks.CHUNK] = source.chunk(k, scratch)
    return Decoded(values[at])


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
            if payload.dense:
                raise SyncError(412, "elements beside whole tensors", "run one configuration")
            for at, shape, data, nonce in payload.read_tensors():
                numel = math.prod(shape)
                position = [there + at - here for here, there, n in places if here <= at and at + numel <= here + n]
                if not position:
                    raise SyncError(412, f"a tensor {shape} that is not one of the anchor's", "run one configuration")
                decode(payload, shape, data, values[position[0] : position[0] + numel], nonce)
        except SyncError as error:
            raise blamed(offer.island, error) from None
