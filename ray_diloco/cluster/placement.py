"""Room for an island: one placement group each, made only if the cluster can ever hold it.

Ray leaves a request that no node can satisfy pending without a word, so feasibility is checked first, against the
nodes that are alive, and the answer is a table: need, have, largest node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_diloco.cluster.calls import ActorFailed, answer
from ray_diloco.errors import InfeasibleError

Bundle = dict[str, float]
# What an island asks of its nodes: labels and their values.
Labels = Mapping[str, str]


def nodes() -> list[Mapping[str, Any]]:
    """Nodes of the cluster that are alive."""
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def check_feasible(islands: Mapping[str, Sequence[Bundle]], labels: Mapping[str, Labels] | None = None) -> None:
    """Sees whether all islands together fit into the cluster, idle or not.

    Bundles go, largest first, to the first node that still has room for them.

    Args:
      islands: what each needs, a bundle for each rank.
      labels: what each asks of its nodes.

    Raises:
      InfeasibleError: RD-210, with a table of what is needed and what there is.
    """
    alive = nodes()
    free = [(node.get("Labels", {}), dict(node["Resources"])) for node in alive]
    asked = [(b, (labels or {}).get(name, {})) for name, group in islands.items() for b in group]
    bundles = [bundle for bundle, _ in asked]
    for bundle, wanted in sorted(asked, key=lambda pair: -sum(pair[0].values())):
        fitting = (f for has, f in free if wanted.items() <= has.items())
        room = next((f for f in fitting if all(f.get(k, 0.0) >= v for k, v in bundle.items())), None)
        if room is None:
            where = f" on nodes with {_words(wanted)}" if wanted else ""
            raise InfeasibleError(
                210,
                f"the cluster has no room for {len(islands)} island(s){where}\n{_table(bundles, alive)}",
                "ask for fewer islands (islands.count), ranks (islands.ranks) or CPUs per rank "
                "(islands.cpus_per_rank), or add nodes; a local Ray can claim more CPUs with ray.num_cpus",
            )
        for key, value in bundle.items():
            room[key] -= value


def on_node(node_id: str | None) -> dict[str, Any]:
    """Options of an actor that is to be on a node, if that is alive; else it may be anywhere.

    Bound softly, an actor that asks for no resources would be anywhere in any case (Ray 2.60 draws a node for it).
    """
    if node_id is None or all(node["NodeID"] != node_id for node in nodes()):
        return {}
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


def here() -> dict[str, Any]:
    """Options of an actor that is to be on the node of this process."""
    return on_node(ray.get_runtime_context().get_node_id())


def fits(bundles: Sequence[Bundle], labels: Labels) -> bool:
    """Whether an island could be placed if nothing else ran."""
    try:
        check_feasible({"": bundles}, {"": labels})
    except InfeasibleError:
        return False
    return True


async def reserve(
    room: str, island: str, bundles: Sequence[Bundle], deadline_s: float, labels: Labels | None = None
) -> PlacementGroup:
    """Reserves room for one island of a run, under a name; names are unique on a cluster.

    `labels`: on nodes that have these.

    Raises:
      InfeasibleError: RD-211, there was no room within `deadline_s` seconds.
    """
    name = f"island {island}"
    group: PlacementGroup = placement_group(
        list(bundles),
        strategy="PACK",
        name=room,
        bundle_label_selector=[dict(labels)] * len(bundles) if labels else None,
    )
    try:
        await answer(group.ready(), f"the placement of {name}", deadline_s)
    except (ActorFailed, asyncio.CancelledError) as error:
        remove_placement_group(group)
        if isinstance(error, asyncio.CancelledError):
            raise
        where = f" on nodes with {_words(labels)}" if labels else ""
        raise InfeasibleError(
            211,
            f"{name} found no room within {deadline_s:g} s{where}\n{_table(bundles, nodes())}",
            "wait until other work on the cluster ends, ask for less, or raise deadlines.placement_s",
        ) from None
    return group


def release(run: str) -> None:
    """Gives back whatever a run still holds: Ray keeps the room of a driver that died until its caller ends too."""
    for group in placement_group_table().values():
        if group["name"].startswith(_prefix(run)) and group["state"] != "REMOVED":
            remove_placement_group(get_placement_group(group["name"]))


def _words(labels: Labels) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))


def _prefix(run: str) -> str:
    return f"run {run}: "


def _table(bundles: Sequence[Bundle], alive: Sequence[Mapping[str, Any]]) -> str:
    available = ray.available_resources()  # type: ignore[no-untyped-call]
    rows = [f"    {'resource':<10}{'need':>10}{'have':>10}{'free now':>10}{'largest node':>14}"]
    for key in sorted({key for bundle in bundles for key in bundle}):
        need = sum(bundle.get(key, 0.0) for bundle in bundles)
        have = [node["Resources"].get(key, 0.0) for node in alive]
        rows.append(
            f"    {key:<10}{need:>10g}{sum(have):>10g}{available.get(key, 0.0):>10g}{max(have, default=0):>14g}"
        )
    return "\n".join(rows)
