"""The safetensors file format, so that tensors stream to and from storage without a second copy in memory.

A file is the length of the header (8 bytes, little-endian), the header (JSON: name → dtype, shape, byte range), then
the tensors one behind the other.  The `safetensors` package writes to a path and tells nothing on the way; here a file
is views of at most `CHUNK` bytes, which are digested and sent to any storage in one pass without a second copy.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ray_diloco.errors import CheckpointError

# Bytes per write: large enough for the disk and for one digest call, small enough to stay in the cache.
CHUNK = 4 << 20
# The limit of the reference implementation; more is a damaged length.
MAX_HEADER = 100_000_000

_TAGS = {
    "<f8": "F64",
    "<f4": "F32",
    "<f2": "F16",
    "<i8": "I64",
    "<i4": "I32",
    "<i2": "I16",
    "|i1": "I8",
    "<u8": "U64",
    "<u4": "U32",
    "<u2": "U16",
    "|u1": "U8",
    "|b1": "BOOL",
}
_DTYPES = {tag: np.dtype(text) for text, tag in _TAGS.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor inside a file; it fills the bytes `start` to `stop` (exclusive) of that file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def encode(tensors: Mapping[str, np.ndarray]) -> tuple[int, Iterator[memoryview]]:
    """A safetensors file as its size in bytes and the views that make it up, in order.

    Tensors keep the order of the mapping within one element size; larger elements come first, so that each tensor
    is aligned.  A tensor that is not contiguous and little-endian is copied when its turn comes, the others are not.

    Raises:
      CheckpointError: 519, a dtype that the format does not have.
    """
    entries: dict[str, object] = {}
    ordered = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    at = 0
    for name in ordered:
        array = tensors[name]
        tag = _TAGS.get(array.dtype.newbyteorder("<").str)
        if tag is None:
            raise CheckpointError(
                519,
                f"tensor {name!r} has dtype {array.dtype}, which a safetensors file cannot hold from numpy",
                f"convert it to one of {', '.join(str(d) for d in _DTYPES.values())}",
            )
        entries[name] = {"dtype": tag, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    head = len(header).to_bytes(8, "little") + header

    def views() -> Iterator[memoryview]:
        yield memoryview(head)
        for name in ordered:
            yield from byte_views(tensors[name])

    return len(head) + at, views()


def byte_views(array: np.ndarray) -> Iterator[memoryview]:
    """The little-endian bytes of an array of any shape in row-major order, in views of at most `CHUNK` bytes."""
    flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
    for start in range(0, flat.size, CHUNK):
        yield flat[start : start + CHUNK].data


def header_length(first: bytes, size: int) -> int:
    """Bytes of the header, from the first 8 bytes of a file of `size` bytes.  Raises ValueError if it cannot be."""
    length = int.from_bytes(first, "little")
    if len(first) != 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
        raise ValueError(f"a header of {length} bytes in a file of {size} bytes")
    return length


def parse_header(header: bytes, size: int) -> dict[str, StoredTensor]:
    """The tensors of a file of `size` bytes, in the order in which they lie.

    Raises:
      ValueError: the header is no JSON, or its tensors do not tile the file.
    """
    entries = json.loads(header)
    if not isinstance(entries, dict):
        raise ValueError("the header is no JSON object")
    begin = 8 + len(header)
    found = [_stored(name, entry, begin) for name, entry in entries.items() if name != "__metadata__"]
    found.sort(key=lambda t: (t.start, t.stop))
    at = begin
    for tensor in found:
        if tensor.start != at or tensor.stop - tensor.start != math.prod(tensor.shape) * tensor.dtype.itemsize:
            raise ValueError(f"tensor {tensor.name!r} lies at bytes {tensor.start} to {tensor.stop}, expected at {at}")
        at = tensor.stop
    if at != size:
        raise ValueError(f"the tensors end at byte {at} of {size}")
    return {tensor.name: tensor for tensor in found}


def _stored(name: str, entry: object, begin: int) -> StoredTensor:
    try:
        dtype, shape = _DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])  # type: ignore[index]
        start, stop = (int(n) for n in entry["data_offsets"])  # type: ignore[index]
    except (KeyError, TypeError) as error:
        raise ValueError(f"tensor {name!r} has the entry {entry!r}") from error
    if min((0, start, *shape)) < 0:
        raise ValueError(f"tensor {name!r} has the entry {entry!r}")
    return StoredTensor(name, dtype, shape, begin + start, begin + stop)
