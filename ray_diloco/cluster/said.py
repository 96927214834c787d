"""What a rank says of itself and of what it does: small records that travel to the driver."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ray_diloco.cluster.traffic import Counted
from ray_diloco.outer.layout import Layout
from ray_diloco.rounds.ports import Report


@dataclass(frozen=True)
class Description:
    """What a rank is, once it is built; `calls` are those that its island's ranks have to have done together."""

    layout: Layout
    node_id: str
    calls: int = 0


@dataclass(frozen=True)
class Progress:
    """Where a rank is, for people and for the watch over silent ranks.  `step` counts within the segment."""

    beats: int
    step: int
    steps: int
    loss: float
    tokens_per_s: float
    # Its machine is about to go.
    leaving: bool = False
    # What the network interface of its machine has counted.
    counted: Counted | None = None
    # It encodes what it sends, and makes no steps.
    sending: bool = False


@dataclass(frozen=True)
class EmitStats:
    """What a rank says of its emission; `nbytes` per payload, 0 where it has nothing of that shard."""

    nbytes: tuple[int, ...]
    squared_norm: float = 0.0
    finite: bool = True


@dataclass(frozen=True)
class Trained:
    """What a rank says of a segment, and of what it emitted behind it."""

    report: Report
    emitted: tuple[EmitStats, ...] = ()


# Statistics, then one payload per anchor shard.
Sent = tuple[EmitStats, *tuple[np.ndarray, ...]]
