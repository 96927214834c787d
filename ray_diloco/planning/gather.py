"""`ray-diloco plan`: gathers what a plan is made from, models, speeds, steps and links, and makes it."""

from __future__ import annotations

from collections.abc import Callable

from ray_diloco.blocks import Channel, channels_of
from ray_diloco.config.schema import Config
from ray_diloco.planning.estimate import Plan, plan_of
from ray_diloco.planning.links import measured_links
from ray_diloco.planning.model import layout_of_config
from ray_diloco.planning.search import Option, options
from ray_diloco.planning.speeds import speeds_of
from ray_diloco.planning.steps import step_seconds
from ray_diloco.planning.timing import Speeds
from ray_diloco.planning.traffic import traffic_of


def plan(config: Config) -> tuple[Plan, list[Option]]:
    """The plan of a run, and the options within its budget of loss where the time of a step is known.

    Raises:
      DilocoError: the model or its tokenizer cannot be loaded, or the model cannot be cut as asked.
    """
    layout = layout_of_config(config)
    steps = step_seconds(config, layout.numel)
    folder = config.data.cache
    measured = measured_links(folder)
    found = plan_of(config, traffic_of(config, layout), steps, speeds_of(channels_of(config)[0], folder), measured)
    return found, options(config, layout, steps[0], _speeds(config), measured) if steps[0] else []


def _speeds(config: Config) -> Callable[[Channel], Speeds]:
    """Speeds by codec, each looked up or measured once."""
    folder = config.data.cache
    by_kind: dict[str, Speeds] = {}

    def speeds(channel: Channel) -> Speeds:
        if channel.up.kind not in by_kind:
            by_kind[channel.up.kind] = speeds_of(channel, folder)
        return by_kind[channel.up.kind]

    return speeds
