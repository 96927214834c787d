"""The auditor finds what it is there for: bugs planted into loop and keepers are blamed, each for what it is."""

from collections.abc import Callable

import numpy as np
import pytest

from ray_diloco.outer.layout import Range
from ray_diloco.rounds.commits import Commits
from ray_diloco.rounds.faults import Fault, FaultPlan
from ray_diloco.rounds.ledger import Ledger
from ray_diloco.rounds.ports import Lease
from ray_diloco.rounds.position import Position
from ray_diloco.simulate.anchor import SimAnchor
from ray_diloco.simulate.conditions import Conditions
from ray_diloco.simulate.island import SimIsland
from ray_diloco.simulate.payload import Published
from ray_diloco.simulate.schedules import setup_of
from ray_diloco.simulate.world import World


def blamed(variant: str, *faults: Fault, seed: int = 0) -> str:
    world = World(setup_of(variant, 3), Conditions(seed=seed, spread=0.3, silence_s=5.0), FaultPlan(faults))
    world.run()
    assert world.auditor is not None
    return "\n".join(world.auditor.blamed)


LOST = Fault("exit", "i1", 2, "before_commit")
GONE = Fault("driver_exit", "driver", 3, "mid_inner")


def test_nothing_is_planted_and_nothing_is_blamed() -> None:
    assert blamed("wait", LOST, GONE) == ""


def test_a_ledger_that_issues_a_block_twice_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = Ledger.lease

    def twice(self: Ledger, blocks: int) -> Lease:
        issued = lease(self, blocks)
        return issued if issued.number < 3 else Lease(issued.number, issued.source, (Range(0, blocks),))

    monkeypatch.setattr(Ledger, "lease", twice)
    monkeypatch.setattr(Ledger, "_land", lambda self, lease: self._flying.pop(lease.number))
    monkeypatch.setattr("ray_diloco.rounds.ledger._Blocks.meets", lambda *_: False)
    assert "were credited before" in blamed("wait")


def test_tokens_that_are_counted_for_a_refused_contribution_are_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Position.refuse

    def counted(self: Position, offer: object) -> None:
        self.tokens += 4
        refuse(self, offer)  # type: ignore[arg-type]

    monkeypatch.setattr(Position, "refuse", counted)
    assert "tokens, the contributions have" in blamed("wait", Fault("corrupt_payload", "i0", 1, "before_send"))


def test_an_anchor_that_is_not_the_sum_of_its_contributions_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    move: Callable[..., object] = SimAnchor._move

    def nudged(self: SimAnchor, *arguments: object) -> object:
        kept = move(self, *arguments)
        kept.anchor[0] += 1e-9  # type: ignore[attr-defined]
        return kept

    monkeypatch.setattr(SimAnchor, "_move", nudged)
    assert "and the replay gives" in blamed("wait")


def test_an_island_that_adopts_what_was_not_committed_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    current = SimAnchor.current

    async def private(self: SimAnchor, island: str) -> list[object]:
        updates = list(await current(self, island))
        handle: Published = updates[0].pieces[0].handle
        other = Published(handle.fragment, handle.anchor, handle.version, handle.values + np.ones(4))
        object.__setattr__(updates[0].pieces[0], "handle", other)
        return updates  # type: ignore[return-value]

    monkeypatch.setattr(SimAnchor, "current", private)
    found = blamed("wait", LOST)
    assert "is committed" in found
    assert "measured from" in found


def test_a_commit_that_is_taken_before_the_keepers_swap_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = SimAnchor.commit

    async def late(self: SimAnchor, key: str) -> None:
        import asyncio

        await asyncio.sleep(0.5)
        await commit(self, key)

    monkeypatch.setattr(SimAnchor, "commit", late)
    assert "the commit of 1" in blamed("wait")


def test_work_that_is_lost_with_an_island_and_never_issued_again_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Position, "release", lambda self, leases: None)
    assert "blocks in flight" in blamed("wait", Fault("exit", "i1", 2, "mid_inner"))


def test_an_island_that_sends_one_thing_and_means_another_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    emit = SimIsland.emit

    async def unsure(self: SimIsland, *arguments: int) -> object:
        self._base = self._base + 1.0
        return await emit(self, *arguments)

    monkeypatch.setattr(SimIsland, "emit", unsure)
    assert "measured from" in blamed("wait")


def test_a_run_whose_islands_wait_for_one_another_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: Commits) -> None:
        import asyncio

        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(Commits, "begun", never)
    assert "the run can never end" in blamed("wait")


def test_a_run_that_goes_on_from_another_commit_than_the_newest_good_one_is_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resume = Position.resume

    def elsewhere(round_: int, *rest: object) -> Position:
        position = resume(round_, *rest)  # type: ignore[arg-type]
        position.tokens += 1
        return position

    monkeypatch.setattr(Position, "resume", elsewhere)
    assert "resumed" in blamed("wait", GONE)
