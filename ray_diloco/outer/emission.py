"""What a rank sends: its outer gradients, chunk by chunk straight into a payload.

Elements in a codec of their own take one pass.  Codecs of whole tensors and random fragments need all values at once;
both are for few bytes.  With error feedback a part that is not finite travels as zeros and leaves the error memory as
it was.  Source: ../shared/algorithms.md §10.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ray_diloco.outer import chunks
from ray_diloco.outer.chunks import in_chunks, pieces, squared_norm
from ray_diloco.outer.codec import Codec, Fp32
from ray_diloco.outer.error_feedback import Feedback, add_error, keep_error, keep_picked_error, picked_error
from ray_diloco.outer.held import Held, run_of
from ray_diloco.outer.layout import Layout, Ranges, total
from ray_diloco.outer.matrices import Shape
from ray_diloco.outer.payload import Bytes, Meta, Writer
from ray_diloco.outer.selection import Selection
from ray_diloco.outer.shaped import ShapedCodec


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


class Emitter:
    """Writes what a rank sends, into memory that is used again.

    Args:
      layout: the canonical form.
      held: what the rank holds.
      feedback: error feedback of what is emitted; None: there is none.

    Attributes:
      memories: what codecs of whole tensors keep, by canonical position of the first element of each tensor.
    """

    def __init__(self, layout: Layout, held: Held, feedback: Feedback | None) -> None:
        self.memories: dict[int, torch.Tensor | None] = {}
        self._layout, self._held, self._feedback = layout, held, feedback
        self._writers: dict[tuple[Ranges, str, str], Writer] = {}

    def parameters(self, ranges: Ranges, meta: Meta) -> Bytes:
        """`θ` itself, in fp32."""
        writer = self._writer(ranges, Fp32(), meta)
        writer.begin(meta)
        for start, stop, inside in in_chunks(self._held.plan(ranges), writer.numel):
            target = writer.target(start, stop, self._held.scratch)
            for piece in inside:
                target[piece.at - start :][: piece.numel].copy_(run_of(piece.source.theta, piece))
            writer.put(start, target)
        return writer.seal(meta)

    def elements(self, ranges: Ranges, codec: Codec, meta: Meta) -> tuple[Writer, float]:
        """`B − θ` in a codec of elements; the writer to seal, and the squared norm before encoding."""
        writer = self._writer(ranges, codec, meta)
        writer.begin(meta)
        square, feedback = 0.0, self._feedback
        for start, stop, inside in in_chunks(self._held.plan(ranges), writer.numel):
            target = self._held.scratch[: stop - start] if feedback else writer.target(start, stop, self._held.scratch)
            for piece in inside:
                self._held.measure(piece, target[piece.at - start : piece.at - start + piece.numel])
            square += squared_norm(target)
            if feedback is None:
                writer.put(start, target)
                continue
            add_error(feedback, inside, start, target)
            if math.isfinite(squared_norm(target)):
                writer.put(start, target, residual=True)
                keep_error(inside, start, target)
            else:
                square = math.inf
                writer.put(start, target.zero_())
        return writer, square

    def tensors(self, ranges: Ranges, codec: ShapedCodec, meta: Meta) -> tuple[Writer, float, Bytes | None]:
        """As `elements`, and what the message took from the error memory if it does not say so itself."""
        shapes = shapes_of(self._layout, ranges)
        writer = Writer(codec, ranges, meta, shapes=shapes)
        values, square, feedback = torch.empty(writer.numel), 0.0, self._feedback
        chunked = list(in_chunks(self._held.plan(ranges), writer.numel))
        for start, stop, inside in chunked:
            for piece in inside:
                self._held.measure(piece, values[piece.at : piece.at + piece.numel])
            square += squared_norm(values[start:stop])
            if feedback is not None:
                add_error(feedback, inside, start, values[start:stop])
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
            if start not in self.memories or _shape(self.memories[start]) != _shape(memory):
                self.memories[start] = memory
            encode = codec.encode if feedback is None else codec.encode_residual
            encode(values[at : at + math.prod(shape)], shape, data, self.memories[start], nonce)
        for start, stop, inside in chunked if feedback is not None else ():
            keep_error(inside, start, values[start:stop])
        return writer, square, None if said is None else self._plain(ranges, said.sub_(values), meta)

    def selected(
        self, ranges: Ranges, codec: Codec | ShapedCodec, meta: Meta, selection: Selection
    ) -> tuple[Writer, float]:
        """As `elements`, of those that a selection has."""
        at = torch.from_numpy(selection.packed(ranges))
        writer = Writer(codec, ranges, meta, selection, numel=len(at))
        values = torch.empty(len(at))
        for start, stop, inside in in_chunks(self._held.plan(ranges), total(ranges)):
            target = self._held.scratch[: stop - start]
            for piece in inside:
                self._held.measure(piece, target[piece.at - start : piece.at - start + piece.numel])
            first, last = torch.searchsorted(at, torch.tensor([start, stop])).tolist()
            values[first:last] = target[at[first:last] - start]
        square, feedback = 0.0, self._feedback
        errors = None if feedback is None else picked_error(self._held.plan(ranges), at)
        for start in range(0, writer.numel, chunks.CHUNK):
            chunk = values[start : start + chunks.CHUNK]
            square += squared_norm(chunk)
            if feedback is None or errors is None:
                writer.put(start, chunk)
                continue
            error = errors[start : start + chunks.CHUNK]
            chunk.mul_(feedback.scale).add_(error, alpha=feedback.decay)
            if math.isfinite(squared_norm(chunk)):
                writer.put(start, chunk, residual=True)
                error.copy_(chunk)
            else:
                square = math.inf
                writer.put(start, chunk.zero_())
        if errors is not None:
            keep_picked_error(self._held.plan(ranges), at, errors)
        return writer, square

    def _plain(self, ranges: Ranges, values: torch.Tensor, meta: Meta) -> Bytes:
        writer = Writer(Fp32(), ranges, meta)
        for start in range(0, writer.numel, chunks.CHUNK):
            writer.put(start, values[start : start + chunks.CHUNK])
        return writer.seal(meta)

    def _writer(self, ranges: Ranges, codec: Codec, meta: Meta) -> Writer:
        key = (ranges, codec.name, repr(sorted(codec.params.items())))
        writer = self._writers.get(key)
        if writer is None or not writer.fits(meta):
            writer = self._writers[key] = Writer(codec, ranges, meta)
        return writer


def shapes_of(layout: Layout, ranges: Ranges) -> tuple[Shape, ...]:
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


def _shape(memory: torch.Tensor | None) -> torch.Size | None:
    return None if memory is None else memory.shape
