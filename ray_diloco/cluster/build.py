"""From a configuration to what the run loop and the islands are built from.

The only place where configuration keys become rules of a round, room on the cluster, and what ports and ranks are told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ray_diloco.blocks import (
    Cut,
    anchor_names,
    channels_of,
    is_exact,
    is_free,
    quorum_of,
    schedule_of,
    topology_of,
    weigher_of,
)
from ray_diloco.checkpoint.rundir import RunDirectory
from ray_diloco.cluster.anchor import AnchorSettings
from ray_diloco.cluster.fleet import IslandSpec
from ray_diloco.cluster.journal import JournalSettings
from ray_diloco.cluster.placement import Bundle
from ray_diloco.cluster.rank import RankJob
from ray_diloco.cluster.store import StoreSettings
from ray_diloco.config.schema import Config, InnerConfig, island_data, island_names
from ray_diloco.data.blocks import Corpus
from ray_diloco.inner.settings import RankSettings
from ray_diloco.provenance.digest import digest_json
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rules import IslandPlan, Rules

# Merge rules that compare whole contributions.
WHOLE_VECTORS = ("krum", "multi_krum", "bulyan", "geometric_median", "centred_clipping")


def bundles(config: Config) -> dict[str, tuple[Bundle, ...]]:
    """What each island needs: one bundle per rank."""
    return {name: tuple([_bundle(config)] * _ranks(config, name)) for name in island_names(config)}


def cpus_needed(config: Config) -> float:
    """CPUs of all islands together."""
    return sum(bundle.get("CPU", 0.0) for group in bundles(config).values() for bundle in group)


def source_name(corpus: Corpus) -> str:
    """Name of a corpus' ledger: other content is another ledger."""
    return f"{corpus.name}:{corpus.digest[:16]}"


def rules_of(
    config: Config, corpora: Mapping[str, Corpus], heldout: Corpus, position: Position, cuts: Sequence[Cut]
) -> Rules:
    """The rules of a run that goes on from a position."""
    blocks = range(heldout.heldout_blocks)
    under_way = blocks[: config.evaluate.blocks] if config.evaluate.blocks else blocks
    # At their own pace, every island's contribution is a round.
    each = len(island_names(config)) if is_free(config) else 1
    return Rules(
        islands={
            name: IslandPlan(source_name(corpora[name]), _ranks(config, name) * _sequences(config, name))
            for name in island_names(config)
        },
        schedule=schedule_of(config, cuts, position.hold(config.inner.H)),
        quorum=quorum_of(config),
        weigh=weigher_of(config, cuts, {name: corpora[name].train_blocks for name in island_names(config)}),
        topology=topology_of(config),
        remembers=config.stale.own_fresh,
        max_age=config.stale.max_age,
        free=is_free(config),
        by_speed=config.inner.work == "by_speed",
        round_s=config.inner.round_seconds,
        exact=is_exact(config),
        min_islands=config.islands.min,
        checkpoint_every=config.checkpoint.every * each,
        evaluate_every=config.evaluate.every * each,
        evaluate_blocks=under_way,
        final_blocks=blocks,
        evaluate_chunk=config.inner.micro_batch * max(_ranks(config, name) for name in island_names(config)),
        max_losses=config.deadlines.losses,
    )


def anchor_settings(config: Config) -> AnchorSettings:
    """How the anchor is kept."""
    # The names of rules that compare whole contributions; `outer.merge`, which says so, would import torch.
    whole = config.merge.kind if config.merge.kind in WHOLE_VECTORS else ""
    return AnchorSettings(
        channels=channels_of(config),
        anchors=anchor_names(config),
        shards=config.anchor.shards,
        islands=len(island_names(config)),
        relayed=config.topology.kind == "hierarchy",
        whole_vectors=whole,
        deadline_s=config.deadlines.exchange_s,
    )


def store_settings(config: Config, environment: Mapping[str, Any], sinks: Mapping[str, Any]) -> StoreSettings:
    """What all manifests of a run say, and how many commits are kept."""
    return StoreSettings(
        run=config.run.name,
        config_digest=digest_json(asdict(config)),
        environment=environment,
        keep_last=config.checkpoint.keep_last,
        keep_every=config.checkpoint.keep_every,
        deadline_s=config.deadlines.exchange_s,
        sinks=sinks,
    )


def journal_settings(config: Config, directory: RunDirectory) -> JournalSettings:
    """What the journal needs to know beside the books."""
    return JournalSettings(
        trace=directory.trace if config.trace.contributions else None,
        outer=asdict(config.outer),
        deadline_s=config.deadlines.exchange_s,
    )


def island_specs(
    config: Config, corpora: Mapping[str, Corpus], heldout: Corpus, folders: tuple[str, ...] = ()
) -> dict[str, IslandSpec]:
    """How each island is built; `folders` are where a user's own modules are imported from."""
    return {name: _spec(config, name, corpora[name], heldout, room, folders) for name, room in bundles(config).items()}


def _spec(
    config: Config, name: str, corpus: Corpus, heldout: Corpus, room: tuple[Bundle, ...], folders: tuple[str, ...]
) -> IslandSpec:
    threads = config.islands.threads or max(1, math.floor(config.islands.cpus_per_rank))
    accelerator = "cuda" if config.islands.gpus_per_rank else "cpu"
    settings = RankSettings(
        model=config.model,
        inner=_inner(config, name),
        vocab_size=heldout.vocab_size,
        eos_id=heldout.eos_id,
        sequence_length=config.data.sequence_length,
        seed=config.run.seed,
        total_steps=config.inner.schedule.total_steps or config.run.rounds * config.inner.H,
        island=name,
        world=len(room),
        threads=threads,
        accelerator=accelerator,
        evaluation_batch=config.inner.micro_batch,
        timeout_s=config.deadlines.silence_s,
    )
    job = RankJob(
        settings=settings,
        corpus=corpus,
        heldout=heldout,
        data=island_data(config, name),
        heldout_data=config.data,
        tokenizer=config.tokenizer,
        channels=channels_of(config),
        folders=folders,
    )
    return IslandSpec(room, threads, accelerator, job)


def _inner(config: Config, name: str) -> InnerConfig:
    override = config.islands.overrides.get(name)
    if override is None or override.micro_batch is None:
        return config.inner
    return replace(config.inner, micro_batch=override.micro_batch)


def _ranks(config: Config, name: str) -> int:
    override = config.islands.overrides.get(name)
    return config.islands.ranks if override is None or override.ranks is None else override.ranks


def _sequences(config: Config, name: str) -> int:
    inner = _inner(config, name)
    return inner.micro_batch * inner.gradient_accumulation


def _bundle(config: Config) -> Bundle:
    bundle = {"CPU": float(config.islands.cpus_per_rank)}
    if config.islands.gpus_per_rank:
        bundle["GPU"] = float(config.islands.gpus_per_rank)
    return bundle
