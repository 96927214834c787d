"""An anchor shard as a Ray actor: `outer.shard.AnchorShard` plus reading and writing its part of a commit.

Payloads arrive as read-only views of the object store and leave as return values, which the driver owns.  A commit is
written by a thread from the live buffers, without a copy: they are not written again before the second next round is
prepared, and that waits for the thread.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from ray_diloco.cluster.calls import actor
from ray_diloco.cluster.storage import Storage
from ray_diloco.outer.layout import Layout, Ranges, shard_ranges

if TYPE_CHECKING:
    from ray_diloco.checkpoint.manifest import FileEntry, Manifest
    from ray_diloco.checkpoint.store import CheckpointStore

# Seconds that a round waits for the previous commit but one to be on disk before it gives up.
WRITE_DEADLINE_S = 600.0


@dataclass(frozen=True)
class ShardSettings:
    """What every shard of an anchor is built from.  `outer` has the keys of the `outer` section."""

    layout: Layout
    fragments: tuple[Ranges, ...]
    outer: Mapping[str, Any]
    codec_down: str
    shards: int


@dataclass(frozen=True)
class ShardStats:
    """What a shard says of a payload that it returns; squares are sums over its elements."""

    version: int
    nbytes: int
    anchor_squared: float = 0.0
    update_squared: float = 0.0


class Shard:
    """Shard `index` of an anchor."""

    def __init__(self, index: int) -> None:
        # torch reads it once: buffers in huge pages, by which a round takes a fifth less.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        # The slow imports, while the islands of a run are still starting.
        import ray_diloco.outer.shard  # noqa: F401

        self._index = index
        self._writer = ThreadPoolExecutor(1)
        self._writes: dict[int, Future[list[FileEntry]]] = {}
        # Writes under way with the version that they read.
        self._reading: list[tuple[int, Future[list[FileEntry]]]] = []

    def build(self, settings: ShardSettings) -> None:
        """Makes room for the anchor of a model."""
        import torch

        from ray_diloco.outer.codec import codec_of
        from ray_diloco.outer.optimizer import outer_optimizer
        from ray_diloco.outer.shard import AnchorShard

        torch.set_num_threads(1)
        self._settings = settings
        optimizer = outer_optimizer(**settings.outer)
        self._state_names = optimizer.state_names
        self._shard = AnchorShard(
            settings.layout,
            shard_ranges(settings.layout, settings.shards)[self._index],
            settings.fragments,
            optimizer,
            codec_of(settings.codec_down),
        )

    def found(self, *payloads: np.ndarray) -> None:
        """Sets version 0."""
        self._shard.found(payloads)

    def load(self, storage: Storage, manifest: Manifest) -> None:
        """Takes over anchor and outer state from a commit."""

        store = storage.open()
        names = [t.name for t in self._settings.layout.tensors if t.name in self._shard.tensors()]
        anchor = dict(store.load(manifest, names))
        state = {key: dict(self._outer(store, manifest, key, names)) for key in self._state_names}
        self._shard.load(anchor, state, {int(k): v for k, v in manifest.versions.items()})

    @ray.method(num_returns=2)
    def prepare(
        self, key: str, fragment: int, specs: Sequence[tuple[str, float, int, int]], *payloads: np.ndarray
    ) -> tuple[ShardStats, np.ndarray]:
        """Prepares a round.

        Args:
          key: names the round; the same key again gives the same answer.
          fragment: which.
          specs: per island, in sorted order: name, weight, base version, number of its payloads.
          payloads: of all islands, in that order.
        """
        from ray_diloco.outer.contribution import Contribution

        self._wait_for_older_writes()
        contributions, at = [], 0
        for island, weight, base_version, count in specs:
            contributions.append(Contribution(island, weight, base_version, payloads[at : at + count]))
            at += count
        prepared, payload = self._shard.prepare(key, fragment, contributions)
        stats = ShardStats(prepared.version, payload.nbytes, prepared.squared_anchor_norm, prepared.squared_update_norm)
        return stats, payload

    def commit(self, key: str) -> None:
        """Makes a prepared round the committed state."""
        self._shard.commit(key)

    def abort(self, key: str) -> None:
        """Forgets a prepared round."""
        self._shard.abort(key)

    @ray.method(num_returns=2)
    def current(self, fragment: int) -> tuple[ShardStats, np.ndarray]:
        """The committed anchor of a fragment."""
        payload = self._shard.payload(fragment)
        return ShardStats(self._shard.versions[fragment], payload.nbytes), payload

    def save(self, storage: Storage, round_: int) -> None:
        """Starts writing the committed state as part of the commit of `round_`."""
        anchor = self._shard.tensors()
        state = {key: self._shard.state_tensors(key) for key in self._state_names}
        write = self._writer.submit(self._write, storage, round_, anchor, state)
        self._writes[round_] = write
        self._reading = [(v, f) for v, f in self._reading if not f.done()] + [(self._version, write)]

    @ray.method(concurrency_group="writing")
    def saved(self, round_: int) -> list[FileEntry]:
        """Waits for a write; returns its file entries."""
        return self._writes.pop(round_).result(WRITE_DEADLINE_S)

    def _write(
        self,
        storage: Storage,
        round_: int,
        anchor: Mapping[str, np.ndarray],
        state: Mapping[str, Mapping[str, np.ndarray]],
    ) -> list[FileEntry]:
        from ray_diloco.checkpoint.names import anchor_filename, outer_filename

        store, k, n = storage.open(), self._index, self._settings.shards
        outer = {f"{key}.{name}": array for key, arrays in state.items() for name, array in arrays.items()}
        return [
            store.write_tensors(round_, anchor_filename(k, n), anchor, kind="anchor"),
            store.write_tensors(round_, outer_filename(k, n), outer, kind="outer"),
        ]

    @property
    def _version(self) -> int:
        return sum(self._shard.versions.values())

    def _wait_for_older_writes(self) -> None:
        """Spare buffers hold the version before the live one; a thread may still be reading them."""
        for version, write in self._reading:
            if version < self._version:
                write.exception(WRITE_DEADLINE_S)

    def _outer(
        self, store: CheckpointStore, manifest: Manifest, key: str, names: Sequence[str]
    ) -> list[tuple[str, np.ndarray]]:
        loaded = store.load(manifest, [f"{key}.{name}" for name in names], kind="outer")
        return [(name.removeprefix(f"{key}."), array) for name, array in loaded]


ShardActor = actor(Shard, num_cpus=0, concurrency_groups={"writing": 1})
