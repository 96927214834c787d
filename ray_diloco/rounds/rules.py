"""What the run loop must know of a configuration: plain values, no config keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ray_diloco.outer.schedule import Schedule
from ray_diloco.rounds.ports import Offer
from ray_diloco.rounds.rendezvous import Quorum

Weigher = Callable[[Sequence[Offer]], Mapping[str, float]]


@dataclass(frozen=True)
class IslandPlan:
    """What an island trains on: a source's ledger, and how many blocks one of its optimiser steps takes."""

    source: str
    blocks_per_step: int


@dataclass(frozen=True)
class Rules:
    """The rules of a run.

    Attributes:
      weigh: offers → normalised weights by island; an island that weighs nothing is left out.
      min_islands: below this many living islands no new segment begins.
      checkpoint_every / evaluate_every: rounds between them (evaluate: 0 never).
      evaluate_blocks / final_blocks: held-out blocks of an evaluation under way / at the end.
      evaluate_chunk: blocks per call.
      max_losses: islands lost, or rounds voided, in a row without a commit before the run fails.
    """

    islands: Mapping[str, IslandPlan]
    schedule: Schedule
    quorum: Quorum
    weigh: Weigher
    min_islands: int = 1
    checkpoint_every: int = 1
    evaluate_every: int = 0
    evaluate_blocks: Sequence[int] = ()
    final_blocks: Sequence[int] = ()
    evaluate_chunk: int = 8
    max_losses: int = 6

    @property
    def last_fragment(self) -> int:
        """The fragment whose round, once adopted, ends the round of the whole model."""
        return len(self.schedule.offsets) - 1

    def durable(self, round_: int) -> bool:
        """True if a round is to be made durable although nobody asked for a stop."""
        return round_ % self.checkpoint_every == 0 or round_ == self.schedule.rounds

    def evaluated(self, round_: int) -> bool:
        """True if the anchor is evaluated after a round; the last round has its own, final evaluation."""
        return self.evaluate_every > 0 and round_ % self.evaluate_every == 0 and round_ < self.schedule.rounds
