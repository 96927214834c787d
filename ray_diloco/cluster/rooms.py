"""Rooms for islands that come when there is one: looked for again and again, and kept until the island is launched.

Whether there is room now only Ray knows, so a placement group is asked for and given up after a moment; it is not left
pending, since groups that nobody can place hold back others (Ray PR #62779).  What no node could ever hold is not asked
for at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence

from ray.util.placement_group import PlacementGroup

from ray_diloco.cluster.placement import Bundle, Labels, fits, reserve
from ray_diloco.cluster.roster import room_name
from ray_diloco.errors import InfeasibleError

# Seconds between two looks for room, and how long one of them takes at most.
SEEK_S = 2.0
# Rooms that were looked for are numbered from here on: those of launches have the incarnation's number.
SOUGHT = 1_000_000


class Rooms:
    """The rooms of a run that were found and not yet taken.

    Args:
      run: its name.
      epoch: of its driver.
    """

    def __init__(self, run: str, epoch: int) -> None:
        self._run, self._epoch = run, epoch
        self._found: dict[str, tuple[str, PlacementGroup]] = {}
        self._numbers = itertools.count(SOUGHT)

    async def seek(self, island: str, bundles: Sequence[Bundle], labels: Labels) -> None:
        """Returns when there is room for an island, and keeps it."""
        while island not in self._found:
            if fits(bundles, labels):
                name = room_name(self._run, island, self._epoch, next(self._numbers))
                with contextlib.suppress(InfeasibleError):
                    self._found[island] = name, await reserve(name, island, bundles, SEEK_S, labels)
                    return
            await asyncio.sleep(SEEK_S)

    def take(self, island: str) -> tuple[str, PlacementGroup] | None:
        """The room that was found for an island, with its name."""
        return self._found.pop(island, None)
