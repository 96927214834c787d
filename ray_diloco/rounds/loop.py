"""The run loop: one coroutine per island, one rendezvous per round of a fragment, one coroutine that concludes it.

An island **trains** a segment, **emits** what is due, waits for the **merge**, **adopts** it.  A round commits
everywhere or nowhere: keepers prepare in spare buffers, the decision is a line in the ledger, then they swap.
Whatever can fail raises at one of these awaits, and only the supervisor of that island (`_slot`) decides what
becomes of it.  Plain DiLoCo (2311.08105) is one fragment without delay and quorum `all`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

from ray_diloco.errors import SyncError
from ray_diloco.outer.schedule import Due
from ray_diloco.rounds.commits import Commits
from ray_diloco.rounds.evaluation import Evaluation
from ray_diloco.rounds.ledger import Ledger
from ray_diloco.rounds.members import Member, State
from ray_diloco.rounds.plans import Assignment, Plans
from ray_diloco.rounds.ports import (
    Anchor,
    ContributionRefused,
    Fleet,
    Island,
    IslandLost,
    Journal,
    Offer,
    Outcome,
    Prepared,
    Store,
    Timing,
    Update,
)
from ray_diloco.rounds.position import Claim, Position
from ray_diloco.rounds.rendezvous import Rendezvous
from ray_diloco.rounds.rules import Rules

Weighed = Sequence[tuple[Offer, float]]


class Run:
    """One run over its ports.  `await run()` returns "finished" or "stopped", or raises what ended it.

    `owes_evaluation`: the commit that the run goes on from was due to be evaluated, and the run ended before.
    """

    def __init__(
        self,
        rules: Rules,
        position: Position,
        fleet: Fleet,
        anchor: Anchor,
        store: Store,
        journal: Journal,
        owes_evaluation: bool = False,
    ) -> None:
        self.rules = rules
        self.position = position
        self.members: dict[str, Member] = {}
        for plan in rules.islands.values():
            position.ledgers.setdefault(plan.source, Ledger(plan.source))
        for fragment in range(len(rules.schedule.offsets)):
            position.versions.setdefault(fragment, 0)
        self._fleet, self._anchor, self._journal = fleet, anchor, journal
        self._plans = Plans(rules, position, self.members, journal)
        self._rounds: dict[Due, Rendezvous] = {}
        self._concluding: dict[Due, asyncio.Task[None]] = {}
        self._commits = Commits(store, position.round, self._written)
        self._evaluations: dict[int, Evaluation] = {}
        self._failures, self._refusal = 0, ""
        self._resumed = position.round
        self._owes_evaluation = owes_evaluation and rules.evaluated(position.round)
        self._passed: dict[int, int] = {}
        self._stopping = False
        self._founding = asyncio.Lock()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # The whole run.

    async def run(self) -> Literal["finished", "stopped"]:
        """Runs until the last round is committed, `stop` is called, or nothing can go on."""
        slots = {asyncio.create_task(self._slot(name), name=name) for name in sorted(self.rules.islands)}
        halted = asyncio.create_task(self._halted())
        waiting: set[asyncio.Future[Any]] = {*slots, halted, self._failed}
        try:
            while not (halted.done() or all(slot.done() or self._needless(slot.get_name()) for slot in slots)):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            undecided = {self._concluding[due] for due, r in self._rounds.items() if not r.closed.done()}
            await _cancel({*slots, halted, *undecided})
            await _settled(set(self._concluding.values()))
            await self._commits.settle()
        return "finished" if self._plans.complete else "stopped"

    def stop(self) -> None:
        """Ends the run at the newest commit: at once if that is durable, else as soon as the next one is."""
        if not self._stopping:
            self._stopping = True
            self._journal.event("stop_requested", round=self.position.round)
            self._plans.pulse()

    @property
    def awaited(self) -> dict[str, list[str]]:
        """Open rounds, and whom each waits for."""
        return {
            f"round {due.round}": sorted(rendezvous.awaited)
            for due, rendezvous in self._rounds.items()
            if not rendezvous.closed.done()
        }

    def _needless(self, name: str) -> bool:
        """True for an island that is still starting when others have brought the run to its end."""
        over = self._plans.complete and any(m.state is State.DONE for m in self.members.values())
        return over and self.members[name].state in (State.LAUNCHING, State.JOINING)

    # The life of an island.

    async def _slot(self, name: str) -> None:
        """Keeps one island running: launches it, and launches it again when it is lost."""
        incarnation = 0
        while not (self._plans.complete and any(m.state is State.DONE for m in self.members.values())):
            member = self.members[name] = Member(name, incarnation)
            island = None
            try:
                self._journal.event("island_launching", island=name, incarnation=incarnation)
                island = await self._fleet.launch(name, incarnation)
                await self._join(member, island)
                await self._sail(member, island)
                return
            except IslandLost as lost:
                self._lose(member, str(lost))
            finally:
                self._plans.launched(name)
                if island is not None:
                    await self._fleet.retire(island)
            incarnation += 1

    async def _join(self, member: Member, island: Island) -> None:
        """Gives a new island the committed anchor; the first one of a run without a commit founds it."""
        member.state = State.JOINING
        async with self._founding:
            if not self.position.founded:
                await self._anchor.found(await island.found())
                await self._journal.trace(0, None, ())
                self.position.founded = True
        await self._adopt(member, island, await self._anchor.current())
        self._journal.event(
            "island_joined", island=member.name, incarnation=member.incarnation, region=island.region or None
        )
        if self._owes_evaluation and self.position.round == self._resumed:
            await self._evaluate(member, island, self._resumed, self.rules.evaluate_blocks)

    async def _sail(self, member: Member, island: Island) -> None:
        """Trains, emits and adopts until no segment is left."""
        while (assignment := await self._assignment(member)) is not None:
            started, timing = _now(), Timing()
            work, boundary = assignment
            member.leases.append(work.lease)
            if member.joined_late(self.position.versions):
                timing.adopt_s += await self._adopt(member, island, await self._anchor.current())
            member.state = State.TRAINING
            report = await island.train(work)
            member.trained(report.steps, report.tokens)
            timing.trained(report)
            for due in boundary.emits:
                await self._emit(member, island, due, timing)
            for due in boundary.adopts:
                await self._take(member, island, due, timing)
            timing.wall_s = _now() - started
            self._book(member, boundary.adopts, timing)
            for due in boundary.adopts:
                await self._after(member, island, due)
        await self._evaluate(member, island, self.rules.schedule.rounds, self.rules.final_blocks)
        # Its ranks write their inner state in the background; they may only end when that is part of a commit.
        while self._commits.writing:
            await self._plans.changed()
        member.state = State.DONE

    async def _assignment(self, member: Member) -> Assignment | None:
        """Waits for the island's next segment; None when nothing is left to train."""
        member.state = State.READY
        self._commits.excuse(member.name)
        self._plans.launched(member.name)
        while True:
            if self._plans.over(member):
                return None
            assignment = self._plans.take(member, halted=self._stopping and self._commits.sent == self.position.round)
            if assignment is not None:
                return assignment
            await self._plans.changed()

    async def _emit(self, member: Member, island: Island, due: Due, timing: Timing) -> None:
        """Offers what is due; a contribution that cannot count is refused here, by name."""
        member.state, started = State.SENDING, _now()
        base = member.versions[due.fragment]
        emission = await island.emit(due.fragment, base, due.round)
        timing.send_s += _now() - started
        timing.norm, timing.bytes_up = emission.norm, timing.bytes_up + emission.nbytes
        steps, tokens = member.done[due.fragment]
        self.position.claims[due, member.name] = Claim(tuple(member.leases), steps, tokens)
        member.leases.clear()
        offer = Offer(
            member.name, member.incarnation, due.fragment, base, steps, tokens, timing.loss, emission, timing.train_s
        )
        rendezvous = self._rendezvous(due)
        if not emission.finite or steps == 0:
            reason = "no inner step was taken" if emission.finite else "the pseudo-gradient is not finite"
            self._refuse(due, member.name, reason)
            rendezvous.refuse(member.name)
            if not emission.finite:
                # Nor are its moments.  The next incarnation takes up those of the last commit.
                raise IslandLost(reason)
        elif not rendezvous.offer(offer):
            self._refuse(due, member.name, "it came after the round had closed")

    async def _take(self, member: Member, island: Island, due: Due, timing: Timing) -> None:
        """Waits for a round and adopts what came of it."""
        member.state = State.WAITING
        started = _now()
        outcome = await asyncio.shield(self._rendezvous(due).outcome)
        timing.wait_s += _now() - started
        member.state = State.ADOPTING
        if outcome.update is not None and outcome.update.version == self.position.versions[due.fragment]:
            updates: Sequence[Update] = (outcome.update,)
        else:
            updates = [u for u in await self._anchor.current() if u.fragment == due.fragment]
        timing.adopt_s += await self._adopt(member, island, updates)
        timing.bytes_down += sum(u.nbytes for u in updates)

    async def _adopt(self, member: Member, island: Island, updates: Sequence[Update]) -> float:
        started = _now()
        await island.adopt(updates)
        for update in updates:
            member.adopted(update.fragment, update.version)
        return _now() - started

    async def _after(self, member: Member, island: Island, due: Due) -> None:
        """What an island does once a round is adopted: saves its inner state, shares the evaluation."""
        if due.fragment != self.rules.last_fragment:
            return
        if self._commits.awaits(due.round, member.name):
            self._commits.redeem(due.round, member.name, await island.save(due.round))
        if self.rules.evaluated(due.round) and member.versions == self.position.versions:
            await self._evaluate(member, island, due.round, self.rules.evaluate_blocks)

    async def _evaluate(self, member: Member, island: Island, round_: int, blocks: Sequence[int]) -> None:
        if not blocks:
            return
        member.state = State.EVALUATING
        evaluation = self._evaluations.setdefault(round_, Evaluation(blocks, self.rules.evaluate_chunk))
        if await evaluation.share(island):
            self._journal.evaluated(round_, evaluation.losses())

    def _lose(self, member: Member, reason: str) -> None:
        """Writes an island off: its work is issued again, and no round waits for it."""
        member.state = State.LOST
        self.position.tally(member.name).restarts += 1
        self.position.release(member.leases)
        member.leases.clear()
        self._plans.withdraw(member.name)
        self._commits.excuse(member.name)
        self._journal.event("island_lost", island=member.name, incarnation=member.incarnation, reason=reason)
        self._failure(f"island {member.name} was lost: {reason}")
        for rendezvous in list(self._rounds.values()):
            rendezvous.reconsider()

    # Rounds.

    def _rendezvous(self, due: Due) -> Rendezvous:
        rendezvous = self._rounds.get(due)
        if rendezvous is None and due.round <= self._passed.get(due.fragment, self._resumed):
            return Rendezvous.void(due)
        if rendezvous is None:
            rendezvous = self._rounds[due] = Rendezvous(due, self.rules.quorum, lambda: self._plans.expected(due))
            task = self._concluding[due] = asyncio.create_task(self._conclude(rendezvous))
            task.add_done_callback(lambda done: self._concluded(due, done))
        return rendezvous

    async def _conclude(self, rendezvous: Rendezvous) -> None:
        """Merges what a closed round holds, commits it and tells everybody; void if nothing can be merged."""
        await rendezvous.closed
        due, started = rendezvous.due, _now()
        absent, offers = sorted(rendezvous.awaited), rendezvous.take()
        islands = [offer.island for offer in offers]
        self._journal.event("round_closed", round=due.round, fragment=due.fragment, islands=islands, absent=absent)
        prepared, weighed = await self._prepare(due, offers)
        if prepared is None:
            what = f"round {due.round} of fragment {due.fragment} had no contribution that could be merged"
            self._failure(f"{what}; {self._refusal}" if self._refusal else what)
            self._journal.event("round_aborted", round=due.round, fragment=due.fragment)
            self._resolve(rendezvous, Outcome(due.fragment, due.round, None))
            return
        # The decision.  Keepers swap before they do anything else for us, so islands need not wait for the answers.
        swap = asyncio.ensure_future(self._anchor.commit(prepared.key))
        told = asyncio.create_task(self._tell(due, prepared, weighed, swap, started))
        self.position.credit(due, prepared.update, [offer for offer, _ in weighed])
        self._failures = 0
        self._resolve(rendezvous, Outcome(due.fragment, due.round, prepared.update))
        self._make_durable(due, told)
        await told

    async def _tell(
        self, due: Due, prepared: Prepared, weighed: Weighed, swap: asyncio.Future[None], started: float
    ) -> None:
        """Writes down a commit once the keepers have swapped."""
        await swap
        self._journal.committed(due.round, prepared, _now() - started, weighed)
        await self._journal.trace(due.round, prepared, weighed)

    async def _prepare(self, due: Due, offers: Sequence[Offer]) -> tuple[Prepared | None, Weighed]:
        """Prepares a round, leaving out contributions that turn out to be unusable, one by one."""
        left = list(offers)
        while left:
            weights = self.rules.weigh(left)
            weighed = [(offer, weights[offer.island]) for offer in left]
            key = f"{due.round}.{due.fragment}:" + ",".join(f"{o.island}/{o.incarnation}" for o in left)
            try:
                return await self._anchor.prepare(key, due.fragment, weighed), weighed
            except ContributionRefused as refused:
                await self._anchor.abort(key)
                self._refuse(due, refused.island, refused.reason)
                left = [offer for offer in left if offer.island != refused.island]
        return None, []

    def _resolve(self, rendezvous: Rendezvous, outcome: Outcome) -> None:
        due = rendezvous.due
        self._plans.concluded(due)
        self._passed[due.fragment] = due.round
        rendezvous.outcome.set_result(outcome)
        for old in [d for d in self._rounds if d.fragment == due.fragment and d.round < due.round]:
            del self._rounds[old]

    def _refuse(self, due: Due, island: str, reason: str) -> None:
        self._refusal = f"that of {island} was refused: {reason}"
        self.position.refuse(due, island)
        self._journal.event(
            "contribution_rejected", island=island, round=due.round, fragment=due.fragment, reason=reason
        )

    # Commits, accounts and failures.

    def _make_durable(self, due: Due, told: asyncio.Task[None]) -> None:
        """Starts the durable write of a committed round, if it is one's turn."""
        if due.fragment == self.rules.last_fragment and (self.rules.durable(due.round) or self._stopping):
            crew = sorted(m.name for m in self.members.values() if m.sailing)
            self._commits.start(self.position.snapshot(due.round, crew), told)

    def _written(self, task: asyncio.Task[None]) -> None:
        self._fail_with(task)
        self._plans.pulse()

    async def _halted(self) -> None:
        """Returns when a requested stop may take place."""
        while not (self._stopping and self._commits.durable == self.position.round and not self._commits.writing):
            await self._plans.changed()

    def _book(self, member: Member, adopted: Sequence[Due], timing: Timing) -> None:
        tally = self.position.tally(member.name)
        tally.train_s += timing.train_s
        tally.wall_s += timing.wall_s
        for due in adopted[-1:]:
            self._journal.island_round(due.round, member.name, timing)

    def _failure(self, what: str) -> None:
        self._failures += 1
        if self._failures > self.rules.max_losses and not self._failed.done():
            self._failed.set_exception(
                SyncError(
                    490,
                    f"{self._failures} failures in a row without a commit; the last: {what}",
                    "look at events.jsonl for the first of them; the same command goes on from the last commit",
                )
            )

    def _concluded(self, due: Due, task: asyncio.Task[None]) -> None:
        del self._concluding[due]
        self._fail_with(task)

    def _fail_with(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await _settled(tasks)


async def _settled(tasks: set[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(set(tasks))
