"""The run loop: one coroutine per island, one rendezvous per round of a fragment, one coroutine that concludes it.

An island **trains** a segment, **emits** what is due, waits for the **merge**, **adopts** it.  A round commits
everywhere or nowhere: keepers prepare in spare buffers, the decision is a line in the ledger, then they swap.
Whatever can fail raises at one of these awaits, and only the supervisor of that island (`_slot`) decides what
becomes of it.  Plain DiLoCo (2311.08105) is one fragment without delay and quorum `all`; every other method is another
schedule, quorum, topology or weigher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

from ray_diloco.outer.layout import total
from ray_diloco.outer.schedule import Boundary, Due
from ray_diloco.rounds.clock import now
from ray_diloco.rounds.commits import Commits
from ray_diloco.rounds.conclusions import Conclusions, Told
from ray_diloco.rounds.evaluation import Evaluation
from ray_diloco.rounds.failures import Failures
from ray_diloco.rounds.ledger import Ledger
from ray_diloco.rounds.members import Member, State
from ray_diloco.rounds.plans import Assignment, FreePlans, Planner, Plans
from ray_diloco.rounds.ports import (
    Anchor,
    Fleet,
    Island,
    IslandLost,
    Journal,
    Offer,
    Outcome,
    Report,
    Store,
    Timing,
    Work,
)
from ray_diloco.rounds.position import Claim, Position
from ray_diloco.rounds.rules import Rules


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
        for fragment in range(rules.schedule.fragments):
            position.versions.setdefault(fragment, 0)
        self._fleet, self._anchor, self._journal = fleet, anchor, journal
        self._failures = Failures(rules.max_losses)
        planner: type[Planner] = FreePlans if rules.free else Plans
        self._plans = planner(rules, position, self.members, journal)
        self._commits = Commits(store, position.round, self._written)
        self._evaluations: dict[int, Evaluation] = {}
        self._resumed, self._resumed_versions = position.round, dict(position.versions)
        self._owes_evaluation = owes_evaluation and rules.evaluated(position.round)
        self._stopping = False
        self._founding = asyncio.Lock()
        told = Told(self._failures.forget, self._failures.count, self._make_durable, self._failures.end_with)
        self._rounds = Conclusions(rules, position, anchor, journal, self._plans, self._commits, told)

    # The whole run.

    async def run(self) -> Literal["finished", "stopped"]:
        """Runs until the last round is committed, `stop` is called, or nothing can go on."""
        slots = {asyncio.create_task(self._slot(name), name=name) for name in sorted(self.rules.islands)}
        halted = asyncio.create_task(self._halted())
        waiting: set[asyncio.Future[Any]] = {*slots, halted, self._failures.ended}
        try:
            while not (halted.done() or all(slot.done() or self._needless(slot.get_name()) for slot in slots)):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            await self._rounds.end({*slots, halted})
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
        return self._rounds.awaited

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
                await self._journal.trace(None, None, ())
                self.position.founded = True
        if not await self._take_up(member, island):
            await self._enter(member, island)
        self._journal.event(
            "island_joined", island=member.name, incarnation=member.incarnation, region=island.region or None
        )
        if self._owes_evaluation and self.position.round == self._resumed:
            await self._evaluate(member, island, self._resumed, self.rules.evaluate_blocks, None)

    async def _take_up(self, member: Member, island: Island) -> bool:
        """Lets an island go on with the parameters that a commit holds of it, if they belong to the present anchors."""
        committed = self.position.versions
        if island.restored is None or committed != self._resumed_versions or island.restored.keys() != committed.keys():
            return False
        if any(island.restored[fragment] > version for fragment, version in committed.items()):
            # It had gone on by itself when it handed over its state, and that was never committed.
            return False
        behind = {fragment for fragment, version in committed.items() if island.restored[fragment] < version}
        if behind and not self.rules.free:
            updates = await self._anchor.current(member.name)
            member.inherited = {update.fragment: update for update in updates if update.fragment in behind}
        member.versions, member.restored, member.joined_at = dict(island.restored), True, dict(committed)
        return True

    async def _sail(self, member: Member, island: Island) -> None:
        """Trains, emits and adopts until no segment is left."""
        left: Boundary | None = None
        while (assignment := await self._assignment(member, island, left)) is not None:
            started, timing = now(), Timing()
            work, boundary, skipped = assignment
            member.leases.append(work.lease)
            if skipped:
                self._rounds.reconsider()
            if member.joined_late(self.position.versions):
                timing.adopt_s += await self._enter(member, island)
            await self._catch_up(member, island, [due for one in skipped for due in one.adopts], timing)
            member.state, member.settled = State.TRAINING, True
            report = await island.train(work)
            self._trained(member, work, report)
            timing.trained(report)
            adopted: list[tuple[Due, Outcome]] = []
            for stage in boundary.stages:
                emitted = {due: await self._emit(member, island, due, timing) for due in stage.emits}
                for due in stage.adopts:
                    own = emitted.get(due, due)
                    adopted.append((own, await self._take(member, island, own, timing)))
            timing.wall_s = now() - started
            self._book(member, adopted, timing)
            await self._hand_over(member, island, boundary)
            left = boundary
            for due, outcome in adopted:
                ended = due.fragment == self.rules.last_fragment and due.round > self._resumed
                if ended and self.rules.evaluated(due.round):
                    await self._evaluate(member, island, due.round, self.rules.evaluate_blocks, outcome)
        # What it trained for rounds that closed without it.
        self.position.release(member.leases)
        member.leases.clear()
        while not self._plans.complete:
            await self._plans.changed()
        await self._settle_up(member, island, left)
        await self._evaluate(member, island, self.rules.schedule.rounds, self.rules.final_blocks, None)
        # Its ranks write their inner state in the background; they may only end when that is part of a commit.
        while self._commits.writing:
            await self._plans.changed()
        member.state = State.DONE

    def _trained(self, member: Member, work: Work, report: Report) -> None:
        """Books a segment; blocks that time did not suffice for go back."""
        blocks = report.steps * self.rules.islands[member.name].blocks_per_step
        if work.seconds and blocks < total(work.lease.blocks):
            ledger = self.position.ledgers[work.lease.source]
            member.leases[-1] = ledger.shorten(work.lease, blocks)
        member.trained(report.steps, report.tokens)
        self._plans.measured(member.name, report.steps, report.seconds)

    async def _assignment(self, member: Member, island: Island, left: Boundary | None) -> Assignment | None:
        """Waits for the island's next segment; None when nothing is left to train.  It stands where it `left`."""
        member.state = State.READY
        self._plans.launched(member.name)
        while True:
            await self._settle_up(member, island, left)
            if self._plans.over(member):
                return None
            assignment = self._plans.take(member, halted=self._stopping and self._commits.sent == self.position.round)
            if assignment is not None:
                return assignment
            await self._plans.changed()

    async def _settle_up(self, member: Member, island: Island, left: Boundary | None) -> None:
        """Hands over for commits that began while the island stood where it is; nothing is expected of a joiner."""
        if left is None:
            self._commits.excuse(member.name)
        while left is not None and self._commits.owed(member.name):
            await self._hand_over(member, island, left)

    async def _emit(self, member: Member, island: Island, due: Due, timing: Timing) -> Due:
        """Offers what is due and returns the round it is for; what cannot count is refused here, by name."""
        member.state, started = State.SENDING, now()
        base = member.versions[due.fragment]
        emission = await island.emit(due.fragment, base, due.round)
        timing.send_s += now() - started
        timing.norm, timing.bytes_up = emission.norm, timing.bytes_up + emission.nbytes
        due = self._plans.numbered(due, member.name)
        member.under_way.add(due)
        steps, tokens = member.done[due.fragment]
        self.position.claims[due, member.name] = Claim(tuple(member.leases), *member.unclaimed)
        member.leases.clear()
        member.unclaimed = (0, 0)
        offer = Offer(
            member.name,
            member.incarnation,
            due.fragment,
            due.round,
            base,
            steps,
            tokens,
            timing.loss,
            emission,
            timing.train_s,
            now(),
            island.region,
        )
        rendezvous = self._rounds.open(due)
        if not emission.finite or steps == 0:
            reason = "no inner step was taken" if emission.finite else "the pseudo-gradient is not finite"
            self._rounds.refuse(offer, reason)
            rendezvous.refuse(member.name)
            if not emission.finite:
                # Nor are its moments.  The next incarnation takes up those of the last commit.
                raise IslandLost(reason)
        elif not rendezvous.offer(offer):
            member.late.add(due)
            if self.rules.quorum.carry and self.position.round < self.rules.schedule.rounds:
                self._rounds.carry(offer)
            else:
                self._rounds.refuse(offer, "it came after the round had closed")
        return due

    async def _take(self, member: Member, island: Island, due: Due, timing: Timing) -> Outcome:
        """Waits for a round and adopts what came of it; who came too late for it adopts what is newest."""
        member.state = State.WAITING
        started = now()
        outcome = await asyncio.shield(self._rounds.find(due).outcome)
        timing.wait_s += now() - started
        member.state = State.ADOPTING
        late = due in member.late
        member.late.discard(due)
        own = due in member.under_way or (member.restored and self._plans.passed(due))
        member.under_way.discard(due)
        if outcome.prepared is not None and not late:
            update = outcome.prepared.update_of(member.name)
        elif self._plans.passed(due) and due.fragment in member.inherited:
            update = member.inherited[due.fragment]
        else:
            current = await self._anchor.current(member.name)
            update = next(u for u in current if u.fragment == due.fragment)
        if not self._plans.passed(due):
            member.inherited.pop(due.fragment, None)
        # A late contribution that is carried on will be merged; of what an earlier process sent this one knows nothing.
        merged = self.rules.quorum.carry if late else member.name in outcome.merged
        heard = {} if self._plans.passed(due) else {due.fragment: merged}
        if update.version > member.versions[due.fragment] or (own and outcome.prepared is None):
            started = now()
            if own:
                await island.adopt((update,), heard)
            else:
                # A rule that mixes or rebases would begin from an emission that there was not.
                await island.join((update,))
            member.adopted(due.fragment, update.version)
            timing.adopt_s += now() - started
            timing.bytes_down += update.nbytes
        return outcome

    async def _catch_up(self, member: Member, island: Island, missed: Sequence[Due], timing: Timing) -> None:
        """Adopts what was due at boundaries that an island skips, the newest of each fragment."""
        newest = {due.fragment: due for due in missed}
        for due in missed:
            if due in member.under_way or due == newest[due.fragment]:
                await self._take(member, island, due, timing)

    async def _enter(self, member: Member, island: Island) -> float:
        """Takes an island to the newest anchors; returns the seconds that took."""
        started = now()
        updates = await self._anchor.current(member.name)
        await island.join(updates)
        for update in updates:
            member.adopted(update.fragment, update.version)
        member.joined_at = dict(member.versions)
        return now() - started

    async def _hand_over(self, member: Member, island: Island, boundary: Boundary | None) -> None:
        """Hands the inner state to the commits that wait for it, or will."""
        rounds = set(self._commits.owed(member.name))
        if boundary is not None and not self.rules.free:
            last = [due.round for due in boundary.emits if due.fragment == self.rules.last_fragment]
            rounds |= {round_ for round_ in last if self.rules.durable(round_) or self._stopping}
        versions = None if self.rules.exact else dict(member.versions)
        for round_ in sorted(rounds):
            if self._commits.wants(round_, member.name):
                self._commits.hand_over(round_, member.name, await island.save(round_, versions))

    async def _evaluate(
        self, member: Member, island: Island, round_: int, blocks: Sequence[int], outcome: Outcome | None
    ) -> None:
        """Takes part in the evaluation of a round, unless the island is behind; without `outcome` it never is."""
        if not blocks:
            return
        member.state = State.EVALUATING
        if self.rules.exact and outcome is not None and member.versions != self.position.versions:
            return
        if round_ not in self._evaluations:
            at = None if self.rules.exact else await self._anchor.published()
            self._evaluations.setdefault(round_, Evaluation(blocks, self.rules.evaluate_chunk, at))
        if await self._evaluations[round_].share(island):
            self._journal.evaluated(round_, self._evaluations[round_].losses())

    def _lose(self, member: Member, reason: str) -> None:
        """Writes an island off: its work is issued again, and no round waits for it."""
        member.state = State.LOST
        self.position.tally(member.name).restarts += 1
        self.position.release(member.leases)
        member.leases.clear()
        self._plans.withdraw(member.name)
        self._commits.lost(member.name)
        self._journal.event("island_lost", island=member.name, incarnation=member.incarnation, reason=reason)
        self._failures.count(f"island {member.name} was lost: {reason}")
        self._rounds.reconsider()

    # Commits, accounts and failures.

    def _make_durable(self, told: asyncio.Task[None]) -> None:
        """Starts the durable write of where the run stands, if it is time for one."""
        round_ = self.position.round
        wanted = self.rules.durable(round_)
        if self._stopping and not wanted:
            # Islands that have gone on, and did not know, could not say any more where they stood.
            beyond = set() if self.rules.exact else self._plans.beyond(Due(self.rules.last_fragment, round_))
            wanted = beyond <= self._commits.early(round_)
        if wanted:
            crew = sorted(m.name for m in self.members.values() if m.sailing)
            self._commits.start(self.position.snapshot(round_, crew), told)

    def _written(self, task: asyncio.Task[None]) -> None:
        self._failures.end_with(task)
        self._plans.pulse()

    async def _halted(self) -> None:
        """Returns when a requested stop may take place."""
        while not (self._stopping and self._commits.durable == self.position.round and not self._commits.writing):
            await self._plans.changed()

    def _book(self, member: Member, adopted: Sequence[tuple[Due, Outcome]], timing: Timing) -> None:
        tally = self.position.tally(member.name)
        tally.train_s += timing.train_s
        tally.wall_s += timing.wall_s
        member.timing = member.timing.followed_by(timing)
        ended = [due for due, _ in adopted if due.fragment == self.rules.last_fragment]
        for due in ended[-1:]:
            self._journal.island_round(due, member.name, member.timing)
            member.timing = Timing()
