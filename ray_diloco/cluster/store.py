"""The store port: durable commits, written by those who hold the tensors and made visible by the driver.

Anchor shards and ranks write their own files; the driver collects names, sizes and digests and writes the manifest
last.  A commit that cannot be written is an event and the previous one stays the newest: training goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_diloco.checkpoint.epochs import SUCCEEDED
from ray_diloco.checkpoint.manifest import FileEntry, Manifest
from ray_diloco.cluster.anchor import RayAnchor
from ray_diloco.cluster.calls import ActorFailed
from ray_diloco.cluster.misfortune import NO_FAULTS, Misfortune, Misfortunes, rot
from ray_diloco.cluster.storage import Storage
from ray_diloco.errors import CheckpointError, ClusterError, DilocoError
from ray_diloco.rounds.faults import AFTER_COMMIT, BEFORE_COMMIT, MID_SEND
from ray_diloco.rounds.ports import Journal, Snapshot


@dataclass(frozen=True)
class StoreSettings:
    """What every manifest of a run has in common, and how many are kept.

    Attributes:
      sinks: what the sinks need to go on (run id of a mirror).
      epoch: of the driver.
      faults: of the storage, on purpose.
    """

    run: str
    config_digest: str
    environment: Mapping[str, Any]
    keep_last: int
    keep_every: int
    deadline_s: float
    sinks: Mapping[str, Any]
    epoch: int | None = None
    faults: Misfortunes = NO_FAULTS


class RayStore:
    """Commits of one run.

    Attributes:
      newest: the newest durable one.
      trouble: why the last one could not be written; None if it was.
    """

    def __init__(
        self,
        storage: Storage,
        newest: Manifest | None,
        anchor: RayAnchor,
        journal: Journal,
        settings: StoreSettings,
    ) -> None:
        self.storage, self.store, self.newest = storage, storage.open(), newest
        self._anchor, self._journal, self._settings = anchor, journal, settings
        self.trouble: str | None = None
        self._misfortune = Misfortune(settings.faults)
        self._turn = asyncio.Lock()
        # The newest round that holds inner state of each island; it is kept as long as no newer one does.
        self._inner_in: dict[str, int] = {}

    async def save(
        self, snapshot: Snapshot, inner: Mapping[str, Awaitable[Sequence[FileEntry]]], told: Awaitable[None]
    ) -> bool:
        """Makes a committed round durable; see `rounds.ports.Store`."""
        began = time.monotonic()
        written = self._anchor.save(self.storage, snapshot.round, snapshot.sent)
        async with self._turn:
            try:
                self._pass(snapshot.round, BEFORE_COMMIT)
                files = await written
                files += await self._inner_files(snapshot.round, inner)
                await told
                self._pass(snapshot.round, MID_SEND)
                manifest = self._manifest(snapshot, files)
                self.newest = await asyncio.to_thread(self.store.commit, manifest, epoch=self._settings.epoch)
                self.trouble = None
                if self._misfortune.pass_(snapshot.round, AFTER_COMMIT):
                    await asyncio.to_thread(rot, self.store.url, self.newest)
                self._anchor.durable(self.storage, self.newest)
                self._inner_in |= {entry.island: snapshot.round for entry in files if entry.island is not None}
                self._journal.event(
                    "checkpoint_written",
                    round=snapshot.round,
                    bytes=sum(entry.bytes for entry in files),
                    write_s=time.monotonic() - began,
                )
            except (ActorFailed, CheckpointError, ClusterError) as error:
                if isinstance(error, CheckpointError) and error.number == SUCCEEDED:
                    # Nothing that this driver does counts any more, and what lies there is its successor's.
                    raise
                self.trouble = _reason(error)
                self._anchor.not_durable(snapshot.round)
                self._journal.event("checkpoint_failed", round=snapshot.round, reason=self.trouble)
                await self._abandon(snapshot.round)
                return False
            await self._prune()
            return True

    def _pass(self, round_: int, phase: str) -> None:
        if self._misfortune.pass_(round_, phase):
            raise CheckpointError(566, f"the storage fails in round {round_} at {phase}, on purpose", "see faults.plan")

    async def inner_of(self, island: str) -> Manifest | None:
        """The newest commit that holds inner state of an island: others may have committed since it was lost."""
        manifest = await asyncio.to_thread(self._inner_of, island)
        if manifest is not None:
            self._inner_in[island] = manifest.round
        return manifest

    def _inner_of(self, island: str) -> Manifest | None:
        for round_ in reversed(self.store.rounds()):
            with contextlib.suppress(CheckpointError):
                manifest = self.store.read(round_)
                if manifest.files_of("inner", island):
                    return manifest
        return None

    async def _inner_files(self, round_: int, inner: Mapping[str, Awaitable[Sequence[FileEntry]]]) -> list[FileEntry]:
        """Inner states that could be written; one that could not costs its island the state, not the run the commit."""
        files: list[FileEntry] = []
        for island, pending in sorted(inner.items()):
            try:
                files += await pending
            except (ActorFailed, DilocoError) as error:
                self._journal.event(
                    "warning",
                    text=f"the inner state of island {island} is not in the commit of round {round_}: {error}",
                )
        return files

    async def _abandon(self, round_: int) -> None:
        """Frees what a failed commit has written: on a full disk it would block every later one."""
        try:
            await asyncio.to_thread(self.store.abandon, round_)
        except CheckpointError as error:
            self._journal.event(
                "warning", text=f"what was written of round {round_} could not be removed: {error.what}"
            )

    async def _prune(self) -> None:
        try:
            kept = self._settings.keep_last, self._settings.keep_every, set(self._inner_in.values())
            await asyncio.to_thread(self.store.prune, *kept)
        except CheckpointError as error:
            self._journal.event("warning", text=f"old commits could not be removed: {error.what}")

    def _manifest(self, snapshot: Snapshot, files: Sequence[FileEntry]) -> Manifest:
        layout = self._anchor.layout
        if layout is None:
            raise CheckpointError(561, "there is no anchor to commit", "this is a defect; please report it")
        s = self._settings
        return Manifest(
            run=s.run,
            round=snapshot.round,
            versions={str(fragment): version for fragment, version in snapshot.versions.items()},
            step=snapshot.step,
            layout=tuple((t.name, t.shape) for t in layout.tensors),
            files=tuple(files),
            ledger=dict(snapshot.ledgers),
            membership=list(snapshot.members),
            sinks=dict(s.sinks),
            counters=dict(snapshot.counters),
            environment=dict(s.environment),
            config_digest=s.config_digest,
            created=time.time(),
            previous=self.newest.digest if self.newest else "",
        )


def _reason(error: Exception) -> str:
    return error.what if isinstance(error, DilocoError) else str(error)
