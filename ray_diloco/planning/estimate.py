"""The plan of a run: bytes, time, memory, money and loss, put together from what the other modules find.

Figures that depend on the time of a step are left out where that is not known.  Pure: everything measured comes in as
an argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_diloco.blocks import Channel, channels_of, is_free, quorum_of
from ray_diloco.config.schema import Config, island_names
from ray_diloco.planning.links import link_of
from ray_diloco.planning.memory import Memory, memory_of
from ray_diloco.planning.quality import CODEC_COST, cost_of
from ray_diloco.planning.sites import site_of
from ray_diloco.planning.timing import Link, Load, RoundTime, Site, Speeds, bandwidth_for, round_time
from ray_diloco.planning.traffic import Traffic
from ray_diloco.rules import blocks_per_step, ranks_of

DAY_S = 86400.0
# Utilisation for which the bandwidth is given.
_GOAL = 0.95


@dataclass(frozen=True, slots=True)
class Times:
    """What depends on the time of a step.

    Attributes:
      step_s: by island; `step_source` says where it is from.
      round_s, train_s, exposed_s, utilisation: see `timing.RoundTime`; seconds of the slowest island.
      run_s: of the whole run, without its start.
      average_mbit: that the anchor's side carries, both ways together, over a round.
      peak_mbit: of an island while it sends or gets a message and nothing may be exposed; where nothing overlaps, as
        fast as the link is, and None.
      goal_mbit: each way, for 95 % utilisation.
      tokens_per_day: of all islands.
    """

    step_s: Mapping[str, float]
    step_source: str
    round_s: float
    train_s: float
    exposed_s: float
    utilisation: float
    run_s: float
    average_mbit: float
    peak_mbit: float | None
    goal_mbit: float
    tokens_per_day: float


@dataclass(frozen=True, slots=True)
class Spend:
    """Price, power and carbon of a run by region; None where nothing was said of it."""

    region: str
    islands: int
    dollars: float | None
    kwh: float | None
    kg_co2: float | None


@dataclass(frozen=True, slots=True)
class Loss:
    """What is published of the cost in loss: of H and of the codec, each with its source; None: nothing is."""

    H: float | None
    H_source: str
    codec: float | None
    codec_source: str

    @property
    def total(self) -> float | None:
        """Both together."""
        return None if self.H is None or self.codec is None else self.H + self.codec


@dataclass(frozen=True, slots=True)
class Plan:
    """A run, before it runs."""

    algorithm: str
    model: str
    parameters: int
    islands: tuple[str, ...]
    H: int
    delay: int
    fragments: int
    codec: tuple[str, str]
    rounds: int
    shards: int
    bytes_up: Mapping[str, int]
    bytes_down: int
    run_bytes_up: int
    run_bytes_down: int
    start_bytes: int
    tokens_per_round: int
    links: Mapping[str, tuple[Link, str]]
    speeds: Speeds
    memory: Memory
    loss: Loss
    times: Times | None = None
    spend: tuple[Spend, ...] = ()


def plan_of(
    config: Config,
    traffic: Traffic,
    steps: tuple[Mapping[str, float], str],
    speeds: Speeds,
    measured: Mapping[str, Mapping[str, Any]],
) -> Plan:
    """The plan of a run.

    Args:
      config: of the run.
      traffic: its messages.
      steps: seconds of a step by island, empty where they are not known, and where they are from.
      speeds: of its exchange.
      measured: links that the doctor measured.
    """
    channels, names = channels_of(config), traffic.islands
    anchor = anchor_island(config)
    links = {name: link_of(config, name, anchor, measured) for name in names}
    ranks = max(ranks_of(config, name) for name in names)
    main = channels[0]
    times = _times(config, traffic, steps, speeds, {name: link for name, (link, _) in links.items()})
    return Plan(
        algorithm=config.algorithm.name,
        model=config.model.name,
        parameters=traffic.parameters,
        islands=names,
        H=main.H,
        delay=main.delay,
        fragments=len(traffic.main.fragments),
        codec=(main.up.kind, main.down.kind),
        rounds=config.run.rounds,
        shards=traffic.shards,
        bytes_up={name: round(traffic.up(name)) for name in names},
        bytes_down=round(traffic.down),
        run_bytes_up=traffic.total_up,
        run_bytes_down=traffic.total_down,
        start_bytes=traffic.start,
        tokens_per_round=sum(tokens_per_step(config, name) * steps_of(config, steps[0])[name] for name in names),
        links=links,
        speeds=speeds,
        memory=memory_of(traffic, channels, config.inner, ranks),
        loss=loss_of(main, traffic.parameters, len(names)),
        times=times,
        spend=_spend(config, times.run_s if times else None),
    )


def anchor_island(config: Config) -> str:
    """The island beside which the anchor lives."""
    return config.plan.anchor or island_names(config)[0]


def tokens_per_step(config: Config, name: str) -> int:
    """Tokens that an island trains on in a step."""
    return blocks_per_step(config, name) * config.data.sequence_length


def steps_of(config: Config, step_s: Mapping[str, float]) -> dict[str, int]:
    """Inner steps of each island in a round: H, or what fits into its time."""
    inner, names = config.inner, island_names(config)
    if not step_s:
        return dict.fromkeys(names, inner.H)
    if inner.round_seconds:
        return {n: max(1, min(inner.H, math.floor(inner.round_seconds / step_s[n]))) for n in names}
    if inner.work == "by_speed":
        fastest = min(step_s.values())
        return {n: max(1, math.floor(inner.H * fastest / step_s[n])) for n in names}
    return dict.fromkeys(names, inner.H)


def loads_of(traffic: Traffic) -> list[Load]:
    """All exchanges of a round of the main channel."""
    H = traffic.main.H
    return [
        Load(f.elements, f.up, f.down, channel.delay, H / channel.H)
        for channel in traffic.channels
        for f in channel.fragments
    ]


def loss_of(channel: Channel, parameters: int, islands: int) -> Loss:
    """What is published of this H and codec at this size."""
    H = cost_of(parameters, islands, channel.H)
    codec = CODEC_COST.get(channel.up.kind)
    return Loss(
        None if H is None else H.cost,
        "no published H is as long" if H is None else H.source,
        None if codec is None else codec[0],
        f"nothing is published of {channel.up.kind} here" if codec is None else codec[1],
    )


def predicted_round(
    config: Config, traffic: Traffic, step_s: Mapping[str, float], speeds: Speeds, links: Mapping[str, Link]
) -> RoundTime:
    """The time of a round."""
    steps, quorum = steps_of(config, step_s), quorum_of(config)
    sites = {name: Site(step_s[name], steps[name], links[name]) for name in traffic.islands}
    return round_time(
        loads_of(traffic),
        sites,
        anchor_island(config),
        speeds,
        traffic.shards,
        max(ranks_of(config, name) for name in traffic.islands),
        free=is_free(config),
        quorum=quorum.enough(len(traffic.islands)) if quorum.kind == "at_least" else 0,
        grace_s=quorum.grace_s,
    )


def _times(
    config: Config,
    traffic: Traffic,
    steps: tuple[Mapping[str, float], str],
    speeds: Speeds,
    links: Mapping[str, Link],
) -> Times | None:
    step_s, source = steps
    if not step_s:
        return None
    predicted = predicted_round(config, traffic, step_s, speeds, links)
    n, round_s, main = len(traffic.islands), predicted.round_s, traffic.main
    slowest = max(traffic.islands, key=lambda name: step_s[name])
    moved = sum(traffic.up(name) for name in traffic.islands) + traffic.down * n
    largest = max((max(f.up[slowest], f.down) for f in main.fragments), default=0)
    hidden_s = main.delay * step_s[slowest]
    tokens = math.fsum(tokens_per_step(config, name) * s for name, s in steps_of(config, step_s).items())
    return Times(
        step_s=dict(step_s),
        step_source=source,
        round_s=round_s,
        train_s=max(predicted.train_s.values()),
        exposed_s=max(predicted.exposed_s.values()),
        utilisation=predicted.utilisation,
        run_s=round_s * config.run.rounds,
        average_mbit=_mbit(moved / round_s) if round_s else 0.0,
        peak_mbit=_mbit(largest / hidden_s) if hidden_s else None,
        goal_mbit=_mbit(bandwidth_for(_GOAL, loads_of(traffic), step_s[slowest], main.H, slowest)),
        tokens_per_day=tokens / round_s * DAY_S if round_s else 0.0,
    )


def _spend(config: Config, run_s: float | None) -> tuple[Spend, ...]:
    """Of the run where its time is known, by region; of an hour otherwise nothing."""
    if run_s is None:
        return ()
    hours = run_s / 3600
    regions: dict[str, list[str]] = {}
    for name in island_names(config):
        regions.setdefault(str(site_of(config, name).region), []).append(name)
    return tuple(_spend_of(config, region, names, hours) for region, names in sorted(regions.items()))


def _spend_of(config: Config, region: str, names: Sequence[str], hours: float) -> Spend:
    sites = [site_of(config, name) for name in names]
    dollars = math.fsum((s.dollars_per_hour or 0.0) * hours for s in sites)
    kwh = math.fsum((s.watts or 0.0) / 1000 * hours for s in sites)
    grams = math.fsum((s.watts or 0.0) / 1000 * hours * (s.grams_co2_per_kwh or 0.0) for s in sites)
    return Spend(region, len(names), dollars or None, kwh or None, grams / 1000 or None)


def _mbit(bytes_per_s: float) -> float:
    return bytes_per_s * 8 / 1e6
