"""Seconds of an inner step: as `plan.*` gives them, as an earlier run here took, else timed here and now.

No import of torch before something is timed: the end of a run remembers its steps here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from ray_diloco.config.schema import Config, island_names
from ray_diloco.planning.remembered import recall, remember
from ray_diloco.planning.sites import site_of
from ray_diloco.provenance.digest import digest_json
from ray_diloco.provenance.environment import processor_name

FILE = "steps"
# Models above this are not timed unasked.
MOST_TIMED = 20_000_000


def known_steps(config: Config) -> tuple[dict[str, float], str]:
    """Seconds of a step of each island, and whether they are given or of an earlier run; empty where unknown."""
    names = island_names(config)
    given = {name: float(site_of(config, name).step_seconds or 0.0) for name in names}
    if all(given.values()):
        return given, "given"
    known = recall(config.data.cache, FILE).get(step_key(config), {})
    if not known:
        return {}, "unknown"
    typical = sorted(known.values())[len(known) // 2]
    return {name: given[name] or float(known.get(name, typical)) for name in names}, "an earlier run"


def step_seconds(config: Config, parameters: int) -> tuple[dict[str, float], str]:
    """As `known_steps`, and timed now where the model is small enough for that."""
    known = known_steps(config)
    if known[0] or parameters > MOST_TIMED or config.islands.gpus_per_rank:
        return known
    from ray_diloco.planning.timed import timed_step

    timed = timed_step(config)
    given = {name: site_of(config, name).step_seconds for name in island_names(config)}
    return {name: float(seconds or timed) for name, seconds in given.items()}, "timed in plain torch"


def steps_of_run(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of a step by island, of the lines of `metrics.jsonl`."""
    seconds: defaultdict[str, float] = defaultdict(float)
    steps: defaultdict[str, int] = defaultdict(int)
    for line in lines:
        if line.get("kind") == "island":
            seconds[line["island"]] += line["train_s"]
            steps[line["island"]] += line["steps"]
    return {name: seconds[name] / steps[name] for name in seconds if steps[name]}


def remember_steps(config: Config, seconds: Mapping[str, float]) -> None:
    """Keeps what steps of a run took, for later plans of the same model and batch on this machine."""
    if seconds:
        remember(config.data.cache, FILE, {step_key(config): dict(seconds)})


def step_key(config: Config) -> str:
    """What the time of a step depends on, as far as a plan knows."""
    inner, islands = config.inner, config.islands
    parts: dict[str, Any] = {
        "model": asdict(config.model) | {"name": ""},
        "tokenizer": asdict(config.tokenizer),
        "sequence": config.data.sequence_length,
        "batch": [inner.micro_batch, inner.gradient_accumulation],
        "engine": [inner.zero_stage, inner.precision, inner.optimizer.name],
        "room": [islands.count, islands.ranks, islands.cpus_per_rank, islands.threads, islands.gpus_per_rank],
        "processor": processor_name(),
    }
    return digest_json(parts)[:16]
