"""The fleet port over Ray: an island is a placement group and one actor per rank, replaced as a whole.

Any exception of any rank means that the island failed.  `watch.py` finds what becomes of ranks.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayActorError

from ray_diloco.checkpoint.manifest import FileEntry, Manifest
from ray_diloco.cluster.anchor import RayAnchor
from ray_diloco.cluster.calls import ActorFailed, answer, answers
from ray_diloco.cluster.enclosure import Enclosure, Room
from ray_diloco.cluster.fence import SUPERSEDED, Stamped
from ray_diloco.cluster.misfortune import NO_FAULTS, Misfortune, Misfortunes
from ray_diloco.cluster.placement import Bundle, Labels
from ray_diloco.cluster.rank import Description, Progress, RankActor, RankJob
from ray_diloco.cluster.rooms import Rooms
from ray_diloco.cluster.roster import Crew, rank_name
from ray_diloco.cluster.storage import Storage
from ray_diloco.cluster.watch import Watch
from ray_diloco.config.schema import DeadlinesConfig
from ray_diloco.errors import EXIT_BAD_INPUT, DilocoError
from ray_diloco.inner.environment import rank_environment
from ray_diloco.rounds.faults import BEFORE_INNER, BEFORE_SEND, MID_INNER, MID_SEND
from ray_diloco.rounds.ports import BlockLoss, Emission, Island, IslandLost, Journal, Piece, Report, Update, Work


@dataclass(frozen=True)
class IslandSpec:
    """How an island is built: room for each rank, environment of its processes, what they do, and where."""

    bundles: tuple[Bundle, ...]
    threads: int
    accelerator: str
    job: RankJob
    labels: Labels = field(default_factory=dict)
    region: str = ""


@dataclass(frozen=True)
class FleetSettings:
    """What islands have in common.

    Attributes:
      run: name of the run.
      storage: where commits go.
      save_inner: whether inner states are part of commits.
      newest: gives the newest durable commit.
      inner_of: finds the newest one that holds inner state of an island, which its successor takes up.
      epoch: of the driver.
      faults: what goes wrong on purpose; `driver`: with this process.
      within: room that the run was given.
    """

    run: str
    storage: Storage
    save_inner: bool
    deadlines: DeadlinesConfig
    newest: Callable[[], Manifest | None]
    inner_of: Callable[[str], Awaitable[Manifest | None]]
    epoch: int = 0
    faults: Misfortunes = NO_FAULTS
    driver: Misfortune | None = None
    within: Enclosure | None = None


class RayIsland:
    """One island; see `rounds.ports.Island`."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        ranks: Sequence[Any],
        room: Room,
        settings: FleetSettings,
        H: int = 1,
    ) -> None:
        self.name, self.incarnation, self.region = name, incarnation, ""
        self.restored: Mapping[int, int] | None = None
        self._watch: Watch | None = None
        self._ranks, self._room, self._settings = list(ranks), room, settings
        self._shards = 0
        self._H, self._round = H, 0

    @property
    def progress(self) -> Progress:
        """Where rank 0 is."""
        return Progress(0, 0, 0, math.nan, 0.0) if self._watch is None else self._watch.progress

    def tell(self, noticed: Callable[[], None]) -> None:
        """Says whom to call when a rank hears that its machine is about to go."""
        if self._watch is not None:
            self._watch.noticed = noticed

    async def train(self, work: Work) -> Report:
        """Trains a segment on all ranks."""
        self._round = 1 + work.start_step // self._H
        self._pass(BEFORE_INNER)
        calls = [
            rank.train.remote(work.start_step, work.steps, work.lease.blocks, work.seconds) for rank in self._ranks
        ]
        deadline_s = self._settings.deadlines.train_s or None
        self._pass(MID_INNER)
        stepping = nullcontext() if self._watch is None else self._watch.stepping()
        with stepping:
            reports: list[Report] = await self._watched(calls, f"training segment {work.segment}", deadline_s)
        return max(reports, key=lambda r: r.seconds)

    async def emit(self, fragment: int, base_version: int, round_: int) -> Emission:
        """Encodes the pseudo-gradient on all ranks."""
        self._pass(BEFORE_SEND)
        returns = 1 + self._shards
        calls = [rank.emit.options(num_returns=returns).remote(fragment, base_version) for rank in self._ranks]
        emission = await self._emission(calls, f"emitting round {round_}")
        self._pass(MID_SEND)
        return emission

    async def found(self) -> Sequence[Piece]:
        """The parameters as initialised."""
        calls = [rank.read.options(num_returns=1 + self._shards).remote() for rank in self._ranks]
        return (await self._emission(calls, "reading the parameters")).pieces

    async def adopt(self, updates: Sequence[Update], merged: Mapping[int, bool]) -> None:
        """Sets θ and B on all ranks, by the rule of adoption."""
        fragments = [update.fragment for update in updates]
        calls = [rank.adopt.remote(fragments, dict(merged), *_payloads(updates)) for rank in self._ranks]
        await self._exchanged(calls, "adopting the anchor")

    async def join(self, updates: Sequence[Update]) -> None:
        """Sets θ and B on all ranks to anchors."""
        fragments = [update.fragment for update in updates]
        calls = [rank.join.remote(fragments, *_payloads(updates)) for rank in self._ranks]
        await self._exchanged(calls, "adopting the anchor")

    async def evaluate(self, blocks: Sequence[int], at: Sequence[Update] | None) -> Sequence[BlockLoss]:
        """Evaluates held-out blocks, cut evenly over the ranks."""
        n = len(self._ranks)
        parts = [blocks[len(blocks) * k // n : len(blocks) * (k + 1) // n] for k in range(n)]
        anchors = _payloads(at or ())
        calls = [rank.evaluate.remote(part, *anchors) for rank, part in zip(self._ranks, parts, strict=True)]
        losses = await self._exchanged(calls, "evaluating")
        flat = [loss for part in losses for loss in part]
        return [BlockLoss(block, nats, tokens) for block, (nats, tokens) in zip(blocks, flat, strict=True)]

    async def save(self, round_: int, versions: Mapping[int, int] | None) -> Awaitable[Sequence[FileEntry]]:
        """Copies the inner state now; the awaitable yields its files once written."""
        settings = self._settings
        if not settings.save_inner:
            return _nothing()
        calls = [rank.save.remote(settings.storage, round_, versions) for rank in self._ranks]
        await self._exchanged(calls, "copying inner state")
        # Goes on by itself: a commit that has failed meanwhile does not ask how it ended.
        written = asyncio.ensure_future(self._saved(round_, settings.deadlines.exchange_s))
        written.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return written

    async def restore(self, manifest: Manifest, parameters: bool) -> bool:
        """Takes up the inner state of a commit, with parameters and bases if they are those of its anchors.

        Returns:
          Whether what the exchange remembered (error feedback) fitted.

        Raises:
          ActorFailed, DilocoError: the state of the optimiser does not fit.
        """
        calls = [rank.restore.remote(self._settings.storage, manifest, parameters) for rank in self._ranks]
        what = f"restoring the inner state of {self.name}"
        found = await answers(calls, what, self._settings.deadlines.exchange_s)
        fitted = all(one for one, _ in found)
        self.restored = found[0][1] if fitted else None
        return fitted

    async def reset(self) -> None:
        """Makes the inner state that of optimisers that have not stepped, and warms the learning rate up again."""
        await self._exchanged([rank.reset.remote() for rank in self._ranks], "resetting the inner state")

    async def build(self, anchor: RayAnchor) -> None:
        """Brings the ranks together and, for the first island, the anchor to life."""
        deadlines = self._settings.deadlines
        opened = self._ranks[0].open_store.remote(deadlines.launch_s)
        host, port = await answer(opened, f"starting rank 0 of {self.name}", deadlines.launch_s)
        built = await self._call(
            [rank.build.remote(host, port) for rank in self._ranks], "building the model", deadlines.launch_s
        )
        self._watch = Watch(self.name, self._ranks, deadlines.heartbeat_s, deadlines.silence_s)
        await self._connect(anchor, built)

    async def attach(self, anchor: RayAnchor) -> None:
        """Takes over ranks that another driver has left behind, as soon as they have done what it asked for."""
        deadlines = self._settings.deadlines
        self._watch = Watch(self.name, self._ranks, deadlines.heartbeat_s, deadlines.silence_s)
        calls = [rank.attach.remote(self.incarnation) for rank in self._ranks]
        found = await self._watched(calls, "attaching", deadlines.launch_s)
        if len({description.calls for description in found}) > 1:
            raise IslandLost(
                f"the driver died while it called the ranks of {self.name}: they stand at different points"
            )
        await self._connect(anchor, found)

    async def _connect(self, anchor: RayAnchor, built: Sequence[Description]) -> None:
        """Tells ranks of the anchor, and brings it to life for the first island."""
        deadlines = self._settings.deadlines
        self.region = built[0].region
        node_ids = [b.node_id for b in built]
        await anchor.start(built[0].layout, node_ids, self._settings.newest(), self._settings.storage)
        self._shards = anchor.parts
        connected = [rank.connect.remote(anchor.parts, anchor.cuts) for rank in self._ranks]
        await self._call(connected, "connecting to the anchor", deadlines.exchange_s)

    def _pass(self, phase: str) -> None:
        if self._settings.driver is not None:
            self._settings.driver.pass_(self._round, phase)

    def end(self) -> None:
        """Kills the ranks and gives their room back."""
        if self._watch is not None:
            self._watch.end()
        for rank in self._ranks:
            ray.kill(rank.handle)
        self._room.release()

    async def _emission(self, calls: Sequence[Sequence[Any]], what: str) -> Emission:
        stats = await self._exchanged([returned[0] for returned in calls], what)
        pieces = tuple(
            Piece(k, nbytes, handle)
            for s, (_, *handles) in zip(stats, calls, strict=True)
            for k, (nbytes, handle) in enumerate(zip(s.nbytes, handles, strict=True))
            if nbytes
        )
        norm = math.sqrt(math.fsum(s.squared_norm for s in stats)) if all(s.finite for s in stats) else math.inf
        return Emission(pieces, norm, all(s.finite for s in stats))

    async def _saved(self, round_: int, deadline_s: float) -> Sequence[FileEntry]:
        calls = [rank.saved.remote(round_, deadline_s) for rank in self._ranks]
        return [
            entry
            for entries in await answers(calls, f"writing inner state of {self.name}", deadline_s)
            for entry in entries
        ]

    async def _call(self, calls: Sequence[Any], what: str, deadline_s: float | None) -> list[Any]:
        try:
            return await answers(calls, f"{what} on {self.name}", deadline_s)
        except ActorFailed as failed:
            how = "died" if isinstance(failed.cause, RayActorError) else "failed"
            raise IslandLost(str(failed), how) from failed
        except DilocoError as error:
            # What the user has to mend would come again; anything else is this island's own trouble.
            if error.exit_code == EXIT_BAD_INPUT or error.number == SUPERSEDED:
                raise
            raise IslandLost(f"{what} on {self.name} failed: {error.what}") from error

    async def _exchanged(self, calls: Sequence[Any], what: str) -> list[Any]:
        return await self._watched(calls, what, self._settings.deadlines.exchange_s)

    async def _watched(self, calls: Sequence[Any], what: str, deadline_s: float | None) -> list[Any]:
        """Waits for calls as long as their ranks live."""
        work = asyncio.ensure_future(self._call(calls, what, deadline_s))
        return await work if self._watch is None else await self._watch.guarded(work)


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

    async def _take_over(self, crew: Crew, incarnation: int) -> RayIsland | None:
        """An island that another driver has started; None if it is of no use, and then it is ended."""
        stamped = [Stamped(rank, self._settings.epoch) for rank in crew.ranks]
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
        island.region = self._specs[island.name].region or island.region
        island.tell(lambda: self.noticed(island.name) if self.noticed is not None else None)
        return island

    async def _restore_if_newest(self, island: RayIsland) -> None:
        """Gives a living island the inner state of the commit that the run goes on from; else it keeps its own."""
        newest, saved = self._settings.newest(), await self._settings.inner_of(island.name)
        restores = newest is not None and saved is not None and saved.round == newest.round
        inner = "restored" if restores else "kept"
        self._journal.event("island_reattached", island=island.name, incarnation=island.incarnation, inner=inner)
        if restores:
            await self._restore(island)

    async def _restore(self, island: RayIsland) -> None:
        newest, reason = self._settings.newest(), "no commit that is kept holds inner state of this island"
        if newest is None:
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


async def _nothing() -> Sequence[FileEntry]:
    return ()


def _payloads(updates: Sequence[Update]) -> list[Any]:
    return [piece.handle for update in updates for piece in update.pieces if piece.nbytes]
