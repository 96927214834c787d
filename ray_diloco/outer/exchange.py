"""A rank's side of a round: what it holds of the canonical form, what it sends, what it adopts.

    emit     Δ = B − θ, start minus end, chunk by chunk straight into the payload
             with error feedback: e ← β e + s Δ is sent, and what its bytes do not say stays in e
    adopt    (θ, B) ← Adopt(θ, θ at emission, A), chunk by chunk straight out of the payload

`B` is a copy of its own in host memory, never the memory of `θ` or `A`: where they were one, outer gradients became 0
from the second round on.  Each rank of an island emits its own part and writes all that it holds.
Source: ../shared/algorithms.md §1, §9.6 item 54 and §10.1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from ray_diloco.errors import SyncError
from ray_diloco.outer.adopt import Adopt, AdoptChunk, adopt_of
from ray_diloco.outer.chunks import CHUNK, Piece, describe, in_chunks, pieces, quiet, squared_norm
from ray_diloco.outer.codec import Codec, Fp32
from ray_diloco.outer.layout import Layout, Range, Ranges, intersect, normalise, subtract, total
from ray_diloco.outer.matrices import Shape
from ray_diloco.outer.payload import Bytes, Meta, Payload, Writer, open_payload, require_purpose
from ray_diloco.outer.selection import Selection
from ray_diloco.outer.shaped import ShapedCodec, is_shaped

OVERWRITE = adopt_of("overwrite")
# Emissions of one fragment that may wait to hear whether they were merged: more than any lag of rounds that trains.
_UNHEARD = 64


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
class Feedback:
    """Error feedback: `e ← β e + s Δ`, of which a codec sends what it can (../shared/algorithms.md §7, §10.1).

    Attributes:
      decay: `β`.
      scale: `s`.
    """

    decay: float = 1.0
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class _Part:
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

    def cut(self, start: int, numel: int) -> _Part:
        """A run of its elements."""
        first = self.range.start + start

        def run(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values[start : start + numel]

        return _Part(
            Range(first, first + numel),
            self.theta[start : start + numel],
            run(self.base),
            run(self.error),
            run(self.emitted),
            run(self.anchor),
        )


@dataclass(eq=False)
class _Unheard:
    """Payloads that were sent and not yet acknowledged, by the ranges that they are of; the oldest first."""

    sent: dict[Ranges, deque[Bytes]] = field(default_factory=dict)

    def add(self, ranges: Ranges, payload: Bytes) -> None:
        self.sent.setdefault(ranges, deque(maxlen=_UNHEARD)).append(payload.copy())

    def oldest(self, inside: Ranges) -> list[Bytes]:
        """Takes out the oldest payload of each set inside a fragment."""
        return [self.sent[ranges].popleft() for ranges in self.waiting(inside)]

    def waiting(self, inside: Ranges) -> list[Ranges]:
        """Sets inside a fragment of which some payload has not been acknowledged."""
        return [ranges for ranges, queue in self.sent.items() if queue and not subtract(ranges, inside)]


class Exchange:
    """The parameters of a rank in canonical form, and the base that it measures from.

    Args:
      layout: the canonical form.
      held: slices that this rank holds, disjoint.
      emits: elements that this rank sends; a part of those it holds.
      rule: how anchors are adopted.
      feedback: error feedback of what is emitted; None: there is none.
      keeps_anchor: keep a copy of the anchor beside the base, for rules whose base is another.

    Attributes:
      holds: elements that this rank holds.
      emits: elements that this rank sends.
      versions: version of each fragment as last adopted.
      base: `B` of `emits`, packed, fp32 on the host.
      anchor: the anchor as last adopted, likewise; None unless it is kept.

    Raises:
      SyncError: RD-441, slices that overlap, leave the layout or are no flat fp32 memory, or emitted elements that are
        not held.
    """

    def __init__(
        self,
        layout: Layout,
        held: Sequence[Slice],
        emits: Ranges,
        *,
        rule: Adopt = OVERWRITE,
        feedback: Feedback | None = None,
        keeps_anchor: bool = False,
    ) -> None:
        held = sorted((piece for piece in held if piece.range.numel), key=lambda piece: piece.range)
        _check_slices(layout, held)
        self.holds = normalise(piece.range for piece in held)
        self.emits = normalise(emits)
        outside = subtract(self.emits, self.holds)
        if outside:
            raise _slice_error(f"elements {describe(outside)} shall be emitted but are not held")
        numel = total(self.emits)
        self.base = torch.empty(numel).fill_(0)
        self.anchor = torch.empty(numel).fill_(0) if keeps_anchor else None
        self._error = None if feedback is None else torch.empty(numel).fill_(0)
        self._layout, self._rule, self._feedback = layout, rule, feedback
        self._parts = _parts(held, self.emits, self.base, self._error, self.anchor, rule.reads_emitted)
        self._based: Ranges = ()
        self.versions: dict[int, int] = {}
        self._writers: dict[tuple[Ranges, str, str], Writer] = {}
        self._plans: dict[Ranges, list[Piece[_Part]]] = {}
        self._memories: dict[int, torch.Tensor | None] = {}
        self._unheard = _Unheard()
        self._scratch = torch.empty(CHUNK).fill_(0)
        self._staging = torch.empty(CHUNK).fill_(0)

    @torch.no_grad()
    def emit(
        self, ranges: Ranges, codec: Codec | ShapedCodec, meta: Meta, selection: Selection | None = None
    ) -> Emission:
        """Encodes `B − θ` for some of the elements that this rank emits.

        Args:
          ranges: canonical elements, for example those of a fragment that one anchor shard keeps.
          codec: how they travel.
          meta: what the header shall say.
          selection: which of them travel; None: all.

        With error feedback, a part that is not finite travels as zeros and leaves the error memory as it was: whoever
        asks is told that the emission is not finite, and one such step must not poison all that follow.

        Raises:
          ValueError: a selection with error feedback, or in a codec of whole tensors.
          SyncError: RD-442, elements that this rank does not emit, or that have no base because nothing was adopted
            or the last adoption failed half-way.
        """
        if total(intersect(ranges, self._based)) != total(ranges):
            lacking = describe(subtract(ranges, self._based))
            raise SyncError(442, f"elements {lacking} have no base to measure from", "adopt an anchor for them first")
        if selection is not None and (self._feedback is not None or is_shaped(codec)):
            raise ValueError("random fragments go with neither error feedback nor codecs of whole tensors")
        said: Bytes | None = None
        with quiet():
            if selection is not None:
                writer, square = self._emit_selected(ranges, codec, meta, selection)
            elif is_shaped(codec):
                writer, square, said = self._emit_tensors(ranges, codec, meta)
            else:
                writer, square = self._emit_elements(ranges, cast(Codec, codec), meta)
        payload = writer.seal(meta)
        if self._feedback is not None:
            self._unheard.add(ranges, payload if said is None else said)
        return Emission(payload, square, math.isfinite(square))

    @torch.no_grad()
    def note(self, ranges: Ranges) -> None:
        """Remembers `θ` as it is at the emission of a fragment, for rules that ask for it.

        `emit` does so of what it emits.  A rank that holds more than it emits has to be told of the whole fragment.
        """
        for piece in self._plan(intersect(self.holds, ranges)) if self._rule.reads_emitted else ():
            part = piece.source.cut(piece.position, piece.numel)
            _required(part.emitted).copy_(part.theta)

    @torch.no_grad()
    def acknowledge(self, ranges: Ranges, merged: bool) -> None:
        """Hears whether the oldest emission of a fragment was merged; what was not is put back into the error memory.

        Args:
          ranges: elements of the fragment.
          merged: whether a commit holds it.
        """
        if self._error is None:
            return
        for array in self._unheard.oldest(ranges):
            if not merged:
                for piece, values in self._decoded(open_payload(array)):
                    error = piece.source.cut(piece.position, piece.numel).error
                    if error is not None:
                        error.add_(values)

    def give_up(self, ranges: Ranges) -> None:
        """Puts back all that a fragment still waits to hear of: its island joins anew and will not hear of it."""
        while self._error is not None and self._unheard.waiting(ranges):
            self.acknowledge(ranges, False)

    @torch.no_grad()
    def read(self, ranges: Ranges, meta: Meta) -> Bytes:
        """Encodes `θ` itself in fp32, to found the anchor of a run.

        Returns:
          uint8 [n], a read-only view of memory that the next emission of the same ranges in fp32 writes again.

        Raises:
          SyncError: RD-406, elements that this rank does not hold.
        """
        writer = self._writer(ranges, Fp32(), meta)
        writer.begin(meta)
        for start, stop, inside in in_chunks(self._plan(ranges), writer.numel):
            target = writer.target(start, stop, self._scratch)
            for piece in inside:
                target[piece.at - start :][: piece.numel].copy_(_run(piece.source.theta, piece))
            writer.put(start, target)
        return writer.seal(meta)

    @torch.no_grad()
    def adopt(self, arrays: Sequence[Bytes], ranges: Ranges | None = None, rule: Adopt | None = None) -> dict[int, int]:
        """Takes over anchors.

        Headers and coverage are checked before anything is written.  Bodies are checked chunk by chunk, each before it
        is written, in the one pass that a rule which does not read `θ` needs: if one is damaged, these elements are
        half old and half new and have no base, so that `emit` refuses them until an adoption succeeds, and adopting
        again mends it.  For a rule that reads `θ`, and where a selection travels, all bodies are checked before the
        first write.

        Args:
          arrays: payloads of anchors; together they have each wanted element once, and may have others.
          ranges: elements to adopt, for example those of a fragment; None: all that this rank holds.
          rule: how; None: the rule of this exchange.

        Returns:
          The version of each fragment that the payloads name.

        Raises:
          SyncError: RD-401 to RD-408, a payload that cannot be used or elements that are missing or come twice.
        """
        rule = rule or self._rule
        opened = [open_payload(array) for array in arrays]
        wanted = self.holds if ranges is None else intersect(self.holds, ranges)
        pieces(wanted, [(payload, payload.header.ranges) for payload in opened], "adopted anchors")
        versions = _versions(opened)
        selected = any(payload.header.selection is not None for payload in opened)
        if rule.reads_theta or selected:
            for payload in opened:
                payload.verify()
        parts = [piece.source.cut(piece.position, piece.numel) for piece in self._plan(wanted)]
        if not selected:
            self._based = subtract(self._based, wanted)
        for payload in opened:
            adopt_one = self._adopt_elements if payload.header.selection is None else self._adopt_selected
            adopt_one(payload, parts, rule)
        if not selected:
            self._based = normalise((*self._based, *wanted))
        self.versions.update(versions)
        return versions

    @torch.no_grad()
    def measure_from_here(self, ranges: Ranges) -> None:
        """`B ← θ`: a faster channel goes on from what a slower one has adopted."""
        for piece in self._plan(intersect(self.emits, ranges)):
            part = piece.source.cut(piece.position, piece.numel)
            if part.base is not None:
                part.base.copy_(part.theta)

    def state(self, *, with_parameters: bool) -> dict[str, np.ndarray]:
        """Copies of what is not in any anchor: error memory, what codecs keep, and if asked for `θ` and `B`.

        Returns:
          fp32 arrays by name; `<kind>|<first canonical element>` of each run of `emits`, of `θ` each run of `holds`.
        """
        kinds = {"error": self._error}
        if with_parameters:
            theta = torch.cat([self._on_host(p.theta).clone() for p in self._parts] or [torch.empty(0)])
            kinds |= {"theta": theta, "base": self.base, "kept": self.anchor}
            if self._rule.reads_emitted:
                kinds["emitted"] = torch.cat([_required(p.emitted) for p in self._parts] or [torch.empty(0)])
        found = {}
        for kind, values in kinds.items():
            if values is not None:
                at = 0
                for r in self._runs(kind):
                    found[f"{kind}|{r.start}"] = values[at : at + r.numel].numpy().copy()
                    at += r.numel
        for start, memory in self._memories.items():
            if memory is not None:
                found[f"memory|{start}"] = memory.numpy().copy()
        return found

    @torch.no_grad()
    def load_state(self, pieces_by_name: Mapping[str, np.ndarray], versions: Mapping[int, int] | None) -> bool:
        """Takes up what `state` gave, of the same cut; `versions` of the bases where `θ` and `B` are to be restored.

        Returns:
          Whether it fitted; nothing has been changed if it did not.
        """
        wanted = ["error"] if self._error is not None else []
        if versions is not None:
            wanted += ["theta", "base"]
            wanted += ["kept"] if self.anchor is not None else []
            wanted += ["emitted"] if self._rule.reads_emitted else []
        arrays = {(kind, r): pieces_by_name.get(f"{kind}|{r.start}") for kind in wanted for r in self._runs(kind)}
        saved = sum(name.split("|")[0] in wanted for name in pieces_by_name)
        if saved != len(arrays) or any(a is None or a.size != r.numel for (_, r), a in arrays.items()):
            return False
        for (kind, r), array in arrays.items():
            at = total(intersect(self.emits, (Range(0, r.start),)))
            values = from_dlpack(np.ascontiguousarray(array))
            flat = {"error": self._error, "base": self.base, "kept": self.anchor}.get(kind)
            if flat is not None:
                flat[at : at + r.numel].copy_(values)
                continue
            for piece in self._plan((r,)):
                part = piece.source.cut(piece.position, piece.numel)
                target = part.theta if kind == "theta" else _required(part.emitted)
                target.copy_(values[piece.at : piece.at + piece.numel])
        for name, array in pieces_by_name.items():
            if name.startswith("memory|"):
                self._memories[int(name.removeprefix("memory|"))] = from_dlpack(np.array(array))
        if versions is not None:
            self._based = self.emits
            self.versions.update(versions)
        return True

    def forget(self) -> None:
        """Makes error memory and what codecs keep those of a rank that has sent nothing."""
        if self._error is not None:
            self._error.zero_()
        self._memories.clear()
        self._unheard = _Unheard()

    def _runs(self, kind: str) -> Ranges:
        """What a kind of saved array is kept of."""
        return self.holds if kind in ("theta", "emitted") else self.emits

    def _emit_elements(self, ranges: Ranges, codec: Codec, meta: Meta) -> tuple[Writer, float]:
        writer = self._writer(ranges, codec, meta)
        writer.begin(meta)
        square, feedback = 0.0, self._feedback
        for start, stop, inside in in_chunks(self._plan(ranges), writer.numel):
            target = self._scratch[: stop - start] if feedback else writer.target(start, stop, self._scratch)
            for piece in inside:
                self._subtract(piece, target[piece.at - start : piece.at - start + piece.numel])
            square += squared_norm(target)
            if feedback is None:
                writer.put(start, target)
                continue
            self._add_error(feedback, inside, start, target)
            if math.isfinite(squared_norm(target)):
                writer.put(start, target, residual=True)
                self._keep_error(inside, start, target)
            else:
                square = math.inf
                writer.put(start, target.zero_())
        return writer, square

    def _emit_tensors(self, ranges: Ranges, codec: ShapedCodec, meta: Meta) -> tuple[Writer, float, Bytes | None]:
        """As `_emit_elements`, and what the message took from the error memory if it does not say so itself."""
        shapes = _shapes(self._layout, ranges)
        writer = Writer(codec, ranges, meta, shapes=shapes)
        values, square, feedback = torch.empty(writer.numel), 0.0, self._feedback
        chunked = list(in_chunks(self._plan(ranges), writer.numel))
        for start, stop, inside in chunked:
            for piece in inside:
                self._subtract(piece, values[piece.at : piece.at + piece.numel])
            square += squared_norm(values[start:stop])
            if feedback is not None:
                self._add_error(feedback, inside, start, values[start:stop])
                if not math.isfinite(squared_norm(values[start:stop])):
                    square = math.inf
        # Signs of coefficients take the coefficients themselves from the error memory, as in DeMo.
        said = values.clone() if feedback is not None and codec.params.get("values") == "sign" else None
        # What is not finite is refused anyway, and a decomposition of it would not end.
        if not math.isfinite(square):
            values.zero_()
            for at, shape, data, nonce in writer.tensors():
                codec.encode(values[at : at + math.prod(shape)], shape, data, nonce=nonce)
            return writer, square, None if said is None else self._plain(ranges, values, meta)
        starts = _starts(ranges, shapes)
        for start, (at, shape, data, nonce) in zip(starts, writer.tensors(), strict=True):
            memory = codec.memory(shape)
            if start not in self._memories or _shape(self._memories[start]) != _shape(memory):
                self._memories[start] = memory
            encode = codec.encode if feedback is None else codec.encode_residual
            encode(values[at : at + math.prod(shape)], shape, data, self._memories[start], nonce)
        for start, stop, inside in chunked if feedback is not None else ():
            self._keep_error(inside, start, values[start:stop])
        return writer, square, None if said is None else self._plain(ranges, said.sub_(values), meta)

    def _plain(self, ranges: Ranges, values: torch.Tensor, meta: Meta) -> Bytes:
        writer = Writer(Fp32(), ranges, meta)
        for start in range(0, writer.numel, CHUNK):
            writer.put(start, values[start : start + CHUNK])
        return writer.seal(meta)

    def _emit_selected(
        self, ranges: Ranges, codec: Codec | ShapedCodec, meta: Meta, selection: Selection
    ) -> tuple[Writer, float]:
        at = torch.from_numpy(selection.packed(ranges))
        writer = Writer(codec, ranges, meta, selection, numel=len(at))
        values = torch.empty(len(at))
        for start, stop, inside in in_chunks(self._plan(ranges), total(ranges)):
            target = self._scratch[: stop - start]
            for piece in inside:
                self._subtract(piece, target[piece.at - start : piece.at - start + piece.numel])
            first, last = torch.searchsorted(at, torch.tensor([start, stop])).tolist()
            values[first:last] = target[at[first:last] - start]
        square = 0.0
        for start in range(0, writer.numel, CHUNK):
            square += squared_norm(values[start : start + CHUNK])
            writer.put(start, values[start : start + CHUNK])
        return writer, square

    def _add_error(self, feedback: Feedback, inside: Sequence[Piece[_Part]], start: int, values: torch.Tensor) -> None:
        """`e ← β e + s Δ`, in `values`."""
        if feedback.scale != 1.0:
            values.mul_(feedback.scale)
        for piece in inside:
            error = _required(piece.source.cut(piece.position, piece.numel).error)
            values[piece.at - start :][: piece.numel].add_(error, alpha=feedback.decay)

    def _keep_error(self, inside: Sequence[Piece[_Part]], start: int, values: torch.Tensor) -> None:
        for piece in inside:
            error = _required(piece.source.cut(piece.position, piece.numel).error)
            error.copy_(values[piece.at - start :][: piece.numel])

    def _decoded(self, payload: Payload) -> list[tuple[Piece[_Part], torch.Tensor]]:
        """The elements of a payload of this rank, by where they belong."""
        values = torch.empty(payload.numel)
        if payload.dense:
            for start in range(0, payload.numel, CHUNK):
                stop = min(start + CHUNK, payload.numel)
                values[start:stop] = payload.read(start, stop, self._scratch)
        else:
            for at, shape, data, nonce in payload.read_tensors():
                payload.shaped_codec.decode(data, shape, values[at : at + math.prod(shape)], nonce)
        plan = self._plan(payload.header.ranges)
        return [(piece, values[piece.at : piece.at + piece.numel]) for piece in plan]

    def _adopt_elements(self, payload: Payload, parts: Sequence[_Part], rule: Adopt) -> None:
        sources = [(part, (part.range,)) for part in parts]
        found = pieces(payload.header.ranges, sources, "held slices", partial=True)
        for _, _, inside in in_chunks(found, payload.numel):
            start, stop = inside[0].at, inside[-1].at + inside[-1].numel
            anchor = payload.read(start, stop, self._scratch)
            for piece in inside:
                part = piece.source.cut(piece.position, piece.numel)
                self._apply(rule, part, anchor[piece.at - start :][: piece.numel])

    def _adopt_selected(self, payload: Payload, parts: Sequence[_Part], rule: Adopt) -> None:
        """Adopts the elements that a payload has of its ranges; the others stay."""
        selection = payload.header.selection
        positions = from_dlpack(selection.positions(payload.header.ranges))  # type: ignore[union-attr]
        values = torch.empty(payload.numel)
        for start in range(0, payload.numel, CHUNK):
            stop = min(start + CHUNK, payload.numel)
            values[start:stop] = payload.read(start, stop, self._scratch)
        for part in parts:
            bounds = torch.tensor([part.range.start, part.range.stop])
            first, last = torch.searchsorted(positions, bounds).tolist()
            if first == last:
                continue
            at = positions[first:last] - part.range.start
            kept = {name: getattr(part, name) for name in ("theta", "base", "emitted", "anchor")}
            chosen = {name: one[at.to(one.device)] for name, one in kept.items() if one is not None}
            run = Range(int(part.range.start), int(part.range.start) + len(at))
            self._apply(rule, _Part(run, **chosen), values[first:last])
            for name, picked in chosen.items():
                kept[name][at.to(picked.device)] = picked

    def _apply(self, rule: Adopt, part: _Part, anchor: torch.Tensor) -> None:
        if part.anchor is not None:
            part.anchor.copy_(anchor)
        if part.theta.device.type == "cpu" or not rule.reads_theta:
            rule.apply(AdoptChunk(part.theta, part.base, anchor, part.emitted))
            return
        staged = self._on_host(part.theta)
        rule.apply(AdoptChunk(staged, part.base, anchor, part.emitted))
        part.theta.copy_(staged)

    def _subtract(self, piece: Piece[_Part], out: torch.Tensor) -> None:
        part = piece.source.cut(piece.position, piece.numel)
        if part.base is None:
            what = f"elements {describe((part.range,))} are held but not emitted by this rank"
            raise SyncError(442, what, "emit a part of `emits`")
        theta = self._on_host(part.theta)
        if part.emitted is not None:
            part.emitted.copy_(theta)
        torch.sub(part.base, theta, out=out)

    def _on_host(self, values: torch.Tensor) -> torch.Tensor:
        if values.device.type == "cpu":
            return values
        return values.cpu() if values.numel() > CHUNK else self._staging[: values.numel()].copy_(values)

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


def _parts(
    held: Sequence[Slice],
    emits: Ranges,
    base: torch.Tensor,
    error: torch.Tensor | None,
    anchor: torch.Tensor | None,
    keeps_emitted: bool,
) -> list[_Part]:
    """Cuts slices where what is emitted begins and ends; the vectors [total(emits)] are shared out among them."""
    parts = []
    sources = [(piece, (piece.range,)) for piece in held]
    for run in pieces(emits, sources, "slices of this rank"):
        mine = [None if one is None else one[run.at :][: run.numel] for one in (base, error, anchor)]
        emitted = torch.empty(run.numel).fill_(0) if keeps_emitted else None
        parts.append(_Part(_range_of(run), _run(run.source.values, run), mine[0], mine[1], emitted, mine[2]))
    silent = subtract(normalise(piece.range for piece in held), emits)
    for run in pieces(silent, sources, "slices of this rank"):
        emitted = torch.empty(run.numel).fill_(0) if keeps_emitted else None
        parts.append(_Part(_range_of(run), _run(run.source.values, run), emitted=emitted))
    return sorted(parts, key=lambda part: part.range)


def _shapes(layout: Layout, ranges: Ranges) -> tuple[Shape, ...]:
    """Shapes of the tensors in a set, in order; a piece of a tensor has its number of elements as its shape."""
    found = pieces(ranges, [(spec, (spec.range,)) for spec in layout.tensors], "tensors of the layout")
    return tuple(p.source.shape if p.numel == p.source.numel else (p.numel,) for p in found)


def _starts(ranges: Ranges, shapes: Sequence[Shape]) -> list[int]:
    """Canonical position of the first element of each tensor of a set."""
    starts, at, todo = [], 0, list(ranges)
    for shape in shapes:
        while todo and at >= todo[0].numel:
            at -= todo.pop(0).numel
        starts.append(todo[0].start + at if todo else 0)
        at += math.prod(shape)
    return starts


def _required(values: torch.Tensor | None) -> torch.Tensor:
    if values is None:
        raise ValueError("this exchange does not keep what was asked for")
    return values


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
        if not payload.dense:
            raise SyncError(412, f"an anchor in {payload.header.codec}, a codec of whole tensors", "send elements")
    return versions


def _shape(memory: torch.Tensor | None) -> torch.Size | None:
    return None if memory is None else memory.shape


def _slice_error(what: str) -> SyncError:
    return SyncError(441, what, "give each element that the rank holds once, as flat fp32 memory")
