"""Rooms of islands: given to the run beforehand, or reserved for a launch, or looked for until there is one.

Whether there is room now only Ray knows, so a placement group is asked for and given up after a moment; it is not left
pending, since groups that nobody can place hold back others (Ray PR #62779).  What no node could ever hold is not asked
for at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence

from ray.util.placement_group import placement_group_table

from ray_diloco.cluster.enclosure import Enclosure, Room
from ray_diloco.cluster.placement import Bundle, Labels, fits, reserve
from ray_diloco.cluster.roster import room_name
from ray_diloco.errors import InfeasibleError

# Seconds between two looks for room, and how long one of them takes at most.
SEEK_S = 2.0
# Rooms that were looked for are numbered from here on: those of launches have the incarnation's number.
SOUGHT = 1_000_000


class Rooms:
    """The rooms of a run.

    Args:
      run: its name.
      epoch: of its driver.
      within: what it was given.
    """

    def __init__(self, run: str, epoch: int, within: Enclosure | None = None) -> None:
        self._run, self._epoch, self._within = run, epoch, within
        self._found: dict[str, Room] = {}
        self._held: dict[str, tuple[Room, int]] = {}
        self._numbers = itertools.count(SOUGHT)

    async def seek(self, island: str, bundles: Sequence[Bundle], labels: Labels) -> None:
        """Returns when there is room for an island, and keeps it."""
        while island not in self._found and not self._is_given(island):
            if fits(bundles, labels):
                name = room_name(self._run, island, self._epoch, next(self._numbers))
                with contextlib.suppress(InfeasibleError):
                    self._found[island] = Room(name, await reserve(name, island, bundles, SEEK_S, labels))
                    return
            await asyncio.sleep(SEEK_S)

    async def take(
        self, island: str, incarnation: int, bundles: Sequence[Bundle], labels: Labels, deadline_s: float
    ) -> Room:
        """The room of an island: what was given or found, else what can be reserved within `deadline_s` seconds.

        Raises:
          InfeasibleError: RD-211, there was none.
        """
        name = room_name(self._run, island, self._epoch, incarnation)
        room = self._found.pop(island, None)
        if self._within is not None and self._is_given(island):
            room = Room(name, self._within.group, self._within.first[island], given=True)
        elif room is None:
            room = Room(name, await reserve(name, island, bundles, deadline_s, labels))
        self.hold(island, room, len(bundles))
        return room

    def hold(self, island: str, room: Room, ranks: int) -> None:
        """Takes note of a room that an island has already."""
        self._held[island] = room, ranks

    def nodes(self) -> dict[str, tuple[str, ...]]:
        """Nodes of the islands that have room, rank by rank."""
        found = {}
        for island, (room, ranks) in self._held.items():
            placed = placement_group_table(room.group).get("bundles_to_node_id", {})
            nodes = tuple(placed.get(room.first + k) or "" for k in range(ranks))
            if all(nodes):
                found[island] = nodes
        return found

    def _is_given(self, island: str) -> bool:
        return self._within is not None and island in self._within.first
