"""What must always hold, checked while a simulated run runs (../shared/design.md, "What must always hold").

The auditor keeps a copy of the run of its own: it repeats every outer step in a few lines of numpy, adds up blocks and
tokens as the contributions themselves say, and compares with what the run says of itself, at every movement, every
commit and the end.  It trusts no ledger, no counter and no version of the loop.  What it finds is kept in `blamed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ray_diloco.outer.layout import Range, Ranges, normalise, total
from ray_diloco.outer.momentum import HeavyBall, Nesterov, Sgd
from ray_diloco.outer.recipe import Recipe
from ray_diloco.rounds.ports import SHARED, Movement, Snapshot, Step
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rules import Rules
from ray_diloco.simulate.anchor import Kept, Table
from ray_diloco.simulate.payload import Contribution, Published
from ray_diloco.simulate.setup import WIDTH, Setup

Key = tuple[int, str]
Replay = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def replay_of(recipe: Recipe) -> Replay | None:
    """`(A, u, Δ) → (A, u)` written down again, for recipes that are a weighted sum and one of three optimisers."""
    plain = recipe.merge == "mean" and recipe.direction is None and not recipe.reanchor and recipe.recode is None
    if not plain or recipe.consensus or recipe.rate.kind != "constant" or recipe.rate.warmup_rounds:
        return None
    optimizer = recipe.optimizer
    if isinstance(optimizer, Nesterov):
        eta, mu = optimizer.lr, optimizer.momentum
        return lambda A, u, d: (A - eta * (d + mu * (mu * u + d)), mu * u + d)
    if isinstance(optimizer, HeavyBall):
        eta, mu = optimizer.lr, optimizer.momentum
        return lambda A, u, d: (A - eta * (mu * u + d), mu * u + d)
    if isinstance(optimizer, Sgd):
        eta = optimizer.lr
        return lambda A, u, d: (A - eta * d, u)
    return None


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two anchors are the same but for the order of additions."""
    return float(np.abs(a - b).max()) <= 1e-12 * (1.0 + float(np.abs(b).max()))


