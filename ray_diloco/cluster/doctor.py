"""The doctor of a cluster: facts of every node, and what was measured between them.

One small actor on each node tells its facts, listens, and measures towards the others.  Pairs are tried one after the
other, as two measurements over one link would spoil each other: every pair of nodes is connected both ways, and one
node of each region is measured against those of the others.  Every wait has a deadline, and a node that does not answer
is a line that fails, not the end of the examination.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import permutations
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_diloco.cluster.calls import actor
from ray_diloco.cluster.placement import nodes
from ray_diloco.cluster.session import ray_session
from ray_diloco.cluster.whereabouts import BY_LABEL, Whereabouts
from ray_diloco.config.schema import Config
from ray_diloco.data.cache import cache_folder
from ray_diloco.doctor.facts import Facts, gather
from ray_diloco.doctor.local import check_node, facts_here, local_paths, needs_here, packages, storage_of
from ray_diloco.doctor.network import (
    Measured,
    Reach,
    check_addresses,
    check_clocks,
    check_link,
    check_reach,
)
from ray_diloco.doctor.places import check_data, check_storage, marker
from ray_diloco.doctor.record import Check, passed
from ray_diloco.doctor.sockets import Listener, rate_mbit, round_trip_s, try_to_reach
from ray_diloco.doctor.versions import check_same_versions, check_versions, matrix
from ray_diloco.errors import ClusterError, DilocoError
from ray_diloco.planning.links import LINKS, key_of_pair
from ray_diloco.planning.remembered import remember

# Seconds that a node may take to start an actor and answer, beside what it was asked to do.
ANSWER_S = 60.0
STREAMS = 4
MEASURE_S = 2.0
# Times there and back that a measurement lasts at least: over the wanlab's links a cold connection grew for 28.
_ROUND_TRIPS = 30
# Questions after the time of a node; the one with the shortest way counts.
_CLOCK_ASKS = 3


class Probe:
    """Looks at the machine that it runs on."""

    def __init__(self) -> None:
        self._listener = Listener()

    def facts(self, node: str, region: str, address: str, other: str, paths: Sequence[str], gpus: bool) -> Facts:
        """Facts of this machine, whose Ray node has that address and is to reach the other one."""
        return gather(node, packages(), paths, gpus=gpus, region=region, ray=address, towards=other)

    def port(self) -> int:
        """Where this one listens."""
        return self._listener.port

    def clock(self) -> float:
        """Unix seconds."""
        return time.time()

    def reach(self, source: str, target: str, address: str, port: int) -> Reach:
        """Connects to another node."""
        return try_to_reach(source, target, address, port)

    def measure(self, source: str, target: str, address: str, port: int, seconds: float) -> Measured:
        """Measures a link from here, in one stream and in several; `seconds` each, or more where the way is long."""
        rtt_s = round_trip_s(address, port)
        seconds = max(seconds, _ROUND_TRIPS * rtt_s)
        # One stream goes last: the kernel remembers of those before how far a connection may grow, as Ray's have grown.
        several, one = (rate_mbit(address, port, streams, seconds) for streams in (STREAMS, 1))
        return Measured(source, target, rtt_s, one, several, STREAMS)

    def sees(self, path: str) -> bool:
        """Whether a file is there."""
        return Path(path).is_file()

    def round(self, node: str) -> Check:
        """Computes a round of two islands."""
        from ray_diloco.doctor.arithmetic import check_round

        return check_round(node)

    def storage(self, url: str, node: str) -> Check:
        """Writes and reads where commits go."""
        return check_storage(url, node)


ProbeActor = actor(Probe, num_cpus=0)


@dataclass(frozen=True)
class Node:
    """A node that answers: its name and region here, where others reach it, and its probe."""

    name: str
    region: str
    address: str
    port: int
    handle: Any
    facts: Facts

    @property
    def place(self) -> str:
        """Under which its links are stored: its region, else its name."""
        return self.region or self.name


def examine_cluster(config: Config, seconds: float = MEASURE_S) -> list[Check]:
    """All checks of the cluster that `ray.address` or the environment names.

    Raises:
      ClusterError: RD-201, there is none; RD-240, none is named.
    """
    if not (ray.is_initialized() or config.ray.address or os.environ.get("RAY_ADDRESS")):
        raise ClusterError(
            240, "--cluster without a cluster to look at", "set ray.address=HOST:PORT or RAY_ADDRESS, or leave it out"
        )
    with ray_session(config, 0):
        alive = nodes()
        probes = {name: (found, _probe(found)) for name, found in named(alive, Whereabouts.of(config.islands)).items()}
        try:
            return _examine(config, probes, seconds)
        finally:
            for _, probe in probes.values():
                ray.kill(probe)


def named(alive: Sequence[Mapping[str, Any]], where: Whereabouts = BY_LABEL) -> dict[str, Mapping[str, Any]]:
    """Nodes by a name that people know: the region where it is alone there, with its address otherwise."""
    regions = [where.region(node) for node in alive]
    found: dict[str, Mapping[str, Any]] = {}
    for node, region in zip(alive, regions, strict=True):
        name = region if region and regions.count(region) == 1 else f"{region} {_address(node)}".strip()
        found[name if name not in found else f"{name} {str(node['NodeID'])[:8]}"] = node
    return found


def one_of_each(found: Sequence[Node]) -> list[Node]:
    """The first node of each region; nodes without a region are one each."""
    first: dict[str, Node] = {}
    for node in found:
        first.setdefault(node.place, node)
    return list(first.values())


def remember_links(cache: str | None, links: Sequence[Measured]) -> None:
    """Stores what was measured, for the planner."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    entries = {
        key_of_pair(link.source, link.target): {
            "rtt_ms": 1e3 * link.rtt_s,
            "one_mbit": link.one_mbit,
            "several_mbit": link.several_mbit,
            "streams": link.streams,
            "at": at,
        }
        for link in links
    }
    if entries:
        remember(cache, LINKS, entries)


