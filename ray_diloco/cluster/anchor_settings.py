"""What the anchor of a run is kept from."""

from __future__ import annotations

from dataclasses import dataclass

from ray_diloco.blocks import Channel
from ray_diloco.cluster.misfortune import NO_FAULTS, Misfortunes
from ray_diloco.cluster.whereabouts import BY_LABEL, Whereabouts


@dataclass(frozen=True)
class AnchorSettings:
    """What an anchor is kept from.

    Attributes:
      channels: the main one first.
      anchors: names of the anchors of the main channel.
      shards: how many keep a shared anchor; 0: by the size of the model.
      islands: number of islands.
      relayed: islands of a region meet first.
      whole_vectors: name of a merge rule that needs whole vectors; empty: it does not.
      deadline_s: seconds that a call may take.
      alive_s: seconds that a living shard may be silent.
      losses: shards that may be lost in a row without a durable commit in between.
      faults: what goes wrong on purpose, with shards and the driver.
      where: how nodes say in which region they are.
    """

    channels: tuple[Channel, ...]
    anchors: tuple[str, ...]
    shards: int
    islands: int
    relayed: bool
    whole_vectors: str
    deadline_s: float
    alive_s: float = 60.0
    losses: int = 6
    faults: Misfortunes = NO_FAULTS
    where: Whereabouts = BY_LABEL
