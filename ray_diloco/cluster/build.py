"""From a configuration to what the run loop and the islands are built from.

The only place where configuration keys become rules of a round, room on the cluster, and what ports and ranks are told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ray_diloco import rules
from ray_diloco.blocks import Cut, anchor_names, channels_of, faults_of
from ray_diloco.checkpoint.rundir import RunDirectory
from ray_diloco.cluster.anchor_settings import AnchorSettings
from ray_diloco.cluster.fleet import IslandSpec
from ray_diloco.cluster.job import RankJob
from ray_diloco.cluster.journal import JournalSettings
from ray_diloco.cluster.misfortune import Misfortunes
from ray_diloco.cluster.placement import Bundle, Labels
from ray_diloco.cluster.store import StoreSettings
from ray_diloco.cluster.whereabouts import Whereabouts
from ray_diloco.config.schema import Config, island_data, island_names, region_of, slot_names
from ray_diloco.data.blocks import Corpus
from ray_diloco.inner.settings import RankSettings
from ray_diloco.provenance.digest import digest_json
from ray_diloco.rounds.faults import STORAGE
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rules import Rules
from ray_diloco.rules import Supply, emitting, inner_of, ranks_of

# Ray's own, on nodes whose accelerator it knows.
ACCELERATOR_LABEL = "ray.io/accelerator-type"

# Merge rules that compare whole contributions.
WHOLE_VECTORS = ("krum", "multi_krum", "bulyan", "geometric_median", "centred_clipping")


def bundles(config: Config) -> dict[str, tuple[Bundle, ...]]:
    """What each island needs that a run begins with: one bundle per rank."""
    return {name: _bundles(config, name) for name in island_names(config)}


def labels_of(config: Config, name: str) -> Labels:
    """What an island asks of its nodes."""
    region, override = region_of(config, name), config.islands.overrides.get(name)
    labels = {config.islands.region_label: region} if region and not config.islands.region_resource else {}
    own = None if override is None else override.accelerator
    accelerator = config.islands.accelerator if own is None else own
    return labels | ({ACCELERATOR_LABEL: accelerator} if accelerator else {})


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
    of = {name: corpora.get(name, heldout) for name in slot_names(config)}
    supplies = {name: Supply(source_name(corpus), corpus.train_blocks) for name, corpus in of.items()}
    return rules.rules_of(config, supplies, heldout.heldout_blocks, position, cuts)


def misfortunes_of(config: Config, directory: RunDirectory) -> Misfortunes:
    """What is to go wrong, on purpose."""
    return Misfortunes("", faults_of(config).left, str(directory.path / "faults") if config.faults.plan else "")


def anchor_settings(config: Config, faults: Misfortunes) -> AnchorSettings:
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
        alive_s=config.deadlines.heartbeat_s,
        losses=config.deadlines.losses,
        faults=faults,
        where=Whereabouts.of(config.islands),
    )


def digest_of(config: Config) -> str:
    """What a manifest keeps of the configuration: SHA-256 over all resolved values."""
    return digest_json(asdict(config))


def store_settings(
    config: Config, environment: Mapping[str, Any], sinks: Mapping[str, Any], epoch: int, faults: Misfortunes
) -> StoreSettings:
    """What all manifests of a run say, and how many commits are kept."""
    return StoreSettings(
        run=config.run.name,
        config_digest=digest_of(config),
        environment=environment,
        keep_last=config.checkpoint.keep_last,
        keep_every=config.checkpoint.keep_every,
        deadline_s=config.deadlines.exchange_s,
        sinks=sinks,
        epoch=epoch,
        faults=faults.of(STORAGE),
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
    return {name: _spec(config, name, corpora.get(name, heldout), heldout, folders) for name in slot_names(config)}


def _spec(config: Config, name: str, corpus: Corpus, heldout: Corpus, folders: tuple[str, ...]) -> IslandSpec:
    room = _bundles(config, name)
    threads = config.islands.threads or max(1, math.floor(config.islands.cpus_per_rank))
    accelerator = "cuda" if config.islands.gpus_per_rank else "cpu"
    settings = RankSettings(
        model=config.model,
        inner=inner_of(config, name),
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
        channels=channels_of(emitting(config, name)),
        folders=folders,
    )
    return IslandSpec(room, threads, accelerator, job, labels_of(config, name), region_of(config, name))


def _bundles(config: Config, name: str) -> tuple[Bundle, ...]:
    return tuple([_bundle(config, name)] * ranks_of(config, name))


def _bundle(config: Config, name: str) -> Bundle:
    bundle = {"CPU": float(config.islands.cpus_per_rank)}
    if config.islands.gpus_per_rank:
        bundle["GPU"] = float(config.islands.gpus_per_rank)
    return bundle | Whereabouts.of(config.islands).demand(region_of(config, name))
