"""Who trains which block, exactly once: leases, credits and returns over virtual block indices.

A source's training blocks, epoch after epoch, are one endless sequence of virtual indices; order within an epoch is
`data.permutation`'s affair.  An index is issued in a lease, then either credited by exactly one commit or returned
and issued again, lowest first.  At any time `issued = credited + in flight + returned`.  The durable part is what was
credited: whatever else was under way when a run stopped is issued again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

from ray_diloco.outer.layout import Range, Ranges, normalise, subtract, total
from ray_diloco.rounds.ports import Lease


class Ledger:
    """The ledger of one source."""

    def __init__(self, source: str, credited: Ranges = ()) -> None:
        self.source = source
        self._credited = _Blocks(normalise(credited))
        self._next = self.credited[-1].stop if self.credited else 0
        self._returned = _Blocks(subtract((Range(0, self._next),), self.credited) if self._next else ())
        self._flying: dict[int, Lease] = {}
        self._leases = 0

    def lease(self, blocks: int) -> Lease:
        """Hands out `blocks` indices: returned ones first, lowest first, then new ones."""
        again = self._returned.take(blocks)
        missing = blocks - total(again)
        new = (Range(self._next, self._next + missing),) if missing else ()
        self._next += missing
        self._leases += 1
        lease = Lease(self._leases, self.source, normalise((*again, *new)))
        self._flying[lease.number] = lease
        return lease

    def credit(self, lease: Lease) -> None:
        """Books a lease as trained and committed.  Raises ValueError if it is not in flight or was credited."""
        self._land(lease)
        if self._credited.meets(lease.blocks):
            raise ValueError(f"lease {lease.number} of {self.source} holds blocks that are already credited")
        self._credited.add(lease.blocks)

    def release(self, lease: Lease) -> None:
        """Takes a lease back; its blocks are issued again.  Raises ValueError if it is not in flight."""
        self._land(lease)
        self._returned.add(lease.blocks)

    def shorten(self, lease: Lease, blocks: int) -> Lease:
        """Takes back all but the first `blocks` of a lease in flight; returns what is left of it."""
        kept = _first(lease.blocks, blocks)
        self._land(lease)
        self._returned.add(subtract(lease.blocks, kept))
        self._leases += 1
        left = Lease(self._leases, self.source, kept)
        self._flying[left.number] = left
        return left

    @property
    def credited(self) -> Ranges:
        """What commits have credited."""
        return self._credited.ranges

    @property
    def issued(self) -> int:
        """Number of indices ever issued."""
        return self._next

    @property
    def in_flight(self) -> int:
        """Number of indices leased and neither credited nor returned."""
        return sum(total(lease.blocks) for lease in self._flying.values())

    @property
    def returned(self) -> int:
        """Number of indices waiting to be issued again."""
        return total(self._returned.ranges)

    def balanced(self) -> bool:
        """True if every index issued is in exactly one of the three places."""
        return self.issued == total(self.credited) + self.in_flight + self.returned

    def to_json(self) -> dict[str, Any]:
        """The durable part."""
        return {"source": self.source, "credited": [[r.start, r.stop] for r in self.credited]}

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> Ledger:
        """A ledger that goes on from a commit."""
        return cls(state["source"], tuple(Range(start, stop) for start, stop in state["credited"]))

    def _land(self, lease: Lease) -> None:
        if self._flying.get(lease.number) != lease:
            raise ValueError(f"lease {lease.number} of {self.source} is not in flight")
        del self._flying[lease.number]


class _Blocks:
    """A set of indices that grows by few at a time, however many ranges it has: they are found, not walked through."""

    def __init__(self, ranges: Ranges) -> None:
        self._starts = [r.start for r in ranges]
        self._stops = [r.stop for r in ranges]

    @property
    def ranges(self) -> Ranges:
        """The set, sorted; ranges that touch are one."""
        return tuple(map(Range, self._starts, self._stops))

    def meets(self, ranges: Ranges) -> bool:
        """Whether it has any of these already."""
        return any(bisect_left(self._starts, r.stop) > bisect_right(self._stops, r.start) for r in ranges)

    def add(self, ranges: Ranges) -> None:
        """Adds ranges; those that touch or overlap become one."""
        for r in ranges:
            first, last = bisect_left(self._stops, r.start), bisect_right(self._starts, r.stop)
            if first < last:
                r = Range(min(r.start, self._starts[first]), max(r.stop, self._stops[last - 1]))
            self._starts[first:last], self._stops[first:last] = [r.start], [r.stop]

    def take(self, count: int) -> Ranges:
        """Takes out the lowest so many, or all."""
        taken, whole = [], 0
        while count > 0 and whole < len(self._starts):
            start, stop = self._starts[whole], self._stops[whole]
            taken.append(Range(start, min(stop, start + count)))
            if stop > start + count:
                self._starts[whole] = start + count
                break
            count -= stop - start
            whole += 1
        del self._starts[:whole], self._stops[:whole]
        return tuple(taken)


def _first(ranges: Ranges, count: int) -> Ranges:
    taken: list[Range] = []
    for r in ranges:
        if count <= 0:
            break
        taken.append(Range(r.start, min(r.stop, r.start + count)))
        count -= taken[-1].numel
    return tuple(taken)
