"""How long a round takes: inner steps, and what of the exchange is not hidden behind them.

An exchange of a fragment is: the island encodes, its message goes to the anchor's side, the anchor merges and steps,
its message comes back, the island adopts.  Encoding and adopting stop the island; the rest is exposed only where it
takes longer than the `τ` steps that are made meanwhile: `max(0, T − τ c)` (../shared/algorithms.md §8.4).  Where it is
hidden, the island still waits for its next call at emission and at adoption.  All islands share the link of the island
beside which the anchor lives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# What waits for one another in an exchange, in times there and back: what was emitted is told (half), the shard's pull,
# the anchor is told of (half), and pulled: measured, three of them and the bytes, as its owner is asked for it first
# (docs/benchmarks.md).  Adoption and the next training are asked for meanwhile (`cluster/ahead.py`).
ROUND_TRIPS = 5
# Where steps are made meanwhile: after emission, and again before adoption, a report and the next call.
TURNS = 2


@dataclass(frozen=True, slots=True)
class Link:
    """Between an island and the anchor: bytes per second each way (0: no limit), seconds there and back."""

    up: float = 0.0
    down: float = 0.0
    rtt_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds per element, measured (`speeds.py`).

    Attributes:
      emit: of `B − θ` in the codec of the way up.
      merge, merge_each: of an outer step, and what each contribution adds.
      adopt: of a message of the way down.
    """

    emit: float = 0.0
    merge: float = 0.0
    merge_each: float = 0.0
    adopt: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """An exchange of one fragment.

    Attributes:
      elements: of the fragment.
      up: bytes by island; down: bytes that each gets.
      delay: inner steps between emission and adoption.
      times: how often it happens in a round of the main channel.
    """

    elements: int
    up: Mapping[str, int]
    down: int
    delay: int
    times: float = 1.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """How long an exchange of one fragment takes, in seconds; `rtt` is the longest way there and back."""

    emit: float
    up: float
    merge: float
    down: float
    adopt: float
    rtt: float

    @property
    def away(self) -> float:
        """Seconds in which the island need not do anything."""
        return self.up + self.merge + self.down + ROUND_TRIPS * self.rtt

    def exposed(self, hidden_s: float) -> float:
        """Seconds in which the island does not train, if it makes steps of `hidden_s` seconds meanwhile."""
        turns = TURNS * self.rtt if hidden_s else 0.0
        return self.emit + self.adopt + max(turns, self.away - hidden_s)


@dataclass(frozen=True, slots=True)
class Site:
    """An island, for the time of a round: seconds of a step, steps in a round, and its link."""

    step_s: float
    steps: int
    link: Link


@dataclass(frozen=True, slots=True)
class RoundTime:
    """A round.

    Attributes:
      round_s: seconds from one round to the next.
      train_s: by island, seconds of inner steps.
      exposed_s: by island, seconds of the exchange in which it does not train.
      utilisation: mean over the islands of `train_s / round_s`.
      busy_s: seconds in which the busiest link carries payloads.
    """

    round_s: float
    train_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    utilisation: float
    busy_s: float


def exchange_time(
    load: Load, sites: Mapping[str, Site], anchor: str, speeds: Speeds, shards: int, ranks: int
) -> Exchange:
    """How long the slowest island takes for one exchange."""
    far = [name for name in sites if name != anchor]
    hub = sites[anchor].link
    up = max([_seconds(load.up[n], sites[n].link.up) for n in far], default=0.0)
    down = max([_seconds(load.down, sites[n].link.down) for n in far], default=0.0)
    return Exchange(
        speeds.emit * load.elements / ranks,
        max(up, _seconds(sum(load.up[n] for n in far), hub.down)),
        (speeds.merge + speeds.merge_each * len(sites)) * load.elements / shards,
        max(down, _seconds(load.down * len(far), hub.up)),
        speeds.adopt * load.elements,
        max([sites[n].link.rtt_s for n in far], default=0.0),
    )


def round_time(
    loads: Sequence[Load],
    sites: Mapping[str, Site],
    anchor: str,
    speeds: Speeds,
    shards: int,
    ranks: int,
    free: bool = False,
    quorum: int = 0,
    grace_s: float = 0.0,
) -> RoundTime:
    """The time of a round of the main channel.

    Args:
      loads: all that is exchanged in it.
      sites: the islands.
      anchor: the one beside which the anchor lives.
      speeds: of the code.
      shards: that work side by side; ranks: of an island, likewise.
      free: islands wait for nobody.
      quorum: islands that a round waits for; 0: all.
      grace_s: seconds that it waits for others then.
    """
    train = {name: site.step_s * site.steps for name, site in sites.items()}
    exposed = {}
    for name, site in sites.items():
        alone = {anchor: sites[anchor], name: site} if free else sites
        exposed[name] = math.fsum(
            load.times * exchange_time(load, alone, anchor, speeds, shards, ranks).exposed(load.delay * site.step_s)
            for load in loads
        )
    busy = _busiest(loads, sites, anchor)
    own = {name: train[name] + exposed[name] for name in sites}
    if free:
        rounds = {name: max(seconds, busy) for name, seconds in own.items()}
    else:
        n = quorum or len(own)
        closes = sorted(own.values())[n - 1] + (grace_s if n < len(own) else 0.0)
        rounds = dict.fromkeys(own, max(min(closes, max(own.values())), busy))
    parts = [min(1.0, train[n] / rounds[n]) if rounds[n] else 1.0 for n in rounds]
    slowest = max(rounds.values()) if not free else len(rounds) / math.fsum(1 / s for s in rounds.values())
    return RoundTime(slowest, train, exposed, math.fsum(parts) / len(parts), busy)


def bandwidth_for(utilisation: float, loads: Sequence[Load], step_s: float, H: int, island: str) -> float:
    """Bytes per second each way that let an island train this part of its time, codecs and latency left out.

    Bisection, since what several fragments hide is not one formula.
    """

    def reached(rate: float) -> float:
        away = [(load, load.up[island] / rate + load.down / rate) for load in loads]
        exposed = math.fsum(load.times * max(0.0, s - load.delay * step_s) for load, s in away)
        return H * step_s / (H * step_s + exposed)

    low, high = 1.0, 1e15
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reached(middle) >= utilisation else (middle, high)
    return high


def _busiest(loads: Sequence[Load], sites: Mapping[str, Site], anchor: str) -> float:
    """Seconds of a round in which the busiest direction of a link is in use; rounds cannot follow faster."""
    far = [name for name in sites if name != anchor]
    hub = sites[anchor].link
    up = {n: math.fsum(load.times * load.up[n] for load in loads) for n in far}
    down = math.fsum(load.times * load.down for load in loads)
    own = [max(_seconds(up[n], sites[n].link.up), _seconds(down, sites[n].link.down)) for n in far]
    shared = [_seconds(math.fsum(up.values()), hub.down), _seconds(down * len(far), hub.up)]
    return max([*own, *shared], default=0.0)


def _seconds(nbytes: float, rate: float) -> float:
    return nbytes / rate if rate else 0.0
