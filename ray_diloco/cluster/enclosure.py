"""Room that a run was given beforehand: a placement group that it was started in, with a bundle for each rank.

Ray Tune reserves one group for all of a trial, so that a trial starts when all of it fits and not before.  Bundle 0 is
the caller's own; those behind it are taken in the order of islands and ranks.  A run that is started in a group with
other bundles makes groups of its own, as one does that is started outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ray.util.placement_group import PlacementGroup, get_current_placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_diloco.cluster.placement import Bundle


@dataclass(frozen=True)
class Room:
    """A placement group, or some bundles of one that was given, from `first` on; `name` is unique on a cluster."""

    name: str
    group: PlacementGroup
    first: int = 0
    given: bool = False

    def strategy(self, rank: int) -> PlacementGroupSchedulingStrategy:
        """Where a rank is to be."""
        return PlacementGroupSchedulingStrategy(self.group, self.first + rank)

    def release(self) -> None:
        """Gives it back, if it was this run's own."""
        if not self.given:
            remove_placement_group(self.group)


@dataclass(frozen=True)
class Enclosure:
    """A placement group, and the bundle of each island's first rank."""

    group: PlacementGroup
    first: Mapping[str, int]


def enclosure(islands: Mapping[str, Sequence[Bundle]]) -> Enclosure | None:
    """The group that this process was started in, if it has the bundles that the islands of a run need."""
    group = get_current_placement_group()
    if group is None:
        return None
    free, at = list(group.bundle_specs), 1
    first: dict[str, int] = {}
    for island, wanted in islands.items():
        first[island] = at
        for bundle in wanted:
            if at >= len(free) or any(free[at].get(key, 0.0) < value for key, value in bundle.items()):
                return None
            at += 1
    return Enclosure(group, first)
