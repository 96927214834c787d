"""The life of one island: it **trains** a segment, **emits** what is due, waits for the **merge**, **adopts** it.

`sail` is that sentence; the rest says what an island takes up when it joins, what becomes of offers that come too late
or are bad, and what it hands over for commits.  Whatever can fail raises at one of these awaits, and the supervisor of
the island (`loop.Run`) decides.  A joiner adopts committed anchors and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ray_diloco.outer.layout import total
from ray_diloco.outer.schedule import Boundary, Due
from ray_diloco.rounds.clock import now
from ray_diloco.rounds.commits import Commits
from ray_diloco.rounds.conclusions import Conclusions
from ray_diloco.rounds.durability import Durability
from ray_diloco.rounds.evaluation import Evaluation
from ray_diloco.rounds.inherited import inherited, made_by
from ray_diloco.rounds.members import Member, State
from ray_diloco.rounds.membership import Membership
from ray_diloco.rounds.plans import Assignment, Planner
from ray_diloco.rounds.ports import Anchor, Island, IslandLost, Journal, Offer, Outcome, Report, Work
from ray_diloco.rounds.position import Claim, Position
from ray_diloco.rounds.rules import Rules
from ray_diloco.rounds.salvage import Salvage
from ray_diloco.rounds.timing import Timing
from ray_diloco.rounds.vetting import STALE, Vetting


@dataclass(frozen=True)
class Waters:
    """What all islands of a run have in common.

    Attributes:
      evaluations: by round.
      resumed, resumed_versions: where the run went on from; round -1: from nothing.
      owes_evaluation: that commit was due to be evaluated, and the run ended before.
      founding: held by the island that founds the run.
    """

    rules: Rules
    position: Position
    anchor: Anchor
    journal: Journal
    plans: Planner
    commits: Commits
    durability: Durability
    rounds: Conclusions
    vetting: Vetting
    membership: Membership
    salvage: Salvage
    evaluations: dict[int, Evaluation]
    resumed: int
    resumed_versions: dict[int, int]
    owes_evaluation: bool
    founding: asyncio.Lock


class Voyage:
    """The life of one incarnation of an island."""

    def __init__(self, waters: Waters, member: Member, island: Island) -> None:
        self._member, self._island, self._waters = member, island, waters
        self._rules, self._position, self._anchor = waters.rules, waters.position, waters.anchor
        self._plans, self._commits, self._rounds = waters.plans, waters.commits, waters.rounds
        # Where it stands: the boundary that it has passed.
        self._left: Boundary | None = None
        # The rest of a segment in which the incarnation before was lost.
        self._rest: Assignment | None = None

    async def join(self) -> None:
        """Gives a new island the committed anchor; the first one of a run without a commit founds it."""
        waters = self._waters
        self._member.to(State.JOINING)
        async with waters.founding:
            if not self._position.founded:
                await self._anchor.found(await self._island.found())
                await waters.journal.trace(None, None, ())
                self._position.founded = True
                waters.durability.founded()
        async with waters.membership.door():
            self._rest = await waters.salvage.take_up(self._member, self._island)
            if self._rest is None and not await self._take_up():
                await self._enter()
        waters.membership.joined(self._member, self._island.region)
        if waters.owes_evaluation and self._position.round == waters.resumed:
            await self._evaluate(waters.resumed, self._rules.evaluate_blocks, None)

    async def _take_up(self) -> bool:
        """Lets an island go on with the parameters that a commit holds of it, if they belong to the present anchors."""
        committed = self._position.versions
        if (
            self._island.restored is None
            or committed != self._waters.resumed_versions
            or self._island.restored.keys() != committed.keys()
        ):
            return False
        if any(self._island.restored[fragment].version > version for fragment, version in committed.items()):
            # It had gone on by itself when it handed over its state, and that was never committed.
            return False
        self._member.take_up(self._island.restored)
        if not self._rules.free:
            self._member.inherited = await inherited(
                self._anchor, self._member.name, self._member.versions, self._position
            )
        self._member.joined_at = dict(committed)
        return True

    async def sail(self) -> None:
        """Trains, emits and adopts until no segment is left, or until it is to leave."""
        while (assignment := await self._assignment()) is not None:
            started, timing = now(), Timing()
            work, boundary, skipped = assignment
            if work.lease not in self._member.leases:
                self._member.leases.append(work.lease)
            if skipped:
                self._rounds.reconsider()
            if self._member.joined_late(self._position.versions):
                timing.adopt_s += await self._enter()
            await self._catch_up([due for one in skipped for due in one.adopts], timing)
            self._member.to(State.TRAINING)
            work = await self._begun(self._announced(work, boundary), boundary)
            report = await self._island.train(work)
            self._trained(work, report)
            timing.trained(report)
            adopted: list[tuple[Due, Outcome]] = []
            for stage in boundary.stages:
                emitted = {due: await self._emit(due, timing) for due in stage.emits}
                for due in stage.adopts:
                    own = emitted.get(due, due)
                    adopted.append((own, await self._take(own, timing)))
            if boundary.early:
                await self._hand_over(boundary)
            for due in boundary.early:
                adopted.append((due, await self._take(due, timing)))
            timing.wall_s = now() - started
            self._book(adopted, timing)
            if self._member.strayed:
                await self._come_back()
            await self._hand_over(boundary)
            self._left = boundary
            for due, outcome in adopted:
                ended = self._closes(due) and due.round > self._waters.resumed
                if ended and self._rules.evaluated(due.round):
                    await self._evaluate(due.round, self._rules.evaluate_blocks, outcome)
        # What it trained for rounds that closed without it.
        self._position.release(self._member.leases)
        self._member.leases.clear()
        if self._plans.over(self._member):
            await self._see_the_end()
        else:
            await self._written()

    def _announced(self, work: Work, boundary: Boundary) -> Work:
        """The work, with what is emitted right behind it."""
        first = boundary.stages[0].emits if boundary.stages else ()
        versions = self._member.versions
        emits = tuple((due.fragment, versions[due.fragment], due.round) for due in first)
        if not self._rules.points:
            return replace(work, emits=emits)
        before = tuple(r for lease in self._member.leases if lease != work.lease for r in lease.blocks)
        return replace(work, emits=emits, bases=self._member.bases, before=before)

    async def _begun(self, work: Work, boundary: Boundary) -> Work:
        """The work, less what was done of it before the run was interrupted; notes where the island stands."""
        waters, first = self._waters, not self._member.settled
        self._member.settled = True
        if first and self._rules.points and waters.resumed >= 0 and self._position.versions == waters.resumed_versions:
            work = await waters.salvage.resumed(self._member, self._island, work)
        waters.salvage.begins(self._member, Assignment(work, boundary))
        return work

    async def _see_the_end(self) -> None:
        """Waits for the last round, and takes part in the last evaluation."""
        while not self._plans.complete:
            await self._plans.changed()
        await self._settle_up()
        await self._evaluate(self._rules.schedule.rounds, self._rules.final_blocks, None)
        # Its ranks write their inner state in the background; they may only end when that is part of a commit.
        while self._commits.writing:
            await self._plans.changed()
        self._member.to(State.DONE)

    async def _written(self) -> None:
        """Waits until what its ranks still write is part of a commit; those to come do without."""
        self._commits.excuse(self._member.name)
        self._rounds.reconsider()
        while self._commits.holds(self._member.name):
            await self._plans.changed()

    def _trained(self, work: Work, report: Report) -> None:
        """Books a segment; blocks that time did not suffice for go back."""
        if report.trouble:
            self._waters.journal.event("warning", text=f"island {self._member.name}: {report.trouble}")
        blocks = report.steps * self._rules.islands[self._member.name].blocks_per_step
        if work.seconds and blocks < total(work.lease.blocks):
            ledger = self._position.ledgers[work.lease.source]
            self._member.leases[-1] = ledger.shorten(work.lease, blocks)
        self._member.trained(report.steps, report.tokens)
        self._plans.measured(self._member.name, report.steps, report.seconds)
        usual = self._waters.vetting.strays(self._member.name, report)
        if usual is not None:
            self._member.strayed = True
            self._waters.journal.event(
                "island_strayed",
                island=self._member.name,
                incarnation=self._member.incarnation,
                loss=report.loss,
                usual=usual,
            )

    async def _assignment(self) -> Assignment | None:
        """Waits for the island's next segment; None when it is to train no more."""
        self._member.to(State.READY)
        if self._left is None or self._waters.durability.waiting:
            self._plans.launched(self._member.name)
        while True:
            await self._settle_up()
            if self._rest is not None and not self._member.leaving and not self._plans.complete:
                rest, self._rest = self._rest, None
                return rest
            if self._plans.over(self._member) or self._member.leaving:
                return None
            assignment = self._plans.take(self._member, self._waters.durability.halts)
            if assignment is not None:
                return assignment
            await self._plans.changed()

    async def _settle_up(self) -> None:
        """Hands over for commits that began while the island stood where it is; nothing is expected of a joiner."""
        if self._left is None:
            self._commits.excuse(self._member.name)
        while self._left is not None and self._commits.owed(self._member.name):
            await self._hand_over(self._left)

    async def _emit(self, due: Due, timing: Timing) -> Due:
        """Offers what is due and returns the round it is for; what cannot count is refused here, by name."""
        self._member.to(State.SENDING)
        started = now()
        base = self._member.versions[due.fragment]
        emission = await self._island.emit(due.fragment, base, due.round)
        timing.send_s += now() - started
        timing.norm, timing.bytes_up = emission.norm, timing.bytes_up + emission.nbytes
        due = self._plans.numbered(due, self._member.name)
        self._member.under_way.add(due)
        steps, tokens = self._member.done[due.fragment]
        claim = Claim(tuple(self._member.leases), *self._member.unclaimed)
        self._position.claims[due, self._member.name, self._member.incarnation] = claim
        self._member.leases.clear()
        self._member.unclaimed = (0, 0)
        offer = Offer(
            self._member.name,
            self._member.incarnation,
            due.fragment,
            due.round,
            base,
            steps,
            tokens,
            timing.loss,
            emission,
            timing.train_s,
            now(),
            self._island.region,
        )
        rendezvous = self._rounds.open(due)
        fault = self._waters.vetting.fault_of(offer)
        if fault is not None:
            self._rounds.refuse(offer, fault)
            if fault.number == STALE:
                raise IslandLost(fault.what)
            rendezvous.refuse(self._member.name)
            if not emission.finite:
                # Nor are its moments.  The next incarnation takes up those of the last commit.
                raise IslandLost(fault.what)
        elif not rendezvous.offer(offer):
            self._member.late.add(due)
            if self._rules.quorum.carry and self._position.round < self._rules.schedule.rounds:
                self._rounds.carry(offer)
            else:
                self._rounds.refuse(offer, "it came after the round had closed")
        return due

    async def _take(self, due: Due, timing: Timing) -> Outcome:
        """Waits for a round and adopts what came of it; who came too late for it adopts what is newest."""
        self._member.to(State.WAITING)
        # Whoever is lost from here on has adopted a part of what is due.
        self._member.begun = None
        started = now()
        outcome = await asyncio.shield(self._rounds.find(due).outcome)
        timing.wait_s += now() - started
        self._member.to(State.ADOPTING)
        late = due in self._member.late
        self._member.late.discard(due)
        own = due in self._member.under_way or (self._member.restored and self._plans.passed(due))
        self._member.under_way.discard(due)
        if outcome.prepared is not None and not late:
            update = outcome.prepared.update_of(self._member.name)
        elif self._plans.passed(due) and due.fragment in self._member.inherited:
            update = made_by(self._member.inherited[due.fragment], due.round)
        else:
            current = await self._anchor.current(self._member.name)
            update = next(u for u in current if u.fragment == due.fragment)
        if not self._plans.passed(due):
            self._member.inherited.pop(due.fragment, None)
        # A late contribution that is carried on will be merged; of what an earlier process sent this one knows nothing.
        merged = self._rules.quorum.carry if late else self._member.name in outcome.merged
        heard = {} if self._plans.passed(due) else {due.fragment: merged}
        if update.version > self._member.versions[due.fragment] or (own and outcome.prepared is None):
            started = now()
            if own:
                await self._island.adopt((update,), heard)
            else:
                # A rule that mixes or rebases would begin from an emission that there was not.
                await self._island.join((update,))
            self._member.adopted(due.fragment, update.version)
            timing.adopt_s += now() - started
            timing.bytes_down += update.nbytes
        return outcome

    async def _catch_up(self, missed: Sequence[Due], timing: Timing) -> None:
        """Adopts what was due at boundaries that an island skips, the newest of each fragment."""
        newest = {due.fragment: due for due in missed}
        for due in missed:
            if due in self._member.under_way or due == newest[due.fragment]:
                await self._take(due, timing)

    async def _enter(self) -> float:
        """Takes an island to the newest anchors; returns the seconds that took."""
        started = now()
        updates = await self._anchor.current(self._member.name)
        await self._island.join(updates)
        for update in updates:
            self._member.adopted(update.fragment, update.version)
        self._member.joined_at = dict(self._member.versions)
        return now() - started

    async def _come_back(self) -> None:
        """Takes an island whose training has gone astray to the newest anchors, with moments that begin anew."""
        await self._island.reset()
        await self._enter()
        member = self._member
        # Nothing is left of what it trained since its last emission, nor of emissions that are under way.
        self._position.release(member.leases)
        member.leases.clear()
        member.under_way.clear()
        member.unclaimed, member.strayed = (0, 0), False
        self._waters.journal.event(
            "inner_state_reset",
            island=self._member.name,
            round=self._position.round,
            reason="its inner loss had strayed, it has adopted the anchor",
        )

    async def _hand_over(self, boundary: Boundary | None) -> None:
        """Hands the inner state to the commits that wait for it, or will."""
        rounds = set(self._commits.owed(self._member.name))
        if boundary is not None and not self._rules.free:
            last = [due.round for due in boundary.emits if self._closes(due)]
            rounds |= {round_ for round_ in last if self._waters.durability.wants_inner(round_)}
        bases = None if self._rules.exact else self._member.bases
        for round_ in sorted(rounds):
            if self._commits.wants(round_, self._member.name):
                self._commits.hand_over(round_, self._member.name, await self._island.save(round_, bases))

    async def _evaluate(self, round_: int, blocks: Sequence[int], outcome: Outcome | None) -> None:
        """Takes part in the evaluation of a round, unless the island is behind; without `outcome` it never is."""
        if not blocks:
            return
        self._member.to(State.EVALUATING)
        if self._rules.exact and outcome is not None and self._member.versions != self._position.versions:
            return
        if round_ not in self._waters.evaluations:
            at = None if self._rules.exact else await self._anchor.published()
            self._waters.evaluations.setdefault(round_, Evaluation(blocks, self._rules.evaluate_chunk, at))
        if await self._waters.evaluations[round_].share(self._island):
            self._waters.journal.evaluated(round_, self._waters.evaluations[round_].losses())

    def _closes(self, due: Due) -> bool:
        """True for the fragment that is emitted last in its round."""
        return due.fragment == self._position.closing(due.round, self._rules.last_fragment)

    def _book(self, adopted: Sequence[tuple[Due, Outcome]], timing: Timing) -> None:
        tally = self._position.tally(self._member.name)
        tally.train_s += timing.train_s
        tally.wall_s += timing.wall_s
        self._member.timing = self._member.timing.followed_by(timing)
        ended = [due for due, _ in adopted if self._closes(due)]
        for due in ended[-1:]:
            self._waters.journal.island_round(due, self._member.name, self._member.timing)
            self._member.timing = Timing()
