"""What a plan assumes of one island: its own keys of `plan.islands` over those of `plan`."""

from __future__ import annotations

from ray_diloco.config.plan import SiteConfig
from ray_diloco.config.schema import Config, region_of


def site_of(config: Config, island: str) -> SiteConfig:
    """What holds for one island, its region included; no number is None."""
    plan = config.plan
    own = plan.islands.get(island, SiteConfig())

    def pick(mine: float | None, shared: float) -> float:
        return shared if mine is None else mine

    return SiteConfig(
        own.region or region_of(config, island) or island,
        pick(own.step_seconds, plan.step_seconds),
        pick(own.up_mbit, plan.up_mbit),
        pick(own.down_mbit, plan.down_mbit),
        pick(own.rtt_ms, plan.rtt_ms),
        pick(own.dollars_per_hour, plan.dollars_per_hour),
        pick(own.watts, plan.watts),
        pick(own.grams_co2_per_kwh, plan.grams_co2_per_kwh),
    )
