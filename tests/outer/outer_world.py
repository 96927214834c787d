"""Islands of ranks and an anchor of shards in one process, for tests of outer/: no Ray, small chunks."""

import contextlib
import hashlib
from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st

from ray_diloco.outer import chunks, payload
from ray_diloco.outer.codec import Fp32
from ray_diloco.outer.exchange import Exchange, Slice
from ray_diloco.outer.layout import Range, intersect, layout_of, normalise, shard_ranges
from ray_diloco.outer.optimizer import Nesterov
from ray_diloco.outer.payload import Meta, open_payload
from ray_diloco.outer.shard import AnchorShard, Contribution

# Eight elements in two tensors.
LAYOUT = layout_of([("w", (2, 3)), ("b", (2,))])
WHOLE = LAYOUT.whole


@contextlib.contextmanager
def chunk_size(numel):
    """Passes cut their work every `numel` elements, so that small tensors have many chunks."""
    before = chunks.CHUNK
    chunks.CHUNK = numel
    try:
        yield
    finally:
        chunks.CHUNK = before


def contribution_payload(values, ranges, island="i0", version=0, fragment=0, codec=None, incarnation=0):
    """A contribution with the given elements, made without `Exchange`."""
    return _written(values, ranges, Meta("contribution", {fragment: version}, island, incarnation), codec)


def parameters_payload(values, ranges, codec=None):
    return _written(values, ranges, Meta("parameters"), codec)


def anchor_payload(values, ranges, versions=None, codec=None):
    return _written(values, ranges, Meta("anchor", versions or {0: 0}), codec)


def _written(values, ranges, meta, codec):
    writer = payload.Writer(codec or Fp32(), tuple(ranges), meta)
    values = torch.as_tensor(values, dtype=torch.float32).contiguous()
    for start in range(0, writer.numel, chunks.CHUNK):
        stop = min(start + chunks.CHUNK, writer.numel)
        writer.put(start, values[start:stop])
    return writer.seal(meta)


def founded(layout, optimizer, values, fragments=None, **settings):
    """One shard that keeps everything, founded with `values`."""
    kept = AnchorShard(layout, layout.whole, fragments or [layout.whole], optimizer, **settings)
    kept.found([parameters_payload(values, layout.whole)])
    return kept


def flat(tensors):
    """Tensors by name as one flat array."""
    return np.concatenate([t.reshape(-1) for t in tensors.values()])


def state_digest(kept, states=("momentum",)):
    """SHA-256 of everything that is committed."""
    digest = hashlib.sha256(repr(kept.versions).encode())
    for tensors in (kept.tensors(), *(kept.state_tensors(name) for name in states)):
        for name, array in tensors.items():
            digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()


class Island:
    """Ranks that each emit their part of one model; they hold it whole or only that part."""

    def __init__(self, name, layout, parts, whole, **settings):
        self.name = name
        self.layout = layout
        self.parts = parts
        self.memory = [torch.full((layout.numel,), float("nan")) for _ in parts]
        self.ranks = []
        for memory, part in zip(self.memory, parts, strict=True):
            tensors = tuple(t.range for t in layout.tensors)
            held = tensors if whole else tuple(r for t in tensors for r in intersect((t,), part))
            slices = [Slice(r, memory[r.start : r.stop]) for r in held]
            self.ranks.append(Exchange(layout, slices, part, **settings))

    def write(self, values):
        """Sets θ on all ranks; what a rank does not hold stays NaN."""
        for rank, memory in zip(self.ranks, self.memory, strict=True):
            for r in rank.holds:
                memory[r.start : r.stop] = values[r.start : r.stop]

    def theta(self):
        """θ as the ranks that emit it have it."""
        values = np.full(self.layout.numel, np.nan, np.float32)
        for memory, part in zip(self.memory, self.parts, strict=True):
            for r in part:
                values[r.start : r.stop] = memory[r.start : r.stop].numpy()
        return values

    def read(self, ranges):
        return [rank.read(intersect(ranges, rank.emits), Meta("parameters")) for rank in self.ranks]

    def contribute(self, ranges, fragment, version, weight, codec):
        meta = Meta("contribution", {fragment: version}, self.name)
        payloads = tuple(rank.emit(intersect(ranges, rank.emits), codec, meta).payload for rank in self.ranks)
        return Contribution(self.name, weight, version, payloads)

    def adopt(self, arrays, ranges=None):
        for rank in self.ranks:
            rank.adopt(arrays, ranges)


def dealt(numel, cuts, owners, count):
    """Cuts [0, numel) and deals the pieces out: a partition into `count` interleaved sets."""
    borders = sorted({0, numel, *(cut % numel for cut in cuts)})
    sets = [[] for _ in range(count)]
    for k, (start, stop) in enumerate(pairwise(borders)):
        sets[owners[k % len(owners)] % count].append(Range(start, stop))
    return [normalise(s) for s in sets]


def partitions(numel, most):
    """Strategy: partitions of [0, numel) into at most `most` sets, some of which may be empty."""
    cuts = st.lists(st.integers(0, 10_000), max_size=8)
    owners = st.lists(st.integers(0, 20), min_size=1, max_size=9)
    return st.builds(lambda c, o, n: dealt(numel, c, o, n), cuts, owners, st.integers(1, most))


shapes = st.lists(st.one_of(st.tuples(st.integers(1, 40)), st.tuples(st.integers(1, 7), st.integers(1, 7))), max_size=5)
layouts = shapes.map(lambda found: layout_of((f"t{k}", s) for k, s in enumerate([(1,), *found])))


@st.composite
def worlds(draw):
    """A layout, its islands, the fragments and the number of shards."""
    layout = draw(layouts)
    islands = [
        Island(f"i{k}", layout, draw(partitions(layout.numel, 3)), draw(st.booleans()))
        for k in range(draw(st.integers(1, 3)))
    ]
    return layout, islands, draw(partitions(layout.numel, 3)), draw(st.integers(1, 4))


def shards_of(layout, count, fragments, optimizer, codec_down=None):
    return [AnchorShard(layout, kept, fragments, optimizer, codec_down) for kept in shard_ranges(layout, count)]


def offer(island, values, weight=1.0, version=0, ranges=WHOLE, fragment=0, codec=None):
    payload = contribution_payload(values, ranges, island, version, fragment, codec)
    return Contribution(island, weight, version, (payload,))


def elements(payload):
    opened = open_payload(payload)
    return opened.read(0, opened.numel, torch.empty(opened.numel)).numpy().copy()


def nesterov(start=None):
    return founded(LAYOUT, Nesterov(0.5, 0.5), np.arange(8.0) if start is None else start)
