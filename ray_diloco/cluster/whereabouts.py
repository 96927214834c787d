"""Which region a node of the cluster is in: a label of it says so, or, where nodes cannot have labels, a resource."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray_diloco.cluster.placement import nodes
from ray_diloco.config.islands import REGION_LABEL, IslandsConfig

# Of a resource that stands for a region: so little that a node with one of it holds any number of ranks.
REGION_SHARE = 0.001
_HERE = "{region}"


@dataclass(frozen=True)
class Whereabouts:
    """How nodes say in which region they are.

    Attributes:
      label: label with the region's name.
      resource: name of a resource, with `{region}` where the region's name stands; empty: labels say it.
    """

    label: str = REGION_LABEL
    resource: str = ""

    @staticmethod
    def of(islands: IslandsConfig) -> Whereabouts:
        """As a run is configured."""
        return Whereabouts(islands.region_label, islands.region_resource)

    def region(self, node: Mapping[str, Any]) -> str:
        """Region of a node, as `ray.nodes()` has it; empty where it says none, the first where it says several."""
        if not self.resource:
            return str(node.get("Labels", {}).get(self.label, ""))
        before, _, after = self.resource.partition(_HERE)
        around = len(before) + len(after)
        found = (name for name in sorted(node.get("Resources", {})) if name.startswith(before) and name.endswith(after))
        return next((name[len(before) : len(name) - len(after)] for name in found if len(name) > around), "")

    def demand(self, region: str) -> dict[str, float]:
        """What an actor asks for that is to be in a region; nothing where labels say it."""
        return {self.resource.replace(_HERE, region): REGION_SHARE} if region and self.resource else {}

    def inside(self, region: str) -> dict[str, Any]:
        """Options of an actor that is to be in a region, if a node of it is alive; else it may be anywhere."""
        demand = self.demand(region)
        if self.resource:
            there = bool(demand) and any(demand.keys() <= node.get("Resources", {}).keys() for node in nodes())
            return {"resources": demand} if there else {}
        there = any(self.region(node) == region for node in nodes())
        return {"label_selector": {self.label: region}} if there else {}


# As nodes say it where nothing else is configured.
BY_LABEL = Whereabouts()
