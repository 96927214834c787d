"""Keys that say who takes part in a run, and what makes an island's contributions bad; see `schema.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# The label by which Ray itself says where a node is.
REGION_LABEL = "ray.io/availability-region"


@dataclass
class IslandOverrideConfig:
    """Settings of one island that differ from the others'; unset ones are inherited."""

    # Name of a data group file, or a source of data.source.
    data: str | None = None
    data_path: str | None = None
    # Other keys of data.* that differ; compose fills in what the group file of `data` sets.  See `island_data`.
    data_settings: dict[str, Any] = field(default_factory=dict)
    ranks: int | None = None
    micro_batch: int | None = None
    accelerator: str | None = None
    # Kind of the codec of its contributions; the other keys of codec.up hold for it too.
    codec: str | None = None


@dataclass
class IslandsConfig:
    """The groups of compute that train."""

    count: int = 2
    # Names; default i0, i1, …
    names: list[str] = field(default_factory=list)
    # Islands by region, as in {eu: 2, us: 1}; they are named eu-0, eu-1, us-0, and run on nodes with that label.
    regions: dict[str, int] = field(default_factory=dict)
    # Label of a node that says in which region it is.
    region_label: str = REGION_LABEL
    # Resource that stands for the label, as in "region-{region}"; empty: the label counts.
    region_resource: str = ""
    # Ranks (processes, accelerators) per island.
    ranks: int = 1
    # Islands below which no segment begins.
    min: int = 1
    # Most islands; above count, others start as soon as there is room for them.  0: as many as are asked for.
    max: int = 0
    # Islands that may join at a time; 0: any number.
    joins: int = 4
    # Seconds in which an island that is asked to leave may finish its segment.
    drain_s: float = 60.0
    # Seconds that its slot stays empty where it left because its machine goes.
    away_s: float = 60.0
    cpus_per_rank: float = 1.0
    gpus_per_rank: float = 0.0
    # Type of accelerator that its nodes have, as Ray names it (H100, A100); empty: any.
    accelerator: str = ""
    # Threads of each rank; 0: cpus_per_rank.
    threads: int = 0
    overrides: dict[str, IslandOverrideConfig] = field(default_factory=dict)


@dataclass
class GuardConfig:
    """Which contributions are bad though they can be read, and what becomes of who sends them."""

    # Times the median norm of recent contributions above which one is refused; 0: any norm is taken.
    norm: float = 30.0
    # Times the usual inner loss above which an island goes back to the anchor; 0: none does.
    loss: float = 3.0
    # Bad contributions within `rounds` rounds after which an island is put into quarantine; 0: never.
    strikes: int = 3
    # Rounds that it stays there.
    rounds: int = 10
