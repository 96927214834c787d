"""What an island that goes on from a commit has still to adopt of rounds that were over by then.

Where merges are adopted with a delay, a commit finds islands before the adoption of one round, or of several where the
delay is longer than a round.  Keepers have kept what was sent of each, and the position which round made it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ray_diloco.rounds.ports import Anchor, Update
from ray_diloco.rounds.position import Position


async def inherited(
    anchor: Anchor, island: str, bases: Mapping[int, int], position: Position
) -> dict[int, Sequence[Update]]:
    """The anchors beyond an island's bases, by fragment, oldest first; of fragments that have none, nothing."""
    found: dict[int, Sequence[Update]] = {}
    if all(bases[fragment] >= version for fragment, version in position.versions.items()):
        return found
    for newest in await anchor.current(island):
        fragment, rounds = newest.fragment, {version: r for r, version in position.made.get(newest.fragment, ())}
        if bases[fragment] >= newest.version:
            continue
        between = [v for v in sorted(rounds) if bases[fragment] < v < newest.version]
        older = [await anchor.passed(island, fragment, version) for version in between]
        kept = [update for update in older if update is not None] + [newest]
        found[fragment] = [replace(update, round=rounds.get(update.version, 0)) for update in kept]
    return found


def made_by(updates: Sequence[Update], round_: int) -> Update:
    """That which a round made, or the newest before it if it was void; the newest of all if there is neither."""
    older = [update for update in updates if 0 < update.round <= round_]
    return (older or updates)[-1]
