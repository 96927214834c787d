"""Passes over the canonical form in pieces that stay in the cache.

Payloads, buffers of the anchor and parameters of a rank hold the same elements in different pieces of memory.  `pieces`
says where the elements of a set lie in each of several sources, and finds what is missing or there twice; `in_chunks`
hands those pieces out one chunk at a time, so that everything that happens to a chunk (check, subtract, merge, step,
encode) happens before it leaves the cache.  Measured: ../shared/numbers.md, "One outer synchronisation".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
import torch

from ray_diloco.errors import SyncError
from ray_diloco.outer.layout import Range, Ranges, subtract, total

# Elements of one step of a pass, and of one digest in a payload.  1 MiB of fp32: what a pass touches of a chunk stays
# in the shared cache, and the fixed cost of its dozen calls into torch (about 45 µs) is small beside the work on it.
# Half of it costs up to 18 % more time, twice as much gains nothing (tests/bench/bench_outer_shard.py).
CHUNK = 262144

Source = TypeVar("Source")


@dataclass(frozen=True, slots=True)
class Piece(Generic[Source]):
    """A run of elements that is contiguous in the packed set and in its source.

    Attributes:
      at: position of the first element in the packed set.
      numel: number of elements.
      source: who has them.
      position: position of the first element in the packed source.
    """

    at: int
    numel: int
    source: Source
    position: int


def pieces(
    wanted: Ranges, sources: Iterable[tuple[Source, Ranges]], who: str, *, partial: bool = False
) -> list[Piece[Source]]:
    """Finds each element of a set in the one source that has it, in ascending order.

    Args:
      wanted: the set.
      sources: sources with the ranges that each has, packed in that order.  They may have elements beyond the set.
      who: names the sources in errors, such as "island i1".
      partial: leave out elements that no source has, instead of raising.

    Raises:
      SyncError: RD-406, elements are missing or are in two sources.
    """
    entries: list[tuple[int, int, int, Source]] = []
    for source, ranges in sources:
        position = 0
        for r in ranges:
            entries.append((r.start, r.stop, position, source))
            position += r.numel
    entries.sort(key=lambda entry: entry[:2])
    for (_, stop, _, _), (start, later_stop, _, _) in pairwise(entries):
        if start < stop:
            twice = Range(start, min(stop, later_stop))
            raise _cover_error(f"{who}: elements {describe((twice,))} come twice")
    found: list[Piece[Source]] = []
    at = 0
    k = 0
    for r in wanted:
        while k < len(entries) and entries[k][1] <= r.start:
            k += 1
        j = k
        while j < len(entries) and entries[j][0] < r.stop:
            first, last, position, source = entries[j]
            start, stop = max(r.start, first), min(r.stop, last)
            found.append(Piece(at + start - r.start, stop - start, source, position + start - first))
            j += 1
        at += r.numel
    if not partial and sum(piece.numel for piece in found) != at:
        have = tuple(Range(start, stop) for start, stop, _, _ in entries)
        raise _cover_error(f"{who}: elements {describe(subtract(wanted, have))} are missing")
    return found


def require_within(ranges: Ranges, limit: Ranges, who: str) -> None:
    """Raises RD-406 if a set has elements outside another one."""
    outside = subtract(ranges, limit)
    if outside:
        raise _cover_error(f"{who}: elements {describe(outside)} do not belong here")


def in_chunks(found: Sequence[Piece[Source]], numel: int) -> Iterator[tuple[int, int, list[Piece[Source]]]]:
    """Cuts pieces at the borders of the chunks of the packed set.

    Args:
      found: pieces in ascending order.
      numel: number of elements of the packed set.

    Yields:
      `(start, stop, pieces)` of each chunk that has pieces; `at` still counts from the start of the packed set.
    """
    k = 0
    rest: Piece[Source] | None = None
    for start in range(0, numel, CHUNK):
        stop = min(start + CHUNK, numel)
        inside: list[Piece[Source]] = []
        while rest is not None or k < len(found):
            if rest is None:
                rest, k = found[k], k + 1
            if rest.at >= stop:
                break
            taken = min(rest.numel, stop - rest.at)
            inside.append(Piece(rest.at, taken, rest.source, rest.position))
            left = rest.numel - taken
            rest = Piece(rest.at + taken, left, rest.source, rest.position + taken) if left else None
        if inside:
            yield start, stop, inside


def squared_norm(values: torch.Tensor) -> float:
    """Sum of the squares of a contiguous fp32 host tensor; NaN or infinite if an element is, or if it overflows.

    numpy's BLAS reads a chunk in the cache at 90 GB/s, `torch.dot` at 39 (measured on the development machine).  It
    warns of what is not finite, which a pass that looks at the result silences, once, with `quiet`.
    """
    array = values.numpy()
    return float(np.dot(array, array))


def quiet() -> np.errstate:
    """Context in which numpy does not warn of what is not finite."""
    return np.errstate(all="ignore")


def describe(ranges: Ranges) -> str:
    """A set in a few words, for errors: its first ranges and its size."""
    shown = ", ".join(f"[{r.start}, {r.stop})" for r in ranges[:3])
    more = f" and {len(ranges) - 3} more ranges" if len(ranges) > 3 else ""
    return f"{shown}{more} ({total(ranges)} in all)" if ranges else "none"


def _cover_error(what: str) -> SyncError:
    return SyncError(406, what, "send each element of the fragment that belongs to this receiver exactly once")
