"""Speeds of the exchange, measured."""

import pytest

from ray_diloco.blocks import channels_of
from ray_diloco.config.compose import compose
from ray_diloco.planning import speeds
from ray_diloco.planning.timing import Speeds


@pytest.mark.parametrize(
    "settings",
    [[], ["codec.up.kind=bf16", "codec.up.feedback=true"], ["merge.kind=median"], ["merge.kind=krum"]],
    ids=str,
)
def test_the_passes_of_any_channel_are_timed(settings):
    (channel,) = channels_of(compose(["islands.count=5", *settings]).config)
    found = speeds.measure(channel, elements=1 << 12)
    assert found.emit > 0 and found.adopt > 0 and found.merge + found.merge_each > 0


def test_speeds_are_measured_once(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(speeds, "measure", lambda channel: asked.append(channel) or Speeds(1.0, 2.0, 3.0, 4.0))
    (channel,) = channels_of(compose([]).config)
    first, again = (speeds.speeds_of(channel, str(tmp_path)) for _ in range(2))
    assert first == again == Speeds(1.0, 2.0, 3.0, 4.0)
    assert len(asked) == 1


def test_another_codec_has_a_speed_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(speeds, "measure", lambda channel: Speeds(len(channel.up.kind)))
    kinds = ("fp32", "int4", "1bit", "e3m0", "topk", "int8_bin_mean")
    found = {
        kind: speeds.speeds_of(channels_of(compose([f"codec.up.kind={kind}"]).config)[0], str(tmp_path)).emit
        for kind in kinds
    }
    assert found == {kind: len(kind) for kind in kinds}
