"""The fleet port over Ray: an island is a placement group and one actor per rank, replaced as a whole.

What an island is asked to do is in `island.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from ray_diloco.cluster.anchor import RayAnchor
from ray_diloco.cluster.berths import Berths, Place, berths
from ray_diloco.cluster.calls import ActorFailed
from ray_diloco.cluster.fence import Stamped
from ray_diloco.cluster.island import FleetSettings, RayIsland
from ray_diloco.cluster.job import RankJob
from ray_diloco.cluster.placement import Bundle, Labels, nodes
from ray_diloco.cluster.rank import RankActor
from ray_diloco.cluster.rooms import Rooms
from ray_diloco.cluster.roster import Crew, rank_name
from ray_diloco.errors import DilocoError
from ray_diloco.inner.environment import rank_environment
from ray_diloco.rounds.ports import Island, IslandLost, Journal


@dataclass(frozen=True)
class IslandSpec:
    """How an island is built: room for each rank, environment of its processes, what they do, and where."""

    bundles: tuple[Bundle, ...]
    threads: int
    accelerator: str
    job: RankJob
    labels: Labels = field(default_factory=dict)
    region: str = ""


class RayFleet:
    """Starts and ends islands; see `rounds.ports.Fleet`."""

    def __init__(
        self,
        specs: Mapping[str, IslandSpec],
        anchor: RayAnchor,
        journal: Journal,
        settings: FleetSettings,
        crews: Mapping[str, Crew] | None = None,
    ) -> None:
        self.islands: dict[str, RayIsland] = {}
        self._crews = dict(crews or {})
        self._H = next(iter(specs.values())).job.channels[0].H
        self._specs, self._anchor, self._journal, self._settings = specs, anchor, journal, settings
        self._rooms = Rooms(settings.run, settings.epoch, settings.within)
        # Called with the name of an island whose machine is about to go.
        self.noticed: Callable[[str], None] | None = None
        anchor.awaited, anchor.berths = self._fetch, self._berths

    async def launch(self, name: str, incarnation: int) -> RayIsland:
        """Starts an island from nothing to a rank that could train, or takes over one that lives."""
        if name in self._crews and (taken := await self._take_over(self._crews.pop(name), incarnation)):
            return taken
        spec, settings = self._specs[name], self._settings
        deadline_s = settings.deadlines.placement_s
        room = await self._rooms.take(name, incarnation, spec.bundles, spec.labels, deadline_s)
        faults, orphan_s = settings.faults.of(name), settings.deadlines.orphan_s
        job = replace(spec.job, incarnation=incarnation, orphan_s=orphan_s, faults=faults)
        ranks = [
            RankActor.options(
                name=rank_name(room.name, k, len(spec.bundles)),
                lifetime="detached",
                num_cpus=bundle.get("CPU", 0.0),
                num_gpus=bundle.get("GPU", 0.0),
                scheduling_strategy=room.strategy(k),
                runtime_env={
                    "env_vars": rank_environment(
                        k, len(spec.bundles), threads=spec.threads, accelerator=spec.accelerator
                    )
                },
            ).remote(job, k)
            for k, bundle in enumerate(spec.bundles)
        ]
        stamped = [Stamped(rank, settings.epoch) for rank in ranks]
        return await self._ready(RayIsland(name, incarnation, stamped, room, settings, self._H), anew=True)

    async def room(self, name: str) -> None:
        """Waits until there is room for an island, and keeps it for its launch."""
        if name not in self._crews:
            await self._rooms.seek(name, self._specs[name].bundles, self._specs[name].labels)

    async def retire(self, island: Island) -> None:
        """Ends an island; one that is gone already is no matter."""
        held = self.islands.pop(island.name, None)
        if held is not None:
            held.end()

    def _fetch(self, islands: Sequence[str], payload: Any, node_id: str | None) -> None:
        for name in islands:
            if (island := self.islands.get(name)) is not None:
                island.fetch(payload, node_id)

    def _berths(self, built: Sequence[str]) -> Berths:
        """Where the anchor is to live, now that one island has come up on the nodes given."""
        regions = self._regions()
        placed = self._rooms.nodes()
        places = {
            name: Place(spec.region or regions[placed[name][0]], placed[name])
            for name, spec in self._specs.items()
            if name in placed and regions.keys() >= set(placed[name])
        }
        home = regions.get(ray.get_runtime_context().get_node_id(), "")
        return berths(places, home) if places else Berths(built)

    def _regions(self) -> dict[str, str]:
        """Region of every living node."""
        return {node["NodeID"]: self._settings.where.region(node) for node in nodes()}

    async def _take_over(self, crew: Crew, incarnation: int) -> RayIsland | None:
        """An island that another driver has started; None if it is of no use, and then it is ended."""
        stamped = [Stamped(rank, self._settings.epoch) for rank in crew.ranks]
        self._rooms.hold(crew.name, crew.room, len(stamped))
        try:
            return await self._ready(
                RayIsland(crew.name, incarnation, stamped, crew.room, self._settings, self._H), anew=False
            )
        except IslandLost as lost:
            text = f"island {crew.name} could not be taken over from the driver before: {lost}"
            self._journal.event("warning", text=text)
            return None

    async def _ready(self, island: RayIsland, *, anew: bool) -> RayIsland:
        """Brings an island to where it could train."""
        try:
            if anew:
                await island.build(self._anchor)
                await self._restore(island)
            else:
                await island.attach(self._anchor)
                await self._restore_if_newest(island)
        except ActorFailed as failed:
            island.end()
            raise IslandLost(str(failed)) from failed
        except BaseException:  # also where the launch is cancelled: nobody else knows these processes
            island.end()
            raise
        self.islands[island.name] = island
        island.region = self._specs[island.name].region or self._regions().get(island.node_id, "")
        island.tell(lambda: self.noticed(island.name) if self.noticed is not None else None)
        return island

    async def _restore_if_newest(self, island: RayIsland) -> None:
        """Gives a living island the inner state of the commit that the run goes on from.

        That is none of a founding commit; where a later one has none of it, the island keeps its own.
        """
        newest, saved = self._settings.newest(), await self._settings.inner_of(island.name)
        inner = "kept"
        if newest is not None and newest.round == 0:
            inner = "new"
        elif newest is not None and saved is not None and saved.round == newest.round:
            inner = "restored"
        self._journal.event("island_reattached", island=island.name, incarnation=island.incarnation, inner=inner)
        if inner == "new":
            await island.reset(rewarm=False)
        elif inner == "restored":
            await self._restore(island)

    async def _restore(self, island: RayIsland) -> None:
        newest, reason = self._settings.newest(), "no commit that is kept holds inner state of this island"
        if newest is None or newest.round == 0:
            # The founding commit holds no inner state, and ranks that were just started have not trained.
            return
        try:
            manifest = await self._settings.inner_of(island.name)
            if manifest is not None:
                fitted = await island.restore(manifest, parameters=manifest.round == newest.round)
                self._journal.event("inner_state_restored", island=island.name, round=manifest.round)
                if not fitted:
                    text = f"the error memory of {island.name} does not fit its ranks any more and begins anew"
                    self._journal.event("warning", text=text)
                return
        except DilocoError as error:
            reason = error.what
        # What was found may have fitted some of the ranks, and they would step apart.
        await island.reset()
        self._journal.event("inner_state_reset", island=island.name, round=newest.round, reason=reason)
