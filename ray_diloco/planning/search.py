"""Which H, codec and fragments keep islands busiest within a budget of loss.

Every combination is planned like the run itself.  The loss is what is published (`quality.py`); combinations of which
nothing is published, or more than the budget, are left out.  Of equal utilisation the lower loss wins, then fewer
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from ray_diloco.blocks import Channel, channels_of
from ray_diloco.config.blocks import CodecConfig
from ray_diloco.config.schema import Config
from ray_diloco.errors import SyncError
from ray_diloco.outer.layout import Layout
from ray_diloco.planning.estimate import anchor_island, loss_of, predicted_round
from ray_diloco.planning.links import link_of
from ray_diloco.planning.timing import Speeds
from ray_diloco.planning.traffic import Traffic, traffic_of

ROUND_LENGTHS = (10, 20, 30, 50, 100, 200, 500)
CODECS = ("fp32", "bf16", "int8", "int4", "e3m0")
# Fragments and delay: at once and waited for; Streaming DiLoCo's, with one step and with five to hide behind.
CUTS = (("whole", 0), ("layers", 1), ("layers", 5))
# Utilisations that differ by less are the same.
_SAME = 0.002


@dataclass(frozen=True, slots=True)
class Option:
    """One combination: what it keeps of the islands' time, what it costs in loss, and what it sends."""

    H: int
    codec: str
    fragments: int
    delay: int
    utilisation: float
    loss: float
    source: str
    bytes_up: int


def options(
    config: Config,
    layout: Layout,
    step_s: Mapping[str, float],
    speeds: Callable[[Channel], Speeds],
    measured: Mapping[str, Mapping[str, Any]],
) -> list[Option]:
    """All combinations within the budget `plan.quality`, the best first."""
    links = {name: link_of(config, name, anchor_island(config), measured)[0] for name in step_s}

    @cache
    def messages(kind: str, codec: str) -> Traffic | None:
        """A model without numbered blocks has no fragments of layers."""
        try:
            return traffic_of(_varied(config, max(ROUND_LENGTHS), codec, kind, 1), layout)
        except SyncError:
            return None

    found = []
    for (kind, delay), codec, H in product(CUTS, CODECS, ROUND_LENGTHS):
        varied = _varied(config, H, codec, kind, delay)
        (main, *_) = channels_of(varied)
        loss = loss_of(main, layout.numel, len(step_s))
        traffic = messages(kind, codec)
        if loss.total is None or loss.total > config.plan.quality or delay >= H or traffic is None:
            continue
        traffic = replace(traffic, channels=(replace(traffic.main, H=H, delay=delay),))
        time = predicted_round(varied, traffic, step_s, speeds(main), links)
        sent = round(max(traffic.up(name) for name in traffic.islands))
        parts = len(traffic.main.fragments)
        found.append(Option(H, codec, parts, delay, time.utilisation, loss.total, loss.H_source, sent))
    return sorted(found, key=lambda o: (-round(o.utilisation / _SAME), o.loss, o.bytes_up / o.H))


def _varied(config: Config, H: int, codec: str, kind: str, delay: int) -> Config:
    """The run with other blocks, and no further channels."""
    return replace(
        config,
        inner=replace(config.inner, H=H),
        codec=replace(config.codec, up=CodecConfig(kind=codec)),
        fragments=replace(config.fragments, kind=kind),
        schedule=replace(config.schedule, spread=kind != "whole", delay=delay, lag=0),
        channels={},
    )
