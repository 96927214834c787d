"""On which nodes the anchor lives.

A shared anchor lives in one region, on the nodes of its islands in turn: its shards fetch over all their network cards,
and a cut between regions takes all of it or nothing.  The region is the driver's, so that whoever reaches the driver
reaches the anchor; where no island is in that, it is the region with most islands.  An anchor that one island has for
itself lives beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Place:
    """Where an island is: its region, and the nodes of its ranks in order."""

    region: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Berths:
    """Nodes for the shards of a shared anchor, to be taken in turn, and for the anchors of single islands."""

    shared: Sequence[str]
    beside: Mapping[str, str] = field(default_factory=dict)


def berths(places: Mapping[str, Place], home: str) -> Berths:
    """Where shards are to start.

    Args:
      places: of the islands that have been placed, at least one; where regions have as many islands, the first counts.
      home: region of the driver.
    """
    regions: dict[str, list[Place]] = {}
    for place in places.values():
        regions.setdefault(place.region, []).append(place)
    chosen = regions.get(home) or max(regions.values(), key=len)
    # The first nodes of all islands come before the second ones of any.
    turns = itertools.zip_longest(*(place.nodes for place in chosen))
    shared = dict.fromkeys(node for turn in turns for node in turn if node is not None)
    return Berths(tuple(shared), {name: place.nodes[0] for name, place in places.items()})
