"""The conditions of a simulation: how fast, how far apart and how unreliable everything is.

Plain values, drawn from one seed where they are drawn.  What each island gets of them (its speed, its link, when it
fails) depends on the seed, its name and its incarnation alone, so that one more island changes nobody else's luck.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """A way to the anchor and back: seconds, and bytes per second each way; 0: as fast as one likes."""

    latency_s: float = 0.0
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """How often things fail.

    Attributes:
      exit, freeze: of each island, per hour; a frozen one is noticed after its silence.
      cut, slow: of each link, per hour; they last `trouble_s`, a slow one at a tenth of its speed.
      corrupt, nan: part of all contributions.
      storage: part of all writes that fail, tear or rot, a third each.
      driver: of the driver, per hour.
    """

    exit: float = 0.0
    freeze: float = 0.0
    cut: float = 0.0
    slow: float = 0.0
    corrupt: float = 0.0
    nan: float = 0.0
    storage: float = 0.0
    driver: float = 0.0
    trouble_s: float = 60.0


@dataclass(frozen=True)
class Conditions:
    """Everything that a simulation knows of the world.

    Attributes:
      seed: of all draws.
      step_s: seconds of an inner step on an average island.
      steps_s: by island, where they are given.
      spread: relative standard deviation of the islands' speeds, log-normal.
      jitter: the same of each segment.
      link: of islands without one of their own in `links`.
      hub: what all links together can carry, at the anchor's side.
      launch_s, repair_s: until an island runs; its next incarnation runs `repair_s` later still.
      detect_s: until the death of a process is noticed; `silence_s`: of a frozen one; `exchange_s`: of a dead link.
      merge_s, commit_s, write_s: of the anchor and the store; `merge_each_s` for each contribution.
      restart_s: until a lost driver is back; `restarts`: how often that may happen.
      region: by island.
      grid_s: what happens happens at multiples of it, and in any order there; 0: whenever.
    """

    seed: int = 0
    step_s: float = 1.0
    steps_s: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.0
    jitter: float = 0.0
    link: LinkSpeed = LinkSpeed()
    links: Mapping[str, LinkSpeed] = field(default_factory=dict)
    hub: LinkSpeed = LinkSpeed()
    launch_s: float = 1.0
    repair_s: float = 0.0
    detect_s: float = 0.5
    silence_s: float = 60.0
    exchange_s: float = 300.0
    merge_s: float = 0.01
    merge_each_s: float = 0.0
    commit_s: float = 0.02
    write_s: float = 0.5
    restart_s: float = 5.0
    restarts: int = 20
    rates: Rates = Rates()
    region: Mapping[str, str] = field(default_factory=dict)
    grid_s: float = 0.0

    def luck(self, *what: object) -> random.Random:
        """Random numbers for one purpose."""
        return random.Random("/".join(map(str, (self.seed, *what))))

    def pace(self, name: str) -> float:
        """Seconds of a step of an island, without jitter."""
        own = self.steps_s.get(name, self.step_s)
        return own * math.exp(self.luck("pace", name).gauss(0.0, self.spread)) if self.spread else own

    def link_of(self, name: str) -> LinkSpeed:
        """The link of an island."""
        return self.links.get(name, self.link)


def waiting_time(luck: random.Random, per_hour: float) -> float:
    """Seconds until the next of so many events per hour; infinity if there are none."""
    return luck.expovariate(per_hour / 3600.0) if per_hour > 0 else math.inf
