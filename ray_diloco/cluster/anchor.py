"""The anchor port over Ray: a few shard actors, spoken to as one.

Payloads go from rank to shard and back by reference; this side holds references and numbers.  Where all islands share
an anchor, each shard keeps a part of its elements; where every island has its own, each shard keeps one of them whole.
A round is prepared on all shards before any of them commits.  Ray keeps the order of one caller's calls to one actor,
so a commit that was sent is done before whatever is sent after it.  A shard that dies has a successor (`keepers.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import ray

from ray_diloco.blocks import Cut, cuts_of, shard_count
from ray_diloco.checkpoint.manifest import FileEntry, Manifest
from ray_diloco.cluster.ahead import handed_over
from ray_diloco.cluster.anchor_settings import AnchorSettings
from ray_diloco.cluster.berths import Berths
from ray_diloco.cluster.calls import answers
from ray_diloco.cluster.keepers import Keeper, Keepers, Shards, start_shard
from ray_diloco.cluster.layout import check_layout
from ray_diloco.cluster.misfortune import NO_FAULTS, Misfortune
from ray_diloco.cluster.pieces import fragment_of, handles_of, owner_of_lost, pieces_of
from ray_diloco.cluster.recall import Sent, recalled, sent_by
from ray_diloco.cluster.relay import Relays
from ray_diloco.cluster.shard import ShardSettings, ShardWork, round_of
from ray_diloco.cluster.storage import Storage
from ray_diloco.errors import BadContribution, ClusterError, SyncError, TooOld
from ray_diloco.outer.layout import Layout
from ray_diloco.rounds.faults import AFTER_COMMIT, BEFORE_COMMIT, SHARD
from ray_diloco.rounds.ports import (
    SHARED,
    ContributionRefused,
    Journal,
    Movement,
    Offer,
    Piece,
    Prepared,
    Step,
    TooFew,
    Update,
)

# Number of the error that a merge rule has fewer contributions than it needs.
TOO_FEW = 431
# Turns of the loop by which islands that wait for a round have asked their ranks to adopt it.
TURNS_OF_ISLANDS = 3


class RayAnchor:
    """All anchor shards of a run.  Not usable before `start`.

    Args:
      settings: how they are kept.
      start, end: start and end the actor of a shard.
      driver: what goes wrong with this process on purpose.
    """

    def __init__(
        self,
        settings: AnchorSettings,
        start: Callable[[str | None], Any] = start_shard,
        end: Callable[[Any], None] = ray.kill,
        driver: Misfortune | None = None,
    ) -> None:
        self.settings = settings
        self.layout: Layout | None = None
        self.cuts: tuple[Cut, ...] = ()
        self._start = start
        self.driver = driver or Misfortune(NO_FAULTS)
        # Called with who will adopt a payload, the payload, and the node where it will be.
        self.awaited: Callable[[Sequence[str], Any, str | None], None] = lambda islands, payload, node_id: None
        # Where shards are to start, given the nodes of an island that has come up.
        self.berths: Callable[[Sequence[str]], Berths] = Berths
        self._actors: list[Any] = []
        self._shards = Keepers(Shards(start, end, settings.losses, settings.deadline_s, settings.alive_s))
        # Where neighbours are pulled towards one another: committed anchors by fragment, prepared ones by key.
        self._newest: dict[int, Mapping[str, Update]] = {}
        self._prepared: dict[str, Mapping[str, Update]] = {}
        self._pulls = settings.channels[0].merge.consensus > 0
        self._relays = Relays(settings.channels[0], settings.deadline_s, settings.where)
        self._starting = asyncio.Lock()

    @property
    def shared(self) -> bool:
        """Whether there is one anchor for all."""
        return self.settings.anchors == (SHARED,)

    @property
    def parts(self) -> int:
        """Into how many payloads a contribution is cut."""
        return len(self._keepers) if self.shared else 1

    @property
    def first_shard(self) -> Any:
        """The actor of the first shard."""
        return self._keepers[0].handle

    @property
    def kept_bytes(self) -> int:
        """Bytes of contributions that are kept for successors of shards until the next durable commit."""
        return self._shards.kept_bytes

    def tell(self, journal: Journal) -> None:
        """Where events go."""
        self._shards.journal = journal

    def durable(self, storage: Storage, manifest: Manifest) -> None:
        """Takes a durable commit for what successors of shards begin with."""
        self._shards.durable(storage, manifest)

    def not_durable(self, round_: int) -> None:
        """Forgets a write that came to nothing."""
        for keeper in self._keepers:
            keeper.not_durable(round_)

    def prestart(self) -> None:
        """Starts the shards that are needed in any case, for a cluster where it does not matter on which node."""
        count = max(1, self.settings.shards) if self.shared else len(self.settings.anchors)
        self._actors = [self._start(None) for _ in range(count)]

    async def start(self, layout: Layout, node_ids: Sequence[str], manifest: Manifest | None, storage: Storage) -> None:
        """Starts the shards for a model, with the state of a commit if there is one.

        Called for every island that comes up; the first call does the work, the others compare layouts.

        Raises:
          CommittedError: RD-560, the commit is of another model.
          ClusterError: RD-220, an island has another model than the others; RD-221, a shard does not start.
        """
        async with self._starting:
            if self.layout is not None:
                if self.layout.digest != layout.digest:
                    raise ClusterError(
                        220,
                        f"an island built a model with layout {layout.digest[:16]}…, the first one built one with "
                        f"{self.layout.digest[:16]}…",
                        "give all nodes the same code and the same model",
                    )
                return
            if manifest is not None:
                check_layout(manifest, layout)
            self.cuts = cuts_of(self.settings.channels, layout)
            s = self.settings
            count = shard_count(s.anchors, s.shards, s.islands, layout.numel)
            berths = self.berths(node_ids)
            near = [berths.shared[k % len(berths.shared)] for k in range(count)]
            if not self.shared:
                near = [berths.beside.get(name, node) for name, node in zip(s.anchors, near, strict=True)]
            self._actors += [self._start(near[k]) for k in range(len(self._actors), count)]
            each = [(SHARED,)] * count if self.shared else [(name,) for name in self.settings.anchors]
            parts = count if self.shared else 1
            keepers = []
            for k, (actor, names) in enumerate(zip(self._actors, each, strict=True)):
                part, faults = k if self.shared else 0, self.settings.faults.of(f"{SHARD}:{k}")
                settings = ShardSettings(layout, self.cuts, names, part, parts, k, count, faults)
                keepers.append(Keeper(actor, settings, near[k]))
            self._shards.all = keepers  # all anew, where a start before this one was cancelled

            async def attempt() -> list[list[str]]:
                calls = [keeper.build() for keeper in self._keepers]
                loads = [] if manifest is None else [keeper.load(storage, manifest) for keeper in self._keepers]
                await self._all(calls, "starting the anchor")
                return await self._all(loads, "loading the anchor")

            try:
                fresh = await self._shards.ask("starting the anchor", attempt, starting=True)
            except ClusterError as failed:
                what = f"the anchor did not start: {failed.what}"
                raise ClusterError(221, what, "see the logs of that node") from failed
            self.layout = layout
            for name in sorted({name for names in fresh for name in names}):
                if self._shards.journal is not None:
                    text = f"the commit holds no outer state of {name}: it begins anew at the published anchor"
                    self._shards.journal.event("warning", text=text)

    async def found(self, pieces: Sequence[Piece]) -> None:
        """Sets version 0 of every anchor from the parameters of one island."""
        await self._shards.tell("founding the anchor", [k.found(handles_of(pieces, k.part)) for k in self._keepers])

    async def prepare(self, step: Step) -> Prepared:
        """Merges and steps on all shards, into spare buffers."""
        offers = [offer for movement in step.movements for offer, _ in movement.contributions]
        try:
            movements = [await self._near(step, movement) for movement in step.movements]
            return await self._shards.ask(f"preparing round {step.key}", lambda: self._prepare(step, movements))
        except SyncError as bad:
            if isinstance(bad, BadContribution):
                # Who is slow has done nothing that counts against it.
                number = 0 if isinstance(bad, TooOld) else bad.number
                raise ContributionRefused(bad.island, bad.what, number) from bad
            if bad.number == TOO_FEW:
                raise TooFew(bad.what) from bad
            raise
        except ClusterError as failed:
            island = owner_of_lost(failed.__cause__, offers)
            if island is None:
                raise
            raise ContributionRefused(island, "its payload was lost with its node") from failed

    async def commit(self, key: str) -> None:
        """Swaps on all shards; who is told now what to adopt is told first, unless it asks the shards for more."""
        fragment = fragment_of(key)
        if self._pulls:
            self._newest[fragment] = self._prepared.pop(key)
        for keeper in self._keepers:
            keeper.commit(key, fragment)
        for _ in range(TURNS_OF_ISLANDS):
            await asyncio.sleep(0)
        sent = [answer for keeper in self._keepers for answer in keeper.committed(key)]
        await self._shards.tell(f"committing round {key}", sent)
        self.driver.pass_(round_of(key), AFTER_COMMIT)

    async def abort(self, key: str) -> None:
        """Forgets a prepared round on all shards."""
        self._prepared.pop(key, None)
        await self._shards.tell(f"aborting round {key}", [keeper.abort(key) for keeper in self._keepers])

    async def current(self, island: str) -> Sequence[Update]:
        """The committed anchor of every fragment that an island adopts."""
        return [await self._asked(fragment, island, "current") for fragment in self._numbers()]

    async def passed(self, island: str, fragment: int, version: int) -> Update | None:
        """An anchor that was replaced, if it is kept."""
        update = await self._asked(fragment, island, "passed", version)
        return update if all(p.nbytes for p in update.pieces) else None

    async def published(self) -> Sequence[Update]:
        """What is evaluated and exported, of the main channel."""
        if self.shared:
            return [await self._asked(fragment, SHARED, "published") for fragment in self.cuts[0].numbers]
        return [await self._mean(fragment) for fragment in self.cuts[0].numbers]

    async def recalled(self, offer: Offer) -> Offer:
        """A contribution that was merged before the run went on from a commit, with its payloads."""
        return await self._shards.ask("recalling", lambda: recalled(self._keepers, offer, self.settings.deadline_s))

    def save(self, storage: Storage, round_: int, sent: Sent) -> Awaitable[list[FileEntry]]:
        """Starts writing the committed state of all shards; the awaitable yields file entries when it is durable."""
        # The order of calls to a shard holds: means are taken of what was committed before this line.
        means = [] if self.shared else [self._mean_refs(fragment)[1] for fragment in self.cuts[0].numbers]
        started: list[Any] = []
        for keeper in self._keepers:
            mine = dict(sent_by(keeper.anchors, sent))
            payloads = (*mine.values(), *(() if started else means))  # the first shard writes what is published
            started.append(keeper.save(storage, round_, tuple(mine), payloads))
        return self._saved(started, round_)

    @property
    def _keepers(self) -> list[Keeper]:
        return self._shards.all

    async def _prepare(self, step: Step, movements: Sequence[Movement]) -> Prepared:
        if self._pulls and step.fragment not in self._newest:
            asked = {name: await self._asked(step.fragment, name, "current") for name in self.settings.anchors}
            self._newest[step.fragment] = asked
        calls: list[tuple[str, Any, Any]] = []
        for movement in movements:
            factors = [factor for _, factor in movement.contributions]
            extras: tuple[float, ...] = ()
            if self.settings.whole_vectors and movement.contributions and step.fragment in self.cuts[0].numbers:
                factors, extras = await self._whole(step, movement)
            for keeper in self._of(step.fragment, movement.anchor):
                work, payloads, nbytes = self._work(step, movement, keeper, factors, extras)
                meta, payload = keeper.prepare(work, payloads, nbytes)
                self.awaited([offer.island for offer, _ in movement.contributions], payload, keeper.node_id)
                calls.append((movement.anchor, meta, payload))
        stats = await self._all([meta for _, meta, _ in calls], f"preparing round {step.key}")
        pieces: dict[str, list[Piece]] = {}
        for (anchor, _, payload), s in zip(calls, stats, strict=True):
            mine = pieces.setdefault(anchor, [])
            mine.append(Piece(len(mine), s.nbytes, payload))
        updates = {
            anchor: Update(step.fragment, step.version + 1, tuple(mine), step.round) for anchor, mine in pieces.items()
        }
        if self._pulls:
            self._prepared[step.key] = updates
        self.driver.pass_(step.round, BEFORE_COMMIT)
        squares = ((s.anchor_squared for s in stats), (s.update_squared for s in stats))
        return Prepared(step.key, updates, *(math.sqrt(math.fsum(each) / len(updates)) for each in squares))

    async def _near(self, step: Step, movement: Movement) -> Movement:
        """The movement, with the contributions of each region as one."""
        if not self.settings.relayed or step.fragment not in self.cuts[0].numbers:
            return movement
        return await self._relays.merged(step, movement, self.parts, self.layout, self.cuts[0])

    async def _whole(self, step: Step, movement: Movement) -> tuple[list[float], tuple[float, ...]]:
        """Factors of a rule that looks at whole vectors, over all shards."""
        keepers = self._of(step.fragment, movement.anchor)
        weights = [factor for _, factor in movement.contributions]
        grams = []
        for keeper in keepers:
            work, payloads, _ = self._work(step, movement, keeper, weights, ())
            grams.append(keeper.handle.gram.remote(work, *payloads))
        asked = keepers[0].handle.factors.remote(self.settings.whole_vectors, weights, *grams)
        # Shards that refuse say whose contribution it is; the one that was handed their errors does not.
        await self._all(grams, f"comparing contributions to round {step.key}")
        (found,) = await self._all([asked], f"weighing contributions to round {step.key}")
        # Factors of such a rule do not know of what scales the round as a whole (its age, or the number of islands).
        scale = math.fsum(weights)
        return [scale * factor for factor in found[: len(weights)]], tuple(scale * f for f in found[len(weights) :])

    def _work(
        self, step: Step, movement: Movement, keeper: Keeper, factors: Sequence[float], extras: tuple[float, ...]
    ) -> tuple[ShardWork, list[Any], int]:
        """What a shard is told of a movement: the work, payloads, and bytes of these."""
        parts = [pieces_of(offer.emission.pieces, keeper.part) for offer, _ in movement.contributions]
        specs = tuple(
            (offer.island, factor, offer.base_version, len(part), offer.incarnation)
            for (offer, _), factor, part in zip(movement.contributions, factors, parts, strict=True)
        )
        neighbours = movement.neighbours if self._pulls and len(movement.neighbours) > 1 else ()
        around = [piece for name in neighbours for piece in self._newest[step.fragment][name].pieces]
        work = ShardWork(
            step.key,
            movement.anchor,
            step.fragment,
            specs,
            extras,
            len(around),
            neighbours.index(movement.anchor) if around else 0,
            not movement.contributions,
        )
        flat = [piece for part in parts for piece in part] + around
        return work, handed_over(flat), sum(piece.nbytes for piece in flat)

    def _of(self, fragment: int, anchor: str) -> list[Keeper]:
        """The shards that keep an anchor; side channels have one anchor in any case."""
        if self.shared or fragment not in self.cuts[0].numbers:
            return self._keepers
        return [keeper for keeper in self._keepers if anchor in keeper.anchors]

    def _numbers(self) -> list[int]:
        return [number for cut in self.cuts for number in cut.numbers]

    async def _asked(self, fragment: int, island: str, method: str, *more: int) -> Update:
        anchor = SHARED if self.shared else island

        async def attempt() -> Update:
            calls = [getattr(k.handle, method).remote(fragment, anchor, *more) for k in self._of(fragment, anchor)]
            stats = await self._all([meta for meta, _ in calls], "reading the anchor")
            pieces = tuple(Piece(k, s.nbytes, p) for k, (s, (_, p)) in enumerate(zip(stats, calls, strict=True)))
            return Update(fragment, stats[0].version, pieces)

        return await self._shards.ask("reading the anchor", attempt)

    def _mean_refs(self, fragment: int) -> tuple[Any, Any]:
        """The mean of all islands' anchors of a fragment: references to what a shard says of it, and to its payload."""
        payloads = [keeper.handle.published.remote(fragment, keeper.anchors[0])[1] for keeper in self._keepers]
        meta, payload = self._keepers[0].handle.mean.remote(*payloads)
        return meta, payload

    async def _mean(self, fragment: int) -> Update:
        async def attempt() -> Update:
            meta, payload = self._mean_refs(fragment)
            (stats,) = await self._all([meta], "averaging the anchors")
            return Update(fragment, 0, (Piece(0, stats.nbytes, payload),))

        return await self._shards.ask("averaging the anchors", attempt)

    async def _saved(self, started: Sequence[Any], round_: int) -> list[FileEntry]:
        # The wait runs in a thread of its own in the shard, where it could overtake the call that starts the write.
        await self._shards.tell("starting to write the anchor", started)

        async def attempt() -> list[FileEntry]:
            waits = [keeper.handle.saved.remote(round_) for keeper in self._keepers]
            return [entry for part in await self._all(waits, "writing the anchor") for entry in part]

        return await self._shards.ask("writing the anchor", attempt)

    async def _all(self, refs: Sequence[Any], what: str) -> list[Any]:
        return await answers(refs, what, self.settings.deadline_s)
