"""The doctor of one machine: what `ray-diloco doctor` checks without a cluster, in a few seconds."""

from __future__ import annotations

import math
from pathlib import Path

from ray_diloco.blocks import channels_of
from ray_diloco.config.schema import Config, island_names
from ray_diloco.data.cache import cache_folder
from ray_diloco.doctor.facts import Facts, gather
from ray_diloco.doctor.machine import (
    Needs,
    check_compilers,
    check_disk,
    check_gpus,
    check_memory,
    check_shm,
    needs_of,
)
from ray_diloco.doctor.network import Reach, check_addresses, check_reach
from ray_diloco.doctor.places import check_data, check_storage
from ray_diloco.doctor.record import Check, passed
from ray_diloco.doctor.sockets import Listener, try_to_reach
from ray_diloco.doctor.versions import PACKAGES, check_versions, matrix
from ray_diloco.errors import DilocoError
from ray_diloco.rules import ranks_of

HERE = "here"


def examine(config: Config) -> list[Check]:
    """All checks of this machine for a run."""
    from ray_diloco.doctor.arithmetic import check_round

    needs, model = needs_here(config)
    facts = facts_here(config)
    return [
        *check_versions(facts, matrix()),
        *model,
        *check_node(facts, needs),
        check_room_for_ranks(config, facts),
        check_round(),
        *check_addresses(facts, alone=True),
        *check_reach(_loopback()),
        check_storage(storage_of(config)),
        *check_data(config),
    ]


def check_node(facts: Facts, needs: Needs | None) -> list[Check]:
    """Room, compilers and accelerators of a node; nothing where the needs are not known."""
    if needs is None:
        return []
    checks = [check_memory(facts, needs), check_shm(facts, needs), *check_disk(facts, needs)]
    return [*checks, check_compilers(facts, needs), check_gpus(facts, needs)]


def check_room_for_ranks(config: Config, facts: Facts) -> Check:
    """Processors against the ranks that a local run starts on them."""
    wanted = math.ceil(sum(ranks_of(config, name) * config.islands.cpus_per_rank for name in island_names(config)))
    said = f"{facts.cpus} processors for ranks that ask for {wanted}"
    if facts.cpus >= wanted:
        return passed("processors", facts.node, said)
    mend = f"islands share them and train slower; or islands.count={max(1, facts.cpus)}"
    return Check("processors", facts.node, "warn", said, mend)


def needs_here(config: Config, nodes: int = 1) -> tuple[Needs | None, list[Check]]:
    """What a run needs of each of so many nodes, and what the model says to being built."""
    from ray_diloco.planning.memory import memory_of
    from ray_diloco.planning.model import layout_of_config
    from ray_diloco.planning.traffic import traffic_of

    try:
        layout = layout_of_config(config)
        traffic = traffic_of(config, layout)
    except DilocoError as error:
        return None, [Check("model", "", "fail", error.what, error.mend)]
    names = island_names(config)
    ranks = max(ranks_of(config, name) for name in names)
    memory = memory_of(traffic, channels_of(config), config.inner, ranks)
    per_node = math.ceil(sum(ranks_of(config, name) for name in names) / nodes)
    needs = needs_of(config, layout.numel, memory, per_node, storage_of(config), str(cache_folder(config.data.cache)))
    return needs, [passed("model", "", f"{config.model.name}: {layout.numel:,} parameters")]


def facts_here(config: Config, node: str = HERE) -> Facts:
    """The facts of this machine that the checks of a run need."""
    return gather(node, packages(), local_paths(config), gpus=config.islands.gpus_per_rank > 0)


def packages() -> tuple[str, ...]:
    """Packages whose versions are compared."""
    return (*PACKAGES, "ray_diloco")


def local_paths(config: Config) -> list[str]:
    """Folders of this machine that are written."""
    storage = storage_of(config)
    return [*([storage] if "://" not in storage else []), str(cache_folder(config.data.cache))]


def storage_of(config: Config) -> str:
    """Where commits go: a URL, or the folder that holds those of all runs."""
    storage = config.run.storage or config.run.root
    return storage if "://" in storage else str(Path(storage).expanduser().absolute())


def _loopback() -> list[Reach]:
    with Listener("127.0.0.1") as listener:
        return [try_to_reach(HERE, HERE, "127.0.0.1", listener.port)]
