"""Who meets whom in a round: from weighed contributions to the movement of each anchor.

One anchor shared by all (a star), or one for each island.  With an anchor for each, an island's neighbourhood is
everybody, itself fresh and the others as of the round before (Eager, 2502.12996), or a random partner (NoLoCo,
2506.10911).  The draws depend on seed and round alone.  Source: ../shared/algorithms.md §4.2, §6.4, §10.1.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ray_diloco.rounds.ports import SHARED, Movement, Offer

Weighed = Sequence[tuple[Offer, float]]


@dataclass(frozen=True, slots=True)
class Meeting:
    """What is known when a round is merged.

    Attributes:
      round: its number.
      islands: all islands of the run, sorted.
      weighed: its contributions with their factors, in sorted island order.
      before: those of the fragment's previous round.
    """

    round: int
    islands: tuple[str, ...]
    weighed: Weighed
    before: Weighed = ()


Topology = Callable[[Meeting], tuple[Movement, ...]]


def star(meeting: Meeting) -> tuple[Movement, ...]:
    """One anchor, moved by all."""
    return (Movement(SHARED, tuple(meeting.weighed)),)


def everybody(meeting: Meeting) -> tuple[Movement, ...]:
    """An anchor for each island, moved by all: provably the same as one for all."""
    return tuple(Movement(name, tuple(meeting.weighed), meeting.islands) for name in meeting.islands)


def eager(meeting: Meeting) -> tuple[Movement, ...]:
    """Each anchor is moved by its own island's fresh contribution and what the others sent the round before.

    `mean_j Δ_j^(t−1) + w_m (Δ_m^(t) − Δ_m^(t−1))` is that sum.  Before the first round the others have sent nothing,
    which counts as zero.
    """
    fresh = {offer.island: (offer, weight) for offer, weight in meeting.weighed}
    movements = []
    for name in meeting.islands:
        others = [pair for pair in meeting.before if pair[0].island != name]
        own = [fresh[name]] if name in fresh else [pair for pair in meeting.before if pair[0].island == name]
        movements.append(Movement(name, tuple(sorted([*others, *own], key=lambda pair: pair[0].island))))
    return tuple(movements)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Random pairs of those who contributed; an anchor whose island is absent stays, one without partner goes alone."""

    seed: int = 0

    def __call__(self, meeting: Meeting) -> tuple[Movement, ...]:
        """See `Topology`."""
        present = {offer.island: (offer, weight) for offer, weight in meeting.weighed}
        order = sorted(present)
        random.Random(f"{self.seed}/{meeting.round}").shuffle(order)
        partners = {name: tuple(sorted(order[k : k + 2])) for k in range(0, len(order), 2) for name in order[k : k + 2]}
        movements = []
        for name in meeting.islands:
            pair = partners.get(name, ())
            whole = sum(present[one][1] for one in pair)
            contributions = tuple((present[one][0], present[one][1] / whole) for one in pair)
            movements.append(Movement(name, contributions, pair))
        return tuple(movements)
