"""Anchor shards that may die: each is kept with what made it what it is, so that a new one can take its place.

A keeper remembers its beginning (the founding parameters, or the newest durable commit) and every call since that
changed it: preparations with references to their payloads, commits, writes under way.  A shard that died is started
anew and told all that again, in the order in which it was told before.  Shards compute the same from the same, so the
new one has the old one's bits, and the call that met a dead shard is simply made again.  What a durable commit holds
is forgotten, so that little is remembered where every round is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ray_diloco.checkpoint.manifest import Manifest
from ray_diloco.cluster.calls import ActorFailed, answers
from ray_diloco.cluster.misfortune import NO_FAULTS
from ray_diloco.cluster.placement import on_node
from ray_diloco.cluster.shard import ShardActor, ShardSettings, ShardWork
from ray_diloco.cluster.storage import Storage
from ray_diloco.errors import ClusterError, DilocoError
from ray_diloco.rounds.clock import now
from ray_diloco.rounds.ports import Journal

T = TypeVar("T")


@dataclass(frozen=True)
class Shards:
    """How shards come and go.

    Attributes:
      start: starts the actor of one, near the node that is named, if one is.
      end: ends an actor that may be frozen.
      most: how many may be lost in a row without a durable commit in between.
      deadline_s: seconds that a call may take; `alive_s`: that a living shard may be silent.
    """

    start: Callable[[str | None], Any]
    end: Callable[[Any], None]
    most: int
    deadline_s: float
    alive_s: float


@dataclass(frozen=True)
class _Told:
    """A call that changed a shard.  `key` is that of the preparation that it is of; `nbytes` is what it keeps alive."""

    method: str
    arguments: tuple[Any, ...]
    key: str = ""
    nbytes: int = 0


@dataclass(frozen=True)
class _Saved:
    """A write under way: what had been told by then is in it."""

    round: int
    arguments: tuple[Any, ...]


def start_shard(node_id: str | None) -> Any:
    """Starts the actor of a shard, on a node if that is alive."""
    return ShardActor.options(**on_node(node_id)).remote()


class Keeper:
    """One anchor shard: the anchors that it keeps, which part of a contribution is for it, and what it was told.

    Attributes:
      frozen: it was silent though its process lived.
    """

    def __init__(self, handle: Any, settings: ShardSettings, node_id: str | None) -> None:
        self._handle = handle
        self.anchors, self.part, self.index = settings.anchors, settings.part, settings.index
        self.node_id, self.frozen = node_id, False
        self._settings = settings
        self._beginning: _Told | None = None
        self._told: list[_Told | _Saved] = []
        # Commits that are to be sent before any other call, with their answers; and those that were.
        self._held: list[tuple[str, int]] = []
        self._committing: dict[str, Any] = {}

    @property
    def handle(self) -> Any:
        """The actor; what was held back has gone to it."""
        held, self._held = self._held, []
        for key, fragment in held:
            self._committing[key] = self._handle.commit.remote(key, fragment)
        return self._handle

    @property
    def kept_bytes(self) -> int:
        """Bytes of payloads that are kept alive for a successor."""
        return sum(told.nbytes for told in self._told if isinstance(told, _Told))

    def build(self) -> Any:
        """Makes room for the anchors."""
        return self.handle.build.remote(self._settings)

    def found(self, handles: Sequence[Any]) -> Any:
        """Sets version 0."""
        self._beginning = _Told("found", tuple(handles))
        return self.handle.found.remote(*handles)

    def load(self, storage: Storage, manifest: Manifest) -> Any:
        """Takes over a commit."""
        self._beginning = _Told("load", (storage, manifest))
        return self.handle.load.remote(storage, manifest)

    def prepare(self, work: ShardWork, payloads: Sequence[Any], nbytes: int) -> Any:
        """Prepares a movement; the same again is not remembered twice."""
        told = _Told("prepare", (work, *payloads), work.key, nbytes)
        if told not in self._told:
            self._told.append(told)
        return self.handle.prepare.remote(work, *payloads)

    def commit(self, key: str, fragment: int) -> None:
        """Makes a preparation the committed state, before anything else is asked of the shard; `committed` sends it."""
        self._told.append(_Told("commit", (key, fragment), key))
        self._held.append((key, fragment))

    def committed(self, key: str) -> list[Any]:
        """The answer to a commit; nothing where a successor has been told of it with all the rest."""
        _ = self.handle
        return [self._committing.pop(key)] if key in self._committing else []

    def abort(self, key: str) -> Any:
        """Forgets a preparation."""
        self._told = [told for told in self._told if isinstance(told, _Saved) or told.key != key]
        return self.handle.abort.remote(key)

    def save(self, storage: Storage, round_: int, labels: Sequence[Any], payloads: Sequence[Any]) -> Any:
        """Starts to write the committed state; see `Shard.save`."""
        self._told.append(_Saved(round_, (storage, round_, labels, *payloads)))
        return self.handle.save.remote(storage, round_, labels, *payloads)

    def durable(self, storage: Storage, manifest: Manifest) -> None:
        """Takes a commit for the beginning: of what it holds, nothing needs to be told again."""
        at = next((k for k, told in enumerate(self._told) if _is_write(told, manifest.round)), None)
        if at is None:
            return
        before, after = self._told[:at], self._told[at + 1 :]
        done = {told.key for told in before if isinstance(told, _Told) and told.method == "commit"}
        still_open = [told for told in before if isinstance(told, _Told) and told.key not in done]
        self._beginning, self._told = _Told("load", (storage, manifest)), [*still_open, *after]

    def not_durable(self, round_: int) -> None:
        """Forgets a write that came to nothing."""
        self._told = [told for told in self._told if not _is_write(told, round_)]

    def succeed(self, handle: Any) -> list[Any]:
        """Puts a new actor in the place of the dead one and tells it everything; nothing can come in between.

        Returns:
          The calls that have to succeed.  What was prepared and not committed will be asked for once more.
        """
        self._handle, self.frozen = handle, False
        self._held, self._committing = [], {}
        self._settings = replace(self._settings, faults=NO_FAULTS)
        refs = [self.build()]
        committed = {told.key for told in self._told if isinstance(told, _Told) and told.method == "commit"}
        beginning = [] if self._beginning is None else [self._beginning]
        for told in (*beginning, *self._told):
            if isinstance(told, _Saved):
                refs.append(handle.save.remote(*told.arguments))
            elif told.method != "prepare":
                refs.append(getattr(handle, told.method).remote(*told.arguments))
            else:
                meta, _ = handle.prepare.remote(*told.arguments)
                refs += [meta] if told.key in committed else []
        return refs


class Keepers:
    """All shards of an anchor, and what is done when one of them is dead."""

    def __init__(self, shards: Shards) -> None:
        self.all: list[Keeper] = []
        self.journal: Journal | None = None
        self._shards = shards
        self._generation = self._lost = 0
        self._beyond_repair = False
        self._reviving = asyncio.Lock()

    @property
    def kept_bytes(self) -> int:
        """Bytes of payloads that are kept alive for successors."""
        return sum(keeper.kept_bytes for keeper in self.all)

    async def ask(self, what: str, attempt: Callable[[], Coroutine[Any, Any, T]], *, starting: bool = False) -> T:
        """Makes calls to shards, and makes them again when one of the shards was dead and has a successor.

        Args:
          what: the calls in words, for the error.
          attempt: makes them and waits for the answers.
          starting: the processes of the shards may not be there yet, so that silence says nothing.

        Raises:
          ClusterError: RD-222, a living shard failed, or shards die again and again.
          DilocoError: what a shard raised.
        """
        while True:
            seen = self._generation
            try:
                return await (attempt() if starting else self._watched(attempt()))
            except ActorFailed as failed:
                if not await self._revived(seen, failed):
                    raise _failed(f"while {what}: {failed}") from failed.cause

    async def tell(self, what: str, refs: Sequence[Any]) -> None:
        """Waits for calls that keepers remember: a successor is told them with all the rest.  Raises as `ask`."""
        pending = [refs]

        async def attempt() -> None:
            await answers(pending.pop() if pending else (), what, self._shards.deadline_s)

        await self.ask(what, attempt)

    def durable(self, storage: Storage, manifest: Manifest) -> None:
        """Notes a durable commit."""
        self._lost = 0
        for keeper in self.all:
            keeper.durable(storage, manifest)

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for calls; when they take long, ends shards that are silent, by which calls to them fail."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=self._shards.alive_s))[0]:
                for keeper in await self._dead():
                    self._shards.end(keeper.handle)
            return task.result()
        finally:
            task.cancel()

    async def _revived(self, seen: int, failed: ActorFailed) -> bool:
        """Sees that dead shards have successors; False if none is dead, or too many have been."""
        async with self._reviving:
            if self._generation != seen:
                return not self._beyond_repair
            while dead := await self._dead():
                self._lost += len(dead)
                if self._lost > self._shards.most:
                    break
                began = now()
                for keeper in dead:
                    how = "frozen" if keeper.frozen else "died"
                    self.event("anchor_shard_lost", shard=keeper.index, how=how, reason=str(failed))
                    self._shards.end(keeper.handle)
                told = [ref for keeper in dead for ref in keeper.succeed(self._shards.start(keeper.node_id))]
                self._generation += 1
                try:
                    await answers(told, "telling an anchor shard what it had been told", self._shards.deadline_s)
                except ActorFailed as again:
                    failed = again
                    continue
                except DilocoError as error:
                    self._beyond_repair = True
                    raise _failed(f"and cannot be made again: {error.what}") from error
                for keeper in dead:
                    self.event("anchor_shard_replaced", shard=keeper.index, recovery_s=now() - began)
                return True
            self._beyond_repair = self._generation != seen
            return False

    async def _dead(self) -> list[Keeper]:
        """Shards that do not answer; the frozen are as good as dead."""

        async def silent(keeper: Keeper) -> bool:
            try:
                await answers([keeper.handle.alive.remote()], "the heartbeat of a shard", self._shards.alive_s)
            except ActorFailed as failed:
                keeper.frozen = keeper.frozen or failed.cause is None
                return True
            return False

        found = await asyncio.gather(*(silent(keeper) for keeper in self.all))
        return [keeper for keeper, dead in zip(self.all, found, strict=True) if dead]

    def event(self, kind: str, **fields: Any) -> None:
        """One line of the tape, if there is one."""
        if self.journal is not None:
            self.journal.event(kind, **fields)


def _failed(how: str) -> ClusterError:
    return ClusterError(
        222, f"an anchor shard failed {how}", "run the same command again: it goes on from the last commit"
    )


def _is_write(told: _Told | _Saved, round_: int) -> bool:
    return isinstance(told, _Saved) and told.round == round_
