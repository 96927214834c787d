"""What the run loop asks of the world: the ports, and the small records that travel through them.

An adapter implements a port: `cluster/` with Ray actors, `simulate/` and the tests with coroutines on a virtual
clock.  Tensors never pass here; a `Piece` names a payload by a handle that only its adapter can open.  Time is the
event loop's own (`loop.time()`), so a virtual loop makes every wait virtual.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ray_diloco.outer.layout import Ranges
from ray_diloco.outer.schedule import Due
from ray_diloco.rounds.timing import Timing


class IslandLost(Exception):
    """An island can no longer be used; its supervisor replaces it.  The text says how it was noticed.

    Attributes:
      how: died, frozen (alive and silent), stalled (it answers and makes no step), or failed.
      silent_s: seconds from its last sign of life, or its last step, to the discovery; 0 where nobody measured.
      stacks: where its ranks stood, in words, if it answers and did not do what it was to do in time.
    """

    def __init__(self, text: str, how: str = "failed", silent_s: float = 0.0, stacks: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.how, self.silent_s, self.stacks = how, silent_s, tuple(stacks)


class ContributionRefused(Exception):
    """A contribution cannot be merged; the round goes on without it.

    `number` is that of the error (RD-4xx); 0: it is no fault of its island.
    """

    def __init__(self, island: str, reason: str, number: int = 0) -> None:
        super().__init__(island, reason, number)
        self.island, self.reason, self.number = island, reason, number


class TooFew(Exception):
    """There are not enough contributions for the merge rule; the round is void.  The text says how many it needs."""


class Base(NamedTuple):
    """Where an island stands with a fragment: the version of its base, steps and tokens since it was adopted."""

    version: int
    steps: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks handed to an island: ranges of virtual block indices of one source's ledger."""

    number: int
    source: str
    blocks: Ranges


@dataclass(frozen=True, slots=True)
class Work:
    """One segment of inner training: `steps` optimiser steps from the run's global step `start_step`.

    `seconds` above 0 ends it earlier, after that time and at least one step.  `emits` says what is emitted behind it,
    fragment, base version and round: over a long way it pays to ask for that in time.  With `bases`, by fragment, the
    island keeps progress points, which belong to this work from there, and after the blocks `before` it that no
    contribution has had yet; `done` steps were taken up from such a point.
    """

    segment: int
    start_step: int
    steps: int
    lease: Lease
    seconds: float = 0.0
    emits: tuple[tuple[int, int, int], ...] = ()
    bases: Mapping[int, Base] | None = None
    before: Ranges = ()
    done: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a `Work`, steps that were taken up included.

    `loss` is in nats per token, mean over the segment; `seconds` is pure training time; `adopt_s` went by before it,
    where the island had still to adopt what it was given last, `send_s` behind it, where what it emits was encoded at
    once.  `trouble` is what a person should know of it.
    """

    steps: int
    tokens: int
    loss: float
    seconds: float
    adopt_s: float = 0.0
    send_s: float = 0.0
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Recovery:
    """How many steps of a `Work` an island has taken up; if none, why not (empty: there is no point at all)."""

    steps: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """One payload: the part of a fragment that anchor shard `shard` keeps, or a rank's part of it."""

    shard: int
    nbytes: int
    handle: Any


@dataclass(frozen=True, slots=True)
class Emission:
    """An encoded pseudo-gradient of one fragment.  `norm` is its L2 norm before encoding."""

    pieces: tuple[Piece, ...]
    norm: float
    finite: bool

    @property
    def nbytes(self) -> int:
        """Bytes that travel, headers included."""
        return sum(p.nbytes for p in self.pieces)


