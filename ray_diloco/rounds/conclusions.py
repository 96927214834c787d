"""Rounds of fragments, from the first offer to the commit: one rendezvous and one coroutine for each.

A round commits everywhere or nowhere: keepers prepare in spare buffers, the decision is one synchronous call that
credits the work, then they swap.  What cannot be merged is refused by name, and the round goes on without it.
Rounds of a fragment are merged one after the other; where all islands are waited for, they commit in the order in which
they were emitted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from ray_diloco.errors import SyncError
from ray_diloco.outer.schedule import Due
from ray_diloco.rounds.clock import now, settled
from ray_diloco.rounds.commits import Commits
from ray_diloco.rounds.plans import Planner
from ray_diloco.rounds.ports import Anchor, ContributionRefused, Journal, Offer, Outcome, Prepared, Step, TooFew
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rendezvous import Rendezvous
from ray_diloco.rounds.rules import Rules
from ray_diloco.rounds.topology import Meeting, Weighed
from ray_diloco.rounds.vetting import Vetting


@dataclass(frozen=True)
class Told:
    """Whom to tell how a round ended.

    Attributes:
      committed: a round was committed.
      voided: nothing could be merged; why.
      whole: a round of the whole model has ended; with the task that writes it down.
      broken: the task of a round has ended, well or not.
      over: not told but asked, before each decision: whether the run ends where it stands.
    """

    committed: Callable[[], None]
    voided: Callable[[str], None]
    whole: Callable[[asyncio.Task[None]], None]
    broken: Callable[[asyncio.Task[None]], None]
    over: Callable[[], bool]


class Conclusions:
    """The rounds of a run that are open or under way."""

    def __init__(
        self,
        rules: Rules,
        position: Position,
        anchor: Anchor,
        journal: Journal,
        plans: Planner,
        commits: Commits,
        vetting: Vetting,
        told: Told,
    ) -> None:
        self._rules, self._position, self._anchor, self._journal = rules, position, anchor, journal
        self._plans, self._commits, self._vetting, self._told = plans, commits, vetting, told
        self._rounds: dict[Due, Rendezvous] = {}
        # By fragment, in the order in which they were opened.
        self._opened: dict[int, deque[Due]] = {}
        self._islands = tuple(sorted(rules.islands))
        # Rounds of nested channels over the same elements wait for one another as well.
        one = asyncio.Lock()
        every = range(rules.schedule.fragments)
        self._turns = {fragment: one if rules.schedule.lanes else asyncio.Lock() for fragment in every}
        # By fragment: offers that came too late for their round.
        self._carried: dict[int, list[Offer]] = {}
        self._concluding: dict[Due, asyncio.Task[None]] = {}
        # By fragment: the newest round of which nothing is kept any more.
        self._forgotten: dict[int, int] = {}
        self._refusal = ""
        self._ending = False

    @property
    def awaited(self) -> dict[str, list[str]]:
        """Open rounds, and whom each waits for."""
        several = self._rules.schedule.fragments > 1
        return {
            f"round {due.round}{f' of fragment {due.fragment}' if several else ''}": sorted(rendezvous.awaited)
            for due, rendezvous in self._rounds.items()
            if not rendezvous.closed.done()
        }

    @property
    def quiet(self) -> bool:
        """True if no round is open or under way."""
        return not self._concluding

    def reconsider(self) -> None:
        """Looks whether rounds can close, now that membership has changed."""
        for rendezvous in list(self._rounds.values()):
            rendezvous.reconsider()

    def find(self, due: Due) -> Rendezvous:
        """The rendezvous of a round that an island adopts; void if nothing is kept of it."""
        return self._rounds.get(due) or Rendezvous.void(due)

    def carry(self, offer: Offer) -> None:
        """Keeps an offer that came late for the fragment's next round."""
        self._carried.setdefault(offer.fragment, []).append(offer)

    async def end(self, cancelled: set[asyncio.Task[None]]) -> None:
        """Ends with the run: nothing more is concluded, and what waits for somebody is given up.

        Args:
          cancelled: other tasks to cancel with those.
        """
        self._ending = True
        for task in cancelled:
            task.cancel()
        self._give_up()
        await settled(cancelled)
        # An island hears of it a turn of the loop later, and may have opened one more round until then.
        self._give_up()
        await settled(set(self._concluding.values()))
        await self._commits.settle()
        for offer in [offer for carried in self._carried.values() for offer in carried]:
            self.refuse(offer, "the run ended before the round that it was carried to")
        self._carried.clear()

    def _give_up(self) -> None:
        """Ends the rounds that still wait for somebody."""
        for due, task in self._concluding.items():
            if due in self._rounds and not self._rounds[due].closed.done():
                task.cancel()

    def open(self, due: Due) -> Rendezvous:
        """The rendezvous of a round, which is concluded as soon as it closes; void for one of long ago."""
        rendezvous = self._rounds.get(due)
        if rendezvous is None and (due.round <= self._forgotten.get(due.fragment, 0) or self._plans.passed(due)):
            return Rendezvous.void(due)
        if rendezvous is None:
            rendezvous = self._rounds[due] = Rendezvous(
                due, self._rules.quorum, lambda: self._plans.expected(due), lambda name: self._plans.expects(due, name)
            )
            self._opened.setdefault(due.fragment, deque()).append(due)
            task = self._concluding[due] = asyncio.create_task(self._conclude(rendezvous))
            task.add_done_callback(lambda done: self._concluded(due, done))
        return rendezvous

    async def _conclude(self, rendezvous: Rendezvous) -> None:
        """Merges what a closed round holds, commits it and tells everybody; void if nothing can be merged."""
        await rendezvous.closed
        due = rendezvous.due
        # Two rounds of a fragment may close in one moment, and whoever has the turn waits for earlier rounds.
        await self._in_order(due, {due.fragment})
        async with self._turns[due.fragment]:
            started = now()
            absent, offers = sorted(rendezvous.awaited), rendezvous.take()
            offers = [*self._carried.pop(due.fragment, ()), *offers]
            islands = [offer.island for offer in offers]
            self._journal.event("round_closed", round=due.round, fragment=due.fragment, islands=islands, absent=absent)
            prepared, weighed = await self._prepare(due, offers)
            if prepared is None:
                what = f"round {due.round} of fragment {due.fragment} had no contribution that could be merged"
                self._told.voided(f"{what}; {self._refusal}" if self._refusal else what)
                self._journal.event("round_aborted", round=due.round, fragment=due.fragment)
                self._resolve(rendezvous, Outcome(due.fragment, due.round, None))
                return
            await self._in_order(due, range(self._rules.schedule.fragments))
            await self._commits.begun()
            if self._ending or self._told.over():
                # Nobody is left to hand over what a commit of it would need, or will be in a moment.
                await self._anchor.abort(prepared.key)
                for offer, _ in weighed:
                    self._position.refuse(offer)
                return
            # The decision.  Keepers swap before they do anything else for us, so islands need not wait for the answers.
            swap = asyncio.ensure_future(self._anchor.commit(prepared.key))
            told = asyncio.create_task(self._tell(due, prepared, weighed, swap, started))
            merged = [offer for offer, _ in weighed]
            self._position.credit(due.fragment, prepared, merged)
            self._position.moved(due.fragment, due.round, prepared.version, self._rules.kept_rounds)
            if self._rules.remembers:
                self._position.before[due.fragment] = weighed
            if self._rules.schedule.pace is not None:
                self._position.note(due.fragment, due.round, prepared, merged, self._rules.kept_rounds + 1)
            self._vetting.merged(due.fragment, merged)
            self._told.committed()
            outcome = Outcome(due.fragment, due.round, prepared, frozenset(o.island for o in merged))
            if self._resolve(rendezvous, outcome):
                self._told.whole(told)
        await told

    async def _in_order(self, due: Due, fragments: Container[int]) -> None:
        """Waits for rounds of these fragments that were emitted earlier, where all islands are waited for.

        A commit then holds all that was contributed up to a step, and nothing from beyond it.
        """
        if self._rules.free or self._rules.quorum.kind != "all":
            return
        place = self._plans.place(due)
        earlier = {other for other in self._concluding if self._plans.place(other) < place}
        await settled({self._concluding[other] for other in earlier if other.fragment in fragments})

    async def _tell(
        self, due: Due, prepared: Prepared, weighed: Weighed, swap: asyncio.Future[None], started: float
    ) -> None:
        """Writes down a commit once the keepers have swapped."""
        await swap
        self._journal.committed(due, prepared, now() - started, weighed)
        await self._journal.trace(due, prepared, weighed)

    async def _prepare(self, due: Due, offers: Sequence[Offer]) -> tuple[Prepared | None, Weighed]:
        """Prepares a round, leaving out contributions that turn out to be unusable, one by one."""
        left = self._sound(due, offers)
        while left:
            version = self._position.versions[due.fragment]
            factors = self._rules.weigh(left, [version - offer.base_version for offer in left], now())
            for offer in [offer for offer, factor in zip(left, factors, strict=True) if factor == 0]:
                self.refuse(offer, "its weight is 0")
            weighed = [(offer, factor) for offer, factor in zip(left, factors, strict=True) if factor != 0]
            left = [offer for offer, _ in weighed]
            if not left:
                break
            meeting = Meeting(due.round, self._islands, weighed, await self._before(due.fragment))
            key = f"{due.round}.{due.fragment}:" + ",".join(f"{o.island}/{o.incarnation}/{o.round}" for o in left)
            step = Step(key, due.fragment, due.round, version, self._rules.topology(meeting))
            try:
                prepared = await self._anchor.prepare(step)
            except ContributionRefused as refused:
                await self._anchor.abort(key)
                fault = SyncError(refused.number, refused.reason, "") if refused.number else refused.reason
                for offer in [offer for offer in left if offer.island == refused.island]:
                    self.refuse(offer, fault)
                left = [offer for offer in left if offer.island != refused.island]
                continue
            except TooFew as few:
                await self._anchor.abort(key)
                for offer in left:
                    self.refuse(offer, str(few))
                return None, []
            return prepared, weighed
        return None, []

    async def _before(self, fragment: int) -> Weighed:
        """The contributions of a fragment's newest round, if they are remembered; a commit keeps them as well."""
        before = self._position.before.get(fragment, ())
        if any(piece.handle is None for offer, _ in before for piece in offer.emission.pieces):
            before = [(await self._anchor.recalled(offer), factor) for offer, factor in before]
            self._position.before[fragment] = before
        return before

    def _sound(self, due: Due, offers: Sequence[Offer]) -> list[Offer]:
        """Refuses contributions that are older or larger than the rules allow; the others in sorted island order."""
        left = []
        for offer in sorted(offers, key=lambda offer: (offer.island, offer.round)):
            age = self._position.versions[due.fragment] - offer.base_version
            if 0 < self._rules.max_age < age:
                self.refuse(offer, f"it was measured {age} versions ago")
            elif (fault := self._vetting.too_large(offer)) is not None:
                self.refuse(offer, fault)
            else:
                left.append(offer)
        return left

    def _resolve(self, rendezvous: Rendezvous, outcome: Outcome) -> bool:
        """Tells islands how a round ended; True if that ends a round of the whole model."""
        due = rendezvous.due
        ended = self._plans.concluded(due)
        if self._rules.points:
            # Who has left a wreck in that segment is awaited no more.
            self.reconsider()
        rendezvous.outcome.set_result(outcome)
        oldest = due.round - self._rules.kept_rounds
        opened = self._opened[due.fragment]
        while opened[0].round < oldest and self._rounds[opened[0]].outcome.done():
            old = opened.popleft()
            self._forgotten[due.fragment] = max(old.round, self._forgotten.get(due.fragment, 0))
            del self._rounds[old]
        return ended

    def refuse(self, offer: Offer, fault: SyncError | str) -> None:
        """Drops an offer; its blocks are issued again.  A numbered fault is its island's own and counts against it."""
        number, reason = (fault.number, fault.what) if isinstance(fault, SyncError) else (None, fault)
        self._refusal = f"that of {offer.island} was refused: {reason}"
        self._position.refuse(offer)
        self._journal.event(
            "contribution_rejected",
            island=offer.island,
            round=offer.round,
            fragment=offer.fragment,
            number=number,
            reason=reason,
        )
        if number is not None:
            self._vetting.strike(offer.island, reason)

    def _concluded(self, due: Due, task: asyncio.Task[None]) -> None:
        del self._concluding[due]
        self._told.broken(task)
