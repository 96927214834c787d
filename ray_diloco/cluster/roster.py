"""Ranks that outlive their driver: how they are named, how the next driver finds them, how none of them stays.

Ray ends what an actor has started when that actor dies, so ranks are started detached from their driver.  Their room
belongs to the command that waits for the run, and ends with it; a rank that nobody speaks to ends itself.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, placement_group_table, remove_placement_group

from ray_diloco.cluster.enclosure import Enclosure, Room


@dataclass(frozen=True)
class Crew:
    """All ranks of an island that an earlier driver has left behind: their actors by rank, and their room."""

    name: str
    ranks: tuple[Any, ...]
    room: Room


def room_name(run: str, island: str, epoch: int, incarnation: int) -> str:
    """Name of the room of an island; no two are alike on a cluster."""
    return f"{_prefix(run)}{island}, {epoch}.{incarnation}"


def rank_name(room: str, rank: int, ranks: int) -> str:
    """Name of a rank's actor."""
    return f"{room}, rank {rank} of {ranks}"


def survivors(run: str, within: Enclosure | None = None) -> dict[str, Crew]:
    """Islands of a run that live and whose driver does not; what is left of others is ended."""
    given = within.first if within is not None else {}
    found: defaultdict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
    wanted: dict[tuple[str, str], int] = {}
    for name, island, room, rank, number in _ranks(run):
        with contextlib.suppress(ValueError):  # it died just now
            found[room, island][rank] = ray.get_actor(name)
            wanted[room, island] = number
    rooms = {group["name"] for group in placement_group_table().values() if group["state"] == "CREATED"}
    crews: dict[str, Crew] = {}
    taken = set()
    for (room, island), ranks_of in found.items():
        whole = len(ranks_of) == wanted[room, island] and island not in crews
        ranks = tuple(ranks_of[k] for k in sorted(ranks_of))
        if whole and within is not None and island in given:
            crews[island] = Crew(island, ranks, Room(room, within.group, given[island], given=True))
        elif whole and room in rooms:
            taken.add(room)
            crews[island] = Crew(island, ranks, Room(room, get_placement_group(room)))
        else:
            for handle in ranks:
                ray.kill(handle)
    for room in rooms - taken:
        if room.startswith(_prefix(run)):
            remove_placement_group(get_placement_group(room))
    return crews


def end_all(run: str) -> None:
    """Ends all ranks of a run that its drivers have left behind."""
    for name, *_ in _ranks(run):
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name))


def _prefix(run: str) -> str:
    return f"run {run}: island "


def _ranks(run: str) -> list[tuple[str, str, str, int, int]]:
    """Living ranks: name of the actor, island, room, number, and how many there are of that island."""
    pattern = re.compile(rf"({re.escape(_prefix(run))}(.+), \d+\.\d+), rank (\d+) of (\d+)")
    names = [name for name in ray.util.list_named_actors() if isinstance(name, str)]
    matches = [match for match in map(pattern.fullmatch, names) if match]
    return [(match[0], match[2], match[1], int(match[3]), int(match[4])) for match in matches]
