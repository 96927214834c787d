"""Writes a payload into memory of its own, chunk by chunk in the pass that makes the elements.

The memory is used again for each message of the same ranges, as new pages cost ten times a copy
(../shared/numbers.md).  What a message is made of: see `payload`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from ray_diloco.errors import SyncError
from ray_diloco.outer import chunks
from ray_diloco.outer.body import (
    DIGEST,
    DIGEST_AT,
    FORMAT_VERSION,
    MAGIC,
    PREFIX,
    Body,
    Bytes,
    digest_of,
    nonce_of,
    padded,
)
from ray_diloco.outer.codec import Codec, Fp32
from ray_diloco.outer.header import Header, Meta, header_text
from ray_diloco.outer.layout import Ranges, total
from ray_diloco.outer.matrices import Shape
from ray_diloco.outer.selection import Selection
from ray_diloco.outer.shaped import ShapedCodec


@dataclass(frozen=True, slots=True)
class Places:
    """Where the parts of a message begin, in bytes, and how long it is."""

    header_bytes: int
    digests: int
    body: int
    nbytes: int


def places_of(header: Header, body: Body) -> Places:
    """Where the parts of a message lie, with room in its header for versions of more digits."""
    header_bytes = padded(len(header_text(header)) + 20 * (len(header.meta.versions) + 1))
    digests_at = PREFIX.size + header_bytes
    body_at = digests_at + padded(DIGEST * body.chunks)
    return Places(header_bytes, digests_at, body_at, body_at + body.nbytes)


def message_bytes(
    codec: Codec | ShapedCodec,
    ranges: Ranges,
    meta: Meta,
    selection: Selection | None = None,
    shapes: tuple[Shape, ...] | None = None,
    numel: int | None = None,
) -> int:
    """Bytes of the message that a `Writer` with the same arguments makes; reserves no memory."""
    body = Body(codec, total(ranges) if numel is None else numel, shapes)
    return places_of(Header(codec.name, codec.params, ranges, meta, selection, shapes), body).nbytes


class Writer:
    """Memory for one payload of given ranges, written again and again.

    A pass calls `put` for each chunk, in any order, then `seal`.  The returned array is a view of this memory: it is
    valid until the next pass begins.

    Args:
      codec: codec of the body.
      ranges: canonical elements of the body.
      meta: an example of what `seal` will get, to reserve room for.

    Attributes:
      elements: fp32 [numel] view of the body if the codec is plain, else None.
      digest: hexadecimal digest of the message that was sealed last.
    """

    def __init__(
        self,
        codec: Codec | ShapedCodec,
        ranges: Ranges,
        meta: Meta,
        selection: Selection | None = None,
        shapes: tuple[Shape, ...] | None = None,
        numel: int | None = None,
    ) -> None:
        self.ranges = ranges
        self.numel = total(ranges) if numel is None else numel
        self._header = Header(codec.name, codec.params, ranges, meta, selection, shapes)
        self._layout = body = Body(codec, self.numel, shapes)
        places = places_of(self._header, body)
        self._header_bytes, digests_at, body_at = places.header_bytes, places.digests, places.body
        # Zeros written, not merely reserved: the first touch of a page costs ten times a copy into it.
        self._memory = torch.empty(places.nbytes, dtype=torch.uint8).fill_(0)
        self._array: Bytes = self._memory.numpy()
        self._head = self._array[:body_at]
        self._digests = memoryview(self._head.data)[digests_at:]
        self._body = self._memory[body_at:]
        self._body_array = self._array[body_at:]
        plain = isinstance(codec, Fp32)
        self.elements = self._body.view(torch.float32) if plain else None
        self._elements_at = self._body.data_ptr()
        self.digest = ""

    @property
    def codec(self) -> Codec:
        """The codec of a dense body."""
        return self._layout.codec  # type: ignore[return-value]

    def begin(self, meta: Meta) -> None:
        """Says what the message that is written now will be about; `seal` gets the same."""
        self._header = replace(self._header, meta=meta)

    def target(self, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        """Where a pass should put the elements of a chunk: in place if the codec allows it, else `scratch`'s head."""
        return scratch[: stop - start] if self.elements is None else self.elements[start:stop]

    def put(self, start: int, values: torch.Tensor, *, residual: bool = False) -> None:
        """Encodes one chunk and notes its digest.

        Args:
          start: position of its first element, a multiple of `chunks.CHUNK`.
          values: fp32 [elements of the chunk] on the host; may be what `target` returned.
          residual: leave in `values` what the bytes do not say.
        """
        k = start // chunks.CHUNK
        where = self._layout.where(k)
        if residual:
            self.codec.encode_residual(values, self._body[where], nonce_of(self._header.meta, k))
        elif self.elements is None or values.data_ptr() != self._elements_at + where.start:
            self.codec.encode(values, self._body[where], nonce_of(self._header.meta, k))
        self._digests[k * DIGEST : (k + 1) * DIGEST] = digest_of(self._body_array[where])

    def tensors(self) -> Iterator[tuple[int, Shape, torch.Tensor, int]]:
        """Where a codec of whole tensors writes: position of the first element, shape, bytes and nonce of each."""
        yield from self._layout.tensors(self._body, self._header.meta)

    def seal(self, meta: Meta) -> Bytes:
        """Writes the header.

        Returns:
          uint8 [whole message], a read-only view of this memory.

        Raises:
          SyncError: RD-407, the header does not fit into the room that was reserved; see `fits`.
        """
        self.begin(meta)
        if self._layout.shapes is not None:
            for k in range(self._layout.chunks):
                where = self._layout.where(k)
                self._digests[k * DIGEST : (k + 1) * DIGEST] = digest_of(self._body_array[where])
        text = header_text(self._header)
        if len(text) > self._header_bytes:
            what = f"a header of {len(text)} bytes has room for {self._header_bytes}"
            raise SyncError(407, what, "build a new Writer")
        head = self._head
        sizes = (FORMAT_VERSION, self._header_bytes, self._body.numel())
        head[PREFIX.size : PREFIX.size + self._header_bytes] = np.frombuffer(text.ljust(self._header_bytes), np.uint8)
        head[: PREFIX.size] = np.frombuffer(PREFIX.pack(MAGIC, *sizes, bytes(DIGEST)), np.uint8)
        digest = digest_of(head)
        head[DIGEST_AT : DIGEST_AT + DIGEST] = np.frombuffer(digest, np.uint8)
        self.digest = digest.hex()
        sealed = self._array.view()
        sealed.flags.writeable = False
        return sealed

    def fits(self, meta: Meta) -> bool:
        """Whether `seal` has room for this header."""
        return len(header_text(replace(self._header, meta=meta))) <= self._header_bytes
