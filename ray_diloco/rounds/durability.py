"""When a commit is made durable, and when the run waits for that: on request to stop, or too far ahead of the storage.

Version 0 is the first, as soon as it exists.
Writing never stops training by itself: where the storage is slower than rounds, not each of them is made durable.  Only
when the newest durable commit is more than `max_lag` rounds behind does no new round begin; then the commit of where
the run stands is tried again and again until one succeeds.
"""

from __future__ import annotations

import asyncio

from ray_diloco.outer.schedule import Due
from ray_diloco.rounds.clock import now
from ray_diloco.rounds.commits import Commits
from ray_diloco.rounds.members import Member, State
from ray_diloco.rounds.plans import Halt, Planner
from ray_diloco.rounds.ports import Journal
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rules import Rules


class Durability:
    """Decides about the durable commits of a run.

    Attributes:
      stopping: somebody has asked the run to stop.
      waiting: that the run waits for its storage, in words; empty: it does not.
    """

    def __init__(
        self,
        rules: Rules,
        position: Position,
        members: dict[str, Member],
        journal: Journal,
        plans: Planner,
        commits: Commits,
    ) -> None:
        self._rules, self._position, self._members = rules, position, members
        self._journal, self._plans, self._commits = journal, plans, commits
        # Versions of the anchors when the last round of the whole model ended.
        self._whole = dict(position.versions)
        # A commit was due that the storage was too slow for.
        self._postponed = False
        self.stopping = False
        self.waiting = ""

    @property
    def halts(self) -> Halt:
        """What must not be planned now."""
        stopped = self.stopping and self._commits.sent == self._position.round
        return Halt(everything=stopped, rounds=self._lags)

    def founded(self) -> None:
        """Version 0 exists: makes it durable, so that a run that ends in its first round has something to go on from.

        No inner state is in it: there is none before the first step.
        """
        self._commits.start(self._position.snapshot(0, ()), _nothing(), inner=False)

    def wants_inner(self, round_: int) -> bool:
        """True if islands hand over their inner state of a round without being asked: a commit of it may come."""
        return (self._rules.durable(round_) and self._rules.keeps_inner(round_)) or self.stopping

    def whole(self, told: asyncio.Task[None]) -> None:
        """A round of the whole model has ended: starts the durable write of where the run stands, if it is time."""
        round_ = self._position.round
        self._whole = dict(self._position.versions)
        wanted = self._rules.durable(round_) or (self._postponed and self._rules.exact)
        if (self.stopping or self._rules.crowded()) and not wanted:
            closing = self._position.closing(round_, self._rules.last_fragment)
            # Islands that have gone on, and did not know, could not say any more where they stood.
            beyond = set() if self._rules.exact else self._plans.beyond(Due(closing, round_))
            wanted = beyond <= self._commits.early(round_)
        self._postponed = wanted and self._commits.full and not self.stopping and round_ < self._rules.schedule.rounds
        if self._postponed:
            self._journal.event("checkpoint_postponed", round=round_, durable=self._commits.durable)
        elif wanted:
            self._start(told)
        if self.stopping:
            self._plans.pulse()

    @property
    def over(self) -> bool:
        """True when a requested stop may take place: all that was committed is durable.

        From then on nothing more may be committed: nobody would hand over what a commit of it would need.
        """
        return self.stopping and self._commits.sent == self._position.round and not self._commits.writing

    async def stopped(self) -> None:
        """Returns when a requested stop may take place."""
        while not self.over:
            await self._plans.changed()

    async def keep_up(self) -> None:
        """Tries the commit again for which the run waits; returns never."""
        since = None
        while True:
            if self._lags and since is None and not self._plans.complete:
                since = now()
                behind = self._position.round - self._commits.durable
                self._journal.event(
                    "storage_awaited", round=self._position.round, durable=self._commits.durable, behind=behind
                )
                self.waiting = f"the storage: {behind} rounds are not durable"
            elif since is not None and not self._lags:
                self._journal.event("storage_back", durable=self._commits.durable, waited_s=now() - since)
                since, self.waiting = None, ""
            if since is not None and self._at_rest:
                await asyncio.sleep(self._rules.retry_s)
                if self._lags and self._at_rest and not self.over:
                    self._start(_nothing())
                    # Those who wait for a segment hand over their inner state.
                    self._plans.pulse()
            owed = self.stopping and not self._plans.complete and self._commits.sent != self._position.round
            if owed and self._at_rest:
                # No round will end for which a commit would be due: too few islands are there.
                self._start(_nothing())
                self._plans.pulse()
            await self._plans.changed()

    @property
    def _lags(self) -> bool:
        return 0 < self._rules.max_lag < self._position.round - self._commits.durable

    @property
    def _at_rest(self) -> bool:
        """True where a commit can be taken of the state as it is: between two rounds, and with nobody under way."""
        still = all(member.state is State.READY for member in self._members.values() if member.sailing)
        # At its own pace no island is at rest before all that it has sent is concluded.
        whole = self._rules.free or self._whole == self._position.versions
        return still and whole and not self._commits.writing

    def _start(self, told: asyncio.Future[None]) -> None:
        round_ = self._position.round
        crew = sorted(m.name for m in self._members.values() if m.sailing and not m.leaving)
        self._commits.start(
            self._position.snapshot(round_, crew), told, self._rules.keeps_inner(round_) or self.stopping
        )


def _nothing() -> asyncio.Future[None]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done
