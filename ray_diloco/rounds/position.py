"""Where a run stands, and the books that say so: versions, ledgers, claims and tallies.

A commit is one synchronous call of `credit`: it happens whole or not at all.  Everything here is what a manifest
keeps; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from ray_diloco.outer.pace import Leg, Note
from ray_diloco.outer.schedule import Due
from ray_diloco.rounds.ledger import Ledger
from ray_diloco.rounds.members import Tally
from ray_diloco.rounds.ports import Emission, Lease, Offer, Piece, Prepared, Snapshot


@dataclass(frozen=True)
class Claim:
    """What a commit credits for one offer."""

    leases: tuple[Lease, ...]
    steps: int
    tokens: int


@dataclass
class Position:
    """The state of a run outside its tensors.

    Attributes:
      round: concluded rounds of the whole model (committed or void); step: the global inner step of their emission.
      origin: H, and the round and step from which on it has held.
      versions: how often each fragment's anchor has moved.
      founded: False until version 0 of the anchor exists.
      claims: per offer, what it will be credited with.
      norms: by fragment, of the last contributions that were merged, oldest first.
      legs: rounds as they were laid out, where that is decided as the run goes; oldest first, the last few.
      notes: what committed rounds came to, for those decisions: the first one and the last few.
      made: by fragment, the newest rounds that moved its anchor, each with the version that it made.
      before: by fragment, the contributions of its newest round with their factors, where the next one needs them.
    """

    round: int = 0
    step: int = 0
    origin: tuple[int, int, int] = (0, 0, 0)
    versions: dict[int, int] = field(default_factory=dict)
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    tallies: dict[str, Tally] = field(default_factory=dict)
    tokens: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    founded: bool = False
    claims: dict[tuple[Due, str, int], Claim] = field(default_factory=dict)
    norms: dict[int, list[float]] = field(default_factory=dict)
    legs: list[Leg] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    made: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    before: dict[int, Sequence[tuple[Offer, float]]] = field(default_factory=dict)

    def hold(self, H: int) -> tuple[int, int]:
        """Notes with which `H` the run goes on; returns the round and step from which on it has held."""
        if self.origin[0] != H:
            self.origin = (H, self.round, self.step)
        return self.origin[1], self.origin[2]

    def closing(self, round_: int, usual: int) -> int:
        """The fragment that is emitted last in a round: the `usual` one, where the order is not laid out anew."""
        return next((leg.closing for leg in self.legs if leg.round == round_), usual)

    def note(self, fragment: int, round_: int, prepared: Prepared, offers: Sequence[Offer], kept: int) -> None:
        """Keeps what a committed round came to; of each fragment the last `kept`."""
        tokens, steps = sum(offer.tokens for offer in offers), sum(offer.steps for offer in offers) / len(offers)
        loss = sum(offer.loss * offer.tokens for offer in offers) / tokens
        self.notes.append(Note(fragment, round_, loss, prepared.update_norm / steps))
        mine = [note for note in self.notes[1:] if note.fragment == fragment]
        for old in mine[:-kept]:
            self.notes.remove(old)

    def tally(self, island: str) -> Tally:
        """The tally of an island, from its first mention on."""
        return self.tallies.setdefault(island, Tally())

    def ledger(self, source: str) -> Ledger:
        """The ledger of a source, from its first use on."""
        if source not in self.ledgers:
            self.ledgers[source] = Ledger(source)
        return self.ledgers[source]

    def moved(self, fragment: int, round_: int, version: int, kept: int) -> None:
        """Notes which round made a version; of each fragment the last `kept`."""
        self.made[fragment] = [*self.made.get(fragment, ()), (round_, version)][-kept:]

    def credit(self, fragment: int, prepared: Prepared, offers: Sequence[Offer]) -> None:
        """Books a commit: the fragment's new version, what was trained for it, and the bytes of both ways."""
        for offer in offers:
            claim = self.claims.pop(_origin(offer))
            for lease in claim.leases:
                self.ledgers[lease.source].credit(lease)
            tally = self.tally(offer.island)
            tally.rounds += 1
            if claim.leases:
                tally.steps += claim.steps
                tally.tokens += claim.tokens
                self.tokens += claim.tokens
            self.bytes_up += offer.emission.nbytes
            self.bytes_down += prepared.update_of(offer.island).nbytes
        self.versions[fragment] = prepared.version

    def refuse(self, offer: Offer) -> None:
        """Drops an offer's claim: its blocks are issued again."""
        self.release(self.claims.pop(_origin(offer)).leases)

    def release(self, leases: Sequence[Lease]) -> None:
        """Returns leases to their ledgers."""
        for lease in leases:
            self.ledgers[lease.source].release(lease)

    def snapshot(self, round_: int, members: Sequence[str]) -> Snapshot:
        """What is made durable of it now."""
        counters = {
            "tokens": self.tokens,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "origin": list(self.origin),
            "norms": {str(fragment): list(norms) for fragment, norms in sorted(self.norms.items())},
            "legs": [[leg.round, *leg.emissions] for leg in self.legs],
            "notes": [astuple(note) for note in self.notes],
            "made": {str(fragment): made for fragment, made in sorted(self.made.items())},
            "before": [[*_kept(offer), factor] for _, sent in sorted(self.before.items()) for offer, factor in sent],
            "islands": {name: asdict(tally) for name, tally in sorted(self.tallies.items())},
        }
        ledgers = {source: ledger.to_json() for source, ledger in sorted(self.ledgers.items())}
        return Snapshot(round_, self.step, dict(self.versions), ledgers, counters, tuple(members), dict(self.before))

    @classmethod
    def resume(
        cls,
        round_: int,
        step: int,
        versions: Mapping[int, int],
        ledgers: Mapping[str, Any],
        counters: Mapping[str, Any],
    ) -> Position:
        """The position that a commit holds; payloads of what it keeps in `before` are still to be recalled."""
        before: dict[int, list[tuple[Offer, float]]] = {}
        for *fields, factor in counters.get("before", ()):
            offer = _offer(*fields)
            before.setdefault(offer.fragment, []).append((offer, factor))
        return cls(
            round=round_,
            step=step,
            versions=dict(versions),
            ledgers={source: Ledger.from_json(state) for source, state in ledgers.items()},
            tallies={name: Tally(**tally) for name, tally in counters["islands"].items()},
            tokens=counters["tokens"],
            bytes_up=counters["bytes_up"],
            bytes_down=counters["bytes_down"],
            origin=tuple(counters["origin"]),
            norms={int(fragment): list(norms) for fragment, norms in counters.get("norms", {}).items()},
            legs=[Leg(round_, tuple(emissions)) for round_, *emissions in counters.get("legs", ())],
            notes=[Note(*note) for note in counters.get("notes", ())],
            made={int(f): [(r, v) for r, v in made] for f, made in counters.get("made", {}).items()},
            before=dict(before),
            founded=True,
        )


def _kept(offer: Offer) -> tuple[Any, ...]:
    """What a manifest keeps of an offer; see `_offer`."""
    sizes = [[piece.shard, piece.nbytes] for piece in offer.emission.pieces]
    return (
        offer.island, offer.incarnation, offer.fragment, offer.round, offer.base_version, offer.steps, offer.tokens,
        offer.loss, offer.emission.norm, sizes,
    )  # fmt: skip


def _offer(*kept: Any) -> Offer:
    island, incarnation, fragment, round_, base_version, steps, tokens, loss, norm, sizes = kept
    emission = Emission(tuple(Piece(shard, nbytes, None) for shard, nbytes in sizes), norm, finite=True)
    return Offer(island, incarnation, fragment, round_, base_version, steps, tokens, loss, emission)


def _origin(offer: Offer) -> tuple[Due, str, int]:
    """What tells an offer from all others: a successor may offer to the round that the lost one had offered to."""
    return Due(offer.fragment, offer.round), offer.island, offer.incarnation
