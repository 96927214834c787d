"""What a rank holds of the canonical form: slices of its memory, cut where what it emits begins and ends.

Beside each emitted element lie its base `B`, and what error feedback, rules of adoption and an anchor of its own need:
vectors that are packed in the order of what is emitted, and shared out among the parts.  `B` is a copy of its own in
host memory, never the memory of `θ` or `A`: where they were one, outer gradients became 0 from the second round on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ray_diloco.errors import SyncError
from ray_diloco.outer import chunks
from ray_diloco.outer.chunks import Piece, describe, pieces
from ray_diloco.outer.layout import Layout, Range, Ranges, normalise, subtract, total


@dataclass(frozen=True)
class Slice:
    """Canonical elements that a rank holds, as memory it can write.

    Attributes:
      range: the elements, in the flat canonical space.
      values: 1-D contiguous fp32 view of them, `range.numel` long, on any device; writing it changes the model.
    """

    range: Range
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class Part:
    """Elements of one slice that are all emitted by this rank, or none of them, with what is kept of each.

    `base` and `error` are None where they are not emitted or there is no feedback, `emitted` and `anchor` where no rule
    asks for them.
    """

    range: Range
    theta: torch.Tensor
    base: torch.Tensor | None = None
    error: torch.Tensor | None = None
    emitted: torch.Tensor | None = None
    anchor: torch.Tensor | None = None

    def cut(self, start: int, numel: int) -> Part:
        """A run of its elements."""
        first = self.range.start + start

        def run(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values[start : start + numel]

        return Part(
            Range(first, first + numel),
            self.theta[start : start + numel],
            run(self.base),
            run(self.error),
            run(self.emitted),
            run(self.anchor),
        )


class Held:
    """The parts of a rank, and what lies beside them.

    Attributes:
      ranges: elements that the rank holds.
      emits: elements that it sends.
      parts: in canonical order.
      base: `B` of `emits`, packed, fp32 on the host.
      error: the error memory, likewise; None without error feedback.
      anchor: the anchor as last adopted, likewise; None unless it is kept.
      keeps_emitted: whether `θ` at the emission is kept of all that is held.
      scratch: fp32 [chunk] on the host, for whoever makes a pass.

    Raises:
      SyncError: RD-441, as `exchange.Exchange`.
    """

    def __init__(
        self,
        layout: Layout,
        held: Sequence[Slice],
        emits: Ranges,
        *,
        keeps_error: bool,
        keeps_anchor: bool,
        keeps_emitted: bool,
    ) -> None:
        held = sorted((piece for piece in held if piece.range.numel), key=lambda piece: piece.range)
        _check_slices(layout, held)
        self.ranges = normalise(piece.range for piece in held)
        self.emits = normalise(emits)
        outside = subtract(self.emits, self.ranges)
        if outside:
            raise _slice_error(f"elements {describe(outside)} shall be emitted but are not held")
        numel = total(self.emits)
        self.base = torch.empty(numel).fill_(0)
        self.anchor = torch.empty(numel).fill_(0) if keeps_anchor else None
        self.error = torch.empty(numel).fill_(0) if keeps_error else None
        self.keeps_emitted = keeps_emitted
        self.parts = _parts(held, self.emits, self.base, self.error, self.anchor, keeps_emitted)
        self.scratch = torch.empty(chunks.CHUNK).fill_(0)
        self._staging = torch.empty(chunks.CHUNK).fill_(0)
        self._plans: dict[Ranges, list[Piece[Part]]] = {}

    def plan(self, ranges: Ranges) -> list[Piece[Part]]:
        """Where the elements of a set lie in the parts.  Raises RD-406 if some are not held."""
        if ranges not in self._plans:
            sources = [(part, (part.range,)) for part in self.parts]
            self._plans[ranges] = pieces(ranges, sources, "slices of this rank")
        return self._plans[ranges]

    def runs(self, ranges: Ranges) -> Iterator[Part]:
        """The elements of a set, in runs that lie in one part each."""
        for piece in self.plan(ranges):
            yield piece.source.cut(piece.position, piece.numel)

    def on_host(self, values: torch.Tensor) -> torch.Tensor:
        """The values, or a copy of them on the host, valid until the next one of at most a chunk."""
        if values.device.type == "cpu":
            return values
        return values.cpu() if values.numel() > chunks.CHUNK else self._staging[: values.numel()].copy_(values)

    def measure(self, piece: Piece[Part], out: torch.Tensor) -> None:
        """`Δ = B − θ` of a piece; `θ` at the emission is kept where a rule asks for it.

        Raises:
          SyncError: RD-442, elements that are not emitted.
        """
        part = piece.source.cut(piece.position, piece.numel)
        if part.base is None:
            what = f"elements {describe((part.range,))} are held but not emitted by this rank"
            raise SyncError(442, what, "emit a part of `emits`")
        theta = self.on_host(part.theta)
        if part.emitted is not None:
            part.emitted.copy_(theta)
        torch.sub(part.base, theta, out=out)


def required(values: torch.Tensor | None) -> torch.Tensor:
    """What has to be kept.  Raises ValueError if it is not."""
    if values is None:
        raise ValueError("this exchange does not keep what was asked for")
    return values


def run_of(values: torch.Tensor, piece: Piece[Part] | Piece[Slice]) -> torch.Tensor:
    """The values of a piece, of those of its source."""
    return values[piece.position : piece.position + piece.numel]


def _check_slices(layout: Layout, held: Sequence[Slice]) -> None:
    for piece in held:
        values, r = piece.values, piece.range
        if values.dtype != torch.float32 or values.shape != (r.numel,) or not values.is_contiguous():
            what = f"slice {describe((r,))} is {values.dtype} {tuple(values.shape)}, not flat contiguous fp32"
            raise _slice_error(what)
        if r.start < 0 or r.stop > layout.numel:
            raise _slice_error(f"slice {describe((r,))} leaves the {layout.numel} elements of the layout")
    for one, next_one in pairwise(held):
        if next_one.range.start < one.range.stop:
            raise _slice_error(f"slices {describe((one.range,))} and {describe((next_one.range,))} overlap")


def _parts(
    held: Sequence[Slice],
    emits: Ranges,
    base: torch.Tensor,
    error: torch.Tensor | None,
    anchor: torch.Tensor | None,
    keeps_emitted: bool,
) -> list[Part]:
    """Cuts slices where what is emitted begins and ends; the vectors [total(emits)] are shared out among them."""
    parts = []
    sources = [(piece, (piece.range,)) for piece in held]
    for run in pieces(emits, sources, "slices of this rank"):
        mine = [None if one is None else one[run.at :][: run.numel] for one in (base, error, anchor)]
        emitted = torch.empty(run.numel).fill_(0) if keeps_emitted else None
        parts.append(Part(_range_of(run), run_of(run.source.values, run), mine[0], mine[1], emitted, mine[2]))
    silent = subtract(normalise(piece.range for piece in held), emits)
    for run in pieces(silent, sources, "slices of this rank"):
        emitted = torch.empty(run.numel).fill_(0) if keeps_emitted else None
        parts.append(Part(_range_of(run), run_of(run.source.values, run), emitted=emitted))
    return sorted(parts, key=lambda part: part.range)


def _range_of(piece: Piece[Part] | Piece[Slice]) -> Range:
    start = piece.source.range.start + piece.position
    return Range(start, start + piece.numel)


def _slice_error(what: str) -> SyncError:
    return SyncError(441, what, "give each element that the rank holds once, as flat fp32 memory")
