"""Bytes on their way, exactly: from the codecs' own sizes, headers and digests, as the sender would write them.

A contribution is one message for each rank and each part of the anchor that has something of the fragment; an anchor
comes back as one message of each part.  What is counted is what `summary.json` counts: the messages of committed
rounds, once for each island, whatever the islands' ranks share.  Source: `outer/payload.py`, `cluster/anchor.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from ray_diloco.blocks import MAIN, Cut, anchor_names, channels_of, codec_of, cuts_of, draw_of, is_free, shard_count
from ray_diloco.config.schema import Config, island_names
from ray_diloco.outer.codec import Codec, Fp32
from ray_diloco.outer.emission import shapes_of
from ray_diloco.outer.header import Meta
from ray_diloco.outer.layout import Layout, Ranges, intersect, shard_ranges, split_evenly, total
from ray_diloco.outer.random_fragments import Draw
from ray_diloco.outer.shaped import ShapedCodec, is_shaped
from ray_diloco.outer.writer import message_bytes
from ray_diloco.rounds.ports import SHARED
from ray_diloco.rules import emitting, ranks_of


@dataclass(frozen=True, slots=True)
class FragmentTraffic:
    """One fragment of one channel, each time that it is exchanged.

    Attributes:
      channel: name of the channel.
      number: of the fragment, over all channels.
      elements: of the model that it has.
      up: bytes that an island sends; by island, as their ranks and names differ.
      down: bytes that each island gets.
    """

    channel: str
    number: int
    elements: int
    up: dict[str, int]
    down: int


@dataclass(frozen=True, slots=True)
class ChannelTraffic:
    """One channel of a run.

    Attributes:
      H, delay: inner steps between two emissions of a fragment, and from emission to adoption.
      exchanges: how often each fragment is exchanged in the run.
    """

    name: str
    H: int
    delay: int
    spread: bool
    exchanges: int
    fragments: tuple[FragmentTraffic, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """All messages of a run.

    Attributes:
      parameters: elements of the anchor.
      shards: actors that keep it.
      start: bytes that each island gets when it joins.
    """

    parameters: int
    shards: int
    islands: tuple[str, ...]
    channels: tuple[ChannelTraffic, ...]
    start: int

    @property
    def main(self) -> ChannelTraffic:
        """The main channel."""
        return self.channels[0]

    def up(self, island: str) -> float:
        """Bytes that an island sends in a round of the main channel, with what other channels send meanwhile."""
        return math.fsum(self._times(c) * sum(f.up[island] for f in c.fragments) for c in self.channels)

    @property
    def down(self) -> float:
        """Bytes that each island gets in a round of the main channel."""
        return math.fsum(self._times(c) * sum(f.down for f in c.fragments) for c in self.channels)

    @property
    def total_up(self) -> int:
        """Bytes that all islands send in the run, to compare with `summary.json`."""
        return sum(c.exchanges * sum(sum(f.up.values()) for f in c.fragments) for c in self.channels)

    @property
    def total_down(self) -> int:
        """Bytes that all islands get in the run."""
        n = len(self.islands)
        return sum(c.exchanges * n * sum(f.down for f in c.fragments) for c in self.channels)

    def _times(self, channel: ChannelTraffic) -> float:
        return self.main.H / channel.H


def traffic_of(config: Config, layout: Layout) -> Traffic:
    """The messages of a run.

    Raises:
      SyncError: RD-451, RD-452, the model cannot be cut so.
    """
    names = tuple(island_names(config))
    cuts = cuts_of(channels_of(config), layout)
    shards = shard_count(anchor_names(config), config.anchor.shards, len(names), layout.numel)
    ranks = {name: ranks_of(config, name) for name in names}
    return Traffic(
        layout.numel,
        shards,
        names,
        tuple(_channel(config, cut, layout, ranks, _parts(config, shards)) for cut in cuts),
        sum(message_bytes(Fp32(), kept, Meta("anchor", {0: 0})) for kept in shard_ranges(layout, 1)),
    )


def _parts(config: Config, shards: int) -> int:
    return shards if anchor_names(config) == (SHARED,) else 1


def _channel(config: Config, cut: Cut, layout: Layout, ranks: dict[str, int], parts: int) -> ChannelTraffic:
    channel = cut.channel
    down = codec_of(channel.down, channel.seed)
    ups = {name: emitting(config, name).codec.up if channel.name == MAIN else channel.up for name in ranks}
    draw = draw_of(channel)
    kept = shard_ranges(layout, parts)

    @cache
    def sent(fragment: int, name_length: int, count: int, kind: str) -> int:
        """Islands of as many ranks whose names are as long send as many bytes in one codec."""
        up = codec_of(next(codec for codec in ups.values() if codec.kind == kind), channel.seed)
        meta = Meta("contribution", {fragment: 0}, "x" * name_length, 0)
        ranges = cut.fragments[fragment - cut.first]
        pieces = [intersect(intersect(ranges, k), m) for m in split_evenly(layout.whole, count) for k in kept]
        return sum(_message(up, piece, meta, layout, draw) for piece in pieces if total(piece))

    def received(fragment: int, ranges: Ranges) -> int:
        pieces = [intersect(ranges, k) for k in kept]
        meta = Meta("anchor", {fragment: 0})
        # A shard without an element of the fragment says so in a message that has a header alone.
        return sum(_message(down, piece, meta, layout, draw) for piece in pieces)

    fragments = tuple(
        FragmentTraffic(
            channel.name,
            number,
            total(ranges),
            {name: sent(number, len(name.encode()), count, ups[name].kind) for name, count in ranks.items()},
            received(number, ranges),
        )
        for number, ranges in zip(cut.numbers, cut.fragments, strict=True)
    )
    return ChannelTraffic(channel.name, channel.H, channel.delay, channel.spread, _exchanges(config, cut), fragments)


def _exchanges(config: Config, cut: Cut) -> int:
    """How often all islands together exchange a fragment: at their own pace, a round has one contribution."""
    channel = cut.channel
    return channel.rounds // channel.islands if is_free(config) and cut.first == 0 else channel.rounds


def _message(codec: Codec | ShapedCodec, ranges: Ranges, meta: Meta, layout: Layout, draw: Draw | None) -> int:
    if draw is not None:
        # On average: how many are drawn differs from round to round.
        numel = round(total(ranges) * draw.p)
        return message_bytes(codec, ranges, meta, draw.of(0), numel=numel)
    shapes = shapes_of(layout, ranges) if is_shaped(codec) else None
    return message_bytes(codec, ranges, meta, shapes=shapes)
