"""What a run is expected to send and take, while it starts: a few figures for its tape, beside what is measured later.

Bytes are those of the plan.  Times are there only if a step is given, or remembered of an earlier run, and the speeds
of the exchange are remembered of a plan: nothing is measured while a run starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray_diloco.blocks import channels_of
from ray_diloco.config.schema import Config
from ray_diloco.outer.layout import Layout
from ray_diloco.planning.estimate import anchor_island, predicted_round
from ray_diloco.planning.links import link_of, measured_links
from ray_diloco.planning.speeds import remembered_speeds
from ray_diloco.planning.steps import known_steps
from ray_diloco.planning.traffic import traffic_of


@dataclass(frozen=True, slots=True)
class Expected:
    """A round: bytes of all islands together; seconds, and those of them in which islands train, where known."""

    bytes_up: int
    bytes_down: int
    round_s: float | None
    train_s: float | None


def expected(config: Config, layout: Layout) -> Expected:
    """What a round of a run is expected to be."""
    traffic = traffic_of(config, layout)
    n = len(traffic.islands)
    up, down = round(sum(traffic.up(name) for name in traffic.islands)), round(n * traffic.down)
    step_s, _ = known_steps(config)
    speeds = remembered_speeds(channels_of(config)[0], config.data.cache)
    if not step_s or speeds is None:
        return Expected(up, down, None, None)
    measured, anchor = measured_links(config.data.cache), anchor_island(config)
    links = {name: link_of(config, name, anchor, measured)[0] for name in traffic.islands}
    time = predicted_round(config, traffic, step_s, speeds, links)
    return Expected(up, down, time.round_s, time.utilisation * time.round_s)
