"""Which elements travel in a round of random fragments (SPARTA, ../shared/algorithms.md §6.5).

    bernoulli      each element with probability p, independently of others and of other rounds
    partitioned    each element once in n = round(1/p) rounds, in an order drawn anew every n rounds

A function of seed, round and the block of 65536 canonical elements alone, computed in integers: all ranks, shards and
islands find the same elements, however they cut the model and whatever processor they have.  The bits are those of
Philox (Salmon et al. 2011), a generator without a history: block and round are its counter.  They are part of what a
payload means and must never change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ray_diloco.errors import SyncError
from ray_diloco.outer.codec import Param
from ray_diloco.outer.layout import Ranges

Positions = NDArray[np.int64]

BLOCK = 65536

# p is compared with 40 random bits an element: 8 for everybody, 32 more for those 8 that decide nothing.
_P_BITS = 40
_LOW_BITS = 32
# Rounds of the Feistel network that permutes a block; four random functions are enough (Luby & Rackoff 1988).
_FEISTEL_ROUNDS = 6
_HALF = 256
# Third word of the counter, so that the draws never share bits.
_BERNOULLI, _PARTITIONED = 0, 1


@dataclass(frozen=True, slots=True)
class Selection:
    """The elements that travel in one round.

    Attributes:
      draw: key of `DRAWS`.
      p: part of the elements, above 0 and at most 1.
      seed: of the run; 0 ≤ seed < 2^64.
      round: number of the round, 0 or more.

    Raises:
      SyncError: RD-455, one of them is impossible.
    """

    draw: str
    p: float
    seed: int
    round: int

    def __post_init__(self) -> None:
        if self.draw not in DRAWS:
            raise _selection_error(f"there is no draw {self.draw!r}", f"use one of {', '.join(sorted(DRAWS))}")
        if not 2.0**-_P_BITS <= self.p <= 1:
            raise _selection_error(f"fragments.p is {self.p}", "use a part of the elements, above 0 and at most 1")
        if not 0 <= self.seed < 1 << 64 or not 0 <= self.round < 1 << 63:
            what = f"a selection of seed {self.seed} and round {self.round}"
            raise _selection_error(what, "use a seed from 0 to 2^64 − 1 and a round from 0")

    @property
    def period(self) -> int:
        """Rounds in which a partitioned draw takes each element once."""
        return max(1, round(1 / self.p))

    def positions(self, ranges: Ranges) -> Positions:
        """Canonical positions of the selected elements of a set.

        Args:
          ranges: sorted and disjoint.

        Returns:
          int64 [selected], ascending, read-only.
        """
        return _positions(self, ranges)

    def packed(self, ranges: Ranges) -> Positions:
        """Where the selected elements of a set lie in the packed set.

        Returns:
          int64 [selected], ascending, in the order of `positions`.
        """
        canonical = self.positions(ranges)
        starts = np.array([r.start for r in ranges], np.int64)
        before = np.cumsum([0, *(r.numel for r in ranges)])[: len(ranges)]
        k = np.searchsorted(starts, canonical, side="right") - 1
        found: Positions = canonical - (starts - before)[k]
        return found

    def count(self, ranges: Ranges) -> int:
        """How many elements of a set are selected."""
        return self.positions(ranges).size

    def to_params(self) -> dict[str, Param]:
        """What the header of a payload says, so that the receiver selects the same elements."""
        return {"draw": self.draw, "p": self.p, "seed": self.seed, "round": self.round}

    @staticmethod
    def from_params(params: Mapping[str, object]) -> Selection:
        """Builds the selection that `to_params` described.

        Raises:
          SyncError: RD-455, it describes none.
        """
        match dict(params):
            case {"draw": str(draw), "p": int() | float() as p, "seed": int(seed), "round": int(round_), **rest} if (
                not rest
            ):
                return Selection(draw, float(p), seed, round_)
        raise _selection_error(f"{dict(params)} is no selection", "run one version on all islands")


# A round asks for the same sets again: to size a message, to write it and to read it.
@lru_cache(maxsize=4)
def _positions(selection: Selection, ranges: Ranges) -> Positions:
    select = DRAWS[selection.draw]
    found, drawn, inside = [], -1, np.empty(0, np.int64)
    for r in ranges:
        for block in range(r.start // BLOCK, -(-r.stop // BLOCK)):
            if block != drawn:
                drawn, inside = block, select(selection, block) + block * BLOCK
            first, last = np.searchsorted(inside, (r.start, r.stop))
            found.append(inside[first:last])
    positions = np.concatenate(found) if found else np.empty(0, np.int64)
    positions.flags.writeable = False
    return positions


def _bernoulli(selection: Selection, block: int) -> Positions:
    """Elements whose 40 random bits, read as a number in [0, 1), are below p; ascending positions in the block."""
    high, low = divmod(round(selection.p * 2**_P_BITS), 1 << _LOW_BITS)
    if high == _HALF:
        return np.arange(BLOCK, dtype=np.int64)
    words = _philox(selection.seed, block, _BERNOULLI, selection.round)
    octets = _octets(words, BLOCK)
    maybe = np.flatnonzero(octets <= high)
    undecided = np.flatnonzero(octets[maybe] == high)
    rest = _octets(words, 4 * undecided.size).view("<u4")
    return np.delete(maybe, undecided[rest >= low])


def _partitioned(selection: Selection, block: int) -> Positions:
    """Every n-th element of the block in the order of its permutation, n rounds for all; ascending positions.

    The classes go on from block to block, so that they are equally large over the whole model.
    """
    period = selection.period
    epoch, turn = divmod(selection.round, period)
    tables = _octets(_philox(selection.seed, block, _PARTITIONED, epoch), _FEISTEL_ROUNDS * _HALF)
    ranks = np.arange((turn - block * BLOCK) % period, BLOCK, period)
    left, right = ranks >> 8, ranks & 255
    for table in tables.reshape(_FEISTEL_ROUNDS, _HALF):
        left, right = right, left ^ table[right]
    positions: Positions = np.sort(left << 8 | right).astype(np.int64, copy=False)
    return positions


DRAWS: dict[str, Callable[[Selection, int], Positions]] = {"bernoulli": _bernoulli, "partitioned": _partitioned}


def _philox(seed: int, block: int, draw: int, turn: int) -> np.random.Philox:
    """The generator of one block in one round or epoch; the first word of its counter counts what is drawn."""
    key, counter = np.array([seed, 0], np.uint64), np.array([0, block, draw, turn], np.uint64)
    return np.random.Philox(key=key, counter=counter)


def _octets(words: np.random.Philox, count: int) -> NDArray[np.uint8]:
    """The next random bytes, the lowest of a word first on every processor."""
    drawn = words.random_raw(-(-count // 8)).astype("<u8", copy=False)
    return drawn.view(np.uint8)[:count]


def _selection_error(what: str, mend: str) -> SyncError:
    return SyncError(455, what, mend)
