"""The islands of a run as the loop sees them: one row per slot, with its state and what it has in hand.

    launching → joining → ready → training → sending → waiting → adopting → ready …
    any → lost → launching (next incarnation);   ready → done (nothing left to train)

`ready` islands that hold no segment yet are joiners: they are admitted when the next segment is planned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ray_diloco.outer.schedule import Due
from ray_diloco.rounds.ports import Lease, Timing, Update


class State(StrEnum):
    """What an island is doing."""

    LAUNCHING = "launching"
    JOINING = "joining"
    READY = "ready"
    TRAINING = "training"
    SENDING = "sending"
    WAITING = "waiting"
    ADOPTING = "adopting"
    EVALUATING = "evaluating"
    LOST = "lost"
    DONE = "done"


@dataclass
class Tally:
    """What an island has contributed to committed rounds, over all its incarnations."""

    rounds: int = 0
    steps: int = 0
    tokens: int = 0
    restarts: int = 0
    train_s: float = 0.0
    wall_s: float = 0.0


@dataclass
class Member:
    """One incarnation of one island.

    Attributes:
      segment: the last segment that it was given; None for a joiner.
      first: the first segment that was planned for it.
      versions: per fragment, the anchor version that its base is a copy of.
      done: per fragment, steps and tokens since that adoption.
      leases: trained or under way, not yet part of an offer; `unclaimed`: steps and tokens trained on them.
      late: rounds that had closed when its offer came.
      under_way: rounds that it has offered to and not yet adopted.
      restored: its parameters and bases are those of the commit that the run went on from.
      inherited: by fragment, the anchor of a round that was under way when that commit was made.
      joined_at: versions of all anchors when it joined.
      timing: of its segments since the last round of the whole model.
      settled: it has begun to train.
    """

    name: str
    incarnation: int
    state: State = State.LAUNCHING
    segment: int | None = None
    first: int = 0
    versions: dict[int, int] = field(default_factory=dict)
    done: dict[int, tuple[int, int]] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    unclaimed: tuple[int, int] = (0, 0)
    late: set[Due] = field(default_factory=set)
    under_way: set[Due] = field(default_factory=set)
    restored: bool = False
    inherited: dict[int, Update] = field(default_factory=dict)
    joined_at: dict[int, int] = field(default_factory=dict)
    timing: Timing = field(default_factory=Timing)
    settled: bool = False

    @property
    def alive(self) -> bool:
        """False once lost or done."""
        return self.state not in (State.LOST, State.DONE)

    @property
    def sailing(self) -> bool:
        """True for a living island that was given a segment."""
        return self.alive and self.segment is not None

    @property
    def joiner(self) -> bool:
        """True for an island that waits to be admitted."""
        return self.state is State.READY and self.segment is None

    def joined_late(self, committed: dict[int, int]) -> bool:
        """True before the first work of an island if anchors have moved on since it joined."""
        return not self.settled and self.joined_at != committed

    def trained(self, steps: int, tokens: int) -> None:
        """Adds a segment's work to every fragment's account."""
        self.unclaimed = (self.unclaimed[0] + steps, self.unclaimed[1] + tokens)
        for fragment in self.versions:
            before = self.done.get(fragment, (0, 0))
            self.done[fragment] = (before[0] + steps, before[1] + tokens)

    def adopted(self, fragment: int, version: int) -> None:
        """Notes a new base; the fragment's account starts again."""
        self.versions[fragment] = version
        self.done[fragment] = (0, 0)
