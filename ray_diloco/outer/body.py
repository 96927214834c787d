"""Where the bytes of a message lie: prefix, header, digests of the chunks, body; what each is and how long.

Payload and writer share this: both have to find the same bytes, digests and nonces from the same header.  The parts are
described in `payload`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from itertools import accumulate, pairwise

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ray_diloco.errors import SyncError
from ray_diloco.outer import chunks
from ray_diloco.outer.codec import Codec, codec_of
from ray_diloco.outer.header import RESEND, Header, Meta
from ray_diloco.outer.layout import total
from ray_diloco.outer.matrices import Shape
from ray_diloco.outer.shaped import ShapedCodec, shaped_of

Bytes = NDArray[np.uint8]

FORMAT_VERSION = 1
MAGIC = b"RDILOCO\0"
# Each part begins at a multiple of so many bytes.
_ALIGN = 64
# Bytes of a digest.
DIGEST = 16
# Magic, format version, bytes of the header, bytes of the body, digest, zeros up to 64 bytes.
PREFIX = struct.Struct("<8sIIQ16s24x")
DIGEST_AT = 24


class Body:
    """Where the bytes of a body lie: how many there are, and which belong to each chunk that has a digest.

    A chunk is `chunks.CHUNK` elements, or as many bytes as they have in fp32 where a codec takes whole tensors.
    """

    def __init__(self, codec: Codec | ShapedCodec, numel: int, shapes: tuple[Shape, ...] | None) -> None:
        self.codec, self.numel, self.shapes = codec, numel, shapes
        if shapes is None:
            self.nbytes = codec.nbytes(numel)  # type: ignore[arg-type]
            self.chunks = math.ceil(numel / chunks.CHUNK)
        else:
            self.borders = [0, *accumulate(codec.nbytes(shape) for shape in shapes)]  # type: ignore[arg-type]
            self.nbytes = self.borders[-1]
            self.chunks = math.ceil(self.nbytes / (4 * chunks.CHUNK))

    def tensors(self, data: torch.Tensor, meta: Meta) -> Iterator[tuple[int, Shape, torch.Tensor, int]]:
        """Position of the first element, shape, bytes and nonce of each whole tensor."""
        at = 0
        for k, (shape, (start, stop)) in enumerate(zip(self.shapes or (), pairwise(self.borders), strict=True)):
            yield at, shape, data[start:stop], nonce_of(meta, k)
            at += math.prod(shape)

    def where(self, k: int) -> slice:
        """Bytes of chunk `k`."""
        if self.shapes is not None:
            return slice(4 * chunks.CHUNK * k, min(4 * chunks.CHUNK * (k + 1), self.nbytes))
        nbytes = self.codec.nbytes
        return slice(nbytes(k * chunks.CHUNK), nbytes(min((k + 1) * chunks.CHUNK, self.numel)))  # type: ignore[arg-type]


def body_of(header: Header) -> Body:
    """What a header says of its body.  Raises RD-404 or RD-406."""
    numel = total(header.ranges)
    if header.shapes is None:
        if header.selection is not None:
            numel = len(header.selection.positions(header.ranges))
        return Body(codec_of(header.codec, header.params), numel, None)
    if header.selection is not None or sum(math.prod(shape) for shape in header.shapes) != numel:
        raise SyncError(406, f"the shapes of a payload are not those of {numel} elements", RESEND)
    return Body(shaped_of(header.codec, header.params), numel, header.shapes)


def nonce_of(meta: Meta, chunk: int) -> int:
    """Another number for each round and chunk; sender and receiver know it."""
    about = ",".join(f"{fragment}:{version}" for fragment, version in sorted(meta.versions.items()))
    return xxhash.xxh3_64_intdigest(f"{about}/{chunk}".encode()) >> 1


def padded(nbytes: int) -> int:
    """Bytes up to where the next part begins."""
    return -(-nbytes // _ALIGN) * _ALIGN


def digest_of(data: Bytes) -> bytes:
    """xxh3-128 of some bytes."""
    return xxhash.xxh3_128_digest(data.data)
