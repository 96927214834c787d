"""Room, compilers and accelerators of a machine against what a run needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_diloco.config.schema import Config
from ray_diloco.doctor.facts import Facts
from ray_diloco.doctor.record import Check, passed
from ray_diloco.observe.units import show_bytes

if TYPE_CHECKING:
    from ray_diloco.planning.memory import Memory

# Copies of what is in flight that /dev/shm should have room for (users.md §2.5).
_SHM_FACTOR = 1.2


@dataclass(frozen=True)
class Needs:
    """What a run needs of each node, in bytes and otherwise.

    Attributes:
      memory: of tensors, for the ranks and shards that one node may have to hold.
      messages: in the object store at once.
      disk: bytes by path.
      compiler: what asks for a C++ compiler; empty: nothing does.
      gpus: accelerators for each rank.
    """

    memory: int
    messages: int
    disk: dict[str, int]
    compiler: str = ""
    gpus: float = 0.0


def needs_of(config: Config, parameters: int, memory: Memory, ranks: int, folder: str, cache: str) -> Needs:
    """What a run needs where `ranks` ranks and one anchor shard share a node.

    Commits hold anchor and outer state, and parameters and moments of the islands where those are saved.
    """
    commit = 3 * 4 * parameters * (1 + (len(config.islands.names) or config.islands.count) * config.checkpoint.inner)
    kept = config.checkpoint.keep_last + 1
    asks = "model.compile=true" if config.model.compile else ""
    return Needs(
        ranks * (memory.model + memory.exchange) + memory.shard,
        memory.store,
        ({} if "://" in folder else {folder: commit * kept}) | {cache: 0},
        asks,
        config.islands.gpus_per_rank,
    )


def check_memory(facts: Facts, needs: Needs) -> Check:
    """Free memory against tensors; activations and libraries come on top."""
    said = f"{show_bytes(facts.memory_free)} free, {show_bytes(needs.memory)} of tensors"
    if facts.memory_free >= needs.memory:
        return passed("memory", facts.node, said)
    mend = "fewer islands on this machine, inner.zero_stage=2 with more ranks, or a smaller model"
    return Check("memory", facts.node, "fail", said, mend)


def check_shm(facts: Facts, needs: Needs) -> Check:
    """/dev/shm, where Ray's object store lives, against the messages of a round."""
    wanted = round(_SHM_FACTOR * needs.messages)
    if facts.shm_free is None:
        return Check("/dev/shm", facts.node, "warn", "there is none: Ray keeps objects on disk", "mount a tmpfs there")
    said = f"{show_bytes(facts.shm_free)} free, a round has {show_bytes(needs.messages)} in flight"
    if facts.shm_free >= wanted:
        return passed("/dev/shm", facts.node, said)
    mend = f"mount -o remount,size={wanted // 2**20 + 1}M /dev/shm (docker run --shm-size={wanted // 2**20 + 1}m)"
    return Check("/dev/shm", facts.node, "warn", said, mend)


def check_disk(facts: Facts, needs: Needs) -> list[Check]:
    """Free bytes where commits and prepared data go."""
    checks = []
    for path, wanted in needs.disk.items():
        free = facts.disk_free.get(path)
        if free is None:
            checks.append(Check("disk", facts.node, "fail", f"{path} cannot be looked at", f"mkdir -p {path}"))
            continue
        said = f"{path}: {show_bytes(free)} free, {show_bytes(wanted)} for commits"
        mend = "free some, or set run.root or run.storage elsewhere"
        checks.append(
            passed("disk", facts.node, said) if free > wanted else Check("disk", facts.node, "fail", said, mend)
        )
    return checks


def check_compilers(facts: Facts, needs: Needs) -> Check:
    """A C++ compiler, where something of the run asks for one."""
    found = ", ".join(sorted(facts.compilers)) or "none"
    if not needs.compiler:
        return passed("compilers", facts.node, f"none is needed; found: {found}")
    if {"g++", "clang++"} & set(facts.compilers):
        return passed("compilers", facts.node, f"{needs.compiler} needs one; found: {found}")
    said = f"{needs.compiler} needs a C++ compiler; found: {found}"
    return Check("compilers", facts.node, "fail", said, "apt-get install g++, or model.compile=false")


def check_gpus(facts: Facts, needs: Needs) -> Check:
    """Accelerators that torch sees, where ranks ask for some."""
    seen = facts.gpus or ()
    said = f"torch sees {len(seen)}" + (f" ({', '.join(sorted(set(seen)))})" if seen else "")
    if not needs.gpus:
        return passed("accelerators", facts.node, "none is asked for")
    if seen:
        return passed("accelerators", facts.node, said)
    mend = "nvidia-smi; then a torch built for its driver, or islands.gpus_per_rank=0"
    return Check("accelerators", facts.node, "fail", f"{said}, each rank asks for {needs.gpus:g}", mend)
