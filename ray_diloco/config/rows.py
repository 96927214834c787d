"""The exchanges of a run, one row for its own blocks and one for each channel, and what follows from their numbers.

For the checker of combinations and for the table of algorithms; algorithms.md §10.4 and §10.6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ray_diloco.config.blocks import (
    AdoptConfig,
    ChannelConfig,
    CodecsConfig,
    FragmentsConfig,
    MergeConfig,
    OuterConfig,
    ScheduleConfig,
)
from ray_diloco.config.schema import Config


@dataclass(frozen=True)
class Row:
    """The blocks of one exchange: the run's own, or a channel's.  `at` stands before its keys in messages."""

    at: str
    H: int
    fragments: FragmentsConfig
    schedule: ScheduleConfig
    codec: CodecsConfig
    merge: MergeConfig
    outer: OuterConfig
    adopt: AdoptConfig
    of_parameters: bool = True


def rows(config: Config) -> list[Row]:
    """The run's own row, then those of its channels."""
    own = (config.fragments, config.schedule, config.codec, config.merge, config.outer, config.adopt)
    return [Row("", config.inner.H, *own), *(_channel(name, channel) for name, channel in config.channels.items())]


def _channel(name: str, channel: ChannelConfig) -> Row:
    own = (channel.fragments, channel.schedule, channel.codec, channel.merge, channel.outer, channel.adopt)
    return Row(f"channels.{name}.", channel.H, *own, of_parameters=channel.signal == "parameters")


def fragment_count(config: Config, row: Row) -> int | None:
    """Number of fragments, or None where only the model can tell."""
    if row.fragments.kind == "bins":
        return row.fragments.count
    if row.fragments.kind == "layers":
        shape = config.model.config if config.model.pretrained is None and config.model.builder is None else {}
        layers = next((shape[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in shape), None)
        return math.ceil(layers / row.fragments.size) if isinstance(layers, int) else None
    return 1


def fewest(config: Config) -> int | None:
    """Fewest contributions that a round may be merged from when nobody is lost, or None where regions decide."""
    quorum, count = config.quorum, config.islands.count
    if config.topology.kind == "hierarchy":
        return None
    if quorum.kind == "immediate":
        return 1
    if config.topology.kind == "pairs":
        return min(2, count)
    if quorum.kind == "at_least":
        return math.ceil(quorum.fraction * count - 1e-9) if quorum.fraction else quorum.n
    return count
