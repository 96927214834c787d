"""One rank of an island as a Ray actor: `inner.InnerRank` plus its side of the exchange.

Calls run one after another; `progress` answers in between from a thread of its own, so that training cannot starve
it.  What a rank sends is a return value: the driver owns it, and it outlives the rank.  A rank outlives its driver for
a while, so that the next one finds it.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import ray

from ray_diloco.blocks import Cut
from ray_diloco.cluster.ahead import brought
from ray_diloco.cluster.calls import actor
from ray_diloco.cluster.fence import fenced, superseded
from ray_diloco.cluster.imports import add_folders
from ray_diloco.cluster.job import RankJob, open_blocks
from ray_diloco.cluster.misfortune import Misfortune, spoiled
from ray_diloco.cluster.notice import Notice
from ray_diloco.cluster.points import Keeping, RankPoints
from ray_diloco.cluster.runs import in_runs
from ray_diloco.cluster.said import Description, EmitStats, Progress, Sent, Trained
from ray_diloco.cluster.stacks import stacks
from ray_diloco.cluster.storage import Storage
from ray_diloco.cluster.traffic import Interface, own_address
from ray_diloco.outer.layout import Ranges, intersect, shard_ranges, total
from ray_diloco.rounds.faults import (
    AFTER_COMMIT,
    BEFORE_COMMIT,
    BEFORE_INNER,
    BEFORE_SEND,
    MID_INNER,
    MID_SEND,
    STALE_EPOCH,
)
from ray_diloco.rounds.ports import Base, Report

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ray_diloco.checkpoint.manifest import FileEntry, Manifest

# Threads for what is asked of a rank while it does something else.
THREADS = {"control": 1, "writing": 1, "fetching": 2}
# Exit code of a rank that no driver speaks to any more.
ORPHANED = 17


class Rank:
    """Rank `rank` of an island."""

    def __init__(self, job: RankJob, rank: int) -> None:
        add_folders(job.folders)
        self._job, self._rank = job, rank
        self._notice, self._interface = Notice(), Interface(own_address())
        self._store: TCPStore | None = None
        self._beats = self._calls = 0
        # Of the newest driver that was heard; the fence keeps it.
        self._epoch = 0
        # Step of the segment, its length, loss and tokens per second.
        self._latest: tuple[int, int, float | torch.Tensor, float] = (0, 0, math.nan, 0.0)
        self._sending = False
        self._writer = ThreadPoolExecutor(1)
        self._writes: dict[int, Future[list[FileEntry]]] = {}
        self._misfortune, self._round = Misfortune(job.faults, job.incarnation, rank), 0
        self._spoken_to = time.monotonic()
        if job.orphan_s:
            threading.Thread(target=self._end_as_orphan, daemon=True).start()

    def admitted(self) -> None:
        """Notes that the newest driver has spoken."""
        self._spoken_to = time.monotonic()

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Opens the island's rendezvous (rank 0); returns its address."""
        from ray_diloco.inner.group import open_store

        host = own_address()
        self._store = open_store(host, timeout_s)
        return host, self._store.port

    def build(self, host: str, port: int) -> Description:
        """Builds model, engine and data; collective over the island."""
        from ray_diloco.cluster.exchanges import Exchanges
        from ray_diloco.inner.rank import InnerRank

        job = self._job
        self._blocks = open_blocks(job.corpus, job.data, job)
        self._heldout = open_blocks(job.heldout, job.heldout_data, job)
        settings = replace(job.settings, rank=self._rank, host=host, port=port)
        self._inner = InnerRank(settings, self._store)
        self._exchanges = Exchanges(self._inner, job.channels)
        self._points = RankPoints(self._inner, self._exchanges, self._writer)
        return self._description()

    def attach(self, incarnation: int) -> Description:
        """Goes on under another driver; what an earlier one has asked for is done, and forgotten."""
        if not hasattr(self, "_exchanges"):
            raise RuntimeError("its model was not built yet")
        self._job = replace(self._job, incarnation=incarnation)
        self._exchanges.give_back()
        return self._description()

    def connect(self, parts: int, cuts: Sequence[Cut]) -> None:
        """Tells the rank how the anchor is cut: in `parts` by element, and in fragments."""
        self._exchanges.connect(cuts)
        # What this rank sends to each shard: of everything, and of each fragment.
        self._whole = [intersect(kept, self._inner.emits) for kept in shard_ranges(self._inner.layout, parts)]
        self._parts = {
            number: [intersect(ranges, mine) for mine in self._whole]
            for cut in cuts
            for number, ranges in zip(cut.numbers, cut.fragments, strict=True)
        }

    def _description(self) -> Description:
        return Description(self._inner.layout, ray.get_runtime_context().get_node_id(), self._calls)

    def train(
        self,
        start_step: int,
        steps: int,
        lease: Ranges,
        seconds: float = 0.0,
        keeping: Keeping | None = None,
        taken: int = 0,
        emits: Sequence[tuple[int, int]] = (),
    ) -> Trained | tuple[Trained, *tuple[np.ndarray, ...]]:
        """Trains a segment, and emits at once what is due behind it: a call of its own would begin a while later.

        With `keeping` it makes progress points; `taken` steps were taken up from one.  When another driver is heard it
        ends after the step: that one goes on from a commit or a point, and nobody waits for the rest of this segment.

        Args:
          start_step, steps, lease, seconds: of the segment; see `rounds.ports.Work`.
          keeping: where its progress points go.
          taken: how many of its steps were taken up from one.
          emits: fragment and base version of each emission.

        Returns:
          What came of it; behind that, if something was emitted, one payload per shard for each emission.
        """
        driver = self._epoch
        report = self._train(start_step, steps, lease, seconds, keeping, taken)
        if not emits:
            return Trained(report)
        if self._epoch != driver:
            raise superseded(driver, self._epoch)
        self._beats += 1
        self._sending, began = True, time.perf_counter()
        try:
            sent = [self._emit(*one) for one in emits]
        finally:
            self._sending = False
        report = replace(report, send_s=time.perf_counter() - began)
        payloads = chain.from_iterable(payloads for _, *payloads in sent)
        return Trained(report, tuple(stats for stats, *_ in sent)), *payloads

    def _train(
        self, start_step: int, steps: int, lease: Ranges, seconds: float, keeping: Keeping | None, taken: int
    ) -> Report:
        """Trains; steps that overflowed and were not applied do not count."""
        from ray_diloco.inner.batches import Batches

        self._calls += 1
        self._misfortune.called()
        self._round = 1 + start_step // self._job.channels[0].H
        self._misfortune.pass_(self._round, BEFORE_INNER)
        self._exchanges.give_back()
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
        earlier = self._points.begin(taken)
        began, driver = time.perf_counter(), self._epoch

        def on_step(step: int, loss: torch.Tensor) -> bool:
            done = step - start_step + 1
            elapsed = time.perf_counter() - began
            self._latest = (done, steps, loss, (done - taken) * per_step / max(elapsed, 1e-9))
            self._beats += 1
            self._points.passed(keeping, done, steps, loss)
            if done == max(1, steps // 2):
                if self._job.faults.faults:
                    # What a fault leaves behind must not depend on how fast the storage is.
                    self._points.written()
                self._misfortune.pass_(self._round, MID_INNER)
            return self._epoch != driver

        report = self._inner.train(start_step, steps, batches, on_step, seconds, earlier)
        # Not the report itself: the driver would import torch and DeepSpeed to read it.
        steps_done = report.steps - report.skipped
        trouble = self._points.end()
        return Report(steps_done, report.tokens, report.loss_mean, report.seconds, trouble=trouble)

    def look_for_points(self, keeping: Keeping, anchored: bool) -> tuple[list[int], str]:
        """How many steps are done in this rank's progress points of a work; if there are none, why not."""
        return self._points.look(keeping, anchored)

    def read_point(self, keeping: Keeping, done: int, anchored: bool) -> str:
        """Reads a progress point and changes nothing; returns why it cannot be taken up, empty if it can."""
        return self._points.read(keeping, done, anchored)

    def take_up_point(self) -> bool:
        """Takes up the point that was read; False: it does not fit, and nothing has been changed.  Collective."""
        self._calls += 1
        return self._points.take_up()

    def emit(self, fragment: int, base_version: int) -> Sent:
        """Encodes `B − θ`: statistics, then one payload per shard."""
        return self._emit(fragment, base_version)

    def _emit(self, fragment: int, base_version: int) -> Sent:
        from ray_diloco.outer.payload import Meta

        self._misfortune.called()
        self._misfortune.pass_(self._round, BEFORE_SEND)
        damage = self._misfortune.spoil()
        incarnation = self._job.incarnation
        if damage == STALE_EPOCH:
            incarnation = abs(incarnation - 1)
        meta = Meta("contribution", {fragment: base_version}, self._job.settings.island, incarnation)
        self._exchanges.begin(fragment)
        payloads, squared, finite = [], 0.0, True
        for ranges in self._parts[fragment]:
            if not total(ranges):
                payloads.append(np.empty(0, np.uint8))
                continue
            emission = self._exchanges.emit(fragment, ranges, meta)
            payloads.append(emission.payload)
            squared += emission.squared_norm
            finite = finite and emission.finite
        self._misfortune.pass_(self._round, MID_SEND)
        payloads = [spoiled(payload, damage) for payload in payloads]
        self._misfortune.transfer(sum(payload.nbytes for payload in payloads))
        self._misfortune.wait_at(self._round, BEFORE_COMMIT)
        return (EmitStats(tuple(p.nbytes for p in payloads), squared, finite), *map(in_runs, payloads))

    def read(self) -> Sent:
        """The parameters themselves, one payload per shard, to found a run."""
        from ray_diloco.outer.payload import Meta

        meta = Meta("parameters", {}, self._job.settings.island, self._job.incarnation)
        read = self._exchanges.main.read
        payloads = [read(r, meta) if total(r) else np.empty(0, np.uint8) for r in self._whole]
        return (EmitStats(tuple(p.nbytes for p in payloads)), *payloads)

    def adopt(self, heard: Mapping[int, bool | None], *payloads: np.ndarray) -> None:
        """Sets θ and B of fragments from all shards' payloads; collective over the island.

        Args:
          heard: the fragments, with whether the oldest emission of each was merged; None: nothing was heard of it.
          payloads: of the anchors.
        """
        self._misfortune.called()
        self._misfortune.pass_(self._round, AFTER_COMMIT)
        arrays: Sequence[np.ndarray] = brought(payloads)
        # Not before: a payload that has gone with its owner leaves this rank where it was.
        self._calls += 1
        self._misfortune.transfer(sum(array.nbytes for array in arrays))
        self._exchanges.adopt(heard, arrays)

    def join(self, fragments: Sequence[int], *payloads: np.ndarray) -> None:
        """Sets θ and B of fragments, whatever the rule of adoption; collective."""
        self._misfortune.called()
        arrays: Sequence[np.ndarray] = brought(payloads)
        self._calls += 1
        self._misfortune.transfer(sum(array.nbytes for array in arrays))
        self._exchanges.join(fragments, arrays)

    @ray.method(concurrency_group="fetching")
    def fetch(self, *payloads: np.ndarray) -> None:
        """Brings payloads to this machine, whatever else is done."""
        brought(payloads)

    def evaluate(self, blocks: Sequence[int], *payloads: np.ndarray) -> list[tuple[float, int]]:
        """Loss of this rank's held-out blocks: nats and predicted tokens of each.

        Under anchors, if their payloads are given; those stay until something else is asked of the rank.
        """
        arrays = brought(payloads)
        self._calls += 1
        self._beats += 1
        if payloads:
            self._exchanges.borrow(arrays)
        else:
            self._exchanges.give_back()
        numbers = np.asarray(blocks, dtype=np.int64)
        return self._inner.evaluate(self._heldout.heldout(numbers))

    def save(self, storage: Storage, round_: int, bases: Mapping[int, Base] | None) -> None:
        """Copies the inner state and starts writing it; with `bases`, by fragment, parameters and bases as well."""
        self._calls += 1
        self._exchanges.give_back()
        state = self._inner.inner_state() | self._exchanges.state(bases)
        self._writes[round_] = self._writer.submit(self._write, storage, round_, state)

    @ray.method(concurrency_group="writing")
    def saved(self, round_: int, deadline_s: float) -> list[FileEntry]:
        """Waits for a write; returns its file entries."""
        return self._writes.pop(round_).result(deadline_s)

    def restore(self, storage: Storage, manifest: Manifest, parameters: bool) -> tuple[bool, dict[int, Base] | None]:
        """Takes over the inner state that a commit holds of this island.

        Args:
          storage: where it is.
          manifest: the commit.
          parameters: take parameters and bases as well, if it holds them.

        Returns:
          Whether what the exchange remembers fitted, and the bases by fragment if they were restored.  Collective.
        """
        from ray_diloco.checkpoint.names import inner_filename

        self._calls += 1
        store, island = storage.open(), self._job.settings.island
        own = inner_filename(island, self._rank)
        mine: dict[str, np.ndarray] = {}
        inner: dict[str, np.ndarray] = {}
        for entry in manifest.files_of("inner", island):
            part = dict(store.load(manifest, kind="inner", island=island, file=entry.name))
            remembered, optimiser = self._exchanges.split(part)
            # The optimiser's state may have been cut in another way; what exchanges remember is each rank's own.
            inner = optimiser | inner
            if entry.name == own:
                mine = remembered
        self._inner.load_inner_state(inner)
        return self._exchanges.load_state(mine, parameters)

    def reset(self, rewarm: bool) -> None:
        """Forgets the inner state, and warms the learning rate up again if that is asked for."""
        self._inner.reset_inner_state()
        if rewarm:
            self._inner.rewarm()
        self._exchanges.forget()

    @ray.method(concurrency_group="control")
    def progress(self) -> Progress:
        """Where this rank is; answers while it trains."""
        step, steps, loss, tokens_per_s = self._latest
        # Read here and not after each step: reading waits for the device, and training need not.
        leaving, counted = self._notice.given, self._interface.counted()
        return Progress(self._beats, step, steps, float(loss), tokens_per_s, leaving, counted, self._sending)

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        """Where the threads of this rank stand; answers while it trains."""
        return stacks()

    def _end_as_orphan(self) -> None:
        """Ends the process when no driver has spoken to it for too long; nothing of a run may stay on a cluster."""
        never, orphan_s = threading.Event(), self._job.orphan_s
        while (left := self._spoken_to + orphan_s - time.monotonic()) > 0:
            never.wait(left)
        os._exit(ORPHANED)

    def _write(self, storage: Storage, round_: int, pieces: dict[str, np.ndarray]) -> list[FileEntry]:
        from ray_diloco.checkpoint.names import inner_filename

        island = self._job.settings.island
        name = inner_filename(island, self._rank)
        return [storage.open().write_tensors(round_, name, pieces, kind="inner", island=island)]


RankActor = actor(fenced(Rank), concurrency_groups=THREADS)