@dataclass
class Copy:
    """A run as the auditor has it."""

    anchors: dict[Key, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    sent: dict[Key, dict[int, np.ndarray]] = field(default_factory=dict)
    blocks: Ranges = ()
    tokens: int = 0
    # Contributions that are credited; those of the last round of a fragment may be merged again (Eager).
    credited: set[int] = field(default_factory=set)
    alive: list[Contribution] = field(default_factory=list)

    def copy(self) -> Copy:
        """One that goes on by itself."""
        return Copy(
            dict(self.anchors),
            dict(self.versions),
            {key: dict(by_version) for key, by_version in self.sent.items()},
            self.blocks,
            self.tokens,
            set(self.credited),
            list(self.alive),
        )


class Auditor:
    """Looks on at one run."""

    def __init__(self, setup: Setup) -> None:
        self.blamed: list[str] = []
        self._setup = setup
        self._replays = [replay_of(recipe) for recipe in setup.recipes]
        self._now = self._new()
        self._durable: dict[int, Copy] = {}
        self._newest = 0
        self._ahead: list[Published] = []
        self.moves = 0

    def _new(self) -> Copy:
        return Copy(versions=dict.fromkeys(range(self._setup.fragments), 0))

    def blame(self, what: str) -> None:
        """Notes that something does not hold."""
        self.blamed.append(what)

    def begin(self, position: Position, resumed: bool) -> None:
        """A life of the driver begins."""
        self._ahead = []
        if not resumed:
            self._now = self._new()
            return
        if position.round not in self._durable:
            self.blame(f"the run went on from round {position.round}, which was never written")
            return
        self._now = self._durable[position.round].copy()
        self._compare(position.versions, position.tokens, position.ledgers["blocks"].credited, "resumed")

    def found(self, table: Table) -> None:
        """Version 0 was made."""
        for key, kept in table.items():
            self._now.anchors[key] = (kept.anchor, np.zeros(WIDTH))
            self._now.sent[key] = {0: kept.sent}

    def moved(self, step: Step, moved: dict[str, Kept]) -> None:
        """All anchors of a fragment have moved: repeats it, and books the contributions."""
        now = self._now
        self.moves += 1
        if now.versions.get(step.fragment) != step.version:
            self.blame(f"fragment {step.fragment} moved from version {step.version}, at {now.versions}")
        now.versions[step.fragment] = step.version + 1
        for movement in step.movements:
            self._repeat(step, movement, moved[movement.anchor])
            for offer, _ in movement.contributions:
                message = offer.emission.pieces[0].handle
                if id(message) not in now.credited:
                    self._book(message)

    def _repeat(self, step: Step, movement: Movement, kept: Kept) -> None:
        key, now = (step.fragment, movement.anchor), self._now
        if kept.version != step.version + 1:
            self.blame(f"anchor {key} went from version {step.version} to {kept.version}")
        replay = self._replays[step.fragment]
        before = now.anchors[key]
        if not movement.contributions:
            if not np.array_equal(kept.anchor, before[0]):
                self.blame(f"anchor {key} moved without a contribution")
        elif replay is None:
            now.anchors[key] = (kept.anchor, before[1])
        else:
            delta = np.zeros(WIDTH)
            for offer, factor in movement.contributions:
                delta = delta + factor * offer.emission.pieces[0].handle.sent
            after = replay(*before, delta)
            if not _equal(after[0], kept.anchor):
                self.blame(f"anchor {key} version {kept.version} is {kept.anchor}, and the replay gives {after[0]}")
            now.anchors[key] = (kept.anchor, after[1])
        now.sent[key][kept.version] = kept.sent
        if self._ahead:
            self._settle_ahead(key, kept)

    def _book(self, message: Contribution) -> None:
        """Credits a contribution's blocks, and looks where it was measured from."""
        now = self._now
        now.credited.add(id(message))
        now.alive.append(message)
        now.tokens += message.tokens
        blocks = [r for ranges in message.blocks for r in ranges]
        before = total(now.blocks)
        now.blocks = normalise((*now.blocks, *blocks))
        if total(now.blocks) != before + sum(r.numel for r in blocks):
            self.blame(f"blocks {blocks} of {message.sender} were credited before")
        name = SHARED if (message.fragment, SHARED) in now.sent else message.sender
        base = now.sent[message.fragment, name].get(message.base_version)
        if base is None:
            self.blame(f"{message.sender} measured from version {message.base_version}, which was never committed")
        elif not self._setup.keeps_own[message.fragment] and not np.array_equal(base, message.base):
            self.blame(f"{message.sender} measured from {message.base}, version {message.base_version} is {base}")

    def adopted(self, published: Published) -> None:
        """An island takes an anchor over: one that is committed, or whose keepers are being told so at this moment."""
        versions = self._now.sent.get((published.fragment, published.anchor), {})
        if published.version in versions:
            self._same(published, versions[published.version])
        else:
            self._ahead.append(published)

    def _same(self, published: Published, known: np.ndarray) -> None:
        if not (known is published.values or np.array_equal(known, published.values)):
            self.blame(
                f"an island adopted {published.values} as version {published.version} of {published.fragment}: "
                f"{known} is committed"
            )

    def _settle_ahead(self, key: Key, kept: Kept) -> None:
        for published in [one for one in self._ahead if (one.fragment, one.anchor) == key]:
            if published.version == kept.version:
                self._same(published, kept.sent)
                self._ahead.remove(published)

    def _none_ahead(self) -> None:
        for published in self._ahead:
            self.blame(f"an island adopted version {published.version} of {published.fragment}, which never came to be")

    def saving(self, snapshot: Snapshot, table: Table) -> None:
        """A commit begins to be written: it has to hold what was committed up to here."""
        self._none_ahead()
        credited = tuple(Range(*pair) for pair in snapshot.ledgers["blocks"]["credited"])
        self._compare(snapshot.versions, snapshot.counters["tokens"], credited, f"the commit of {snapshot.round}")
        for (fragment, name), kept in table.items():
            if kept.version != snapshot.versions[fragment]:
                self.blame(f"the commit of {snapshot.round} holds version {kept.version} of {fragment} {name}")
            if not np.array_equal(kept.anchor, self._now.anchors[fragment, name][0]):
                self.blame(f"the commit of {snapshot.round} holds another anchor of {fragment} {name} than committed")
        self._durable[snapshot.round] = self._now.copy()

    def end(self, status: str, position: Position, rules: Rules, cut_short: bool = False) -> None:
        """A life ended by itself; one that somebody had asked to stop leaves islands where they are."""
        self._none_ahead()
        ledger = position.ledgers["blocks"]
        self._compare(position.versions, position.tokens, ledger.credited, f"the {status} run")
        if not ledger.balanced():
            self.blame(f"the ledger is not balanced: {ledger.issued} issued")
        if status == "finished" and position.round != rules.schedule.rounds:
            self.blame(f"the run finished in round {position.round} of {rules.schedule.rounds}")
        if status == "finished" and ledger.in_flight and not cut_short:
            self.blame(f"the run finished with {ledger.in_flight} blocks in flight")

    def _compare(self, versions: Mapping[int, int], tokens: int, credited: Ranges, what: str) -> None:
        now = self._now
        if dict(versions) != now.versions:
            self.blame(f"{what}: versions {dict(versions)}, the auditor has {now.versions}")
        if tokens != now.tokens:
            self.blame(f"{what}: {tokens} tokens, the contributions have {now.tokens}")
        if credited != now.blocks:
            self.blame(f"{what}: credits {credited}, the contributions have {now.blocks}")
