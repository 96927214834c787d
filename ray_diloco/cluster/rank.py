"""One rank of an island as a Ray actor: `inner.InnerRank` plus its side of the exchange.

Calls run one after another; `progress` answers in between from a thread of its own, so that training cannot starve
it.  What a rank sends is a return value: the driver owns it, and it outlives the rank.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import ray

from ray_diloco.cluster.calls import actor
from ray_diloco.cluster.imports import add_folders
from ray_diloco.cluster.storage import Storage
from ray_diloco.config.schema import DataConfig, TokenizerConfig
from ray_diloco.outer.layout import Layout, Ranges, intersect, normalise, shard_ranges, total
from ray_diloco.rounds.ports import Report

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ray_diloco.checkpoint.manifest import FileEntry, Manifest
    from ray_diloco.data.blocks import Blocks, Corpus
    from ray_diloco.inner.settings import RankSettings

# The node label that says where a node is.
REGION_LABEL = "ray.io/availability-region"


@dataclass(frozen=True)
class RankJob:
    """What a rank actor is started with.

    Attributes:
      settings: of rank 0; rank, host and port are filled in.
      corpus, heldout: prepared blocks to train on and to evaluate on; `data`, `heldout_data` and `tokenizer` say how to
        prepare them where they are missing (another machine).
      codec_up: codec of contributions.
      incarnation: how often the island was started anew.
      folders: where a user's own modules are imported from.
    """

    settings: RankSettings
    corpus: Corpus
    heldout: Corpus
    data: DataConfig
    heldout_data: DataConfig
    tokenizer: TokenizerConfig
    codec_up: str
    incarnation: int = 0
    folders: tuple[str, ...] = ()


@dataclass(frozen=True)
class Description:
    """What a rank is, once it is built."""

    layout: Layout
    node_id: str
    region: str


@dataclass(frozen=True)
class Progress:
    """Where a rank is, for people and for the watch over silent ranks.  `step` counts within the segment."""

    beats: int
    step: int
    steps: int
    loss: float
    tokens_per_s: float


@dataclass(frozen=True)
class EmitStats:
    """What a rank says of its emission; `nbytes` per payload, 0 where it has nothing of that shard."""

    nbytes: tuple[int, ...]
    squared_norm: float = 0.0
    finite: bool = True


# Statistics, then one payload per anchor shard.
Sent = tuple[EmitStats, *tuple[np.ndarray, ...]]


class Rank:
    """Rank `rank` of an island."""

    def __init__(self, job: RankJob, rank: int) -> None:
        add_folders(job.folders)
        self._job, self._rank = job, rank
        self._store: TCPStore | None = None
        self._beats = 0
        # Step of the segment, its length, loss and tokens per second.
        self._latest: tuple[int, int, float | torch.Tensor, float] = (0, 0, math.nan, 0.0)
        self._writer = ThreadPoolExecutor(1)
        self._writes: dict[int, Future[list[FileEntry]]] = {}

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Opens the island's rendezvous (rank 0); returns its address."""
        from ray_diloco.inner.group import open_store

        host = _address()
        self._store = open_store(host, timeout_s)
        return host, self._store.port

    def build(self, host: str, port: int) -> Description:
        """Builds model, engine and data; collective over the island."""
        from ray_diloco.inner.rank import InnerRank
        from ray_diloco.outer.codec import codec_of
        from ray_diloco.outer.exchange import Exchange

        job = self._job
        self._blocks = _open(job.corpus, job.data, job)
        self._heldout = _open(job.heldout, job.heldout_data, job)
        settings = replace(job.settings, rank=self._rank, host=host, port=port)
        self._inner = InnerRank(settings, self._store)
        self._exchange = Exchange(self._inner.layout, self._inner.slices, self._inner.emits)
        self._codec = codec_of(job.codec_up)
        context = ray.get_runtime_context()
        region = context.get_node_labels().get(REGION_LABEL, "")
        return Description(self._inner.layout, context.get_node_id(), str(region))

    def connect(self, shards: int, fragments: Sequence[Ranges]) -> None:
        """Tells the rank how the anchor is cut."""
        self._fragments = list(fragments)
        # What this rank sends to each shard: of everything, and of each fragment.
        self._whole = [intersect(kept, self._inner.emits) for kept in shard_ranges(self._inner.layout, shards)]
        self._parts = [[intersect(fragment, mine) for mine in self._whole] for fragment in fragments]

    def train(self, start_step: int, steps: int, lease: Ranges) -> Report:
        """Trains a segment; steps that overflowed and were not applied do not count."""
        from ray_diloco.inner.batches import Batches

        s = self._inner.settings
        batches = Batches(
            self._blocks,
            self._job.corpus.train_blocks,
            lease,
            s.seed,
            s.rank,
            s.world,
            s.inner.gradient_accumulation,
            s.inner.micro_batch,
        )
        per_step = s.world * s.inner.gradient_accumulation * s.inner.micro_batch * s.sequence_length
        began = time.perf_counter()

        def on_step(step: int, loss: torch.Tensor) -> None:
            done = step - start_step + 1
            elapsed = time.perf_counter() - began
            self._latest = (done, steps, loss, done * per_step / max(elapsed, 1e-9))
            self._beats += 1

        report = self._inner.train(start_step, steps, batches, on_step)
        # Not the report itself: the driver would import torch and DeepSpeed to read it.
        return Report(report.steps - report.skipped, report.tokens, report.loss_mean, report.seconds)

    def emit(self, fragment: int, versions: dict[int, int]) -> Sent:
        """Encodes `B − θ`: statistics, then one payload per shard."""
        from ray_diloco.outer.payload import Meta

        meta = Meta("contribution", versions, self._job.settings.island, self._job.incarnation)
        payloads, squared, finite = [], 0.0, True
        for ranges in self._parts[fragment]:
            if not total(ranges):
                payloads.append(np.empty(0, np.uint8))
                continue
            emission = self._exchange.emit(ranges, self._codec, meta)
            payloads.append(emission.payload)
            squared += emission.squared_norm
            finite = finite and emission.finite
        return (EmitStats(tuple(p.nbytes for p in payloads), squared, finite), *payloads)

    def read(self) -> Sent:
        """The parameters themselves, one payload per shard, to found a run."""
        from ray_diloco.outer.payload import Meta

        meta = Meta("parameters", {}, self._job.settings.island, self._job.incarnation)
        payloads = [self._exchange.read(r, meta) if total(r) else np.empty(0, np.uint8) for r in self._whole]
        return (EmitStats(tuple(p.nbytes for p in payloads)), *payloads)

    def adopt(self, fragments: Sequence[int], *payloads: np.ndarray) -> None:
        """Sets θ and B of fragments from all shards' payloads; collective over the island."""
        ranges = normalise(r for fragment in fragments for r in self._fragments[fragment])
        self._exchange.adopt(payloads, ranges)
        self._inner.commit_writes()

    def evaluate(self, blocks: Sequence[int]) -> list[tuple[float, int]]:
        """Loss of this rank's held-out blocks: nats and predicted tokens of each."""
        self._beats += 1
        numbers = np.asarray(blocks, dtype=np.int64)
        return self._inner.evaluate(self._heldout.heldout(numbers))

    def save(self, storage: Storage, round_: int) -> None:
        """Copies the inner state and starts writing it."""
        self._writes[round_] = self._writer.submit(self._write, storage, round_, self._inner.inner_state())

    @ray.method(concurrency_group="writing")
    def saved(self, round_: int, deadline_s: float) -> list[FileEntry]:
        """Waits for a write; returns its file entries."""
        return self._writes.pop(round_).result(deadline_s)

    def restore(self, storage: Storage, manifest: Manifest) -> None:
        """Takes over the inner state that a commit holds of this island."""

        pieces = storage.open().load(manifest, kind="inner", island=self._job.settings.island)
        self._inner.load_inner_state(dict(pieces))

    def reset(self) -> None:
        """Forgets the inner state."""
        self._inner.reset_inner_state()

    @ray.method(concurrency_group="control")
    def progress(self) -> Progress:
        """Where this rank is; answers while it trains."""
        step, steps, loss, tokens_per_s = self._latest
        # Read here and not after each step: reading waits for the device, and training need not.
        return Progress(self._beats, step, steps, float(loss), tokens_per_s)

    def _write(self, storage: Storage, round_: int, pieces: dict[str, np.ndarray]) -> list[FileEntry]:
        from ray_diloco.checkpoint.names import inner_filename

        island = self._job.settings.island
        name = inner_filename(island, self._rank)
        return [storage.open().write_tensors(round_, name, pieces, kind="inner", island=island)]


def _open(corpus: Corpus, data: DataConfig, job: RankJob) -> Blocks:
    """Opens prepared blocks, preparing them first on a machine that does not have them."""
    from ray_diloco.data.blocks import prepare
    from ray_diloco.errors import DataError

    if not os.path.isdir(corpus.folder):
        here = prepare(data, job.tokenizer, trained_on=job.heldout_data)
        if here.digest != corpus.digest:
            raise DataError(
                390,
                f"the data of {corpus.name} on node {_address()} differs from the driver's: "
                f"{here.digest[:16]}… against {corpus.digest[:16]}…",
                "give every node the same files, or put data.cache on storage that all nodes share",
            )
        corpus = here
    return corpus.open()


def _address() -> str:
    """Address of this node, as Ray and the other nodes know it."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


RankActor = actor(Rank, concurrency_groups={"control": 1, "writing": 1})
