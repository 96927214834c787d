"""The journal port: events, metrics, the mirror, the trace, and the numbers that the live view shows.

One place where the loop's words become the lines of `events.jsonl` and `metrics.jsonl`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray_diloco.cluster.anchor import RayAnchor
from ray_diloco.cluster.books import Books
from ray_diloco.cluster.calls import ActorFailed, answers
from ray_diloco.cluster.placement import here
from ray_diloco.cluster.trace import TraceActor
from ray_diloco.errors import DilocoError
from ray_diloco.observe.metrics import (
    CommitMetrics,
    EvalMetrics,
    IslandMetrics,
    Metrics,
    perplexity,
)
from ray_diloco.observe.view import CommitView, Note, TimeSplit
from ray_diloco.outer.schedule import Due, Schedule
from ray_diloco.rounds.ports import BlockLoss, Offer, Prepared
from ray_diloco.rounds.timing import Timing


@dataclass(frozen=True)
class JournalSettings:
    """`trace` is the folder of the trace or None; `outer` the settings that it records."""

    trace: Path | None
    outer: Mapping[str, Any]
    deadline_s: float


class RunJournal:
    """Writes what happens; see `rounds.ports.Journal`."""

    def __init__(self, books: Books, anchor: RayAnchor, settings: JournalSettings) -> None:
        self.last_commit: CommitView | None = None
        self.eval_loss: float | None = None
        self._events, self._metrics, self._mirror = books.events, books.metrics, books.mirror
        self._position, self._anchor, self._settings = books.position, anchor, settings
        self._rounds, self._main = 0, 1
        self._tracer: Any = None
        self._timings: dict[int, dict[str, Timing]] = {}
        # Incarnation and line of merged contributions whose islands have not written it yet; islands that never will.
        self._without_line: dict[tuple[int, str], tuple[int, Timing]] = {}
        self._lost: set[tuple[str, int]] = set()

    def follow(self, schedule: Schedule) -> None:
        """Says how many rounds there will be, and which fragments are the main channel's."""
        self._rounds, self._main = schedule.rounds, schedule.main

    @property
    def notes(self) -> tuple[Note, ...]:
        """The newest events in words."""
        return self._events.notes

    def event(self, kind: str, **fields: Any) -> None:
        """One line of the tape."""
        self._events.append(kind, **fields)
        if kind == "island_lost":
            self._lost.add((fields["island"], fields["incarnation"]))
            self._write_for_the_lost()

    def island_round(self, due: Due, island: str, timing: Timing) -> None:
        """One island's line of a round."""
        round_ = due.round
        self._append(
            IslandMetrics(
                island=island,
                round=round_,
                steps=timing.steps,
                tokens=timing.tokens,
                loss=timing.loss,
                pseudo_gradient_norm=timing.norm,
                train_s=timing.train_s,
                send_s=timing.send_s,
                wait_s=timing.wait_s,
                adopt_s=timing.adopt_s,
                bytes_up=timing.bytes_up,
                bytes_down=timing.bytes_down,
                tokens_per_s=timing.tokens / timing.train_s if timing.train_s else 0.0,
                wall_s=timing.wall_s,
            )
        )
        self._without_line.pop((round_, island), None)
        self._timings.setdefault(round_, {})[island] = timing
        self._show_split(round_)

    def committed(self, due: Due, prepared: Prepared, seconds: float, offers: Sequence[tuple[Offer, float]]) -> None:
        """The line of a commit; those of side channels belong to the round that is under way."""
        round_ = due.round if due.fragment < self._main else self._position.round + 1
        up = sum(offer.emission.nbytes for offer, _ in offers)
        down = sum(prepared.update_of(offer.island).nbytes for offer, _ in offers)
        self._append(
            CommitMetrics(
                round=round_,
                fragment=due.fragment,
                version=prepared.version,
                anchor_norm=prepared.anchor_norm,
                update_norm=prepared.update_norm,
                contributions=len(offers),
                commit_s=seconds,
                tokens_committed=self._position.tokens,
                bytes_up=up,
                bytes_down=down,
            )
        )
        islands = [offer.island for offer, _ in offers]
        weights = {offer.island: weight for offer, weight in offers}
        if due.fragment != self._position.closing(due.round, self._main - 1):
            self.event(
                "fragment_committed",
                round=round_,
                fragment=due.fragment,
                version=prepared.version,
                islands=islands,
                weights=weights,
            )
            return
        tokens = sum(offer.tokens for offer, _ in offers)
        loss = sum(offer.loss * offer.tokens for offer, _ in offers) / tokens if tokens else math.nan
        self.last_commit = CommitView(round_, loss, prepared.update_norm, up, down)
        self.event(
            "round_committed",
            round=round_,
            rounds=self._rounds,
            version=prepared.version,
            loss=loss,
            islands=islands,
            tokens=self._position.tokens,
            bytes_up=up,
            bytes_down=down,
            weights=weights,
        )
        self._without_line |= {(round_, offer.island): (offer.incarnation, _timing(offer)) for offer, _ in offers}
        self._write_for_the_lost()
        for old in [r for r in self._timings if r < round_ - 2]:
            del self._timings[old]

    def evaluated(self, round_: int, losses: Sequence[BlockLoss]) -> None:
        """The line of an evaluation."""
        tokens = sum(loss.tokens for loss in losses)
        self.eval_loss = math.fsum(loss.nats for loss in losses) / tokens
        ppl = perplexity(self.eval_loss)
        self._append(EvalMetrics(round_, self.eval_loss, ppl, len(losses), tokens))
        self.event("evaluation", round=round_, loss=self.eval_loss, ppl=ppl, blocks=len(losses))

    async def trace(self, due: Due | None, prepared: Prepared | None, offers: Sequence[tuple[Offer, float]]) -> None:
        """Keeps contributions and anchor of a round, if asked for."""
        folder = self._settings.trace
        if folder is None:
            return
        round_, fragment = (0, 0) if due is None else (due.round, due.fragment)
        name = f"round-{round_:06d}" + (f"-fragment-{fragment:03d}" if fragment else "")
        if self._tracer is None:
            # The run directory is here.
            self._tracer = TraceActor.options(**here()).remote(str(folder), self._anchor.layout, self._position.round)
        updates = {"": tuple(await self._anchor.published())} if prepared is None else prepared.updates
        calls = []
        for anchor, update in updates.items():
            pieces = [p for u in (update if isinstance(update, tuple) else (update,)) for p in u.pieces]
            what = f"anchor-{anchor}" if anchor else "anchor"
            calls.append(self._tracer.write.remote(name, what, *(piece.handle for piece in pieces)))
        for offer, _ in offers:
            late = f"-from-{offer.round:06d}" if offer.round != round_ else ""
            handles = [piece.handle for piece in offer.emission.pieces]
            calls.append(self._tracer.write.remote(name, f"island-{offer.island}{late}", *handles))
        if offers:
            description = {
                "weights": {offer.island: weight for offer, weight in offers},
                "outer_lr": self._settings.outer["lr"],
                "momentum": self._settings.outer["momentum"],
            }
            calls.append(self._tracer.describe.remote(name, description))
        try:
            await answers(calls, f"tracing round {round_}", self._settings.deadline_s)
        except (ActorFailed, DilocoError) as error:
            self._tracer = None
            self.event("warning", text=f"round {round_} is not in the trace: {error}")

    def _write_for_the_lost(self) -> None:
        """Writes the lines of islands that contributed and died before they had adopted; their waiting is unknown."""
        for (round_, island), (incarnation, timing) in list(self._without_line.items()):
            if (island, incarnation) in self._lost:
                self.island_round(Due(self._main - 1, round_), island, timing)

    def _append(self, metrics: Metrics) -> None:
        self._mirror.log(self._metrics.append(metrics))

    def _show_split(self, round_: int) -> None:
        """Completes the view of the last commit with the time split of its islands."""
        timings = list(self._timings[round_].values())
        if self.last_commit is None or self.last_commit.round != round_:
            return
        means = [
            math.fsum(getattr(t, name) for t in timings) / len(timings)
            for name in ("train_s", "send_s", "wait_s", "adopt_s")
        ]
        self.last_commit = replace(self.last_commit, time=TimeSplit(*means))


def _timing(offer: Offer) -> Timing:
    """What an offer itself says of its round."""
    done = Timing(offer.steps, offer.tokens, offer.loss, offer.emission.norm, offer.train_s, wall_s=offer.train_s)
    return replace(done, bytes_up=offer.emission.nbytes)
