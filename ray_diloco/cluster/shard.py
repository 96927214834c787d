"""An anchor shard as a Ray actor: an `outer.shard.AnchorShard` for each anchor of each channel that it keeps.

Payloads arrive as read-only views of the object store and leave as return values, which the driver owns.  A commit is
written by a thread from the live buffers, without a copy: they are not written again before the second next round is
prepared, and that takes other memory if a slow storage still has the thread reading.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import ray

from ray_diloco.blocks import CONTROL, Cut
from ray_diloco.cluster.ahead import brought
from ray_diloco.cluster.calls import actor
from ray_diloco.cluster.misfortune import NO_FAULTS, Misfortune, Misfortunes
from ray_diloco.cluster.runs import in_runs
from ray_diloco.cluster.storage import Storage
from ray_diloco.outer.layout import Layout, shard_ranges
from ray_diloco.rounds.faults import AFTER_COMMIT, BEFORE_COMMIT, MID_SEND
from ray_diloco.rounds.ports import SHARED

if TYPE_CHECKING:
    from ray_diloco.checkpoint.manifest import FileEntry, Manifest
    from ray_diloco.config.schema import Config
    from ray_diloco.outer.contribution import Contribution
    from ray_diloco.outer.shard import AnchorShard
    from ray_diloco.outer.sides import Side

# Seconds that a commit may take to be written before whoever waits for it gives up.
WRITE_DEADLINE_S = 600.0
# Of so many ended writes it is kept what became of them.
KEPT_WRITES = 64
# In a file of outer state: the anchor itself, where the file of the anchor holds what is published instead; what the
# island of the anchor has sent last, by fragment and part.
ANCHOR, SENT = "anchor", "sent"


@dataclass(frozen=True)
class ShardSettings:
    """What a shard of an anchor is built from.

    Attributes:
      layout: the canonical form.
      cuts: the channels and their fragments; the main one first.
      anchors: names of the anchors of the main channel that it keeps.
      part, parts: which part of the elements it keeps, of how many.
      index, shards: its number and how many there are, for the names of its files.
      faults: what goes wrong here on purpose.
    """

    layout: Layout
    cuts: tuple[Cut, ...]
    anchors: tuple[str, ...]
    part: int
    parts: int
    index: int
    shards: int
    faults: Misfortunes = NO_FAULTS


@dataclass(frozen=True)
class ShardStats:
    """What a shard says of a payload that it returns; squares are sums over its elements."""

    version: int
    nbytes: int
    anchor_squared: float = 0.0
    update_squared: float = 0.0


@dataclass(frozen=True)
class ShardWork:
    """One movement of one anchor, as a shard is told of it.

    Attributes:
      specs: per contribution, in sorted island order: island, factor, base version, number of payloads, incarnation.
      extras: factors of the extra vectors of the merge rule.
      neighbours: how many payloads of neighbours' anchors follow those of the contributions, one each.
      own: which of them is this anchor.
      idle: nothing moves but the version.
    """

    key: str
    anchor: str
    fragment: int
    specs: tuple[tuple[str, float, int, int, int | None], ...]
    extras: tuple[float, ...] = ()
    neighbours: int = 0
    own: int = 0
    idle: bool = False


class Shard:
    """One shard of an anchor."""

    def __init__(self) -> None:
        # torch reads it once: buffers in huge pages, by which a round takes a fifth less.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        # The slow imports, while the islands of a run are still starting.
        import ray_diloco.outer.shard  # noqa: F401

        self._writer = ThreadPoolExecutor(1)
        self._writes: dict[int, Future[list[FileEntry]]] = {}
        # Writes under way with the buffers that they read.
        self._reading: list[tuple[set[Side], Future[list[FileEntry]]]] = []

    def build(self, settings: ShardSettings) -> None:
        """Makes room for the anchors of a model."""
        import torch

        from ray_diloco.blocks import codec_of, draw_of, recipe_of
        from ray_diloco.outer.shard import AnchorShard
        from ray_diloco.outer.step import compile_for

        torch.set_num_threads(1)
        self._misfortune = Misfortune(settings.faults)
        self._settings = settings
        mine = shard_ranges(settings.layout, settings.parts)[settings.part]
        self._kept: dict[tuple[int, str], AnchorShard] = {}
        # What the commit that the run goes on from holds of contributions to the round before it.
        self._sent: dict[tuple[int, int], np.ndarray] = {}
        for k, cut in enumerate(settings.cuts):
            channel = cut.channel
            for name in settings.anchors if k == 0 else (SHARED,):
                self._kept[k, name] = AnchorShard(
                    settings.layout,
                    mine,
                    cut.fragments,
                    recipe_of(channel),
                    codec_of(channel.down, channel.seed),  # type: ignore[arg-type]
                    draw_of(channel),
                    first=cut.first,
                )
        # While the islands train their first segment.
        for kept in self._kept.values():
            self._writer.submit(compile_for, kept.recipe, max(side.anchor.numel() for side in kept.live_sides()))

    def found(self, *payloads: np.ndarray) -> None:
        """Sets version 0 of every anchor."""
        for (k, _), kept in self._kept.items():
            if self._settings.cuts[k].channel.signal == CONTROL:
                kept.found_zero()
            else:
                kept.found(payloads)

    def load(self, storage: Storage, manifest: Manifest) -> list[str]:
        """Takes over anchors and outer state from a commit.

        Returns:
          Names of the anchors and channels that it holds no state of: they begin at what was published.
        """
        from ray_diloco.outer.replaced import kinds_of

        store, versions = storage.open(), {int(k): v for k, v in manifest.versions.items()}
        published = dict(store.load(manifest, self._main.names))
        stored, fresh = store.names(manifest, "outer"), []
        for (k, name), kept in self._kept.items():
            prefix = self._prefix(k, name)

            def read(kind: str, prefix: str = prefix, names: Sequence[str] = kept.names) -> dict[str, np.ndarray]:
                wanted = [f"{prefix}{kind}.{tensor}" for tensor in names]
                if not stored.issuperset(wanted):
                    return {}
                return {key.removeprefix(f"{prefix}{kind}."): a for key, a in store.load(manifest, wanted, "outer")}

            states = {state: read(state) for state in kept.recipe.state_names}
            anchor = read(ANCHOR)
            lacking = kept.names and (not all(states.values()) or (not anchor and (k > 0 or name != SHARED)))
            if lacking:
                fresh.append(name or self._settings.cuts[k].channel.name)
                zeros = {tensor: np.zeros_like(array) for tensor, array in published.items()}
                control = self._settings.cuts[k].channel.signal == CONTROL
                known = {number: versions.get(number, 0) for number in self._settings.cuts[k].numbers}
                kept.load(zeros if control else published, kept.new_state(), known)
            else:
                replaced = {kind: read(kind) for kind in kinds_of(kept.recipe)}
                kept.load(anchor or published, states, versions, replaced)
        for name in stored:
            kind, *label = name.removeprefix(self._prefix(0, self._settings.anchors[0])).split(".")
            if kind == SENT:
                fragment, k = map(int, label)
                self._sent[fragment, k] = dict(store.load(manifest, [name], "outer"))[name]
        return fresh

    @ray.method(num_returns=2)
    def recalled(self, fragment: int, k: int) -> tuple[int, np.ndarray]:
        """What the island of this anchor had sent when the commit was written: bytes, and the payload."""
        payload = self._sent[fragment, k]
        return payload.nbytes, payload

    def gram(self, work: ShardWork, *payloads: np.ndarray) -> np.ndarray:
        """Inner products of contributions over this shard's part; see `AnchorShard.gram`."""
        contributions, _ = _contributions(work, brought(payloads))
        return self._of(work.fragment, work.anchor).gram(work.fragment, contributions)

    def factors(self, kind: str, weights: Sequence[float], *grams: np.ndarray) -> list[float]:
        """What a rule over whole vectors multiplies contributions and extras by."""
        from ray_diloco.outer.merge import factors_of, merge_rule, require_enough

        settings = self._main.recipe.settings
        require_enough(kind, len(weights), settings)
        return factors_of(merge_rule(kind), np.sum(grams, axis=0), list(weights), settings)

    @ray.method(num_returns=2)
    def prepare(self, work: ShardWork, *payloads: np.ndarray) -> tuple[ShardStats, np.ndarray]:
        """Prepares a movement; the same key again gives the same answer.

        Args:
          work: what to do.
          payloads: of all contributions, in the order of `specs`; then one of each neighbour's anchor.
        """
        self._misfortune.pass_(round_of(work.key), MID_SEND)
        arrays: Sequence[np.ndarray] = brought(payloads)
        self._misfortune.transfer(sum(array.nbytes for array in arrays))
        kept = self._of(work.fragment, work.anchor)
        if any(kept.spare_side(work.fragment) in sides for sides, write in self._reading if not write.done()):
            kept.renew_spare(work.fragment)
        contributions, rest = _contributions(work, arrays)
        prepared, payload = kept.prepare(
            work.key,
            work.fragment,
            contributions,
            scale=[*(float(np.float32(factor)) for _, factor, *_ in work.specs), *work.extras],
            neighbours=[[one] for one in rest],
            own=work.own,
            idle=work.idle,
        )
        self._misfortune.pass_(round_of(work.key), BEFORE_COMMIT)
        stats = ShardStats(prepared.version, payload.nbytes, prepared.squared_anchor_norm, prepared.squared_update_norm)
        return stats, in_runs(payload)

    def commit(self, key: str, fragment: int) -> None:
        """Makes a prepared round the committed state; faster channels go on from it."""
        k = self._channel_of(fragment)
        for (channel, _), kept in self._kept.items():
            if channel == k:
                kept.commit(key)
        # From here on, what the next round needs again the driver has references to.
        self._sent = {label: payload for label, payload in self._sent.items() if label[0] != fragment}
        # The main channel acts last, and the others in their order.
        faster = [j for j in range(1, len(self._settings.cuts)) if k == 0 or j < k]
        faster = [j for j in faster if self._settings.cuts[j].channel.signal != CONTROL]
        if faster and self._settings.cuts[k].channel.signal != CONTROL:
            self._wait_for_writes()
            payload = self._kept[k, SHARED].payload(fragment)
            for j in faster:
                for number in self._settings.cuts[j].numbers:
                    self._kept[j, SHARED].rewrite(number, [payload])

        self._misfortune.pass_(round_of(key), AFTER_COMMIT)

    def abort(self, key: str) -> None:
        """Forgets a prepared round."""
        for kept in self._kept.values():
            kept.abort(key)

    @ray.method(num_returns=2)
    def current(self, fragment: int, anchor: str) -> tuple[ShardStats, np.ndarray]:
        """A committed anchor of a fragment."""
        kept = self._of(fragment, anchor)
        payload = kept.payload(fragment)
        return ShardStats(kept.versions[fragment], payload.nbytes), payload

    @ray.method(num_returns=2)
    def passed(self, fragment: int, anchor: str, version: int) -> tuple[ShardStats, np.ndarray | None]:
        """An anchor that was replaced, as it was sent; 0 bytes if it is not kept."""
        payload = self._of(fragment, anchor).passed(fragment, version)
        return ShardStats(version, 0 if payload is None else payload.nbytes), payload

    @ray.method(num_returns=2)
    def published(self, fragment: int, anchor: str) -> tuple[ShardStats, np.ndarray]:
        """What is evaluated and exported of an anchor."""
        kept = self._of(fragment, anchor)
        payload = kept.published(fragment)
        return ShardStats(kept.versions[fragment], payload.nbytes), payload

    @ray.method(num_returns=2)
    def mean(self, *payloads: np.ndarray) -> tuple[ShardStats, np.ndarray]:
        """The mean of the anchors of a fragment, each given as one payload."""
        from ray_diloco.outer.means import mean_anchor

        payload = mean_anchor(payloads)
        return ShardStats(0, payload.nbytes), payload

    def save(self, storage: Storage, round_: int, labels: Sequence[tuple[int, int]], *payloads: np.ndarray) -> None:
        """Starts writing the committed state as part of the commit of `round_`.

        Args:
          storage: where to.
          round_: the round.
          labels: of payloads of this anchor's island that the next round needs again: fragment, and which part of it.
          payloads: those; then, where every island has an anchor of its own, the mean of those anchors, fragment by
            fragment, for the shard that writes what is published.
        """
        published = self._published(payloads[len(labels) :])
        sent = self._sent | dict(zip(labels, payloads, strict=False))
        prefix = self._prefix(0, self._settings.anchors[0])
        outer = dict(self._outer()) | {f"{prefix}{SENT}.{f}.{k}": payload for (f, k), payload in sent.items()}
        write = self._writer.submit(self._write, storage, round_, published, outer)
        # A write may end, and others begin, before the driver comes to ask what became of it.
        ended = [r for r, w in self._writes.items() if w.done()]
        for r in ended[:-KEPT_WRITES]:
            del self._writes[r]
        self._writes[round_] = write
        sides = {side for kept in self._kept.values() for side in kept.live_sides()}
        self._reading = [(read, w) for read, w in self._reading if not w.done()] + [(sides, write)]

    @ray.method(concurrency_group="writing")
    def saved(self, round_: int) -> list[FileEntry]:
        """Waits for a write; returns its file entries.  May be asked again, as long as it is one of the last."""
        return self._writes[round_].result(WRITE_DEADLINE_S)

    @ray.method(concurrency_group="reckoning")
    def expect(self, config: Config) -> dict[str, float | None]:
        """What a round of the run is expected to be: the fields of `planning.expected.Expected`."""
        from ray_diloco.planning.expected import expected

        # Not the object itself: the driver would import torch to read it.
        return asdict(expected(config, self._settings.layout))

    @ray.method(concurrency_group="control")
    def alive(self) -> None:
        """Answers, whatever else is done."""

    def _published(self, means: Sequence[np.ndarray]) -> Mapping[str, np.ndarray]:
        if SHARED in self._settings.anchors:
            return self._main.published_tensors()
        from ray_diloco.outer.means import tensors_of

        return tensors_of(self._settings.layout, means) if means else {}

    def _outer(self) -> Iterator[tuple[str, np.ndarray]]:
        """Everything that is not in the file of the anchor, by the name that it has in the file of the outer state."""
        for (k, name), kept in self._kept.items():
            prefix = self._prefix(k, name)
            if k > 0 or name != SHARED or kept.averaged:
                yield from ((f"{prefix}{ANCHOR}.{tensor}", array) for tensor, array in kept.tensors().items())
            for state in kept.recipe.state_names:
                yield from ((f"{prefix}{state}.{t}", array) for t, array in kept.state_tensors(state).items())
            yield from ((f"{prefix}{kind}.{tensor}", array) for kind, tensor, array in kept.replaced_tensors())

    def _write(
        self, storage: Storage, round_: int, anchor: Mapping[str, np.ndarray], outer: Mapping[str, np.ndarray]
    ) -> list[FileEntry]:
        from ray_diloco.checkpoint.names import anchor_filename, outer_filename

        store, k, n = storage.open(), self._settings.index, self._settings.shards
        return [
            store.write_tensors(round_, anchor_filename(k, n), anchor, kind="anchor"),
            store.write_tensors(round_, outer_filename(k, n), outer, kind="outer"),
        ]

    @property
    def _main(self) -> AnchorShard:
        return self._kept[0, self._settings.anchors[0]]

    def _of(self, fragment: int, anchor: str) -> AnchorShard:
        k = self._channel_of(fragment)
        return self._kept[k, anchor if k == 0 else SHARED]

    def _channel_of(self, fragment: int) -> int:
        return next(k for k, cut in enumerate(self._settings.cuts) if fragment in cut.numbers)

    def _prefix(self, k: int, name: str) -> str:
        """What the names of an anchor's outer state begin with; nothing for the one that all share."""
        parts = [f"@{self._settings.cuts[k].channel.name}/" if k else "", f"@{name}/" if name else ""]
        return "".join(parts)

    def _wait_for_writes(self) -> None:
        for _, write in self._reading:
            write.exception(WRITE_DEADLINE_S)


def round_of(key: str) -> int:
    """The round that a key names; see `rounds.conclusions`."""
    return int(key.split(".", 1)[0])


def _contributions(work: ShardWork, payloads: Sequence[np.ndarray]) -> tuple[list[Contribution], Sequence[np.ndarray]]:
    """The contributions of a movement, and the payloads behind theirs."""
    from ray_diloco.outer.contribution import Contribution

    found, at = [], 0
    for island, factor, base_version, count, incarnation in work.specs:
        found.append(Contribution(island, factor, base_version, tuple(payloads[at : at + count]), incarnation))
        at += count
    return found, payloads[at:]


# What its methods run in, beside the thread that does the work.
THREADS = {"writing": 1, "control": 1, "reckoning": 1}

ShardActor = actor(Shard, num_cpus=0, concurrency_groups=THREADS)
