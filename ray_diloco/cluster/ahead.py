"""What is asked of an island's ranks before anybody waits for it: each answer costs the way there and back.

A rank does what one caller asks of it in that order.  So training is asked for with the adoption before it, and an
answer that nobody needs yet is read later; an emission is part of the training before it.  A new anchor goes to the
machines of its islands as soon as it is there, in a call that holds up no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from ray_diloco.rounds.clock import now
from ray_diloco.rounds.ports import Emission, Piece

# Bytes; Ray returns an object of up to 100 kB, headers and all, in the answer to a call.
WITHIN_A_CALL = 90_000


class Ahead:
    """Calls to the ranks of one island that are under way.

    Attributes:
      emissions: what was emitted with training and not yet asked for, by fragment and base version.
    """

    def __init__(self) -> None:
        self.emissions: dict[tuple[int, int], Emission] = {}
        self._what: list[str] = []
        self._calls: list[Any] = []
        self._since = 0.0

    def begin(self, what: str, calls: Sequence[Any]) -> None:
        """Notes calls whose answers are to be read before those of later ones."""
        if not self._calls:
            self._since = now()
        self._what.append(what)
        self._calls += calls

    def taken(self) -> tuple[str, list[Any], float]:
        """Those calls in words, the calls, and when the first was made; they are forgotten here."""
        what, calls = " and ".join(self._what), self._calls
        self._what, self._calls = [], []
        return what, calls, self._since

    def fetch(self, ranks: Sequence[Any], nodes: Sequence[str], payload: Any, node_id: str | None) -> None:
        """Lets a payload come from a node to those of the ranks, once for each."""
        for node in dict.fromkeys(nodes):
            if node != node_id:
                ranks[nodes.index(node)].fetch.remote([payload])


def handed_over(pieces: Sequence[Piece]) -> list[Any]:
    """The references of payloads, as arguments of a call that nothing is to wait for but the call itself.

    Ray holds up all later calls to an actor until what an argument stands for has come, heartbeats among them, and asks
    its own daemon about each argument first, which takes up to a millisecond also on one machine.  In a list references
    stay what they are, and `brought` reads them.  Small payloads are with the driver and travel within the call.
    """
    handles = [piece.handle for piece in pieces]
    return [handles] if any(piece.nbytes > WITHIN_A_CALL for piece in pieces) else handles


def brought(payloads: Sequence[Any]) -> Sequence[Any]:
    """What arguments stand for, handed over or not; waits for what has still to come.

    Without a deadline of its own: the caller has one, and ends or replaces who does not answer by then.
    """
    if len(payloads) == 1 and isinstance(payloads[0], list):
        found: list[Any] = ray.get(payloads[0])
        return found
    return payloads
