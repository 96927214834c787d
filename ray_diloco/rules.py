"""From a configuration to the rules that the run loop goes by; cluster and simulator run by the same.

The only place where configuration keys become `rounds.rules.Rules`.  What a run trains on comes as plain numbers, so
that a simulation needs no data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ray_diloco.blocks import Cut, is_exact, is_free, quorum_of, schedule_of, topology_of, weigher_of
from ray_diloco.config.schema import Config, InnerConfig, elastic, island_names, region_of, slot_names
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rules import Guard, IslandPlan, Rules


@dataclass(frozen=True)
class Supply:
    """What an island trains on: the name of a source's ledger, and how many blocks an epoch of it has."""

    source: str
    blocks: int


def rules_of(
    config: Config, supplies: Mapping[str, Supply], heldout_blocks: int, position: Position, cuts: Sequence[Cut]
) -> Rules:
    """The rules of a run that goes on from a position.

    Args:
      config: of the run.
      supplies: by island.
      heldout_blocks: number of held-out blocks.
      position: where it stands.
      cuts: its fragments.
    """
    names, slots, islands = island_names(config), slot_names(config), config.islands
    # Those that may come later train on what the others do, if nothing else is said.
    supplied = {name: supplies.get(name, supplies[names[0]]) for name in slots}
    blocks = range(heldout_blocks)
    under_way = blocks[: config.evaluate.blocks] if config.evaluate.blocks else blocks
    # At their own pace, every island's contribution is a round.
    each = len(names) if is_free(config) else 1
    return Rules(
        islands={
            name: IslandPlan(supplied[name].source, blocks_per_step(config, name), region_of(config, name))
            for name in slots
        },
        initial=tuple(names),
        grows=islands.max > islands.count,
        most=islands.max or len(slots),
        fixed=not elastic(config),
        joins=islands.joins,
        drain_s=islands.drain_s,
        away_s=islands.away_s,
        guard=Guard(config.guard.norm, config.guard.loss, config.guard.strikes, config.guard.rounds * each),
        schedule=schedule_of(config, cuts, position.hold(config.inner.H)),
        quorum=quorum_of(config),
        weigh=weigher_of(config, cuts, {name: supplied[name].blocks for name in slots}),
        topology=topology_of(config),
        remembers=config.stale.own_fresh,
        max_age=config.stale.max_age,
        free=is_free(config),
        by_speed=config.inner.work == "by_speed",
        round_s=config.inner.round_seconds,
        exact=is_exact(config),
        min_islands=config.islands.min,
        checkpoint_every=config.checkpoint.every * each,
        inner_every=config.checkpoint.inner_every * each,
        points=config.checkpoint.progress_every > 0,
        point_wait_s=config.checkpoint.progress_wait_s,
        max_lag=max(config.checkpoint.max_lag, 2 * config.checkpoint.every) * each * (config.checkpoint.max_lag > 0),
        evaluate_every=config.evaluate.every * each,
        evaluate_blocks=under_way,
        final_blocks=blocks,
        evaluate_chunk=config.inner.micro_batch * max(ranks_of(config, name) for name in slots),
        max_losses=config.deadlines.losses,
    )


def inner_of(config: Config, name: str) -> InnerConfig:
    """The section `inner` of one island."""
    override = config.islands.overrides.get(name)
    if override is None or override.micro_batch is None:
        return config.inner
    return replace(config.inner, micro_batch=override.micro_batch)


def ranks_of(config: Config, name: str) -> int:
    """Ranks of one island."""
    override = config.islands.overrides.get(name)
    return config.islands.ranks if override is None or override.ranks is None else override.ranks


def emitting(config: Config, name: str) -> Config:
    """The configuration by which one island sends: the run's, with a codec of its own on the way up if it has one."""
    override = config.islands.overrides.get(name)
    if override is None or override.codec is None:
        return config
    return replace(config, codec=replace(config.codec, up=replace(config.codec.up, kind=override.codec)))


def blocks_per_step(config: Config, name: str) -> int:
    """Blocks, that is sequences, that an optimiser step of one island takes."""
    inner = inner_of(config, name)
    return ranks_of(config, name) * inner.micro_batch * inner.gradient_accumulation
