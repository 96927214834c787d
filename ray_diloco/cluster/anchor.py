"""The anchor port over Ray: a few shard actors, spoken to as one.

Payloads go from rank to shard and back by reference; this side holds references and numbers.  A round is prepared on
all shards before any of them commits.  Ray keeps the order of one caller's calls to one actor, so a commit that was
sent is done before whatever is sent after it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import ObjectLostError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_diloco.checkpoint.manifest import FileEntry, Manifest
from ray_diloco.cluster.calls import ActorFailed, answers
from ray_diloco.cluster.shard import ShardActor, ShardSettings
from ray_diloco.cluster.storage import Storage
from ray_diloco.errors import ClusterError, CommittedError, SyncError
from ray_diloco.outer.layout import Layout, Ranges
from ray_diloco.rounds.ports import ContributionRefused, Offer, Piece, Prepared, Update

# From this many parameters on, one anchor shard per island pays for its process.
PARAMETERS_PER_SHARD = 4_000_000


@dataclass(frozen=True)
class AnchorSettings:
    """What all shards have in common; see `ShardSettings`.  `shards` 0: by the size of the model."""

    outer: Mapping[str, Any]
    codec_down: str
    shards: int
    islands: int
    deadline_s: float


class RayAnchor:
    """All anchor shards of a run.  Not usable before `start`."""

    def __init__(self, settings: AnchorSettings) -> None:
        self.settings = settings
        self.layout: Layout | None = None
        self.fragments: list[Ranges] = []
        self._shards: list[Any] = []
        self._starting = asyncio.Lock()

    @property
    def count(self) -> int:
        """Number of shards."""
        return len(self._shards)

    def prestart(self) -> None:
        """Starts the shards that are needed in any case, for a cluster where it does not matter on which node."""
        self._shards = [ShardActor.remote(k) for k in range(max(1, self.settings.shards))]

    async def start(self, layout: Layout, node_ids: Sequence[str], manifest: Manifest | None, storage: Storage) -> None:
        """Starts the shards for a model, on the nodes given, with the state of a commit if there is one.

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
                _check_layout(manifest, layout)
            self.fragments = [layout.whole]
            count = self.settings.shards or self._automatic(layout)
            shared = ShardSettings(
                layout, tuple(self.fragments), dict(self.settings.outer), self.settings.codec_down, count
            )
            self._shards += [
                ShardActor.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node_ids[k % len(node_ids)], soft=True)
                ).remote(k)
                for k in range(len(self._shards), count)
            ]
            calls = [shard.build.remote(shared) for shard in self._shards]
            if manifest is not None:
                calls += [shard.load.remote(storage, manifest) for shard in self._shards]
            try:
                await answers(calls, "starting the anchor", self.settings.deadline_s)
            except ActorFailed as failed:
                raise ClusterError(221, f"the anchor did not start: {failed}", "see the logs of that node") from failed
            self.layout = layout

    async def found(self, pieces: Sequence[Piece]) -> None:
        """Sets version 0 from the parameters of one island."""
        await self._all(
            [shard.found.remote(*_handles(pieces, k)) for k, shard in enumerate(self._shards)], "founding the anchor"
        )

    async def prepare(self, key: str, fragment: int, contributions: Sequence[tuple[Offer, float]]) -> Prepared:
        """Merges and steps on all shards, into spare buffers."""
        metas, pieces = [], []
        for k, shard in enumerate(self._shards):
            parts = [_handles(offer.emission.pieces, k) for offer, _ in contributions]
            specs = [
                (offer.island, weight, offer.base_version, len(part))
                for (offer, weight), part in zip(contributions, parts, strict=True)
            ]
            meta, payload = shard.prepare.remote(key, fragment, specs, *(h for part in parts for h in part))
            metas.append(meta)
            pieces.append(payload)
        try:
            stats = await self._all(metas, f"preparing round {key}")
        except SyncError as bad:
            # `outer.contribution.BadContribution`, not imported for its name: torch would come with it.
            island = getattr(bad, "island", None)
            if island is None:
                raise
            raise ContributionRefused(island, bad.what) from bad
        except ClusterError as failed:
            island = _owner_of_lost(failed.__cause__, contributions)
            if island is None:
                raise
            raise ContributionRefused(island, "its payload was lost with its node") from failed
        update = Update(
            fragment,
            stats[0].version,
            tuple(Piece(k, s.nbytes, p) for k, (s, p) in enumerate(zip(stats, pieces, strict=True))),
        )
        return Prepared(
            key,
            update,
            math.sqrt(math.fsum(s.anchor_squared for s in stats)),
            math.sqrt(math.fsum(s.update_squared for s in stats)),
        )

    async def commit(self, key: str) -> None:
        """Swaps on all shards."""
        await self._all([shard.commit.remote(key) for shard in self._shards], f"committing round {key}")

    async def abort(self, key: str) -> None:
        """Forgets a prepared round on all shards."""
        await self._all([shard.abort.remote(key) for shard in self._shards], f"aborting round {key}")

    async def current(self) -> Sequence[Update]:
        """The committed anchor of every fragment."""
        updates = []
        for fragment in range(len(self.fragments)):
            calls = [shard.current.remote(fragment) for shard in self._shards]
            stats = await self._all([meta for meta, _ in calls], "reading the anchor")
            pieces = tuple(
                Piece(k, s.nbytes, payload) for k, (s, (_, payload)) in enumerate(zip(stats, calls, strict=True))
            )
            updates.append(Update(fragment, stats[0].version, pieces))
        return updates

    def save(self, storage: Storage, round_: int) -> Awaitable[list[FileEntry]]:
        """Starts writing the committed state of all shards; the awaitable yields file entries when it is durable."""
        started = [shard.save.remote(storage, round_) for shard in self._shards]
        return self._saved(started, round_)

    async def _saved(self, started: Sequence[Any], round_: int) -> list[FileEntry]:
        # The wait runs in a thread of its own in the shard, where it could overtake the call that starts the write.
        deadline_s = self.settings.deadline_s
        await answers(started, "starting to write the anchor", deadline_s)
        waits = [shard.saved.remote(round_) for shard in self._shards]
        parts = await answers(waits, "writing the anchor", deadline_s)
        return [entry for part in parts for entry in part]

    async def _all(self, refs: Sequence[Any], what: str) -> list[Any]:
        try:
            return await answers(refs, what, self.settings.deadline_s)
        except ActorFailed as failed:
            raise ClusterError(
                222, f"an anchor shard failed: {failed}", "run the same command again: it goes on from the last commit"
            ) from failed.cause

    def _automatic(self, layout: Layout) -> int:
        return self.settings.islands if layout.numel >= PARAMETERS_PER_SHARD else 1


def _handles(pieces: Sequence[Piece], shard: int) -> list[Any]:
    return [piece.handle for piece in pieces if piece.shard == shard]


def _owner_of_lost(error: BaseException | None, contributions: Sequence[tuple[Offer, float]]) -> str | None:
    if not isinstance(error, ObjectLostError):
        return None
    return next(
        (o.island for o, _ in contributions for p in o.emission.pieces if p.handle.hex() == error.object_ref_hex), None
    )


def _check_layout(manifest: Manifest, layout: Layout) -> None:
    before, now = dict(manifest.layout), {t.name: t.shape for t in layout.tensors}
    if list(before.items()) != list(now.items()):
        differing = [name for name in (*before, *now) if before.get(name) != now.get(name)]
        first = differing[0] if differing else next(iter(now))
        raise CommittedError(
            560,
            f"round {manifest.round} was committed with another model: tensor {first!r} has shape {before.get(first)} "
            f"there and {now.get(first)} here",
            "use the model of the run, or another run.name",
        )
