"""What the run loop must know of a configuration: plain values and small functions, no config keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ray_diloco.outer.schedule import Schedule
from ray_diloco.rounds.ports import Offer
from ray_diloco.rounds.rendezvous import Quorum
from ray_diloco.rounds.topology import Topology, star

# (offers in island order, age of each in versions, the loop's time) → a factor for each; 0 leaves an offer out.
Weigher = Callable[[Sequence[Offer], Sequence[int], float], Sequence[float]]


@dataclass(frozen=True)
class IslandPlan:
    """What an island trains on: a source's ledger, and how many blocks one of its optimiser steps takes.

    `region` is where it has to be; empty: anywhere.
    """

    source: str
    blocks_per_step: int
    region: str = ""


@dataclass(frozen=True)
class Guard:
    """What makes a contribution bad though it can be read; see `rounds.vetting`.

    Attributes:
      norm: times the median norm of recent contributions above which one is refused; 0: any norm is taken.
      loss: times the median loss, of its own last segments and of the others', above which an island has strayed;
        0: none does.
      strikes: bad contributions within `rounds` rounds after which an island is put into quarantine; 0: never.
      rounds: how long it stays there.
    """

    norm: float = 0.0
    loss: float = 0.0
    strikes: int = 0
    rounds: int = 10


@dataclass(frozen=True)
class Rules:
    """The rules of a run.

    Attributes:
      islands: every island that the run can have, in the order in which more of them come.
      initial: those that it begins with; empty: all of them.
      grows: the others come by themselves as soon as there is room, up to `most` in all; 0: no limit.
      fixed: neither more nor fewer may be asked for.
      joins: how many may join at a time while others are under way; 0: any number.
      drain_s: seconds that an island has to finish its segment when it is asked to leave.
      away_s: seconds that a slot stays empty whose island was told that its machine goes.
      guard: which contributions are bad.
      weigh: what each offer of a round is multiplied by.
      topology: who meets whom; `remembers`: it needs the contributions of the round before.
      max_age: versions after which a contribution counts no more; 0: no such limit.
      free: islands train at their own pace, and every contribution is a round of its own.
      by_speed: a free island takes steps in proportion to its speed, so that all finish together (DyLU, 2401.09135).
      round_s: seconds that every island trains for a round; 0: until its steps are done.
      exact: after an adoption the parameters of an island are the anchor that is published.
      min_islands: below this many living islands no new segment begins.
      checkpoint_every / evaluate_every: rounds between them (evaluate: 0 never).
      inner_every: rounds between commits that hold inner states.
      points: islands keep progress points within a segment; `point_wait_s`: seconds that rounds wait for the successor
        of one that was lost there.
      crowded: so much is kept until the next durable commit that one is wanted now.
      max_lag: rounds that the newest durable commit may be behind before the run waits for it; 0: any number.
      retry_s: seconds between two attempts at a commit for which the run waits.
      evaluate_blocks / final_blocks: held-out blocks of an evaluation under way / at the end.
      evaluate_chunk: blocks per call.
      max_losses: losses of one island, or void rounds, in a row without a commit before the run fails.
    """

    islands: Mapping[str, IslandPlan]
    schedule: Schedule
    quorum: Quorum
    weigh: Weigher
    topology: Topology = star
    remembers: bool = False
    max_age: int = 0
    free: bool = False
    by_speed: bool = False
    round_s: float = 0.0
    exact: bool = True
    min_islands: int = 1
    checkpoint_every: int = 1
    evaluate_every: int = 0
    evaluate_blocks: Sequence[int] = ()
    final_blocks: Sequence[int] = ()
    evaluate_chunk: int = 8
    max_losses: int = 6
    initial: tuple[str, ...] = ()
    grows: bool = False
    most: int = 0
    fixed: bool = False
    joins: int = 0
    drain_s: float = 60.0
    away_s: float = 60.0
    guard: Guard = field(default_factory=Guard)
    inner_every: int = 1
    points: bool = False
    point_wait_s: float = 0.0
    max_lag: int = 0
    crowded: Callable[[], bool] = lambda: False
    retry_s: float = 10.0

    def __post_init__(self) -> None:
        """Fills in who begins."""
        if not self.initial:
            object.__setattr__(self, "initial", tuple(self.islands))
        if not self.most:
            object.__setattr__(self, "most", len(self.islands))

    @property
    def last_fragment(self) -> int:
        """The fragment of the main channel that is emitted last in a round."""
        return self.schedule.main - 1

    @property
    def kept_rounds(self) -> int:
        """For how many rounds of a fragment islands may still come and adopt that very round."""
        return self.most if self.free else 1 + -(-self.schedule.delay // self.schedule.H)

    def durable(self, round_: int) -> bool:
        """True if a round is to be made durable although nobody asked for a stop."""
        return round_ % self.checkpoint_every == 0 or round_ == self.schedule.rounds

    def keeps_inner(self, round_: int) -> bool:
        """True if a commit of this round holds inner states."""
        return round_ % self.inner_every == 0 or round_ == self.schedule.rounds

    def evaluated(self, round_: int) -> bool:
        """True if the anchor is evaluated after a round; neither version 0 nor the last, which is evaluated anyway."""
        return self.evaluate_every > 0 and round_ % self.evaluate_every == 0 and 0 < round_ < self.schedule.rounds
