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

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, TypeGuard

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from ray_diloco.errors import SyncError
from ray_diloco.outer.chunks import CHUNK, Piece
from ray_diloco.outer.codec import Codec, Fp32, Param, codec_of
from ray_diloco.outer.layout import Range, Ranges, total
from ray_diloco.outer.selection import Selection
from ray_diloco.outer.shaped import SHAPED, Shape, ShapedCodec, shaped_of

Bytes = NDArray[np.uint8]

FORMAT_VERSION = 1
PURPOSES = ("contribution", "anchor", "parameters")

_MAGIC = b"RDILOCO\0"
_ALIGN = 64
_DIGEST = 16
# Magic, format version, bytes of the header, bytes of the body, digest, zeros up to 64 bytes.
_PREFIX = struct.Struct("<8sIIQ16s24x")
_DIGEST_AT = 24
_RESEND = "send the payload again; if it happens again, look for broken memory or a changed object store"


@dataclass(frozen=True)
class Meta:
    """What a payload is about.

    Attributes:
      purpose: contribution (`B − θ`), anchor (`A`, an update or for a joiner), parameters (`θ`, to found a run).
      versions: version of each fragment that the elements were measured from, or that they are.
      island: name of the sender; empty for an anchor.
      incarnation: how often that island was started anew.
    """

    purpose: str
    versions: Mapping[int, int] = field(default_factory=dict)
    island: str = ""
    incarnation: int = 0


@dataclass(frozen=True)
class Header:
    """Everything a payload says about its body.

    Attributes:
      codec: name of the codec of the body.
      params: parameters of that codec.
      ranges: canonical elements in the body, packed in this order; sorted, disjoint, not empty.
      meta: see `Meta`.
      selection: which of those elements travel; None: all.
      shapes: of the tensors that the ranges are, for a codec of whole tensors; else None.
    """

    codec: str
    params: Mapping[str, Param]
    ranges: Ranges
    meta: Meta
    selection: Selection | None = None
    shapes: tuple[Shape, ...] | None = None


class _Body:
    """Where the bytes of a body lie: how many there are, and which belong to each chunk that has a digest.

    A chunk is `chunks.CHUNK` elements, or as many bytes as they have in fp32 where a codec takes whole tensors.
    """

    def __init__(self, codec: Codec | ShapedCodec, numel: int, shapes: tuple[Shape, ...] | None) -> None:
        self.codec, self.numel, self.shapes = codec, numel, shapes
        if shapes is None:
            self.nbytes = codec.nbytes(numel)  # type: ignore[arg-type]
            self.chunks = math.ceil(numel / CHUNK)
        else:
            self.borders = [0, *accumulate(codec.nbytes(shape) for shape in shapes)]  # type: ignore[arg-type]
            self.nbytes = self.borders[-1]
            self.chunks = math.ceil(self.nbytes / (4 * CHUNK))

    def tensors(self, data: torch.Tensor, meta: Meta) -> Iterator[tuple[int, Shape, torch.Tensor, int]]:
        """Position of the first element, shape, bytes and nonce of each whole tensor."""
        at = 0
        for k, (shape, (start, stop)) in enumerate(zip(self.shapes or (), pairwise(self.borders), strict=True)):
            yield at, shape, data[start:stop], _nonce(meta, k)
            at += math.prod(shape)

    def where(self, k: int) -> slice:
        """Bytes of chunk `k`."""
        if self.shapes is not None:
            return slice(4 * CHUNK * k, min(4 * CHUNK * (k + 1), self.nbytes))
        nbytes = self.codec.nbytes
        return slice(nbytes(k * CHUNK), nbytes(min((k + 1) * CHUNK, self.numel)))  # type: ignore[arg-type]


