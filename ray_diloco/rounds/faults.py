"""Faults as data: what is to go wrong, with whom, in which round, at which named point.

A plan is a list in the configuration; cluster and simulator look it up at the same points and never by the clock, so
that a fault strikes the same place whatever the speed of the machine.  `FaultPlan.at` is the whole interface: adapters
ask at each point that they pass and do what the fault says.  Source: ../shared/testing.md §3.2, item 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ray_diloco.errors import ConfigError

# The points that a target passes in a round, in their order.  For an island: before its first inner step, between two,
# before it encodes, while its bytes travel, while it waits for the merge, and before it adopts it.
BEFORE_INNER, MID_INNER, BEFORE_SEND = "before_inner", "mid_inner", "before_send"
MID_SEND, BEFORE_COMMIT, AFTER_COMMIT = "mid_send", "before_commit", "after_commit"
PHASES = (BEFORE_INNER, MID_INNER, BEFORE_SEND, MID_SEND, BEFORE_COMMIT, AFTER_COMMIT)

ISLAND, SHARD, DRIVER, STORAGE = "island", "shard", "driver", "storage"

# What passes which points.  A shard meets contributions while they are sent; storage is there before a commit's first
# file, between its files and its manifest (mid_send), and when the manifest is written.
PASSES: Mapping[str, tuple[str, ...]] = {
    ISLAND: PHASES,
    SHARD: (MID_SEND, BEFORE_COMMIT, AFTER_COMMIT),
    DRIVER: PHASES,
    STORAGE: (BEFORE_COMMIT, MID_SEND, AFTER_COMMIT),
}

# What each kind can strike.
EXIT, FREEZE, DROP_LINK, SLOW_LINK = "exit", "freeze", "drop_link", "slow_link"
CORRUPT_PAYLOAD, NAN_DELTA, STALE_EPOCH = "corrupt_payload", "nan_delta", "stale_epoch"
DRIVER_EXIT, STORAGE_ERROR = "driver_exit", "storage_error"
STRIKES: Mapping[str, tuple[str, ...]] = {
    EXIT: (ISLAND, SHARD),
    FREEZE: (ISLAND, SHARD),
    DROP_LINK: (ISLAND, SHARD),
    SLOW_LINK: (ISLAND, SHARD),
    CORRUPT_PAYLOAD: (ISLAND,),
    NAN_DELTA: (ISLAND,),
    STALE_EPOCH: (ISLAND,),
    DRIVER_EXIT: (DRIVER,),
    STORAGE_ERROR: (STORAGE,),
}
KINDS = tuple(STRIKES)

ANY = -1


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
      kind: one of `KINDS`.
      target: an island's name, `shard:<k>`, `driver` or `storage`.
      round: round of the run, from 1: `1 + global step // H` while an island trains.
      phase: one of the points that the target passes (`PASSES`).
      incarnation: of the target; a process that was started again is another one.  `ANY`: the first that comes by.
      rank: of an island, which of its processes.
      seconds: how long a freeze, a cut or a slow link lasts; 0: as long as the target lives.
      bytes_per_s: what is left of a slow link.
    """

    kind: str
    target: str
    round: int
    phase: str
    incarnation: int = 0
    rank: int = 0
    seconds: float = 0.0
    bytes_per_s: float = 0.0

    def __str__(self) -> str:
        others = {"incarnation": 0, "rank": 0, "seconds": 0.0, "bytes_per_s": 0.0}
        extras = [f"{name}={getattr(self, name):g}" for name, usual in others.items() if getattr(self, name) != usual]
        return " ".join([self.kind, self.target, str(self.round), self.phase, *extras])


