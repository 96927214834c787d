"""The keys of `plan`: what `ray-diloco plan` is told of time, links and prices.  A run trains the same without them.

What is 0 is not known: a step is then timed, a link taken from what `ray-diloco doctor` measured (or as no limit), and
a price left out.  Each key is explained in `conf/config.yaml`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SiteConfig:
    """What differs for one island; unset keys are those of `plan`."""

    # Region under which the doctor measured its links; default: that of islands.regions, else the island's name.
    region: str | None = None
    step_seconds: float | None = None
    up_mbit: float | None = None
    down_mbit: float | None = None
    rtt_ms: float | None = None
    dollars_per_hour: float | None = None
    watts: float | None = None
    grams_co2_per_kwh: float | None = None


@dataclass
class PlanConfig:
    """What a plan assumes of every island."""

    # Seconds of one inner step of an island; 0: those of an earlier run on this machine, else timed now.
    step_seconds: float = 0.0
    # Mbit/s between an island and the island beside which the anchor lives, and milliseconds there and back.
    up_mbit: float = 0.0
    down_mbit: float = 0.0
    rtt_ms: float = 0.0
    # Price, power and carbon of an island.
    dollars_per_hour: float = 0.0
    watts: float = 0.0
    grams_co2_per_kwh: float = 0.0
    # Island beside which the anchor lives; default: the first.
    anchor: str | None = None
    # Part by which the loss may be higher than that of synchronous training, for the choice of H, codec and fragments.
    quality: float = 0.03
    islands: dict[str, SiteConfig] = field(default_factory=dict)
