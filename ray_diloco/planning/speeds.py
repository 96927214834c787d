"""How fast the exchange itself is on this machine: the very passes that ranks and shards make, timed once and kept.

A million elements are emitted, merged from one contribution and from several, and adopted; the best of three counts, as
whatever else runs only makes it slower.  It takes a fraction of a second, and a few seconds where numba has to compile
a codec first.  The result is kept under the codecs, the outer optimiser and the processor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import cast

import torch

from ray_diloco.blocks import Channel, adopt_of, codec_of, feedback_of, recipe_of
from ray_diloco.outer import chunks
from ray_diloco.outer.average import OuterAverage
from ray_diloco.outer.codec import Codec, Fp32
from ray_diloco.outer.contribution import Contribution
from ray_diloco.outer.exchange import Exchange, Slice
from ray_diloco.outer.header import Meta
from ray_diloco.outer.layout import Layout, layout_of
from ray_diloco.outer.payload import Bytes
from ray_diloco.outer.shaped import ShapedCodec
from ray_diloco.outer.shard import AnchorShard
from ray_diloco.outer.writer import Writer
from ray_diloco.planning.remembered import recall, remember
from ray_diloco.planning.timing import Speeds
from ray_diloco.provenance.environment import processor_name

ELEMENTS = 1 << 20
_REPEATS = 3
# Most contributions that are merged to see what each adds.
_CONTRIBUTIONS = 4
_FILE = "speeds"


def speeds_of(channel: Channel, cache: str | None) -> Speeds:
    """The speeds of a channel: those that are remembered for this processor, else measured now."""
    known = remembered_speeds(channel, cache)
    if known is not None:
        return known
    found = measure(channel)
    remember(cache, _FILE, {_key(channel): asdict(found)})
    return found


def remembered_speeds(channel: Channel, cache: str | None) -> Speeds | None:
    """The speeds of a channel that an earlier plan measured; None if none did."""
    known = recall(cache, _FILE).get(_key(channel))
    return None if known is None else Speeds(**known)


def measure(channel: Channel, elements: int = ELEMENTS) -> Speeds:
    """Times the passes of a channel over a matrix of `elements` elements, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(channel, elements)
    finally:
        torch.set_num_threads(threads)


def _measure(channel: Channel, elements: int) -> Speeds:
    layout = layout_of([("w", (elements // 1024, 1024))])
    theta = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0)) * 1e-2
    up = codec_of(channel.up, channel.seed)
    held, rule, feedback = [Slice(layout.whole[0], theta)], adopt_of(channel), feedback_of(channel)
    exchange = Exchange(layout, held, layout.whole, rule=rule, feedback=feedback)
    start = _whole(layout, Meta("anchor", {0: 0}), codec_of(channel.down, channel.seed))
    exchange.adopt([start])

    def emit(island: str) -> Bytes:
        return exchange.emit(layout.whole, up, Meta("contribution", {0: 0}, island)).payload

    emit_s = _best(lambda: emit("i0"))
    islands = max(2, min(channel.islands, _CONTRIBUTIONS))
    sent = [Contribution(f"i{k}", 1.0, 0, (emit(f"i{k}").copy(),)) for k in range(islands)]
    one_s, all_s = (_merge_seconds(channel, layout, sent[:n]) for n in (1, islands))
    each = max(0.0, all_s - one_s) / (islands - 1)
    adopt_s = _best(lambda: exchange.adopt([start]))
    n = layout.numel
    return Speeds(emit_s / n, max(0.0, one_s - each) / n, each / n, adopt_s / n)


def _merge_seconds(channel: Channel, layout: Layout, sent: Sequence[Contribution]) -> float:
    """Seconds of an outer step from contributions.

    As a mean where one contribution is too few for the rule, and where the rule takes factors from elsewhere.
    """
    recipe = replace(recipe_of(channel), consensus=0.0, average=OuterAverage())
    if len(sent) == 1 or recipe.rule.needs_whole_vector:
        recipe = replace(recipe, merge="mean")
    down = cast(Codec, codec_of(channel.down, channel.seed))
    shard = AnchorShard(layout, layout.whole, [layout.whole], recipe, down)
    shard.found([_whole(layout, Meta("parameters"), Fp32())])

    def step() -> None:
        shard.prepare("timed", 0, sent)
        shard.abort("timed")

    return _best(step)


def _whole(layout: Layout, meta: Meta, codec: Codec | ShapedCodec) -> Bytes:
    """A message of zeros."""
    writer = Writer(codec, layout.whole, meta)
    for at in range(0, layout.numel, chunks.CHUNK):
        writer.put(at, torch.zeros(min(chunks.CHUNK, layout.numel - at)))
    return writer.seal(meta)


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few calls, after one that builds and compiles what it needs."""
    work()
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _key(channel: Channel) -> str:
    parts = [processor_name(), f"torch {torch.__version__}", str(sorted(asdict(channel.up).items()))]
    parts += [str(sorted(asdict(channel.down).items())), channel.outer.kind, channel.merge.kind, channel.adopt.kind]
    return " | ".join(parts)
