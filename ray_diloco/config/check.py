"""Refuses configurations that cannot run, before Ray starts; warns of those that run and disappoint.

`limits.py` says what single keys may be, `combinations.py` which blocks of an algorithm go together; what else has to
fit together are small functions here.  Data files, models and clusters are looked at by those who open them, not here.
Sources of the numbers: algorithms.md §1 (gain of Nesterov), ray-and-deepspeed.md Part 2 §1 (bf16 at ZeRO stage 0).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray_diloco.config.blocks import ChannelConfig
from ray_diloco.config.combinations import check_combinations
from ray_diloco.config.doubts import doubts
from ray_diloco.config.functions import check_import_path
from ray_diloco.config.islands import IslandsConfig
from ray_diloco.config.keys import fields_of, nearest
from ray_diloco.config.limits import ALLOWED, BOUNDS, FILE_SOURCES, PLAN_NUMBERS, SIGNALS, Bound
from ray_diloco.config.schema import Config, DataConfig, InnerConfig, elastic, island_data, island_names
from ray_diloco.config.traits import DENSE_CODECS
from ray_diloco.errors import ConfigError

# The run's own exchange, beside its channels.
MAIN = "main"

# Names become parts of file names, actor names and labels.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

# Nesterov under a constant pseudo-gradient ends at a step of lr / (1 − momentum); above this, and with fewer rounds
# than this from scratch, runs were measured to end worse than with momentum 0.5 (numbers.md, convergence).
_STEADY_GAIN, _ROUNDS_TO_SETTLE = 4.0, 30


def check(config: Config) -> list[str]:
    """Checks a configuration.

    Returns:
      Warnings, one sentence each.

    Raises:
      ConfigError: 110 value not allowed, 111 number out of bounds, 112 something is missing, 113 unusable name,
        114–126 and 132–147 combinations, 160 a plan of faults, 180 one of costs;
        see docs/errors.md.
    """
    _check_tables(config)
    for name, channel in config.channels.items():
        _check_channel(f"channels.{name}", channel)
    _check_names(config)
    _check_islands(config)
    _check_model(config)
    for name in {**dict.fromkeys(island_names(config)), **config.islands.overrides}:
        _check_data(island_data(config, name), name if name in config.islands.overrides else None)
    _check_inner(config.inner)
    _check_quorum(config)
    _check_storage(config.run.storage)
    _check_faults(config)
    _check_plan(config)
    check_combinations(config)
    return [*_warnings(config), *doubts(config)]


def check_inner(inner: InnerConfig) -> None:
    """Checks the section `inner` alone, for who builds an engine without a whole configuration.

    Raises:
      ConfigError: 110, 111, 115 or 120, as `check`.
    """
    _check_tables(inner, "inner.")
    _check_inner(inner)


def _check_tables(section: Config | InnerConfig, at: str = "") -> None:
    """Compares a section with the rows of the tables whose keys begin with `at`."""
    for key, allowed in ALLOWED.items():
        if key.startswith(at):
            _check_allowed(key, _value(section, key.removeprefix(at)), allowed)
    for key, bound in BOUNDS.items():
        if key.startswith(at):
            _check_bound(key, _value(section, key.removeprefix(at)), bound)


def _check_channel(at: str, channel: ChannelConfig) -> None:
    """Holds a channel to the limits of the same keys of the run."""
    _check_bound(f"{at}.H", channel.H, BOUNDS["inner.H"])
    _check_allowed(f"{at}.signal", channel.signal, SIGNALS)
    sections = fields_of(ChannelConfig)
    for key, allowed in ALLOWED.items():
        if key.partition(".")[0] in sections:
            _check_allowed(f"{at}.{key}", _value(channel, key), allowed)
    for key, bound in BOUNDS.items():
        if key.partition(".")[0] in sections:
            _check_bound(f"{at}.{key}", _value(channel, key), bound)


def _value(section: Config | InnerConfig | ChannelConfig, key: str) -> Any:
    value: Any = section
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _check_allowed(key: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value in allowed:
        return
    close = nearest(str(value), [str(choice) for choice in allowed])
    choices = ", ".join(map(str, allowed))
    raise ConfigError(
        110, f"{key}={value} is not allowed", f"{f'did you mean {close}? ' if close else ''}allowed: {choices}"
    )


def _check_bound(key: str, value: float, bound: Bound) -> None:
    if not bound.holds(value):
        raise ConfigError(111, f"{key}={value} is out of bounds", f"give a value that is {bound}")


def _check_names(config: Config) -> None:
    named = {
        "run.name": [config.run.name],
        "islands.names": config.islands.names,
        "islands.regions": list(config.islands.regions),
        "channels": list(config.channels),
    }
    for key, names in named.items():
        for name in names:
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    113,
                    f"{key}: {name!r} cannot be part of file and actor names",
                    "use 1 to 64 of A–Z a–z 0–9 . _ -, beginning with a letter or digit",
                )
    if MAIN in config.channels:
        raise ConfigError(113, f"channels: {MAIN!r} is what the run's own exchange is called", "give it another name")
    taken = fields_of(IslandsConfig)
    for name in config.islands.names:
        if name in taken:
            raise ConfigError(
                113, f"islands.names: {name!r} is also the key islands.{name}", "give that island another name"
            )
    for key, path in {"model.builder": config.model.builder, "tokenizer.builder": config.tokenizer.builder}.items():
        if path is not None:
            check_import_path(key, path)


def _check_islands(config: Config) -> None:
    islands = config.islands
    twice = sorted({name for name in islands.names if islands.names.count(name) > 1})
    if twice:
        raise ConfigError(114, f"islands.names has {', '.join(twice)} more than once", "give every island its own name")
    if islands.names and len(islands.names) != islands.count:
        raise ConfigError(
            114,
            f"islands.count={islands.count}, but islands.names has {len(islands.names)}: {', '.join(islands.names)}",
            "make them equal, or leave one of them out",
        )
    _check_regions(config)
    most = max(islands.count, islands.max)
    if islands.min > most:
        what = f"islands.count={islands.count}" + (f" and islands.max={islands.max}" if islands.max else "")
        raise ConfigError(116, f"islands.min={islands.min} is more than {what}", "lower islands.min")
    if 0 < islands.max < islands.count:
        raise ConfigError(
            116,
            f"islands.count={islands.count} is more than islands.max={islands.max}",
            "lower islands.count, raise islands.max, or set it to 0",
        )
    for name, override in islands.overrides.items():
        for of_all, value in {"islands.ranks": override.ranks, "inner.micro_batch": override.micro_batch}.items():
            if value is not None:
                _check_bound(f"islands.{name}.{of_all.partition('.')[2]}", value, BOUNDS[of_all])
        if override.codec is not None:
            _check_own_codec(config, name, override.codec)
        for key in ("sequence_length", "cache"):
            if key in override.data_settings:
                raise ConfigError(
                    117, f"islands.{name}.data.{key} is set for one island", f"set data.{key} for all of them"
                )


def _check_own_codec(config: Config, name: str, codec: str) -> None:
    _check_allowed(f"islands.{name}.codec", codec, DENSE_CODECS)
    if config.codec.up.kind not in DENSE_CODECS or config.topology.kind == "ring":
        raise ConfigError(
            128,
            f"islands.{name}.codec={codec} beside codec.up.kind={config.codec.up.kind} and topology.kind="
            f"{config.topology.kind}: contributions in different codecs meet only element by element, and in no ring",
            f"leave it out, or take codec.up.kind from {', '.join(DENSE_CODECS)} and topology.kind=star",
        )


def _check_regions(config: Config) -> None:
    islands = config.islands
    for region, count in islands.regions.items():
        _check_bound(f"islands.regions.{region}", count, Bound(at_least=0))
    if islands.regions and islands.names:
        raise ConfigError(
            123, "islands.regions and islands.names are both set", "take one of them out: regions name their islands"
        )
    together = sum(islands.regions.values())
    if islands.regions and together != islands.count:
        raise ConfigError(
            124, f"islands.regions has {together} islands, but islands.count={islands.count}", "leave islands.count out"
        )
    if islands.region_resource and len(islands.region_resource.split("{region}")) != 2:
        raise ConfigError(
            126,
            f"islands.region_resource={islands.region_resource} names no region, or several",
            'write "{region}" once, where the name of the region stands',
        )
    if islands.region_resource == "{region}":
        raise ConfigError(
            126,
            f"islands.region_resource={islands.region_resource} could be any resource of a node",
            'write something beside the region, as in "region-{region}"',
        )
    if islands.max > islands.count and not elastic(config):
        raise ConfigError(
            125,
            f"islands.max={islands.max} lets islands come, but every island of this run has its own anchor or is alone",
            "leave islands.max out, or set topology.anchors=shared",
        )


def _check_model(config: Config) -> None:
    model, data = config.model, config.data
    if model.pretrained is not None and model.builder is not None:
        raise ConfigError(
            118,
            f"model.pretrained={model.pretrained} and model.builder={model.builder} are both set",
            "set one of them; the other is null",
        )
    longest = model.config.get("max_position_embeddings")
    from_config = model.pretrained is None and model.builder is None
    if from_config and isinstance(longest, int) and data.sequence_length > longest:
        raise ConfigError(
            118,
            f"data.sequence_length={data.sequence_length} is longer than the {longest} positions of the model",
            "lower data.sequence_length or raise model.config.max_position_embeddings",
        )
    name = config.tokenizer.name
    if not name or (name[0] in "./~" and not Path(name).expanduser().exists()):
        raise ConfigError(
            112,
            f"tokenizer.name={name!r}: there is no such folder",
            "give bytes, bpe, a tokenizer's folder or a hub name",
        )


def _check_data(data: DataConfig, island: str | None) -> None:
    at = f"islands.{island}.data" if island else "data"
    _check_allowed(f"{at}.source", data.source, ALLOWED["data.source"])
    for key in ("max_documents", "heldout_blocks"):
        _check_bound(f"{at}.{key}", getattr(data, key), BOUNDS[f"data.{key}"])
    if data.builder is not None:
        check_import_path(f"{at}.builder", data.builder)
        return
    reads = {"path": FILE_SOURCES, "dataset": ("hf",)}
    example = {"path": "a file, or a glob in quotes", "dataset": "the name of a dataset or its folder"}
    for key, sources in reads.items():
        value = getattr(data, key)
        if data.source in sources and not value:
            raise ConfigError(112, f"{at}.source={data.source} needs {at}.{key}", f"give {at}.{key}={example[key]}")
        if data.source not in sources and value:
            raise ConfigError(
                119,
                f"{at}.{key}={value} is set, but {at}.source={data.source} does not read it",
                f"choose a source that does ({at}={f' or {at}='.join(sources)}), or leave {at}.{key} out",
            )


def _check_inner(inner: InnerConfig) -> None:
    schedule = inner.schedule
    if inner.precision == "bf16" and inner.zero_stage == 0:
        raise ConfigError(
            115,
            "inner.precision=bf16 with inner.zero_stage=0: DeepSpeed takes a step with zero gradients at the start",
            "set inner.zero_stage=1; with one rank per island it shards nothing and costs the same",
        )
    shaped = schedule.warmup_steps + (schedule.decay_steps if schedule.kind == "wsd" else 0)
    if 0 < schedule.total_steps < shaped:
        raise ConfigError(
            120,
            f"inner.schedule: warm-up and decay take {shaped} steps of total_steps={schedule.total_steps}",
            "shorten warmup_steps or decay_steps, or set total_steps=0 for run.rounds × inner.H",
        )


def _check_quorum(config: Config) -> None:
    quorum, count = config.quorum, config.islands.count
    if quorum.kind == "at_least" and quorum.n > count:
        raise ConfigError(
            116, f"quorum.n={quorum.n} can never be reached by {count} islands", f"give quorum.n from 1 to {count}"
        )


def _check_storage(storage: str | None) -> None:
    if storage is None or "://" not in storage:
        return
    from fsspec import available_protocols

    scheme = re.split(r"::|://", storage)[0]
    known = available_protocols()
    if scheme not in known:
        close = nearest(scheme, known)
        raise ConfigError(
            121,
            f"run.storage={storage}: fsspec knows no scheme {scheme!r}",
            f"{f'did you mean {close}://? ' if close else ''}use a path, file://, s3://, gs://, …",
        )


def _check_faults(config: Config) -> None:
    if config.faults.plan and not config.faults.allowed:
        raise ConfigError(
            160,
            f"faults.plan would break this run on purpose: {'; '.join(map(str, config.faults.plan))}",
            "empty it, or say faults.allowed=true",
        )


def _check_plan(config: Config) -> None:
    plan, names = config.plan, island_names(config)
    for key, named in {"plan.islands": [*plan.islands], "plan.anchor": [plan.anchor] if plan.anchor else []}.items():
        for name in named:
            if name not in names:
                raise ConfigError(180, f"{key}: the run has no island {name!r}", f"islands: {', '.join(names)}")
    for name, site in plan.islands.items():
        for key in PLAN_NUMBERS:
            value = getattr(site, key)
            if value is not None:
                _check_bound(f"plan.islands.{name}.{key}", value, BOUNDS[f"plan.{key}"])


def _warnings(config: Config) -> Iterator[str]:
    outer, inner, rounds = config.outer, config.inner, config.run.rounds
    gain = outer.lr / (1.0 - outer.momentum)
    from_scratch = config.model.pretrained is None
    if outer.kind == "nesterov" and gain > _STEADY_GAIN and rounds < _ROUNDS_TO_SETTLE and from_scratch:
        yield (
            f"outer.lr={outer.lr:g} with outer.momentum={outer.momentum:g} multiplies steady updates by {gain:.3g}; "
            f"with only {rounds} rounds from scratch that overshoots. Short runs do better with outer.momentum=0.5."
        )
    schedule = inner.schedule
    total = schedule.total_steps or rounds * inner.H
    if schedule.warmup_steps >= total:
        yield (
            f"inner.schedule.warmup_steps={schedule.warmup_steps} is not over before the last of {total} inner steps: "
            f"the learning rate hardly reaches inner.lr={inner.lr:g}."
        )
    elif schedule.kind == "wsd" and schedule.warmup_steps + schedule.decay_steps > total:
        yield (
            f"inner.schedule: warm-up ({schedule.warmup_steps}) and decay ({schedule.decay_steps}) overlap in {total} "
            f"inner steps: the learning rate never reaches inner.lr={inner.lr:g}."
        )
