"""The canonical form: one virtual flat fp32 vector that every island and anchor shard agrees on.

Tensors stand in `named_parameters()` order, tied weights once, row-major, one behind the other.  A set of
elements is a tuple of half-open ranges of that flat space, sorted and disjoint; packed, it is the concatenation of
its ranges.  Fragments, slices of a rank and shards of the anchor are all such sets, so islands of different sizes
and ZeRO stages meet by intersecting ranges and nobody gathers the model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Elements `start` to `stop` (exclusive) of the flat canonical space."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


Ranges = tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A named tensor and where it begins in the flat space (elements)."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def range(self) -> Range:
        """The elements of this tensor in the flat space."""
        return Range(self.offset, self.offset + self.numel)


@dataclass(frozen=True)
class Layout:
    """The tensors of a model in canonical order."""

    tensors: tuple[TensorSpec, ...]

    @cached_property
    def numel(self) -> int:
        """Number of elements of the whole flat space."""
        return sum(t.numel for t in self.tensors)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over names and shapes; equal on all islands of a run."""
        text = json.dumps([[t.name, list(t.shape)] for t in self.tensors], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def whole(self) -> Ranges:
        """The set of all elements."""
        return (Range(0, self.numel),) if self.numel else ()


def layout_of(named_shapes: Iterable[tuple[str, Sequence[int]]]) -> Layout:
    """Lays tensors out one behind the other, in the order given."""
    specs, offset = [], 0
    for name, shape in named_shapes:
        spec = TensorSpec(name, tuple(int(n) for n in shape), offset)
        specs.append(spec)
        offset += spec.numel
    return Layout(tuple(specs))


def total(ranges: Ranges) -> int:
    """Number of elements in a set of ranges."""
    return sum(r.stop - r.start for r in ranges)


def normalise(ranges: Iterable[Range]) -> Ranges:
    """Sorts ranges, joins those that touch or overlap and drops empty ones."""
    joined: list[Range] = []
    for r in sorted(r for r in ranges if r.stop > r.start):
        if joined and r.start <= joined[-1].stop:
            joined[-1] = Range(joined[-1].start, max(joined[-1].stop, r.stop))
        else:
            joined.append(r)
    return tuple(joined)


def intersect(a: Ranges, b: Ranges) -> Ranges:
    """Elements that are in both sets."""
    return tuple(common for _, _, common in _common(a, b))


def subtract(a: Ranges, b: Ranges) -> Ranges:
    """Elements of `a` that are not in `b`."""
    left: list[Range] = []
    for r in a:
        start = r.start
        for hole in intersect((r,), b):
            if hole.start > start:
                left.append(Range(start, hole.start))
            start = hole.stop
        if start < r.stop:
            left.append(Range(start, r.stop))
    return tuple(left)


def overlaps(a: Ranges, b: Ranges) -> list[tuple[int, int, int]]:
    """Where the common elements of two packed sets lie in each of them.

    Returns:
      `(position in packed a, position in packed b, number of elements)`, ascending; each entry is contiguous in
      both packed arrays.
    """
    at_a, at_b = _positions(a), _positions(b)
    return [
        (at_a[i] + common.start - a[i].start, at_b[j] + common.start - b[j].start, common.numel)
        for i, j, common in _common(a, b)
    ]


def split_evenly(ranges: Ranges, parts: int) -> list[Ranges]:
    """Cuts a set into `parts` consecutive sets whose sizes differ by at most one element."""
    size = total(ranges)
    cuts = [size * k // parts for k in range(parts + 1)]
    # Without the end of the last range, which begins none.
    packed = list(zip(_positions(ranges), ranges, strict=False))
    return [
        tuple(
            Range(max(r.start, r.start + lo - at), min(r.stop, r.start + hi - at))
            for at, r in packed
            if at < hi and at + r.numel > lo
        )
        for lo, hi in pairwise(cuts)
    ]


def shard_ranges(layout: Layout, shards: int) -> list[Ranges]:
    """Which elements each anchor shard keeps: whole tensors, largest first to the least loaded shard.

    Whole tensors, so that rules that work per tensor or per matrix see all of it in one place, and so that a
    checkpoint file holds tensors by name.  Ties go to the lower shard and the earlier tensor: the same layout
    always gives the same shards.  With more shards than tensors the last ones are empty.
    """
    load = [0] * shards
    owned: list[list[Range]] = [[] for _ in range(shards)]
    for spec in sorted(layout.tensors, key=lambda t: (-t.numel, t.offset)):
        k = min(range(shards), key=lambda s: (load[s], s))
        load[k] += spec.numel
        owned[k].append(spec.range)
    return [normalise(ranges) for ranges in owned]


def _positions(ranges: Ranges) -> list[int]:
    """Where each range begins in the packed set."""
    return list(accumulate((r.numel for r in ranges), initial=0))


def _common(a: Ranges, b: Ranges) -> Iterator[tuple[int, int, Range]]:
    """Common elements of range `i` of `a` and range `j` of `b`, as `(i, j, elements)`, ascending."""
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i].start, b[j].start), min(a[i].stop, b[j].stop)
        if start < stop:
            yield i, j, Range(start, stop)
        if a[i].stop <= b[j].stop:
            i += 1
        else:
            j += 1