def _examine(config: Config, probes: Mapping[str, tuple[Mapping[str, Any], Any]], seconds: float) -> list[Check]:
    found, silent = _meet(config, probes)
    needs, model = needs_here(config, max(1, len(found)))
    client, known = facts_here(config), matrix()
    checks = [*silent, *model, *check_same_versions([node.facts for node in found], client)]
    for node in found:
        checks += [*check_versions(node.facts, known), *check_node(node.facts, needs)]
        checks += check_addresses(node.facts, alone=len(found) == 1)
    checks += _said("a round", {node.name: node.handle.round.remote(node.name) for node in found})
    checks += check_clocks([(node.name, _ahead_s(node.handle)) for node in found])
    checks += check_reach(_reached(found))
    links, broken = _links(one_of_each(found), seconds)
    remember_links(config.data.cache, links)
    tcp = {node.place: node.facts.tcp for node in found}
    checks += [*broken, *(check_link(link, tcp[link.source]) for link in links)]
    checks += _places(config, found)
    return [*checks, *check_data(config)]


def _probe(node: Mapping[str, Any]) -> Any:
    here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ProbeActor.options(scheduling_strategy=here).remote()


def _meet(config: Config, probes: Mapping[str, tuple[Mapping[str, Any], Any]]) -> tuple[list[Node], list[Check]]:
    """The nodes that answer, and a line for each that does not."""
    paths, gpus = local_paths(config), config.islands.gpus_per_rank > 0
    where = Whereabouts.of(config.islands)
    addresses = [_address(node) for node, _ in probes.values()]
    asked = {}
    for name, (node, probe) in probes.items():
        own = _address(node)
        other = next((address for address in addresses if address != own), own)
        asked[name] = probe.facts.remote(name, where.region(node), own, other, paths, gpus), probe.port.remote()
    found, silent = [], []
    for name, (node, probe) in probes.items():
        facts, port = (_answered(ref, ANSWER_S) for ref in asked[name])
        if isinstance(facts, str) or isinstance(port, str):
            mend = "ray status; see the logs of that node, and whether this package is installed there"
            silent.append(Check("node", name, "fail", f"its probe does not answer: {facts}", mend))
            continue
        found.append(Node(name, where.region(node), _address(node), port, probe, facts))
    return found, silent


