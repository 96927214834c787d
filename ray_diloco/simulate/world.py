"""A whole simulated run: the run loop of `rounds/` over simulated ports, through all lives of its driver.

A life is one `Run` on a virtual clock.  When the driver ends, on the floor or because a shard of the anchor is gone,
or the run is stopped, the next life goes on from the newest good commit, as the same command would.  An auditor looks
on all the while and holds the run to what must always hold (../shared/design.md).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray_diloco.errors import ClusterError, DilocoError, SyncError
from ray_diloco.outer.schedule import Due
from ray_diloco.rounds.faults import DRIVER, SHARD, FaultPlan
from ray_diloco.rounds.loop import Run
from ray_diloco.rounds.ports import BlockLoss, Island, IslandLost, Offer, Prepared, Snapshot, Step
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rules import Rules
from ray_diloco.rounds.timing import Timing
from ray_diloco.simulate.anchor import Kept, ShardLostError, SimAnchor, Table
from ray_diloco.simulate.audit import Auditor
from ray_diloco.simulate.clock import Crowding, Stuck, run_virtual
from ray_diloco.simulate.conditions import Conditions, Rates, waiting_time
from ray_diloco.simulate.figures import Figures
from ray_diloco.simulate.island import SimIsland
from ray_diloco.simulate.links import Hub
from ray_diloco.simulate.payload import Published
from ray_diloco.simulate.points import Point
from ray_diloco.simulate.setup import Setup
from ray_diloco.simulate.store import SimStore

# The driver of a life is gone.
GONE = "gone"


@dataclass
class Event:
    """A line of the tape."""

    t: float
    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Steer:
    """What somebody asks of a run, at a virtual second.

    Attributes:
      drain: the island that is to leave; empty: the number of islands is to be `count`.
      returns: its machine is about to go, and its slot is filled again after a while.
    """

    at: float
    drain: str = ""
    returns: bool = False
    count: int = 0


@dataclass
class Ending:
    """How a simulated run ended.

    Attributes:
      status: `finished`, or `failed`.
      error: what it failed with.
      lives: of its driver.
      seconds: virtual, from its start.
    """

    status: str
    error: DilocoError | None
    lives: int
    seconds: float


@dataclass
class World:
    """A run to be simulated.

    Attributes:
      setup, conditions: what, and in which world.
      plan: faults at named points.
      stops: virtual seconds at which the run is asked to stop; it goes on afterwards.
      steers: what else is asked of it; what comes while there is no driver waits for the next one.
      audited: hold it to the invariants; costs memory for every anchor that was.
      kept_commits: good commits that the store keeps.
      keep_events: keep the tape.
      watch: called after each commit.
    """

    setup: Setup
    conditions: Conditions = field(default_factory=Conditions)
    plan: FaultPlan = field(default_factory=FaultPlan)
    stops: Sequence[float] = ()
    steers: Sequence[Steer] = ()
    audited: bool = True
    kept_commits: int = 4
    keep_events: bool = True
    watch: Callable[[World], None] | None = None

    def __post_init__(self) -> None:
        self.events: list[Event] = []
        self.figures = Figures()
        self.auditor = Auditor(self.setup) if self.audited else None
        self.store = SimStore(self)
        # By island, the newest progress point.
        self.points: dict[str, Point] = {}
        self.shards = tuple(f"{SHARD}:{k}" for k in range(max(1, self.setup.config.anchor.shards)))
        self.life = 0
        self.dead = False
        self._clock = 0.0
        self._stops = sorted(self.stops)
        self._steers = sorted(self.steers, key=lambda steer: steer.at)
        self._gone: asyncio.Future[str] | None = None
        # Nothing goes wrong by itself; the plan is used up as it strikes.
        self._calm = not self.plan and self.conditions.rates == Rates()

    # All lives.

    @property
    def now(self) -> float:
        """Virtual seconds since the start of the run, while it runs."""
        return asyncio.get_running_loop().time()

    def run(self) -> Ending:
        """Runs to the end."""
        restarts = 0
        while True:
            status, error = self._live()
            if status == "finished":
                return self._ended(status, None)
            if error is not None and not isinstance(error, ShardLostError):
                return self._ended("failed", error)
            if status != "stopped":
                restarts += 1
            if restarts > self.conditions.restarts:
                what = f"the driver or a shard of the anchor was lost {restarts} times"
                return self._ended(
                    "failed", SyncError(459, what, "make them more reliable, or simulate.restarts larger")
                )
            self.life += 1
            self._clock += self.conditions.restart_s

    def _live(self) -> tuple[str, DilocoError | None]:
        """One life of the driver."""
        self.dead = False
        grid_s = self.conditions.grid_s
        crowding = Crowding(grid_s, self.conditions.luck("turns", self.life)) if grid_s else None
        try:
            return run_virtual(self._sail(), self._clock, crowding), None
        except DilocoError as error:
            return "failed", error
        except Stuck as error:
            if self.auditor is not None:
                self.auditor.blame(f"the run can never end: {error}")
            return "failed", SyncError(457, f"every task waits for another in life {self.life}", "report it")
        finally:
            self.dead = True

    async def _sail(self) -> str:
        loop = asyncio.get_running_loop()
        self._gone = loop.create_future()
        self._asked = False
        self.hub = Hub(self.conditions.hub)
        self.store.open()
        newest = self.store.newest
        self.position = newest.position() if newest else Position()
        self._restored = newest
        self.anchor = SimAnchor(self, newest.table if newest else None)
        if self.auditor is not None:
            self.auditor.begin(self.position, newest is not None)
        self.rules: Rules = self.setup.rules(self.position)
        run = Run(self.rules, self.position, self, self.anchor, self.store, self)
        task = asyncio.create_task(run.run())
        self._disturb(loop, run)
        try:
            ends: set[asyncio.Future[Any]] = {task, self._gone}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._clock = loop.time()
        if self._gone.done():
            return GONE
        status = task.result()
        self.dead = True
        if self.auditor is not None:
            self.auditor.end(status, self.position, self.rules, cut_short=self._asked)
            self._audit_inner_states(status)
        return status

    def _audit_inner_states(self, status: str) -> None:
        """Who is in the newest commit of a run that was stopped has handed over for it.

        Where things go wrong, somebody may have been lost whom nobody misses yet; but not everybody.
        """
        newest, gone = self.store.newest, {"island_lost", "island_left"} & {event.kind for event in self.events}
        if self.auditor is None or newest is None or status != "stopped" or gone:
            return
        members = set(newest.snapshot.members)
        missing = members - newest.heard
        if missing and (self._calm or (missing == members and len(members) > 1)):
            self.auditor.blame(f"the commit of {newest.snapshot.round} has no inner state of {sorted(missing)}")

    def _disturb(self, loop: asyncio.AbstractEventLoop, run: Run) -> None:
        """Sets timers for what befalls the driver of this life."""
        if self._stops:
            loop.call_at(max(self._stops[0], loop.time()), self._stop, run)
        for steer in self._steers:
            loop.call_at(max(steer.at, loop.time()), self._steer, run, steer)
        seconds = waiting_time(self.conditions.luck("driver", self.life), self.conditions.rates.driver)
        if seconds < float("inf"):
            loop.call_later(seconds, self._drop)

    def _stop(self, run: Run) -> None:
        self._stops.pop(0)
        self._asked = True
        run.stop()

    def _steer(self, run: Run, steer: Steer) -> None:
        if self.dead:
            return
        self._steers.remove(steer)
        try:
            if steer.drain:
                run.drain(steer.drain, returns=steer.returns)
            else:
                run.scale({"": steer.count})
        except ClusterError:
            # There is no such island now, and whoever asked is told so.
            self.figures.counts["steer_refused"] += 1

    def _drop(self) -> None:
        self.dead = True
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(GONE)

    def _ended(self, status: str, error: DilocoError | None) -> Ending:
        return Ending(status, error, self.life + 1, self._clock)

    # What islands and anchors tell.

    def pass_driver(self, round_: int, phase: str) -> None:
        """Somebody passes a point: the driver may end there."""
        if self.plan and not self.dead and self.plan.at(DRIVER, round_, phase, self.life) is not None:
            self._drop()

    def round_of(self, fragment: int, round_: int) -> int:
        """The round of the run in which a round of a fragment falls."""
        schedule = self.rules.schedule
        if self.rules.free:
            return 1 + (round_ - 1) * self.setup.config.run.rounds // schedule.rounds
        return 1 + max(0, schedule.emission_step(Due(fragment, round_)) - 1) // schedule.H

    def spent(self, steps: int, tokens: int, seconds: float) -> None:
        """An island has trained."""
        self.figures.trained_s += seconds
        self.figures.trained_tokens += tokens
        self.figures.trained_steps += steps

    def seen(self, published: Published) -> None:
        """An island adopts an anchor."""
        if self.auditor is not None and not self.dead:
            self.auditor.adopted(published)

    def founding(self) -> None:
        """A new initialisation becomes version 0."""
        if self.auditor is not None and (self.store.newest is not None or self.anchor.founded):
            self.auditor.blame("a fresh initialisation was made the anchor of a run that has a commit")

    def anchors_are(self, table: Table) -> None:
        """The anchors of a new run."""
        if self.auditor is not None and not self.dead:
            self.auditor.found(table)

    def moved(self, step: Step, moved: dict[str, Kept]) -> None:
        """Anchors have moved."""
        if self.auditor is not None and not self.dead:
            self.auditor.moved(step, moved)

    def saving(self, snapshot: Snapshot, table: Table) -> None:
        """A commit is being written."""
        if self.auditor is not None and not self.dead:
            self.auditor.saving(snapshot, table)

    # The port `Fleet`.

    async def launch(self, name: str, incarnation: int) -> Island:
        """See `Fleet.launch`."""
        conditions = self.conditions
        await asyncio.sleep(conditions.launch_s + (conditions.repair_s if incarnation else 0.0))
        island = SimIsland(self, name, incarnation)
        newest = self.store.newest
        state = newest.inner.get(name) if newest is not None and newest is self._restored else None
        if state is not None and incarnation == 0:
            island.restore(state)
        return island

    async def room(self, name: str) -> None:
        """See `Fleet.room`."""

    async def retire(self, island: Island) -> None:
        """See `Fleet.retire`."""

    # The port `Journal`.

    def event(self, kind: str, **fields: Any) -> None:
        """See `Journal.event`."""
        if self.dead:
            return
        if self.keep_events:
            self.events.append(Event(asyncio.get_running_loop().time(), kind, fields))
        self.figures.counts[kind] += 1

    def island_round(self, due: Due, island: str, timing: Timing) -> None:
        """See `Journal.island_round`."""
        self.figures.add(timing)

    def committed(self, due: Due, prepared: Prepared, seconds: float, offers: Sequence[tuple[Offer, float]]) -> None:
        """See `Journal.committed`."""
        self.event(
            "round_committed"
            if due.fragment == self.position.closing(due.round, self.rules.last_fragment)
            else "fragment_committed",
            round=due.round,
            fragment=due.fragment,
            version=prepared.version,
            islands=[offer.island for offer, _ in offers],
            tokens=self.position.tokens,
        )
        self.figures.contributions += len(offers)
        if self.watch is not None:
            self.watch(self)

    def evaluated(self, round_: int, losses: Sequence[BlockLoss]) -> None:
        """See `Journal.evaluated`."""
        loss = sum(loss.nats for loss in losses) / len(losses)
        self.event("evaluation", round=round_, loss=loss, ppl=math.exp(min(loss, 700.0)), blocks=len(losses))

    async def trace(self, due: Due | None, prepared: Prepared | None, offers: Sequence[tuple[Offer, float]]) -> None:
        """See `Journal.trace`."""


__all__ = ["Ending", "Event", "IslandLost", "Steer", "World"]