class FaultPlan:
    """Faults that have not struck yet.  Each strikes once."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._left: dict[tuple[str, int, str], list[Fault]] = {}
        for fault in faults:
            self._left.setdefault((fault.target, fault.round, fault.phase), []).append(fault)

    def __bool__(self) -> bool:
        return bool(self._left)

    def at(self, target: str, round_: int, phase: str, incarnation: int = 0, rank: int = 0) -> Fault | None:
        """What strikes a target at a point, if anything; that fault is then used up."""
        key = (target, round_, phase)
        for fault in self._left.get(key, ()):
            if fault.incarnation in (incarnation, ANY) and fault.rank == rank:
                self._left[key].remove(fault)
                if not self._left[key]:
                    del self._left[key]
                return fault
        return None

    @property
    def left(self) -> tuple[Fault, ...]:
        """Faults that have not struck, to be handed to another process."""
        return tuple(fault for faults in self._left.values() for fault in faults)

    def of(self, target: str) -> FaultPlan:
        """The plan of one target alone, for the process that it runs in."""
        return FaultPlan(fault for fault in self.left if fault.target == target)


def parse_faults(rows: Iterable[Any], islands: Collection[str], shards: int = 0) -> tuple[Fault, ...]:
    """The faults of a configuration: mappings of the fields of `Fault`, or text, `exit i0 3 mid_send seconds=5`.

    Args:
      rows: one each.
      islands: names of the islands of the run.
      shards: number of anchor shards; 0 where it is not known yet.

    Raises:
      ConfigError: 160 to 164.
    """
    return tuple(_checked(_fault(row), islands, shards) for row in rows)


def _fault(row: Any) -> Fault:
    if isinstance(row, str):
        first, given = [part for part in row.split() if "=" not in part], row.split()
        values: dict[str, Any] = dict(zip(("kind", "target", "round", "phase"), first, strict=False))
        values |= dict(part.split("=", 1) for part in given if "=" in part)
        complete = len(first) <= 4
    else:
        values, complete = dict(row) if isinstance(row, Mapping) else {}, True
    types = {"round": int, "incarnation": int, "rank": int, "seconds": float, "bytes_per_s": float}
    try:
        if not complete:
            raise ValueError("it has more than four words")
        return Fault(**{name: types.get(name, str)(value) for name, value in values.items()})
    except (TypeError, ValueError) as error:
        names = ", ".join(field.name for field in fields(Fault))
        raise ConfigError(
            161,
            f"faults.plan has {row!r}, which is no fault: {error}",
            f"write KIND TARGET ROUND PHASE, or a mapping with some of {names}",
        ) from error


def _checked(fault: Fault, islands: Collection[str], shards: int) -> Fault:
    if fault.kind not in STRIKES:
        raise ConfigError(162, f"faults.plan: there is no kind {fault.kind!r} ({fault})", f"use {', '.join(KINDS)}")
    target = _class_of(fault.target, islands, shards)
    if target is None or target not in STRIKES[fault.kind]:
        raise ConfigError(
            163,
            f"faults.plan: {fault.kind} cannot strike {fault.target!r} ({fault})",
            f"it strikes: {', '.join(STRIKES[fault.kind])}; targets are {', '.join(sorted(islands))}, "
            "shard:<number>, driver, storage",
        )
    if fault.phase not in PASSES[target]:
        raise ConfigError(
            164,
            f"faults.plan: {fault.target} never passes {fault.phase!r} ({fault})",
            f"it passes {', '.join(PASSES[target])}",
        )
    numbers = (fault.round - 1, fault.incarnation - ANY, fault.rank, fault.seconds, fault.bytes_per_s)
    if min(numbers) < 0 or (fault.kind == SLOW_LINK and fault.bytes_per_s == 0):
        raise ConfigError(
            165,
            f"faults.plan: a number of {str(fault)!r} is out of bounds",
            "rounds count from 1, nothing is negative, and slow_link needs bytes_per_s above 0",
        )
    return fault


def _class_of(target: str, islands: Collection[str], shards: int) -> str | None:
    """What a target is; None if there is none of that name."""
    if target in islands:
        return ISLAND
    if target in (DRIVER, STORAGE):
        return target
    kind, _, number = target.partition(":")
    known = kind == SHARD and number.isdecimal() and (shards == 0 or int(number) < shards)
    return SHARD if known else None
