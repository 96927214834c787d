"""The run loop: one coroutine per slot, one rendezvous per round of a fragment, one coroutine that concludes it.

An island **trains** a segment, **emits** what is due, waits for the **merge**, **adopts** it (`voyage.Voyage.sail`).
A round commits everywhere or nowhere: keepers prepare in spare buffers, the decision is a line in the ledger, then they
swap (`conclusions`).  Whatever can fail raises at one of these awaits, and only the supervisor of that island
(`Run._slot`) decides what becomes of it.  Plain DiLoCo (2311.08105) is one fragment without delay and quorum `all`;
every other method is another schedule, quorum, topology or weigher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ray_diloco.errors import InfeasibleError
from ray_diloco.rounds.clock import settled
from ray_diloco.rounds.commits import Commits
from ray_diloco.rounds.conclusions import Conclusions, Told
from ray_diloco.rounds.durability import Durability
from ray_diloco.rounds.failures import Failures
from ray_diloco.rounds.members import ABSENT, Member, State
from ray_diloco.rounds.membership import Membership
from ray_diloco.rounds.own_pace import FreePlans
from ray_diloco.rounds.plans import Planner, Plans
from ray_diloco.rounds.ports import Anchor, Fleet, IslandLost, Journal, Store
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rules import Rules
from ray_diloco.rounds.salvage import Salvage
from ray_diloco.rounds.vetting import Vetting
from ray_diloco.rounds.voyage import Voyage, Waters


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
        for name in rules.initial:
            position.ledger(rules.islands[name].source)
        for fragment in range(rules.schedule.fragments):
            position.versions.setdefault(fragment, 0)
        self._fleet, self._journal = fleet, journal
        self._slots: dict[str, asyncio.Task[None]] = {}
        # Done when there are more slots than the run waits for.
        self._more: asyncio.Future[None] | None = None
        self._failures = Failures(rules.max_losses)
        planner: type[Planner] = FreePlans if rules.free else Plans
        plans = self._plans = planner(rules, position, self.members, journal)
        members = self._membership = Membership(rules, position, self.members, journal, plans)
        vetting = Vetting(rules.guard, position, self.members, members.banish)
        commits = self._commits = Commits(store, position.round, self._written)
        durable = self._durability = Durability(rules, position, self.members, journal, plans, commits)
        failures = self._failures
        told = Told(failures.forget, failures.count, durable.whole, failures.end_with, lambda: durable.over)
        self._rounds = Conclusions(rules, position, anchor, journal, plans, commits, vetting, told)
        self._salvage = Salvage(rules, position, journal, plans, self._rounds.reconsider)
        self._waters = Waters(
            rules, position, anchor, journal, plans, commits, durable, self._rounds, vetting, members, self._salvage,
            evaluations={}, resumed=position.round if position.founded else -1,
            resumed_versions=dict(position.versions),
            owes_evaluation=owes_evaluation and rules.evaluated(position.round), founding=asyncio.Lock(),
        )  # fmt: skip

    # The whole run.

    async def run(self) -> Literal["finished", "stopped"]:
        """Runs until the last round is committed, `stop` is called, or nothing can go on."""
        self._fill(self._membership.slots)
        halted = asyncio.create_task(self._durability.stopped())
        watches = {asyncio.create_task(self._membership.watch()), asyncio.create_task(self._durability.keep_up())}
        try:
            while not (halted.done() or all(slot.done() or self._needless(name) for name, slot in self._slots.items())):
                self._more = asyncio.get_running_loop().create_future()
                open_ = {slot for slot in self._slots.values() if not slot.done()}
                waiting: set[asyncio.Future[Any]] = {*open_, halted, *watches, self._failures.ended, self._more}
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            await self._rounds.end({*self._slots.values(), halted, *watches})
            for name, member in self.members.items():
                self._plans.forsake(name, "")
                if member.state is State.JOINING:
                    # It was about to go on with a segment.
                    self.position.release(member.leases)
        return "finished" if self._plans.complete else "stopped"

    def stop(self) -> None:
        """Ends the run at the newest commit: at once if that is durable, else as soon as the next one is."""
        if not self._durability.stopping:
            self._durability.stopping = True
            self._journal.event("stop_requested", round=self.position.round)
            self._plans.pulse()

    def scale(self, asked: Mapping[str, int]) -> list[str]:
        """Asks for numbers of islands by region ("" is the whole run); see `Membership.scale`."""
        wanted = self._membership.scale(asked)
        self._fill(wanted)
        return wanted

    def keep(self, names: Iterable[str]) -> None:
        """Wants islands too that live on from an earlier driver; to be called before `run`."""
        self._membership.keep(names)

    def drain(self, name: str, reason: str = "asked to", *, returns: bool = False) -> None:
        """Asks an island to leave; see `Membership.drain`."""
        self._membership.drain(name, reason, returns=returns)

    @property
    def awaited(self) -> dict[str, list[str]]:
        """Open rounds, and whom each waits for."""
        return self._rounds.awaited

    @property
    def waiting(self) -> str:
        """For what the whole run waits, in words; empty: for nothing."""
        return self._membership.waiting or self._durability.waiting

    @property
    def shown(self) -> list[str]:
        """Islands that a person wants to see."""
        return self._membership.shown

    @property
    def _over(self) -> bool:
        return self._plans.complete and any(m.state is State.DONE for m in self.members.values())

    def _needless(self, name: str) -> bool:
        """True for a slot whose island is not there when others have brought the run to its end."""
        return self._over and self.members[name].state in (*ABSENT, State.LAUNCHING, State.JOINING)

    # The supervisor of an island.

    def _fill(self, names: Iterable[str]) -> None:
        """Gives each of these slots its supervisor, if it has none."""
        for name in names:
            if name not in self._slots:
                self._slots[name] = asyncio.create_task(self._slot(name))
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def _slot(self, name: str) -> None:
        """Keeps a slot filled while an island is wanted there: one incarnation after the other."""
        member = self.members[name] = Member(name, 0)
        while not self._over:
            await self._membership.opened(name)
            life = self._membership.lives[name] = asyncio.create_task(self._life(member))
            try:
                await settled({life})
            finally:
                life.cancel()
                await settled({life})
            # A life that was cancelled is one that was asked to leave, and whose time is up.
            if not life.cancelled() and life.result():
                return
            member = self.members[name] = member.successor()

    async def _life(self, member: Member) -> bool:
        """One incarnation of an island, from its launch to its end; returns whether it has seen the end of the run."""
        island = None
        try:
            with self._membership.seeking(member) as seeks:
                if seeks:
                    await self._fleet.room(member.name)
                self._membership.launching(member)
            island = await self._fleet.launch(member.name, member.incarnation)
            voyage = Voyage(self._waters, member, island)
            await voyage.join()
            await voyage.sail()
            if member.state is State.DONE:
                return True
            self._membership.left(member)
        except InfeasibleError as none:
            if not self._membership.may_fail(member):
                raise
            self._membership.unplaced(member, none.what.splitlines()[0])
        except IslandLost as lost:
            self._membership.lost(member, lost)
            self.position.tally(member.name).restarts += 1
            if not member.leaving:
                self._failures.count(f"island {member.name} was lost: {lost}", member.name)
        except asyncio.CancelledError:
            if member.leaving:
                self._membership.left(member)
            raise
        finally:
            if member.state in ABSENT:
                self._write_off(member)
            self._plans.launched(member.name)
            if island is not None:
                await self._fleet.retire(island)
        return False

    def _write_off(self, member: Member) -> None:
        """Issues the work of an island that is gone again, unless its successor may go on with it; no commit waits."""
        self._salvage.strand(member)
        self.position.release(member.leases)
        member.leases.clear()
        if member.state in (State.LEFT, State.QUARANTINED):
            self._plans.forsake(member.name, "its slot is not filled again for a while")
        if member.wreck is None:
            self._plans.withdraw(member.name)
        self._commits.lost(member.name)
        self._rounds.reconsider()

    def _written(self, task: asyncio.Task[None]) -> None:
        self._failures.end_with(task)
        self._plans.pulse()
