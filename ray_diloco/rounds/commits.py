"""Durable commits under way: what was sent to the store, and which islands still owe their inner state to it.

A commit is written in the background while islands train on.  Each island that takes part in its round has a ticket
and redeems it with a copy of its inner state.  One that is lost, or came too late for the round, is excused, and the
commit goes without it.  Where a merge is adopted with a delay, islands pass the point before the commit begins: they
hand over in advance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ray_diloco.rounds.ports import Snapshot, Store

# Commits that are written at a time.  Keepers need memory of its own for each.
MOST = 2

Written = Awaitable[Sequence[Any]]
_Ticket = asyncio.Future[Written | None]


class Commits:
    """The durable commits of a run.

    Args:
      store: where they go.
      round_: newest durable round so far; 0 also where nothing is durable yet.
      ended: called with the task of each write that ended.

    Attributes:
      durable: newest round that is durable.
      sent: newest round whose write has begun.
    """

    def __init__(self, store: Store, round_: int, ended: Callable[[asyncio.Task[None]], None]) -> None:
        self.durable = self.sent = round_
        self._store, self._ended = store, ended
        self._tickets: dict[int, dict[str, _Ticket]] = {}
        self._early: dict[int, dict[str, Written]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: set[int] = set()

    @property
    def writing(self) -> bool:
        """True while a commit is being written."""
        return bool(self._tasks)

    @property
    def full(self) -> bool:
        """True while so many commits are being written that the storage is slower than rounds."""
        return len(self._tasks) >= MOST

    def start(self, snapshot: Snapshot, told: Awaitable[None], inner: bool = True) -> None:
        """Begins to write a commit, to be visible after `told`; with inner states, its members get a ticket each."""
        loop = asyncio.get_running_loop()
        members = snapshot.members if inner else ()
        tickets = self._tickets[snapshot.round] = {name: loop.create_future() for name in members}
        self.sent = snapshot.round
        self._starting.add(snapshot.round)
        for round_ in [r for r in self._early if r <= snapshot.round]:
            for name, written in self._early.pop(round_).items():
                if round_ == snapshot.round and name in tickets:
                    tickets[name].set_result(written)
        task = asyncio.create_task(self._write(snapshot, tickets, told))
        self._tasks.add(task)
        task.add_done_callback(self._end)

    async def begun(self) -> None:
        """Waits until keepers have been asked for every commit that was started: until then they must not move."""
        while self._starting:
            await asyncio.sleep(0)

    def early(self, round_: int) -> set[str]:
        """Islands that have handed over their state for a round whose commit has not begun."""
        return set(self._early.get(round_, ()))

    def owed(self, island: str) -> list[int]:
        """Rounds whose commits wait for the inner state of an island."""
        return [round_ for round_ in self._tickets if self._awaits(round_, island)]

    def wants(self, round_: int, island: str) -> bool:
        """True if the commit of a round has, or could still get, a use for the inner state of an island."""
        return self._awaits(round_, island) or (round_ > self.sent and island not in self._early.get(round_, {}))

    def hand_over(self, round_: int, island: str, written: Written) -> None:
        """Takes an inner state that is being written; a commit that failed meanwhile has no use for it."""
        if self._awaits(round_, island):
            self._tickets[round_][island].set_result(written)
        elif round_ > self.sent:
            self._early.setdefault(round_, {})[island] = written

    def _awaits(self, round_: int, island: str) -> bool:
        ticket = self._tickets.get(round_, {}).get(island)
        return ticket is not None and not ticket.done()

    def excuse(self, island: str) -> None:
        """Lets all commits under way go without an island's inner state, if they have not got it."""
        for round_ in self._tickets:
            if self._awaits(round_, island):
                self._tickets[round_][island].set_result(None)

    def lost(self, island: str) -> None:
        """Expects nothing more of an island, and does without what it was still writing."""
        for early in self._early.values():
            early.pop(island, None)
        self.excuse(island)

    def holds(self, island: str) -> bool:
        """True while a commit is being written that takes up what an island has handed over."""
        tickets = [tickets[island] for tickets in self._tickets.values() if island in tickets]
        return any(ticket.done() and ticket.result() is not None for ticket in tickets)

    async def settle(self) -> None:
        """Lets what is being written come to its end, without those who have not handed over."""
        for tickets in self._tickets.values():
            for island in tickets:
                self.excuse(island)
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _write(self, snapshot: Snapshot, tickets: Mapping[str, _Ticket], told: Awaitable[None]) -> None:
        inner = {name: _entries(ticket) for name, ticket in tickets.items()}
        try:
            saving = asyncio.ensure_future(self._store.save(snapshot, inner, told))
            await asyncio.sleep(0)
            self._starting.discard(snapshot.round)
            durable = await saving
        finally:
            # A store that failed early has not asked for all of them.
            for entries in inner.values():
                entries.close()
        if durable is not False:
            self.durable = max(self.durable, snapshot.round)
        del self._tickets[snapshot.round]

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._ended(task)


async def _entries(ticket: _Ticket) -> Sequence[Any]:
    written = await ticket
    return () if written is None else await written
