"""The islands of a run as the loop sees them: one row per slot, with its state and what it has in hand.

`TRANSITIONS` is all that an island can go through, and `Member.to` refuses anything else.  A transition that changes
who takes part has an event.  Those of a segment (training, sending, waiting, …) have none: `round_opened` and the
metrics of the round say the same in two lines instead of six for each island and round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from ray_diloco.outer.schedule import Due
from ray_diloco.rounds.ports import Base, Lease, Update
from ray_diloco.rounds.timing import Timing

if TYPE_CHECKING:
    from ray_diloco.rounds.plans import Assignment


class State(StrEnum):
    """What an island is doing."""

    VACANT = "vacant"
    LAUNCHING = "launching"
    JOINING = "joining"
    READY = "ready"
    TRAINING = "training"
    SENDING = "sending"
    WAITING = "waiting"
    ADOPTING = "adopting"
    EVALUATING = "evaluating"
    DONE = "done"
    LOST = "lost"
    LEFT = "left"
    QUARANTINED = "quarantined"


# Whoever leaves may do so from anywhere; the next incarnation begins where the last one ended.
_GOES = {State.LOST: "island_lost", State.LEFT: "island_left", State.QUARANTINED: "island_quarantined"}
_BEGINS = {State.LAUNCHING: "island_launching"}
# From one state to the next, with the event that says so; empty: none.  `ready` islands without a segment are joiners.
TRANSITIONS: Mapping[State, Mapping[State, str]] = {
    State.VACANT: _BEGINS,
    State.LAUNCHING: {State.JOINING: "", State.VACANT: "island_unplaced", **_GOES},
    State.JOINING: {State.READY: "island_joined", **_GOES},
    State.READY: {State.TRAINING: "", State.WAITING: "", State.EVALUATING: "", State.DONE: "", **_GOES},
    State.TRAINING: {State.SENDING: "", State.WAITING: "", State.READY: "", **_GOES},
    State.SENDING: {State.WAITING: "", State.READY: "", **_GOES},
    State.WAITING: {State.ADOPTING: "", **_GOES},
    State.ADOPTING: {
        State.WAITING: "", State.SENDING: "", State.TRAINING: "", State.EVALUATING: "", State.READY: "", **_GOES
    },
    State.EVALUATING: {State.READY: "", State.DONE: "", **_GOES},
    State.DONE: {},
    State.LOST: {**_BEGINS, State.QUARANTINED: "island_quarantined"},
    State.LEFT: _BEGINS,
    State.QUARANTINED: _BEGINS,
}  # fmt: skip

# Of these there is no process any more, or none yet.
ABSENT = frozenset({State.VACANT, State.LOST, State.LEFT, State.QUARANTINED})


@dataclass
class Tally:
    """What an island has contributed to committed rounds, over all its incarnations."""

    rounds: int = 0
    steps: int = 0
    tokens: int = 0
    restarts: int = 0
    train_s: float = 0.0
    wall_s: float = 0.0


# What of a member says where it stands.
_STANDING = (
    "segment", "first", "versions", "done", "leases", "unclaimed", "late", "under_way", "restored", "inherited",
    "joined_at", "timing", "settled",
)  # fmt: skip


@dataclass
class Wreck:
    """What a lost island has left of a segment: how it stood when it began with that, and what it was given.

    `awaited`: rounds still wait for its successor.
    """

    member: Member
    assignment: Assignment
    awaited: bool = False


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
      inherited: by fragment, anchors of rounds that were under way when that commit was made, oldest first.
      joined_at: versions of all anchors when it joined.
      timing: of its segments since the last round of the whole model.
      settled: it has begun to train.
      leaving: why it gets no further segment; empty: it does.
      strayed: its inner loss has left the others'; it counts for nothing until it has adopted the anchor.
      begun: how it stood when it began with the segment that it trains, where progress points are kept.
      wreck: what the incarnation before has left, if this one may still go on with it.
    """

    name: str
    incarnation: int
    state: State = State.VACANT
    segment: int | None = None
    first: int = 0
    versions: dict[int, int] = field(default_factory=dict)
    done: dict[int, tuple[int, int]] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    unclaimed: tuple[int, int] = (0, 0)
    late: set[Due] = field(default_factory=set)
    under_way: set[Due] = field(default_factory=set)
    restored: bool = False
    inherited: dict[int, Sequence[Update]] = field(default_factory=dict)
    joined_at: dict[int, int] = field(default_factory=dict)
    timing: Timing = field(default_factory=Timing)
    settled: bool = False
    leaving: str = ""
    strayed: bool = False
    begun: Wreck | None = None
    wreck: Wreck | None = None

    @property
    def alive(self) -> bool:
        """True from its launch until it is done or gone."""
        return self.state not in ABSENT and self.state is not State.DONE

    def to(self, state: State) -> str:
        """Goes on to another state; returns the event of that transition, empty for none.

        Raises:
          ValueError: an island cannot do that.
        """
        if state is self.state:
            return ""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"island {self.name} cannot go from {self.state} to {state}")
        before, self.state = self.state, state
        return TRANSITIONS[before][state]

    def successor(self) -> Member:
        """The next incarnation of its slot, which begins where this one ended; one that never began is the next."""
        return Member(self.name, self.incarnation + (self.state is not State.VACANT), self.state, wreck=self.wreck)

    def likeness(self) -> Member:
        """A copy that stays as it is."""
        return replace(
            self,
            versions=dict(self.versions),
            done=dict(self.done),
            leases=list(self.leases),
            late=set(self.late),
            under_way=set(self.under_way),
            inherited=dict(self.inherited),
            joined_at=dict(self.joined_at),
            begun=None,
            wreck=None,
        )

    def stand_as(self, other: Member) -> None:
        """Stands where another incarnation stood."""
        stood = other.likeness()
        for name in _STANDING:
            setattr(self, name, getattr(stood, name))

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

    @property
    def awaited(self) -> bool:
        """True where the run counts on a successor to go on with the segment in which an island was lost."""
        return self.wreck is not None and self.wreck.awaited

    def trained(self, steps: int, tokens: int) -> None:
        """Adds a segment's work to every fragment's account."""
        self.unclaimed = (self.unclaimed[0] + steps, self.unclaimed[1] + tokens)
        for fragment in self.versions:
            before = self.done.get(fragment, (0, 0))
            self.done[fragment] = (before[0] + steps, before[1] + tokens)

    @property
    def bases(self) -> dict[int, Base]:
        """Where it stands, by fragment."""
        return {fragment: Base(version, *self.done.get(fragment, ())) for fragment, version in self.versions.items()}

    def take_up(self, bases: Mapping[int, Base]) -> None:
        """Stands where an earlier incarnation stood, whose parameters and bases it has."""
        self.versions = {fragment: base.version for fragment, base in bases.items()}
        self.done = {fragment: (base.steps, base.tokens) for fragment, base in bases.items()}
        self.restored = True

    def adopted(self, fragment: int, version: int) -> None:
        """Notes a new base; the fragment's account starts again."""
        self.versions[fragment] = version
        self.done[fragment] = (0, 0)
