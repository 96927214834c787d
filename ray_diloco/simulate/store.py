"""Simulated storage: commits in memory, writes that take time, fail, tear, or rot behind a good manifest.

A commit is good if its manifest was written and its files are what the manifest says.  Whoever goes on takes the newest
good one.  A driver that ends while it writes leaves a commit without manifest.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray_diloco.rounds.faults import AFTER_COMMIT, BEFORE_COMMIT, MID_SEND, STORAGE
from ray_diloco.rounds.ports import Snapshot
from ray_diloco.rounds.position import Position

if TYPE_CHECKING:
    from ray_diloco.simulate.anchor import Table
    from ray_diloco.simulate.world import World


@dataclass(frozen=True, eq=False)
class Commit:
    """What was written of a round.

    Attributes:
      inner: by island, what it can take up again; `heard`: islands that handed over at all.
      complete: it has a manifest; `rotten`: and a file that is not what that says.
    """

    snapshot: Snapshot
    table: Table
    inner: Mapping[str, Any]
    complete: bool = True
    rotten: bool = False
    heard: frozenset[str] = frozenset()

    @property
    def good(self) -> bool:
        """Whether a run can go on from it."""
        return self.complete and not self.rotten

    def position(self) -> Position:
        """Where a run stands that goes on from it; nothing is shared with the run that wrote it."""
        s = self.snapshot
        ledgers, counters = json.loads(json.dumps([s.ledgers, s.counters]))
        position = Position.resume(s.round, s.step, s.versions, ledgers, counters)
        position.before = dict(s.sent)
        return position


class SimStore:
    """Commits of a run, over all lives of its driver."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.commits: dict[int, Commit] = {}
        self._turn: asyncio.Lock | None = None
        self._luck = world.conditions.luck("storage")

    def open(self) -> None:
        """Begins a life of the driver."""
        self._turn = asyncio.Lock()

    @property
    def newest(self) -> Commit | None:
        """The newest good commit."""
        return max((c for c in self.commits.values() if c.good), key=lambda c: c.snapshot.round, default=None)

    async def save(
        self, snapshot: Snapshot, inner: Mapping[str, Awaitable[Sequence[Any]]], told: Awaitable[None]
    ) -> bool:
        """See `Store.save`."""
        world, life = self._world, self._world.life
        table = dict(world.anchor.table)
        world.saving(snapshot, table)
        assert self._turn is not None
        async with self._turn:
            states = {name: await entries for name, entries in inner.items()}
            await told
            trouble = self._trouble(snapshot.round)
            if trouble != BEFORE_COMMIT:
                await asyncio.sleep(world.conditions.write_s)
            if world.dead or life != world.life:
                return False
            if trouble in (BEFORE_COMMIT, MID_SEND):
                if trouble == MID_SEND and snapshot.round not in self.commits:
                    self.commits[snapshot.round] = Commit(snapshot, table, states, complete=False)
                world.event("checkpoint_failed", round=snapshot.round, reason="the storage has failed")
                return False
            # Readers look at manifests alone: one whose files rot looks well until it is used.
            kept = {name: one[0] for name, one in states.items() if one and one[0] is not None}
            heard = frozenset(name for name, entries in states.items() if entries)
            rotten = trouble == AFTER_COMMIT
            self.commits[snapshot.round] = Commit(snapshot, table, kept, rotten=rotten, heard=heard)
            world.event("checkpoint_written", round=snapshot.round, bytes=0, write_s=world.conditions.write_s)
            self._prune()
            return True

    def _trouble(self, round_: int) -> str:
        """Where a write goes wrong: before its first file, before its manifest, behind it; empty: it does not."""
        points = (BEFORE_COMMIT, MID_SEND, AFTER_COMMIT)
        of_run = self._world.round_of(self._world.rules.last_fragment, round_) if round_ else 0
        for phase in points:
            if self._world.plan.at(STORAGE, of_run, phase) is not None:
                return phase
        rate = self._world.conditions.rates.storage
        return self._luck.choice(points) if rate and self._luck.random() < rate else ""

    def _prune(self) -> None:
        """Keeps the newest good commits and what is newer."""
        good = sorted(round_ for round_, commit in self.commits.items() if commit.good)
        for old in good[: -self._world.kept_commits]:
            del self.commits[old]
