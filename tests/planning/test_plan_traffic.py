"""Planned bytes against the bytes that were metered in runs, and against the messages that exchanges write."""

import pytest
import torch

from ray_diloco.blocks import channels_of, codec_of, cuts_of
from ray_diloco.config.compose import compose
from ray_diloco.outer.codec import Fp32
from ray_diloco.outer.exchange import Exchange, Slice
from ray_diloco.outer.header import Meta
from ray_diloco.outer.layout import layout_of
from ray_diloco.outer.writer import Writer
from ray_diloco.planning.model import layout_of_config
from ray_diloco.planning.traffic import traffic_of

SHAPES = [("embed.weight", (97, 64)), ("layers.0.w", (64, 300)), ("layers.1.w", (64, 300)), ("norm", (64,))]
LAYOUT = layout_of(SHAPES)


def config(*settings):
    return compose(["islands.count=2", "inner.H=20", *settings]).config


def emitted(settings, ranks=1):
    """Bytes of an island's messages, written by the code that sends them."""
    c = config(*settings, f"islands.ranks={ranks}")
    (channel, *_), (cut, *_) = channels_of(c), cuts_of(channels_of(c), LAYOUT)
    exchange = Exchange(LAYOUT, [Slice(r, torch.randn(r.numel)) for r in LAYOUT.whole], LAYOUT.whole)
    exchange.adopt([anchor()])
    codec = codec_of(channel.up, channel.seed)
    sizes = []
    for number, ranges in zip(cut.numbers, cut.fragments, strict=True):
        sizes.append(exchange.emit(ranges, codec, Meta("contribution", {number: 0}, "i0")).payload.nbytes)
    return sizes


def anchor():
    meta = Meta("anchor", {0: 0})
    writer = Writer(Fp32(), LAYOUT.whole, meta)
    writer.put(0, torch.zeros(LAYOUT.numel))
    return writer.seal(meta)


@pytest.mark.parametrize(
    "settings",
    [
        ["codec.up.kind=fp32"],
        ["codec.up.kind=int8"],
        ["codec.up.kind=e3m0", "fragments.kind=layers", "fragments.size=1"],
        ["codec.up.kind=topk", "codec.up.k=16", "codec.up.block=512"],
        ["codec.up.kind=dct", "codec.up.k=8"],
        ["codec.up.kind=low_rank", "codec.up.rank=3"],
    ],
    ids=lambda settings: settings[0],
)
def test_a_contribution_is_planned_to_the_byte(settings):
    planned = traffic_of(config(*settings), LAYOUT)
    assert [f.up["i0"] for f in planned.main.fragments] == emitted(settings)


def test_an_island_with_a_codec_of_its_own_is_planned_by_that():
    planned = traffic_of(config("codec.up.kind=e3m0", "islands.i1.codec=int8"), LAYOUT)
    assert [f.up["i0"] for f in planned.main.fragments] == emitted(["codec.up.kind=e3m0"])
    assert [f.up["i1"] for f in planned.main.fragments] == emitted(["codec.up.kind=int8"])


def test_parameters_are_counted_without_building_them():
    assert layout_of_config(config("model=tiny")).numel == 1_012_960


@pytest.mark.parametrize(
    ("settings", "parameters", "up", "down"),
    [
        # Metered: `summary.json` of a run of the demo's model, and of the hierarchical test run in int8.
        (["run.rounds=24"], 1_012_960, 194_503_680, 194_503_680),
        (["run.rounds=3", "codec.up.kind=int8"], 37_152, 225_456, 893_568),
    ],
)
def test_a_run_is_planned_as_it_was_metered(settings, parameters, up, down):
    planned = traffic_of(config(*settings), layout_of([("w", (parameters,))]))
    rounds = planned.main.exchanges
    assert planned.total_up == pytest.approx(up, rel=0.01, abs=10_000 * rounds)
    assert planned.total_down == pytest.approx(down, rel=0.01, abs=10_000 * rounds)


def test_more_ranks_send_the_same_elements_under_more_headers():
    one, two = (traffic_of(config(f"islands.ranks={n}"), LAYOUT).main.fragments[0].up["i0"] for n in (1, 2))
    assert 0 < two - one < 1000


def test_channels_beside_the_main_one_count_as_often_as_they_act():
    c = config("algorithm=sparta_diloco", "inner.H=20", "run.rounds=3")
    main, side = traffic_of(c, LAYOUT).channels
    assert (main.exchanges, side.exchanges) == (3, 60)
    planned = traffic_of(c, LAYOUT)
    assert planned.up("i0") == main.fragments[0].up["i0"] + 20 * side.fragments[0].up["i0"]


def test_every_round_at_their_own_pace_has_one_contribution():
    free = traffic_of(config("algorithm=async_nesterov", "run.rounds=3"), LAYOUT)
    bound = traffic_of(config("run.rounds=3"), LAYOUT)
    assert free.total_up == bound.total_up


def test_every_island_holds_an_anchor_of_its_own_whole():
    own = traffic_of(config("algorithm=noloco", "islands.count=4"), LAYOUT)
    assert own.shards == 4
    assert own.main.fragments[0].down == pytest.approx(4 * LAYOUT.numel, abs=500)