class Payload:
    """A received payload, opened: header read and checked, body untouched until read.

    Attributes:
      header: see `Header`.
      numel: number of elements in the body.
      nbytes: bytes of the whole message.
      digest: hexadecimal xxh3-128 that stands for the whole message.
    """

    def __init__(self, header: Header, body: _Body, digests: bytes, data: Bytes, digest: str, nbytes: int) -> None:
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
        self._check(start // CHUNK, math.ceil(stop / CHUNK))
        if self._elements is not None:
            return self._elements[start:stop]
        codec = self.codec
        # What the receiver draws as the sender did, it has to draw for the same chunk.
        unit = CHUNK if codec.traits.shared_seed else codec.granularity
        first, last = start // unit * unit, min(-(-stop // unit) * unit, self.numel)
        whole = first == start and last == stop
        target = scratch[: stop - start] if whole else torch.empty(last - first)
        for at in range(first, last, CHUNK):
            end = min(at + CHUNK, last)
            data = self._body[codec.nbytes(at) : codec.nbytes(end)]
            codec.decode(data, target[at - first : end - first], _nonce(self.header.meta, at // CHUNK))
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
                if _digest(self._bytes[self._layout.where(k)]) != self._digest_of(k):
                    raise SyncError(405, f"{self._name()}: chunk {k} of the body is damaged", _RESEND)
                self._checked[k] = 1

    def _digest_of(self, k: int) -> bytes:
        return self._digests[k * _DIGEST : (k + 1) * _DIGEST]

    def _name(self) -> str:
        meta = self.header.meta
        return f"{meta.purpose} payload" + (f" of island {meta.island}" if meta.island else "")


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
        self._layout = body = _Body(codec, self.numel, shapes)
        self._header_bytes = _padded(len(_header_text(self._header)) + 20 * (len(meta.versions) + 1))
        digests_at = _PREFIX.size + self._header_bytes
        body_at = digests_at + _padded(_DIGEST * body.chunks)
        # Zeros written, not merely reserved: the first touch of a page costs ten times a copy into it.
        self._memory = torch.empty(body_at + body.nbytes, dtype=torch.uint8).fill_(0)
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
        k = start // CHUNK
        where = self._layout.where(k)
        if residual:
            self.codec.encode_residual(values, self._body[where], _nonce(self._header.meta, k))
        elif self.elements is None or values.data_ptr() != self._elements_at + where.start:
            self.codec.encode(values, self._body[where], _nonce(self._header.meta, k))
        self._digests[k * _DIGEST : (k + 1) * _DIGEST] = _digest(self._body_array[where])

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
                self._digests[k * _DIGEST : (k + 1) * _DIGEST] = _digest(self._body_array[where])
        text = _header_text(self._header)
        if len(text) > self._header_bytes:
            what = f"a header of {len(text)} bytes has room for {self._header_bytes}"
            raise SyncError(407, what, "build a new Writer")
        head = self._head
        sizes = (FORMAT_VERSION, self._header_bytes, self._body.numel())
        head[_PREFIX.size : _PREFIX.size + self._header_bytes] = np.frombuffer(text.ljust(self._header_bytes), np.uint8)
        head[: _PREFIX.size] = np.frombuffer(_PREFIX.pack(_MAGIC, *sizes, bytes(_DIGEST)), np.uint8)
        digest = _digest(head)
        head[_DIGEST_AT : _DIGEST_AT + _DIGEST] = np.frombuffer(digest, np.uint8)
        self.digest = digest.hex()
        sealed = self._array.view()
        sealed.flags.writeable = False
        return sealed

    def fits(self, meta: Meta) -> bool:
        """Whether `seal` has room for this header."""
        return len(_header_text(replace(self._header, meta=meta))) <= self._header_bytes


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
    if array.nbytes < _PREFIX.size:
        raise SyncError(401, f"a payload of {array.nbytes} bytes ends inside its prefix", _RESEND)
    magic, version, header_bytes, body_bytes, digest = _PREFIX.unpack(array[: _PREFIX.size].tobytes())
    if magic != _MAGIC:
        raise SyncError(402, f"a payload begins with {_MAGIC!r}, not {magic!r}", "send payloads of this program only")
    if version != FORMAT_VERSION:
        raise SyncError(403, f"a payload has format {version}, not {FORMAT_VERSION}", "run one version on all islands")
    if array.nbytes < _PREFIX.size + header_bytes:
        raise SyncError(401, f"a payload of {array.nbytes} bytes ends inside its header", _RESEND)
    digests_at = _PREFIX.size + header_bytes
    header = _parse_header(array[_PREFIX.size : digests_at].tobytes())
    body = _body_of(header)
    numel = body.numel
    body_at = digests_at + _padded(_DIGEST * body.chunks)
    if body.nbytes != body_bytes or array.nbytes != body_at + body_bytes:
        expected = body_at + body.nbytes
        what = f"a payload of {numel} elements in {header.codec} has {array.nbytes} bytes, not {expected}"
        raise SyncError(401, f"{what}, or gives a wrong size of its body ({body_bytes})", _RESEND)
    head = array[:body_at].copy()
    head[_DIGEST_AT : _DIGEST_AT + _DIGEST] = 0
    if _digest(head) != digest:
        raise SyncError(405, f"the header of a {header.meta.purpose} payload is damaged", _RESEND)
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


def _header_text(header: Header) -> bytes:
    meta = header.meta
    fields = {
        "codec": header.codec,
        "params": dict(header.params),
        "ranges": [border for r in header.ranges for border in (r.start, r.stop)],
        "purpose": meta.purpose,
        "versions": {str(fragment): version for fragment, version in meta.versions.items()},
        "island": meta.island,
        "incarnation": meta.incarnation,
    }
    if header.selection is not None:
        fields["selection"] = header.selection.to_params()
    if header.shapes is not None:
        fields["shapes"] = header.shapes
    return json.dumps(fields, separators=(",", ":")).encode()


def _parse_header(text: bytes) -> Header:
    try:
        fields: dict[str, Any] = json.loads(text)
        borders = [_count(border) for border in fields["ranges"]]
        versions = {int(fragment): _count(version) for fragment, version in fields["versions"].items()}
        meta = Meta(str(fields["purpose"]), versions, str(fields["island"]), _count(fields["incarnation"]))
        codec, params = str(fields["codec"]), dict(fields["params"])
        shapes = tuple(tuple(map(_count, shape)) for shape in fields["shapes"]) if "shapes" in fields else None
        selection = Selection.from_params(fields["selection"]) if "selection" in fields else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SyncError(407, f"the header of a payload cannot be read: {error!r}", _RESEND) from None
    if meta.purpose not in PURPOSES:
        raise SyncError(407, f"a payload has the unknown purpose {meta.purpose!r}", f"use one of {', '.join(PURPOSES)}")
    ranges = tuple(Range(start, stop) for start, stop in zip(borders[::2], borders[1::2], strict=False))
    if len(borders) % 2 or sorted(borders) != borders or not all(r.numel for r in ranges):
        raise SyncError(406, f"the ranges of a payload are not ascending and disjoint: {borders[:8]}…", _RESEND)
    return Header(codec, params, ranges, meta, selection, shapes)


def _body_of(header: Header) -> _Body:
    """What a header says of its body.  Raises RD-404 or RD-406."""
    numel = total(header.ranges)
    if header.shapes is None:
        if header.selection is not None:
            numel = len(header.selection.positions(header.ranges))
        return _Body(codec_of(header.codec, header.params), numel, None)
    if header.selection is not None or sum(math.prod(shape) for shape in header.shapes) != numel:
        raise SyncError(406, f"the shapes of a payload are not those of {numel} elements", _RESEND)
    return _Body(shaped_of(header.codec, header.params), numel, header.shapes)


def _nonce(meta: Meta, chunk: int) -> int:
    """Another number for each round and chunk; sender and receiver know it."""
    about = ",".join(f"{fragment}:{version}" for fragment, version in sorted(meta.versions.items()))
    return xxhash.xxh3_64_intdigest(f"{about}/{chunk}".encode()) >> 1


def is_shaped(codec: Codec | ShapedCodec) -> TypeGuard[ShapedCodec]:
    """Whether a codec takes whole tensors."""
    return codec.name in SHAPED


def codec_by_name(kind: str, params: Mapping[str, Param] | None = None) -> Codec | ShapedCodec:
    """The codec of a `codec.kind`, of elements or of whole tensors.  Raises RD-404."""
    return shaped_of(kind, params) if kind in SHAPED else codec_of(kind, params)


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _kind(array: object) -> str:
    return f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _digest(data: Bytes) -> bytes:
    return xxhash.xxh3_128_digest(data.data)
