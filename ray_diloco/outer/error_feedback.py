"""Error feedback: what the bytes of a message do not say is kept, and sent with what comes next.

    e ← β e + s Δ     is what a codec gets to send
    e ← e − C(e)      stays, and a message that was not merged is put back: e ← e + C(e)

Of random fragments only the elements that a round draws go through this: the others have sent nothing, their `B − θ`
waits where it is, and so does their `e`, which does not decay meanwhile.  A message says what was drawn for it.
Source: ../shared/algorithms.md §7, §9.6 item 54 and §10.1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ray_diloco.outer import chunks
from ray_diloco.outer.chunks import Piece
from ray_diloco.outer.held import Held, Part, required
from ray_diloco.outer.layout import Ranges, subtract
from ray_diloco.outer.payload import Bytes, Payload, open_payload

# Emissions of one fragment that may wait to hear whether they were merged: more than any lag of rounds that trains.
_UNHEARD = 64


@dataclass(frozen=True)
class Feedback:
    """`e ← β e + s Δ`, of which a codec sends what it can.

    Attributes:
      decay: `β`.
      scale: `s`.
    """

    decay: float = 1.0
    scale: float = 1.0


@dataclass(eq=False)
class Unheard:
    """Payloads that were sent and not yet acknowledged, by the ranges that they are of; the oldest first."""

    sent: dict[Ranges, deque[Bytes]] = field(default_factory=dict)

    def add(self, ranges: Ranges, payload: Bytes) -> None:
        """Keeps a copy of what was sent of some ranges."""
        self.sent.setdefault(ranges, deque(maxlen=_UNHEARD)).append(payload.copy())

    def oldest(self, inside: Ranges) -> list[Bytes]:
        """Takes out the oldest payload of each set inside a fragment."""
        return [self.sent[ranges].popleft() for ranges in self.waiting(inside)]

    def waiting(self, inside: Ranges) -> list[Ranges]:
        """Sets inside a fragment of which some payload has not been acknowledged."""
        return [ranges for ranges, queue in self.sent.items() if queue and not subtract(ranges, inside)]


def add_error(feedback: Feedback, inside: Sequence[Piece[Part]], start: int, values: torch.Tensor) -> None:
    """`e ← β e + s Δ`, in `values`."""
    if feedback.scale != 1.0:
        values.mul_(feedback.scale)
    for piece in inside:
        error = required(piece.source.cut(piece.position, piece.numel).error)
        values[piece.at - start :][: piece.numel].add_(error, alpha=feedback.decay)


def keep_error(inside: Sequence[Piece[Part]], start: int, values: torch.Tensor) -> None:
    """Leaves in the error memory what the bytes do not say."""
    for piece in inside:
        error = required(piece.source.cut(piece.position, piece.numel).error)
        error.copy_(values[piece.at - start :][: piece.numel])


def picked_error(plan: Sequence[Piece[Part]], at: torch.Tensor) -> torch.Tensor:
    """The error memory of some elements of a set: those at the positions `at`, ascending, of the packed set."""
    found = torch.empty(len(at))
    for inside, error, places in _places(plan, at):
        found[inside] = error[places]
    return found


def keep_picked_error(plan: Sequence[Piece[Part]], at: torch.Tensor, values: torch.Tensor) -> None:
    """Puts into the error memory what `picked_error` gave, changed."""
    for inside, error, places in _places(plan, at):
        error[places] = values[inside]


def _places(plan: Sequence[Piece[Part]], at: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Of each piece that has some of the positions: which of them, its error memory, and where in that they are."""
    for piece in plan:
        first, last = torch.searchsorted(at, torch.tensor([piece.at, piece.at + piece.numel])).tolist()
        if first < last:
            error = required(piece.source.cut(piece.position, piece.numel).error)
            yield slice(first, last), error, at[first:last] - piece.at


def put_back(held: Held, sent: Bytes) -> None:
    """Adds to the error memory what a message took from it."""
    payload = open_payload(sent)
    if payload.header.selection is not None:
        at = torch.from_numpy(payload.header.selection.packed(payload.header.ranges))
        plan = held.plan(payload.header.ranges)
        keep_picked_error(plan, at, picked_error(plan, at).add_(_values(held, payload)))
        return
    for piece, values in _decoded(held, payload):
        error = piece.source.cut(piece.position, piece.numel).error
        if error is not None:
            error.add_(values)


def _decoded(held: Held, payload: Payload) -> list[tuple[Piece[Part], torch.Tensor]]:
    """The elements of a payload of this rank, by where they belong."""
    if payload.dense:
        values = _values(held, payload)
    else:
        values = torch.empty(payload.numel)
        for at, shape, data, nonce in payload.read_tensors():
            payload.shaped_codec.decode(data, shape, values[at : at + math.prod(shape)], nonce)
    plan = held.plan(payload.header.ranges)
    return [(piece, values[piece.at : piece.at + piece.numel]) for piece in plan]


def _values(held: Held, payload: Payload) -> torch.Tensor:
    values = torch.empty(payload.numel)
    for start in range(0, payload.numel, chunks.CHUNK):
        stop = min(start + chunks.CHUNK, payload.numel)
        values[start:stop] = payload.read(start, stop, held.scratch)
    return values
