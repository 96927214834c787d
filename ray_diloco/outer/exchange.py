"""A rank's side of a round: what it holds of the canonical form, what it sends, what it adopts.

    emit     Δ = B − θ, start minus end, chunk by chunk straight into the payload
    adopt    (θ, B) ← Adopt(θ, A), chunk by chunk straight out of the payload

`B` is a copy of its own in host memory, never the memory of `θ` or `A`: where they were one, outer gradients became 0
from the second round on.  Each rank of an island emits its own part and writes all that it holds.
Source: ../shared/algorithms.md §1 and §10.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ray_diloco.errors import SyncError
from ray_diloco.outer.chunks import CHUNK, Piece, describe, in_chunks, pieces, quiet, squared_norm
from ray_diloco.outer.codec import Codec, Fp32
from ray_diloco.outer.layout import Layout, Range, Ranges, intersect, normalise, subtract, total
from ray_diloco.outer.payload import Bytes, Meta, Payload, Writer, open_payload, require_purpose


@dataclass(frozen=True)
class Slice:
    """Canonical elements that a rank holds, as memory it can write.

    Attributes:
      range: the elements, in the flat canonical space.
      values: 1-D contiguous fp32 view of them, `range.numel` long, on any device; writing it changes the model.
    """

    range: Range
    values: torch.Tensor


@dataclass(frozen=True)
class Emission:
    """What a rank sends for some ranges.

    Attributes:
      payload: uint8 [n], a read-only view of memory that the next emission of the same ranges writes again.
      squared_norm: sum of the squares of the elements before encoding.
      finite: whether they are all finite, and small enough for fp32 to square.
    """

    payload: Bytes
    squared_norm: float
    finite: bool


@dataclass(frozen=True)
class Adopt:
    """How a rank takes over an anchor.

    Attributes:
      apply: `(θ, B, A)`, fp32 [n] each, writes `θ` and `B` in place; `B` is None where the rank does not emit.
      reads_theta: the new `θ` depends on the old one.  Such a rule cannot simply be applied again after a failure.
    """

    apply: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]
    reads_theta: bool


def overwrite(theta: torch.Tensor, base: torch.Tensor | None, anchor: torch.Tensor) -> None:
    """`θ ← A; B ← A`."""
    theta.copy_(anchor)
    if base is not None:
        base.copy_(anchor)


ADOPTS: dict[str, Adopt] = {"overwrite": Adopt(overwrite, reads_theta=False)}


@dataclass(frozen=True, eq=False)
class _Part:
    """Elements of one slice that are all emitted by this rank, or none of them."""

    range: Range
    theta: torch.Tensor
    base: torch.Tensor | None


class Exchange:
    """The parameters of a rank in canonical form, and the base that it measures from.

    Args:
      layout: the canonical form.
      held: slices that this rank holds, disjoint.
      emits: elements that this rank sends; a part of those it holds.

    Attributes:
      holds: elements that this rank holds.
      emits: elements that this rank sends.
      versions: version of each fragment as last adopted.

    Raises:
      SyncError: RD-441, slices that overlap, leave the layout or are no flat fp32 memory, or emitted elements that are
        not held.
    """

    def __init__(self, layout: Layout, held: Sequence[Slice], emits: Ranges) -> None:
        held = sorted((piece for piece in held if piece.range.numel), key=lambda piece: piece.range)
        _check_slices(layout, held)
        self.holds = normalise(piece.range for piece in held)
        self.emits = normalise(emits)
        outside = subtract(self.emits, self.holds)
        if outside:
            raise _slice_error(f"elements {describe(outside)} shall be emitted but are not held")
        base = torch.empty(total(self.emits)).fill_(0)
        self._parts = _parts(held, self.emits, base)
        self._based: Ranges = ()
        self.versions: dict[int, int] = {}
        self._writers: dict[tuple[Ranges, str, str], Writer] = {}
        self._plans: dict[Ranges, list[Piece[_Part]]] = {}
        self._scratch = torch.empty(CHUNK).fill_(0)
        self._staging = torch.empty(CHUNK).fill_(0)

    @torch.no_grad()
    def emit(self, ranges: Ranges, codec: Codec, meta: Meta) -> Emission:
        """Encodes `B − θ` for some of the elements that this rank emits.

        Args:
          ranges: canonical elements, for example those of a fragment that one anchor shard keeps.
          codec: how they travel.
          meta: what the header shall say.

        Raises:
          SyncError: RD-442, elements that this rank does not emit, or that have no base because nothing was adopted
            or the last adoption failed half-way.
        """
        if total(intersect(ranges, self._based)) != total(ranges):
            lacking = describe(subtract(ranges, self._based))
            raise SyncError(442, f"elements {lacking} have no base to measure from", "adopt an anchor for them first")
        writer = self._writer(ranges, codec, meta)
        square = 0.0
        with quiet():
            for start, stop, inside in in_chunks(self._plan(ranges), writer.numel):
                target = writer.target(start, stop, self._scratch)
                for piece in inside:
                    self._subtract(piece, target[piece.at - start : piece.at - start + piece.numel])
                square += squared_norm(target)
                writer.put(start, target)
        return Emission(writer.seal(meta), square, math.isfinite(square))

    @torch.no_grad()
    def read(self, ranges: Ranges, meta: Meta) -> Bytes:
        """Encodes `θ` itself in fp32, to found the anchor of a run.

        Returns:
          uint8 [n], a read-only view of memory that the next emission of the same ranges in fp32 writes again.

        Raises:
          SyncError: RD-406, elements that this rank does not hold.
        """
        writer = self._writer(ranges, Fp32(), meta)
        for start, stop, inside in in_chunks(self._plan(ranges), writer.numel):
            target = writer.target(start, stop, self._scratch)
            for piece in inside:
                target[piece.at - start :][: piece.numel].copy_(_run(piece.source.theta, piece))
            writer.put(start, target)
        return writer.seal(meta)

    @torch.no_grad()
    def adopt(
        self, arrays: Sequence[Bytes], ranges: Ranges | None = None, rule: Adopt = ADOPTS["overwrite"]
    ) -> dict[int, int]:
        """Takes over anchors.

        Headers and coverage are checked before anything is written.  Bodies are checked chunk by chunk, each before it
        is written, in the one pass that a rule which does not read `θ` needs: if one is damaged, these elements are
        half old and half new and have no base, so that `emit` refuses them until an adoption succeeds, and adopting
        again mends it.  For a rule that reads `θ`, all bodies are checked before the first write.

        Args:
          arrays: payloads of anchors; together they have each wanted element once, and may have others.
          ranges: elements to adopt, for example those of a fragment; None: all that this rank holds.
          rule: how.

        Returns:
          The version of each fragment that the payloads name.

        Raises:
          SyncError: RD-401 to RD-408, a payload that cannot be used or elements that are missing or come twice.
        """
        opened = [open_payload(array) for array in arrays]
        wanted = self.holds if ranges is None else intersect(self.holds, ranges)
        pieces(wanted, [(payload, payload.header.ranges) for payload in opened], "adopted anchors")
        versions = _versions(opened)
        if rule.reads_theta:
            for payload in opened:
                payload.verify()
        parts = [_narrowed(piece) for piece in self._plan(wanted)]
        self._based = subtract(self._based, wanted)
        for payload in opened:
            self._adopt_one(payload, parts, rule)
        self._based = normalise((*self._based, *wanted))
        self.versions.update(versions)
        return versions

    def _adopt_one(self, payload: Payload, parts: Sequence[_Part], rule: Adopt) -> None:
        sources = [(part, (part.range,)) for part in parts]
        found = pieces(payload.header.ranges, sources, "held slices", partial=True)
        for _, _, inside in in_chunks(found, payload.numel):
            start, stop = inside[0].at, inside[-1].at + inside[-1].numel
            anchor = payload.read(start, stop, self._scratch)
            for piece in inside:
                base = None if piece.source.base is None else _run(piece.source.base, piece)
                self._apply(rule, _run(piece.source.theta, piece), base, anchor[piece.at - start :][: piece.numel])

    def _apply(self, rule: Adopt, theta: torch.Tensor, base: torch.Tensor | None, anchor: torch.Tensor) -> None:
        if theta.device.type == "cpu" or not rule.reads_theta:
            rule.apply(theta, base, anchor)
            return
        staged = self._on_host(theta)
        rule.apply(staged, base, anchor)
        theta.copy_(staged)

    def _subtract(self, piece: Piece[_Part], out: torch.Tensor) -> None:
        base = piece.source.base
        if base is None:
            at = piece.source.range.start + piece.position
            what = f"elements {describe((Range(at, at + piece.numel),))} are held but not emitted by this rank"
            raise SyncError(442, what, "emit a part of `emits`")
        torch.sub(_run(base, piece), self._on_host(_run(piece.source.theta, piece)), out=out)

    def _on_host(self, values: torch.Tensor) -> torch.Tensor:
        return values if values.device.type == "cpu" else self._staging[: values.numel()].copy_(values)

    def _plan(self, ranges: Ranges) -> list[Piece[_Part]]:
        if ranges not in self._plans:
            sources = [(part, (part.range,)) for part in self._parts]
            self._plans[ranges] = pieces(ranges, sources, "slices of this rank")
        return self._plans[ranges]

    def _writer(self, ranges: Ranges, codec: Codec, meta: Meta) -> Writer:
        key = (ranges, codec.name, repr(sorted(codec.params.items())))
        writer = self._writers.get(key)
        if writer is None or not writer.fits(meta):
            writer = self._writers[key] = Writer(codec, ranges, meta)
        return writer


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


def _parts(held: Sequence[Slice], emits: Ranges, base: torch.Tensor) -> list[_Part]:
    """Cuts slices where what is emitted begins and ends; `base` [total(emits)] is shared out among them."""
    parts = []
    sources = [(piece, (piece.range,)) for piece in held]
    for run in pieces(emits, sources, "slices of this rank"):
        parts.append(_Part(_range_of(run), _run(run.source.values, run), base[run.at :][: run.numel]))
    silent = subtract(normalise(piece.range for piece in held), emits)
    for run in pieces(silent, sources, "slices of this rank"):
        parts.append(_Part(_range_of(run), _run(run.source.values, run), None))
    return sorted(parts, key=lambda part: part.range)


def _narrowed(piece: Piece[_Part]) -> _Part:
    base = None if piece.source.base is None else _run(piece.source.base, piece)
    return _Part(_range_of(piece), _run(piece.source.theta, piece), base)


def _range_of(piece: Piece[_Part] | Piece[Slice]) -> Range:
    start = piece.source.range.start + piece.position
    return Range(start, start + piece.numel)


def _run(values: torch.Tensor, piece: Piece[_Part] | Piece[Slice]) -> torch.Tensor:
    return values[piece.position : piece.position + piece.numel]


def _versions(opened: Sequence[Payload]) -> dict[int, int]:
    versions: dict[int, int] = {}
    for payload in opened:
        require_purpose(payload, "anchor")
        for fragment, version in payload.header.meta.versions.items():
            if versions.setdefault(fragment, version) != version:
                what = f"anchors of fragment {fragment} have versions {versions[fragment]} and {version}"
                raise SyncError(412, what, "adopt the payloads of one commit")
    return versions


def _slice_error(what: str) -> SyncError:
    return SyncError(441, what, "give each element that the rank holds once, as flat fp32 memory")
