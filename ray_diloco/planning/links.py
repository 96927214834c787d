"""Links between islands and the anchor: as `plan.*` gives them, else as the doctor measured them.

The doctor stores what it measured from one region to another as `a>b`; here it is taken for the link of an island whose
region is `a` to an anchor in `b`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray_diloco.config.schema import Config
from ray_diloco.planning.remembered import recall
from ray_diloco.planning.sites import site_of
from ray_diloco.planning.timing import Link

# Name of the doctor's file.
LINKS = "links"

_BYTES_OF_MBIT = 1e6 / 8


def key_of_pair(source: str, target: str) -> str:
    """Under which a measurement is stored."""
    return f"{source}>{target}"


def measured_links(cache: str | None) -> Mapping[str, Mapping[str, Any]]:
    """What the doctor measured, by pair: `rtt_ms`, `one_mbit`, `several_mbit`, `streams`, `at`."""
    return recall(cache, LINKS)


def link_of(config: Config, island: str, anchor: str, measured: Mapping[str, Mapping[str, Any]]) -> tuple[Link, str]:
    """The link of an island to the anchor's, and whether it was `given`, `measured`, `beside` the anchor or `none`."""
    site, hub = site_of(config, island), site_of(config, anchor)
    given = Link(
        (site.up_mbit or 0.0) * _BYTES_OF_MBIT, (site.down_mbit or 0.0) * _BYTES_OF_MBIT, (site.rtt_ms or 0.0) / 1e3
    )
    if given != Link():
        return given, "given"
    if site.region == hub.region:
        return Link(), "beside"
    there = measured.get(key_of_pair(str(site.region), str(hub.region)))
    back = measured.get(key_of_pair(str(hub.region), str(site.region)))
    if there is None or back is None:
        return Link(), "none"
    rate = [float(way["several_mbit"]) * _BYTES_OF_MBIT for way in (there, back)]
    return Link(rate[0], rate[1], float(there["rtt_ms"]) / 1e3), "measured"