@dataclass(frozen=True, slots=True)
class Offer:
    """A contribution: an emission with what a round needs to know of its sender.

    Attributes:
      round: the round that it was emitted for; a late one may be merged in another.
      base_version: version of the anchor that it was measured from.
      steps, tokens: what was trained since that was adopted.
      loss: nats per token.
      train_s: seconds that the training took.
      emitted_at: when it was emitted, by the loop's clock.
      region: where its island is.
    """

    island: str
    incarnation: int
    fragment: int
    round: int
    base_version: int
    steps: int
    tokens: int
    loss: float
    emission: Emission
    train_s: float = 0.0
    emitted_at: float = 0.0
    region: str = ""


@dataclass(frozen=True, slots=True)
class Update:
    """An anchor of one fragment at one version, encoded for the islands.

    `round` is that which made it, 0 where nobody knows; rules of adoption and random fragments depend on it.
    """

    fragment: int
    version: int
    pieces: tuple[Piece, ...]
    round: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that each island receives, headers included."""
        return sum(p.nbytes for p in self.pieces)


# The anchor that all islands share; where every island has its own, anchors are named after islands.
SHARED = ""


@dataclass(frozen=True, slots=True)
class Movement:
    """What moves one anchor in a round: contributions with their factors, and the anchors that it is pulled to.

    `contributions` empty: the anchor stays, and only its version moves on with the others'.
    """

    anchor: str
    contributions: tuple[tuple[Offer, float], ...]
    neighbours: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One outer step of one fragment, to be prepared: how each anchor moves.

    Attributes:
      key: names it; preparing the same key again gives the same answer.
      round: the round that it concludes.
      version: version that the anchors have before it.
      movements: one for each anchor.
    """

    key: str
    fragment: int
    round: int
    version: int
    movements: tuple[Movement, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A merged and stepped fragment that waits for its commit.

    Attributes:
      updates: by anchor.
      anchor_norm, update_norm: L2, of the anchor and of its movement; the mean over anchors if there are several.
    """

    key: str
    updates: Mapping[str, Update]
    anchor_norm: float
    update_norm: float

    @property
    def version(self) -> int:
        """Version that all anchors of the fragment have after the commit."""
        return next(iter(self.updates.values())).version

    def update_of(self, island: str) -> Update:
        """What an island adopts."""
        return self.updates[SHARED] if SHARED in self.updates else self.updates[island]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a round ended: committed, or void (`prepared` None: anchor, version and ledger unchanged).

    `merged` are the islands whose contributions are in it.
    """

    fragment: int
    round: int
    prepared: Prepared | None
    merged: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything but tensors that a commit makes durable; `sent` are contributions with their factors, by fragment,
    that the next round needs: their payloads are to be kept too.
    """

    round: int
    step: int
    versions: Mapping[int, int]
    ledgers: Mapping[str, Any]
    counters: Mapping[str, Any]
    members: Sequence[str] = ()
    sent: Mapping[int, Sequence[tuple[Offer, float]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BlockLoss:
    """Sum of nats and number of predicted tokens of one held-out block."""

    block: int
    nats: float
    tokens: int


class Island(Protocol):
    """A group of ranks that trains.  Any method may raise `IslandLost`."""

    name: str
    incarnation: int
    region: str
    # By fragment, where parameters and bases are those of the commit that the run goes on from.
    restored: Mapping[int, Base] | None

    async def train(self, work: Work) -> Report:
        """Trains; returns after the last step."""

    async def recover(self, work: Work, anchored: bool) -> Recovery:
        """Takes up the newest progress point of a work, with parameters, bases and inner state, if one is beyond
        `work.done`.  `anchored`: only if it began from the very bases that the island has now, which versions do not
        say of a run that was continued.
        """

    async def emit(self, fragment: int, base_version: int, round_: int) -> Emission:
        """Encodes `B − θ` of a fragment."""

    async def adopt(self, updates: Sequence[Update], merged: Mapping[int, bool]) -> None:
        """Sets θ and B.  It may return before that is done: what is asked next comes after it, and fails if it failed.

        `merged` says of fragments that were offered whether a commit has acknowledged the offer: what an error feedback
        left out of it is only forgotten then.
        """

    async def join(self, updates: Sequence[Update]) -> None:
        """Sets θ and B to anchors, whatever the rule: for an island that was not under way."""

    async def found(self) -> Sequence[Piece]:
        """The parameters as initialised, to become version 0 of a run that has no commit."""

    async def evaluate(self, blocks: Sequence[int], at: Sequence[Update] | None) -> Sequence[BlockLoss]:
        """Losses of held-out blocks under anchors; None: under the present parameters."""

    async def reset(self) -> None:
        """Forgets the inner state: moments begin anew, and the learning rate is warmed up again for a while."""

    async def save(self, round_: int, bases: Mapping[int, Base] | None) -> Awaitable[Sequence[Any]]:
        """Copies the inner state (with `bases`, by fragment, parameters and bases too) and writes it in the background;
        the awaitable yields file entries.
        """


class Fleet(Protocol):
    """Starts and ends islands."""

    async def launch(self, name: str, incarnation: int) -> Island:
        """Starts an island.

        Raises `IslandLost` if it fails, `InfeasibleError` if there is no room for it now, and another `DilocoError` if
        trying again is pointless.
        """

    async def room(self, name: str) -> None:
        """Waits until there is room for an island, and keeps it for its launch."""

    async def retire(self, island: Island) -> None:
        """Ends what is left of an island; never raises for an island that is gone already."""


class Anchor(Protocol):
    """The keepers of anchor and outer state, seen as one."""

    async def found(self, pieces: Sequence[Piece]) -> None:
        """Sets version 0 of every fragment.  Refused when there already is an anchor."""

    async def prepare(self, step: Step) -> Prepared:
        """Merges and steps into spare buffers; committed state stays as it is.

        Raises `ContributionRefused` for a contribution that the round can do without, `TooFew` if it cannot be merged.
        """

    async def commit(self, key: str) -> None:
        """Makes a prepared round the committed state, on all keepers."""

    async def abort(self, key: str) -> None:
        """Forgets a prepared round."""

    async def current(self, island: str) -> Sequence[Update]:
        """The committed anchor of every fragment, for an island that joins or came late."""

    async def passed(self, island: str, fragment: int, version: int) -> Update | None:
        """An anchor that was replaced before the commit that the run goes on from; None if it is not kept."""

    async def published(self) -> Sequence[Update]:
        """What is evaluated and exported: the mean of the anchors, or of outer iterates."""

    async def recalled(self, offer: Offer) -> Offer:
        """A contribution to the commit that the run goes on from, with the payloads that this has kept (`sent`)."""


class Store(Protocol):
    """Durable commits, written in the background."""

    async def save(
        self, snapshot: Snapshot, inner: Mapping[str, Awaitable[Sequence[Any]]], told: Awaitable[None]
    ) -> bool | None:
        """Writes anchor, outer state and manifest; returns when the commit is durable.  Never raises for a fault of
        the storage: that is an event, False is returned, and the previous commit stays the newest.

        Keepers are asked for what they hold before it first waits: nothing else is committed until then.  The manifest
        waits for `told`: whoever goes on from a commit finds metrics and trace of its round.
        """


class Journal(Protocol):
    """Where transitions, metrics and traces go."""

    def event(self, kind: str, **fields: Any) -> None:
        """One transition of the run."""

    def island_round(self, due: Due, island: str, timing: Timing) -> None:
        """One island's part in one round."""

    def committed(self, due: Due, prepared: Prepared, seconds: float, offers: Sequence[tuple[Offer, float]]) -> None:
        """A round of a fragment was committed."""

    def evaluated(self, round_: int, losses: Sequence[BlockLoss]) -> None:
        """The anchor was evaluated; losses stand in block order."""

    async def trace(self, due: Due | None, prepared: Prepared | None, offers: Sequence[tuple[Offer, float]]) -> None:
        """Keeps decoded contributions and anchor, if asked for (None: the founding anchor)."""
