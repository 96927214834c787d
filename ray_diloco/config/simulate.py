"""The keys of `simulate`: what `ray-diloco simulate` is told of the world beside `plan`.  A run does not read them.

Speeds of islands and links are those of `plan` (`step_seconds`, `up_mbit`, `down_mbit`, `rtt_ms`, and by island); a
step that is not known takes a second.  Each key is explained in `conf/config.yaml`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class FailureRatesConfig:
    """How often things fail."""

    # Per island and hour.
    exit: float = 0.0
    freeze: float = 0.0
    link_cut: float = 0.0
    link_slow: float = 0.0
    # Seconds that a cut or slow link lasts.
    trouble_s: float = 60.0
    # Parts of all contributions.
    corrupt: float = 0.0
    nan: float = 0.0
    # Part of all commits that cannot be written, or not be read.
    storage: float = 0.0
    # Of the driver, per hour.
    driver: float = 0.0


@dataclass
class SimulateConfig:
    """The world of a simulation."""

    # Elements of the model; 0: those of `model`.
    parameters: int = 0
    # Relative standard deviation of the islands' speeds, and of a segment's duration.
    spread: float = 0.0
    jitter: float = 0.0
    # What all links together carry at the anchor's side, Mbit/s each way; 0: no limit.
    hub_mbit: float = 0.0
    # Seconds until an island trains; from then on after a loss.
    launch_s: float = 60.0
    repair_s: float = 0.0
    # Seconds until a death is noticed, a merge is done, a commit is written, a lost driver is back.
    detect_s: float = 1.0
    merge_s: float = 0.1
    write_s: float = 10.0
    restart_s: float = 60.0
    # How often the driver may be lost.
    restarts: int = 100
    failures: FailureRatesConfig = field(default_factory=FailureRatesConfig)
