"""Planned memory against what shards and exchanges reserve."""

import pytest
import torch

from ray_diloco.blocks import adopt_of, channels_of, codec_of, cuts_of, feedback_of, recipe_of
from ray_diloco.config.compose import compose
from ray_diloco.outer.exchange import Exchange, Slice
from ray_diloco.outer.layout import layout_of
from ray_diloco.outer.shard import AnchorShard
from ray_diloco.planning.memory import memory_of
from ray_diloco.planning.traffic import traffic_of

LAYOUT = layout_of([("layers.0.w", (256, 300)), ("layers.1.w", (256, 300)), ("norm.weight", (64,))])


def planned(*settings):
    config = compose(["islands.count=2", "inner.H=20", *settings]).config
    channels = channels_of(config)
    return channels, memory_of(traffic_of(config, LAYOUT), channels, config.inner, config.islands.ranks)


@pytest.mark.parametrize(
    "settings",
    [[], ["codec.down.kind=bf16"], ["outer.kind=adam"], ["fragments.kind=layers", "fragments.size=1"]],
    ids=str,
)
def test_a_shard_reserves_what_is_planned(settings):
    channels, memory = planned(*settings)
    (cut,) = cuts_of(channels, LAYOUT)
    down = codec_of(channels[0].down, 0)
    shard = AnchorShard(LAYOUT, LAYOUT.whole, cut.fragments, recipe_of(channels[0]), down)
    sides = [side for part in shard._fragments for side in (part.live, part.spare)]
    reserved = sum(side.writer._memory.numel() + sum(4 * s.numel() for s in side.state) for side in sides)
    reserved += sum(4 * side.anchor.numel() for side in sides if side.writer.elements is None)
    assert memory.shard == pytest.approx(reserved, rel=0.01)


@pytest.mark.parametrize("settings", [[], ["codec.up.kind=int4", "codec.up.feedback=true"], ["algorithm=cocodc"]])
def test_an_exchange_reserves_what_is_planned(settings):
    channels, memory = planned(*settings)
    theta = Slice(LAYOUT.whole[0], torch.zeros(LAYOUT.numel))
    rule, feedback = adopt_of(channels[0]), feedback_of(channels[0])
    held = Exchange(LAYOUT, [theta], LAYOUT.whole, rule=rule, feedback=feedback)._held
    vectors = [held.base, held.error, *(part.emitted for part in held.parts)]
    reserved = sum(4 * v.numel() for v in vectors if v is not None)
    messages = codec_of(channels[0].up, 0).nbytes(LAYOUT.numel)
    assert memory.exchange == pytest.approx(reserved + messages, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "bytes_a_parameter"),
    [
        (["inner.zero_stage=0"], 4 + 4 + 8),
        (["inner.zero_stage=1", "inner.precision=bf16"], 2 + 2 + 4 + 8),
        (["inner.zero_stage=1", "inner.precision=bf16", "islands.ranks=4"], 2 + 2 + (4 + 8) / 4),
        (["inner.zero_stage=3", "inner.precision=bf16", "islands.ranks=4"], (2 + 2 + 4 + 8) / 4),
        (["inner.optimizer.name=sgd"], 4 + 4),
    ],
    ids=str,
)
def test_the_model_of_a_rank_follows_the_zero_stages(settings, bytes_a_parameter):
    _, memory = planned(*settings)
    assert memory.model == pytest.approx(bytes_a_parameter * LAYOUT.numel, rel=1e-4)


def test_the_driver_holds_no_tensors():
    _, memory = planned()
    assert memory.driver == 0