def _reached(found: Sequence[Node]) -> list[Reach]:
    """All pairs, both ways; each node tries the others while the others try theirs."""
    asked = {
        (a.name, b.name, b.address, b.port): a.handle.reach.remote(a.name, b.name, b.address, b.port)
        for a, b in permutations(found, 2)
    }
    return [
        Reach(*pair, error=answer) if isinstance(answer := _answered(ref, ANSWER_S), str) else answer
        for pair, ref in asked.items()
    ]


def _links(found: Sequence[Node], seconds: float) -> tuple[list[Measured], list[Check]]:
    """Links between regions, one after the other, and a line for each that could not be measured."""
    links, broken = [], []
    for a, b in permutations(found, 2):
        asked = a.handle.measure.remote(a.place, b.place, b.address, b.port, seconds)
        answer = _answered(asked, ANSWER_S + 40 * seconds)
        if isinstance(answer, str):
            where = f"{a.place} to {b.place}"
            mend = f"open the ports between them; try: nc -vz {b.address} {b.port}"
            broken.append(Check("link", where, "fail", f"it could not be measured: {answer}", mend))
        else:
            links.append(answer)
    return links, broken


def _places(config: Config, found: Sequence[Node]) -> list[Check]:
    """Storage from every node, and whether all of them see the prepared data of this one."""
    url = storage_of(config)
    if url.startswith("memory://"):
        checks = [passed("storage", "", f"{url}: kept by one process of the run")]
    else:
        checks = _said("storage", {node.name: node.handle.storage.remote(url, node.name) for node in found})
    shared = {"data": str(cache_folder(config.data.cache)), "storage": url}
    for what, folder in shared.items():
        if "://" not in folder:
            checks += _seen_everywhere(what, folder, found)
    return checks


def _said(check: str, asked: Mapping[str, Any]) -> list[Check]:
    """What the probes of nodes say of one check."""
    return [
        Check(check, name, "fail", answer, "look at the log of that node")
        if isinstance(answer := _answered(ref, ANSWER_S), str)
        else answer
        for name, ref in asked.items()
    ]


def _seen_everywhere(what: str, folder: str, found: Sequence[Node]) -> list[Check]:
    key = "data.cache" if what == "data" else "run.storage"
    try:
        with marker(folder) as path:
            seen = {node.name: _answered(node.handle.sees.remote(path), ANSWER_S) for node in found}
    except OSError as error:
        return [Check(f"shared {what}", "", "fail", f"{folder}: {error.strerror or error}", f"set {key} elsewhere")]
    blind = [name for name, answer in seen.items() if answer is not True]
    if not blind:
        return [passed(f"shared {what}", "", f"{folder} of this machine is seen by {len(seen)} node(s)")]
    said = f"{folder} of this machine is not seen by {', '.join(blind)}"
    mend = f"set {key} to storage that every node sees" + (
        " (s3://, gs://, a shared disk)" if what == "storage" else ""
    )
    return [Check(f"shared {what}", "", "fail", said, mend)]


def _ahead_s(handle: Any) -> float:
    """Seconds that a node's clock is ahead of this one's; its answer is taken for the middle of the way."""
    best = (float("inf"), 0.0)
    for _ in range(_CLOCK_ASKS):
        began = time.time()
        told = _answered(handle.clock.remote(), ANSWER_S)
        ended = time.time()
        if not isinstance(told, str):
            best = min(best, (ended - began, told - (began + ended) / 2))
    return best[1]


def _answered(ref: Any, deadline_s: float) -> Any:
    """The value behind a reference, or in words why there is none."""
    try:
        return ray.get(ref, timeout=deadline_s)
    except (RayError, DilocoError, OSError) as error:
        lines = str(error).strip().splitlines()
        return lines[-1][:200] if lines else type(error).__name__


def _address(node: Mapping[str, Any]) -> str:
    return str(node["NodeManagerAddress"])


def _region(node: Mapping[str, Any], label: str) -> str:
    return str(node.get("Labels", {}).get(label, ""))
