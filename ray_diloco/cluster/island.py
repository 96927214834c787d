"""The island port over Ray: ranks that are spoken to as one, and lost as one.

Any exception of any rank means that the island failed.  `watch.py` finds what becomes of ranks, `ahead.py` has what is
asked of them before anybody waits for it.
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
from ray_diloco.checkpoint.points import Mark
from ray_diloco.cluster.ahead import Ahead, handed_over
from ray_diloco.cluster.anchor import RayAnchor
from ray_diloco.cluster.calls import ActorFailed, Heard, answer, answers
from ray_diloco.cluster.enclosure import Enclosure, Room
from ray_diloco.cluster.fence import SUPERSEDED
from ray_diloco.cluster.misfortune import NO_FAULTS, Misfortune, Misfortunes
from ray_diloco.cluster.points import Keeping, recover
from ray_diloco.cluster.said import Description, EmitStats, Progress, Trained
from ray_diloco.cluster.storage import Storage
from ray_diloco.cluster.traffic import Traffic
from ray_diloco.cluster.watch import Watch
from ray_diloco.cluster.whereabouts import BY_LABEL, Whereabouts
from ray_diloco.config.schema import DeadlinesConfig
from ray_diloco.errors import EXIT_BAD_INPUT, DilocoError
from ray_diloco.rounds.clock import now
from ray_diloco.rounds.faults import BEFORE_INNER, BEFORE_SEND, MID_INNER, MID_SEND
from ray_diloco.rounds.ports import Base, BlockLoss, Emission, IslandLost, Piece, Recovery, Report, Update, Work


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
      where: how nodes say in which region they are.
      progress_every: steps between progress points.
      traffic: hears what the machines of ranks have counted.
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
    where: Whereabouts = BY_LABEL
    progress_every: int = 0
    traffic: Traffic = field(default_factory=Traffic)


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
        self.restored: Mapping[int, Base] | None = None
        self._watch: Watch | None = None
        self._ranks, self._room, self._settings = list(ranks), room, settings
        self._shards = 0
        self._nodes: list[str] = []
        self._ahead = Ahead()
        self._H, self._round = H, 0

    @property
    def progress(self) -> Progress:
        """Where rank 0 is."""
        return Progress(0, 0, 0, math.nan, 0.0) if self._watch is None else self._watch.progress

    @property
    def node_id(self) -> str:
        """Node of rank 0; empty before it is built."""
        return self._nodes[0] if self._nodes else ""

    def tell(self, noticed: Callable[[], None]) -> None:
        """Says whom to call when a rank hears that its machine is about to go."""
        if self._watch is not None:
            self._watch.noticed = noticed

    async def train(self, work: Work) -> Report:
        """Trains a segment on all ranks."""
        self._round = 1 + work.start_step // self._H
        self._pass(BEFORE_INNER)
        emits = [(fragment, base_version) for fragment, base_version, _ in work.emits]
        segment = (work.start_step, work.steps, work.lease.blocks, work.seconds, self._keeping(work), work.done, emits)
        returns = 1 + len(emits) * self._shards
        asked = [rank.train.options(num_returns=returns).remote(*segment) for rank in self._ranks]
        calls = [one[0] for one in asked] if emits else asked
        deadline_s = self._settings.deadlines.train_s or None
        self._pass(MID_INNER)
        adopt_s = await self.settled()
        stepping = nullcontext() if self._watch is None else self._watch.stepping()
        with stepping as ended:
            what = f"training segment {work.segment}"
            trained: list[Trained] = await self._watched(calls, what, deadline_s, ended)
        for k, due in enumerate(emits):
            payloads = slice(1 + k * self._shards, 1 + (k + 1) * self._shards)
            sent = [(one.emitted[k], call[payloads]) for one, call in zip(trained, asked, strict=True)]
            self._ahead.emissions[due] = _emission(sent)
        reports = [one.report for one in trained]
        send_s = max(report.send_s for report in reports)
        return replace(max(reports, key=lambda r: r.seconds), adopt_s=adopt_s, send_s=send_s)

    async def recover(self, work: Work, anchored: bool) -> Recovery:
        """Takes up a progress point on all ranks."""
        keeping = self._keeping(work)
        if keeping is None:
            return Recovery()

        async def ask(method: str, *arguments: Any) -> list[Any]:
            calls = [getattr(rank, method).remote(*arguments) for rank in self._ranks]
            return await self._exchanged(calls, "taking up a progress point")

        return await recover(ask, keeping, work.done, anchored)

    def _keeping(self, work: Work) -> Keeping | None:
        settings = self._settings
        if work.bases is None or not settings.progress_every:
            return None
        blocks = tuple((r.start, r.stop) for r in work.lease.blocks)
        bases = tuple((fragment, *base) for fragment, base in sorted(work.bases.items()))
        before = tuple((r.start, r.stop) for r in work.before)
        mark = Mark(settings.epoch, len(self._ranks), work.start_step, work.steps, blocks, bases, before)
        return Keeping(settings.storage, mark, settings.progress_every)

    async def emit(self, fragment: int, base_version: int, round_: int) -> Emission:
        """Encodes the pseudo-gradient on all ranks."""
        self._pass(BEFORE_SEND)
        emission = self._ahead.emissions.pop((fragment, base_version), None)
        if emission is None:
            emission = await self._emission(self._emit(fragment, base_version), f"emitting round {round_}")
        self._pass(MID_SEND)
        return emission

    async def found(self) -> Sequence[Piece]:
        """The parameters as initialised."""
        calls = [rank.read.options(num_returns=1 + self._shards).remote() for rank in self._ranks]
        return (await self._emission(calls, "reading the parameters")).pieces

    async def adopt(self, updates: Sequence[Update], merged: Mapping[int, bool]) -> None:
        """Sets θ and B on all ranks, by the rule of adoption."""
        heard = {update.fragment: merged.get(update.fragment) for update in updates}
        calls = [rank.adopt.remote(heard, *self._handed(updates)) for rank in self._ranks]
        # Ranks do as they are told in turn: the next call need not wait until the answer to this one has come back.
        self._ahead.begin("adopting the anchor", calls)
        # Others that waited for the same round are told before this one's books are kept, which takes longer than this.
        await asyncio.sleep(0)

    async def join(self, updates: Sequence[Update]) -> None:
        """Sets θ and B on all ranks to anchors."""
        fragments = [update.fragment for update in updates]
        calls = [rank.join.remote(fragments, *self._handed(updates)) for rank in self._ranks]
        await self._exchanged(calls, "adopting the anchor")

    async def evaluate(self, blocks: Sequence[int], at: Sequence[Update] | None) -> Sequence[BlockLoss]:
        """Evaluates held-out blocks, cut evenly over the ranks."""
        n = len(self._ranks)
        parts = [blocks[len(blocks) * k // n : len(blocks) * (k + 1) // n] for k in range(n)]
        anchors = self._handed(at or ())
        calls = [rank.evaluate.remote(part, *anchors) for rank, part in zip(self._ranks, parts, strict=True)]
        losses = await self._exchanged(calls, "evaluating")
        flat = [loss for part in losses for loss in part]
        return [BlockLoss(block, nats, tokens) for block, (nats, tokens) in zip(blocks, flat, strict=True)]

    async def save(self, round_: int, bases: Mapping[int, Base] | None) -> Awaitable[Sequence[FileEntry]]:
        """Copies the inner state now; the awaitable yields its files once written."""
        settings = self._settings
        if not settings.save_inner:
            return _nothing()
        calls = [rank.save.remote(settings.storage, round_, bases) for rank in self._ranks]
        self._ahead.begin("copying inner state", calls)
        # Goes on by itself: a commit that has failed meanwhile does not ask how it ended.
        written = asyncio.ensure_future(self._saved(round_, calls, settings.deadlines.exchange_s))
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

    async def reset(self, *, rewarm: bool = True) -> None:
        """Makes the inner state that of ranks that have not trained; `rewarm`: warms the learning rate up again."""
        await self._exchanged([rank.reset.remote(rewarm) for rank in self._ranks], "resetting the inner state")

    async def build(self, anchor: RayAnchor) -> None:
        """Brings the ranks together and, for the first island, the anchor to life."""
        deadlines = self._settings.deadlines
        opened = self._ranks[0].open_store.remote(deadlines.launch_s)
        host, port = await answer(opened, f"starting rank 0 of {self.name}", deadlines.launch_s)
        built = await self._call(
            [rank.build.remote(host, port) for rank in self._ranks], "building the model", deadlines.launch_s
        )
        self._watch = Watch(self.name, self._ranks, deadlines)
        await self._connect(anchor, built)

    async def attach(self, anchor: RayAnchor) -> None:
        """Takes over ranks that another driver has left behind, as soon as they have done what it asked for."""
        deadlines = self._settings.deadlines
        self._watch = Watch(self.name, self._ranks, deadlines)
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
        self._nodes = [b.node_id for b in built]
        if self._watch is not None:
            self._watch.listener = lambda said: self._settings.traffic.hear(said.counted)
        await anchor.start(built[0].layout, self._nodes, self._settings.newest(), self._settings.storage)
        self._shards = anchor.parts
        connected = [rank.connect.remote(anchor.parts, anchor.cuts) for rank in self._ranks]
        await self._call(connected, "connecting to the anchor", deadlines.exchange_s)

    def fetch(self, payload: Any, node_id: str | None) -> None:
        """Lets a payload that the island will adopt come to its machines while it trains."""
        self._ahead.fetch(self._ranks, self._nodes, payload, node_id)

    def _handed(self, updates: Sequence[Update]) -> list[Any]:
        return handed_over([piece for update in updates for piece in update.pieces if piece.nbytes])

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
        return _emission([(said, handles) for said, (_, *handles) in zip(stats, calls, strict=True)])

    async def _saved(self, round_: int, copying: Sequence[Any], deadline_s: float) -> Sequence[FileEntry]:
        # The wait runs in a thread of its own in the rank, where it could overtake the call that starts the write.
        await answers(copying, f"copying inner state of {self.name}", deadline_s)
        calls = [rank.saved.remote(round_, deadline_s) for rank in self._ranks]
        return [
            entry
            for entries in await answers(calls, f"writing inner state of {self.name}", deadline_s)
            for entry in entries
        ]

    async def _call(
        self, calls: Sequence[Any], what: str, deadline_s: float | None, heard: Heard | None = None
    ) -> list[Any]:
        try:
            return await answers(calls, f"{what} on {self.name}", deadline_s, heard)
        except ActorFailed as failed:
            how = "died" if isinstance(failed.cause, RayActorError) else "failed"
            late = self._watch if failed.cause is None else None
            raise IslandLost(str(failed), how, stacks=await late.stacks() if late else ()) from failed
        except DilocoError as error:
            # What the user has to mend would come again; anything else is this island's own trouble.
            if error.exit_code == EXIT_BAD_INPUT or error.number == SUPERSEDED:
                raise
            raise IslandLost(f"{what} on {self.name} failed: {error.what}") from error

    def _emit(self, fragment: int, base_version: int) -> list[Any]:
        returns = 1 + self._shards
        return [rank.emit.options(num_returns=returns).remote(fragment, base_version) for rank in self._ranks]

    async def settled(self) -> float:
        """Waits for calls whose answers nobody has read yet; seconds since the first of them was made."""
        what, calls, since = self._ahead.taken()
        if not calls:
            return 0.0
        await self._watched(calls, what, self._settings.deadlines.exchange_s)
        return now() - since

    async def _exchanged(self, calls: Sequence[Any], what: str) -> list[Any]:
        await self.settled()
        return await self._watched(calls, what, self._settings.deadlines.exchange_s)

    async def _watched(
        self, calls: Sequence[Any], what: str, deadline_s: float | None, heard: Heard | None = None
    ) -> list[Any]:
        """Waits for calls as long as their ranks live."""
        work = asyncio.ensure_future(self._call(calls, what, deadline_s, heard))
        return await work if self._watch is None else await self._watch.guarded(work)


def _emission(sent: Sequence[tuple[EmitStats, Sequence[Any]]]) -> Emission:
    """What the ranks of an island emitted: of each its statistics and references to its payloads, one per shard."""
    pieces = tuple(
        Piece(k, nbytes, handle)
        for stats, handles in sent
        for k, (nbytes, handle) in enumerate(zip(stats.nbytes, handles, strict=True))
        if nbytes
    )
    finite = all(stats.finite for stats, _ in sent)
    norm = math.sqrt(math.fsum(stats.squared_norm for stats, _ in sent)) if finite else math.inf
    return Emission(pieces, norm, finite)


async def _nothing() -> Sequence[FileEntry]:
    return ()
