"""A message of tensors: raw bytes behind a small typed header that says what they are.

    prefix, 64 bytes   magic, format version, sizes, digest of everything before the body
    header             JSON padded with spaces: codec, ranges, purpose, versions, island, incarnation
    digests            16 bytes (xxh3-128) for each chunk of the body, padded with zeros
    body               the elements of the ranges, packed in that order, in the codec's bytes; of a selection, those
                       that it selects; of a codec of whole tensors, the bytes of each tensor

Each part begins at a multiple of 64 bytes.  The digest in the prefix covers the digests of the chunks, so it stands for
the whole message, while a receiver checks each chunk of the body in its own pass, when it first touches it: in the
cache that costs next to nothing, and a rank that needs a part of a message reads only that part.  Digests detect
damage, not forgery.  No pickle: nothing in a message is executed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

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
    body_of,
    digest_of,
    nonce_of,
    padded,
)
from ray_diloco.outer.chunks import Piece
from ray_diloco.outer.codec import Codec
from ray_diloco.outer.header import RESEND, Header, Meta, parse_header
from ray_diloco.outer.matrices import Shape
from ray_diloco.outer.shaped import ShapedCodec
from ray_diloco.outer.writer import Writer

__all__ = ["Bytes", "Meta", "Payload", "Writer", "gather", "open_payload", "require_purpose", "require_whole"]


class Payload:
    """A received payload, opened: header read and checked, body untouched until read.

    Attributes:
      header: see `Header`.
      numel: number of elements in the body.
      nbytes: bytes of the whole message.
      digest: hexadecimal xxh3-128 that stands for the whole message.
    """

    def __init__(self, header: Header, body: Body, digests: bytes, data: Bytes, digest: str, nbytes: int) -> None:
        self.header = header
        self.numel = body.numel
        self.nbytes = nbytes
        self.digest = digest
        self._layout = body
        self._digests = digests
        self._bytes = data
        # DLPack is the way by which torch takes memory that numpy calls read-only (the object store's) without a
        # warning.  Nothing here writes it.
        self._body = from_dlpack(data)
        self._elements = self._body.view(torch.float32) if self.dense and self.codec.plain else None
        self._checked = bytearray(body.chunks)

    @property
    def dense(self) -> bool:
        """Whether `read` gives its elements; else `read_tensors` does."""
        return self._layout.shapes is None

    @property
    def codec(self) -> Codec:
        """The codec of a dense body."""
        return self._layout.codec  # type: ignore[return-value]

    @property
    def shaped_codec(self) -> ShapedCodec:
        """The codec of a body of whole tensors."""
        return self._layout.codec  # type: ignore[return-value]

    @property
    def lossless(self) -> bool:
        """Whether the elements are those that were sent, bit for bit."""
        return self._layout.codec.traits.lossless

    def read(self, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        """Checks and decodes the elements from position `start` to `stop` (exclusive) of the packed elements.

        Args:
          start: first position.
          stop: position behind the last one; at most `chunks.CHUNK` further.
          scratch: fp32 [≥ stop − start], used if the elements have to be decoded.

        Returns:
          fp32 [stop − start]: `scratch`'s head or a view of the message, which must not be written.

        Raises:
          SyncError: RD-405, a chunk of the body does not have the digest that the header gives for it.
        """
        self._check(start // chunks.CHUNK, math.ceil(stop / chunks.CHUNK))
        if self._elements is not None:
            return self._elements[start:stop]
        codec = self.codec
        # What the receiver draws as the sender did, it has to draw for the same chunk.
        unit = chunks.CHUNK if codec.traits.shared_seed else codec.granularity
        first, last = start // unit * unit, min(-(-stop // unit) * unit, self.numel)
        whole = first == start and last == stop
        target = scratch[: stop - start] if whole else torch.empty(last - first)
        for at in range(first, last, chunks.CHUNK):
            end = min(at + chunks.CHUNK, last)
            data = self._body[codec.nbytes(at) : codec.nbytes(end)]
            codec.decode(data, target[at - first : end - first], nonce_of(self.header.meta, at // chunks.CHUNK))
        return target if whole else target[start - first : stop - first]

    def read_tensors(self) -> Iterator[tuple[int, Shape, torch.Tensor, int]]:
        """Checks a body of whole tensors.

        Yields:
          Of each tensor the position of its first element in the packed ranges, its shape, its bytes and its nonce.

        Raises:
          SyncError: as `read`.
        """
        self.verify()
        yield from self._layout.tensors(self._body, self.header.meta)

    def verify(self) -> None:
        """Checks the whole body.  Raises as `read` does."""
        self._check(0, self._layout.chunks)

    def _check(self, first: int, last: int) -> None:
        for k in range(first, last):
            if not self._checked[k]:
                if digest_of(self._bytes[self._layout.where(k)]) != self._digest_of(k):
                    raise SyncError(405, f"{self._name()}: chunk {k} of the body is damaged", RESEND)
                self._checked[k] = 1

    def _digest_of(self, k: int) -> bytes:
        return self._digests[k * DIGEST : (k + 1) * DIGEST]

    def _name(self) -> str:
        meta = self.header.meta
        return f"{meta.purpose} payload" + (f" of island {meta.island}" if meta.island else "")


def open_payload(array: Bytes) -> Payload:
    """Reads and checks everything but the body.

    Args:
      array: uint8 [n], contiguous; may be read-only.  It must stay unchanged while the payload is in use.

    Raises:
      SyncError: RD-401 wrong size, RD-402 not a payload, RD-403 another format version, RD-404 unknown codec,
        RD-405 damaged header, RD-406 impossible ranges, RD-407 malformed header, RD-408 not a flat array of bytes.
    """
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
        raise SyncError(408, f"a payload is a flat uint8 array, not {_kind(array)}", "pass what `seal` gave")
    if array.nbytes < PREFIX.size:
        raise SyncError(401, f"a payload of {array.nbytes} bytes ends inside its prefix", RESEND)
    magic, version, header_bytes, body_bytes, digest = PREFIX.unpack(array[: PREFIX.size].tobytes())
    if magic != MAGIC:
        raise SyncError(402, f"a payload begins with {MAGIC!r}, not {magic!r}", "send payloads of this program only")
    if version != FORMAT_VERSION:
        raise SyncError(403, f"a payload has format {version}, not {FORMAT_VERSION}", "run one version on all islands")
    if array.nbytes < PREFIX.size + header_bytes:
        raise SyncError(401, f"a payload of {array.nbytes} bytes ends inside its header", RESEND)
    digests_at = PREFIX.size + header_bytes
    header = parse_header(array[PREFIX.size : digests_at].tobytes())
    body = body_of(header)
    numel = body.numel
    body_at = digests_at + padded(DIGEST * body.chunks)
    if body.nbytes != body_bytes or array.nbytes != body_at + body_bytes:
        expected = body_at + body.nbytes
        what = f"a payload of {numel} elements in {header.codec} has {array.nbytes} bytes, not {expected}"
        raise SyncError(401, f"{what}, or gives a wrong size of its body ({body_bytes})", RESEND)
    head = array[:body_at].copy()
    head[DIGEST_AT : DIGEST_AT + DIGEST] = 0
    if digest_of(head) != digest:
        raise SyncError(405, f"the header of a {header.meta.purpose} payload is damaged", RESEND)
    return Payload(header, body, head[digests_at:].tobytes(), array[body_at:], digest.hex(), array.nbytes)


def gather(
    start: int, stop: int, inside: Sequence[Piece[Payload]], scratch: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Elements of one chunk of a set, from the payloads that have them.

    Args:
      start: position of the first element in the packed set.
      stop: position behind the last one.
      inside: the pieces of this chunk, from `chunks.in_chunks`; they leave no gap.
      scratch: two fp32 buffers of `chunks.CHUNK` elements.

    Returns:
      fp32 [stop − start]: a view of a message if it lies there as it is, else of `scratch`.

    Raises:
      SyncError: RD-405, a payload is damaged.
    """
    decoded, joined = scratch
    if len(inside) == 1:
        piece = inside[0]
        return piece.source.read(piece.position, piece.position + piece.numel, decoded)
    for piece in inside:
        values = piece.source.read(piece.position, piece.position + piece.numel, decoded)
        joined[piece.at - start :][: piece.numel].copy_(values)
    return joined[: stop - start]


def require_purpose(payload: Payload, purpose: str) -> None:
    """Raises RD-412 if a payload is about something else."""
    found = payload.header.meta.purpose
    if found != purpose:
        raise SyncError(412, f"a payload has the purpose {found}, not {purpose}", "do not mix up payloads")


def require_whole(payload: Payload) -> None:
    """Raises RD-412 if a payload does not simply have the elements of its ranges."""
    if payload.header.selection is not None or not payload.dense:
        what = f"an {payload.header.meta.purpose} payload has a selection or codes of whole tensors"
        raise SyncError(412, what, "send all elements, each by itself")


def _kind(array: object) -> str:
    return f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
