"""Commits that cannot be written: training goes on, up to a lag, and then waits until the storage is back."""

import asyncio

import numpy as np
import pytest
from test_loop import assert_books_close, resume
from world import World, replay

ALWAYS = float("inf")


def durable(world):
    return [snapshot.round for snapshot, *_ in world.manifests]


def finish(world):
    assert world.run() == "finished"
    np.testing.assert_array_equal(world.anchors, replay(world))
    assert_books_close(world)
    return world


def broken(begin, end, **more):
    """A world whose storage fails for a while."""
    changes = {"max_lag": 3, "retry_s": 5.0} | more.pop("changes", {})
    world = World(rounds=more.pop("rounds", 10), changes=changes, **more)
    world.rooms["disk"] = [(begin, end)]
    return world


def test_a_storage_that_fails_for_a_while_stops_nothing_below_the_lag():
    world = finish(broken(6.0, 14.0))
    assert not world.kinds("storage_awaited")
    assert durable(world) == [1, 4, 5, 6, 7, 8, 9, 10]


def test_beyond_the_lag_no_round_begins_until_a_commit_is_durable():
    said = []
    world = broken(6.0, 100.0, script=[(60.0, lambda run: said.append(run.waiting))])
    finish(world)
    # Round 1 is durable: rounds 2 to 5 are made, which are more than three.
    assert world.kinds("storage_awaited") == [{"round": 5, "durable": 1, "behind": 4}]
    assert said == ["the storage: 4 rounds are not durable"]
    (back,) = world.kinds("storage_back")
    assert back["durable"] == 5 and 75 < back["waited_s"] < 90
    assert durable(world) == [1, 5, 6, 7, 8, 9, 10]
    # While it waits it is tried again every five seconds.
    failed = [f["round"] for f in world.kinds("checkpoint_failed")]
    assert failed[:4] == [2, 3, 4, 5] and set(failed[4:]) == {5} and len(failed) > 15


def test_what_was_written_after_the_wait_has_everybodys_inner_state_and_can_be_resumed():
    world = finish(broken(6.0, 100.0))
    (late,) = [saved for saved in world.manifests if saved[0].round == 5]
    world.manifests = [late]
    *_, entries = late
    assert sorted(name for name, files in entries.items() if files) == ["i0", "i1"]
    again, position = resume(world)
    again.rounds = 10
    assert again.run(position) == "finished"
    np.testing.assert_array_equal(again.anchor, world.anchor)


def test_without_a_lag_training_never_waits():
    world = finish(broken(6.0, ALWAYS, changes={"max_lag": 0}))
    assert durable(world) == [1]
    assert not world.kinds("storage_awaited")


def test_a_stop_is_heard_while_the_storage_fails():
    world = broken(6.0, ALWAYS, stop_at=50.0)
    assert world.run() == "stopped"
    assert durable(world) == [1]


@pytest.mark.parametrize("delay", [1, 2])
def test_parts_that_are_adopted_late_wait_between_rounds_only(delay):
    world = broken(6.0, 60.0, offsets=(0,), delay=delay, changes={"exact": False})
    assert world.run() == "finished"
    assert_books_close(world)
    assert len(world.kinds("storage_awaited")) == len(world.kinds("storage_back")) == 1
    assert len(world.kinds("round_committed")) == 10


def test_a_free_run_waits_for_its_storage_too():
    world = broken(6.0, 80.0, rounds=20, changes={"free": True, "exact": False, "max_lag": 6})
    assert world.run() == "finished"
    assert_books_close(world)
    assert len(world.kinds("storage_awaited")) == len(world.kinds("storage_back")) == 1


def test_inner_states_are_kept_every_so_many_rounds_at_a_stop_and_at_the_end():
    world = finish(World(rounds=5, changes={"inner_every": 3}))
    held = {
        snapshot.round: sorted(n for n, files in entries.items() if files) for snapshot, *_, entries in world.manifests
    }
    assert held == {1: [], 2: [], 3: ["i0", "i1"], 4: [], 5: ["i0", "i1"]}
    stopped = World(rounds=9, stop_at=10.0, checkpoint_every=4, changes={"inner_every": 4})
    assert stopped.run() == "stopped"
    snapshot, *_, entries = stopped.manifests[-1]
    assert (snapshot.round, sorted(entries)) == (3, ["i0", "i1"])


def test_a_commit_is_made_durable_early_when_too_much_is_kept_until_the_next():
    counted = []

    def crowded():
        counted.append(None)
        return len(counted) % 3 == 0

    world = finish(World(rounds=10, changes={"checkpoint_every": 10, "crowded": crowded}))
    assert durable(world) == [3, 6, 9, 10]
    assert all(entries for *_, entries in world.manifests), "islands hand their inner state over when asked"


def test_a_storage_slower_than_rounds_gets_some_of_them_and_the_last():
    world = finish(World(rounds=10, write_s=9.0))
    written = durable(world)
    assert written[-1] == 10 and 3 <= len(written) < 10
    postponed = [fields["round"] for fields in world.kinds("checkpoint_postponed")]
    assert sorted(written + postponed) == list(range(1, 11))
    assert not world.kinds("storage_awaited"), "training never waits for it"


class Gated(World):
    """Round 2 becomes durable, and one of two islands offers to round 3 or that is prepared, when `open` lets them.

    The two come so many turns of the loop apart, after somebody has asked for a stop.
    """

    def __init__(self, what, turns):
        super().__init__(rounds=9, before=lambda run: asyncio.ensure_future(self.open(run, turns)))
        self.what, self.gates = what, {name: (asyncio.Event(), asyncio.Event()) for name in ("written", what)}

    async def at(self, gate):
        """Waits at a gate."""
        if gate in self.gates:
            came, opened = self.gates[gate]
            came.set()
            await opened.wait()

    async def launch(self, name, incarnation):
        island = await super().launch(name, incarnation)
        emit = island.emit

        async def gated(fragment, base_version, round_):
            emission = await emit(fragment, base_version, round_)
            if round_ == 3 and self.what == "emitted":
                await (self.at("emitted") if name == "i0" else asyncio.Event().wait())
            return emission

        island.emit = gated
        return island

    async def save(self, snapshot, inner, told):
        durable = await super().save(snapshot, inner, told)
        if snapshot.round == 2:
            await self.at("written")
        return durable

    async def prepare(self, step):
        prepared = await super().prepare(step)
        if step.round == 3:
            await self.at("prepared")
        return prepared

    async def open(self, run, turns):
        (written, write), (came, go) = self.gates["written"], self.gates[self.what]
        await written.wait()
        await came.wait()
        run.stop()
        first, second = (write, go) if turns >= 0 else (go, write)
        first.set()
        for _ in range(abs(turns)):
            await asyncio.sleep(0)
        second.set()


@pytest.mark.parametrize("what", ["emitted", "prepared"])
@pytest.mark.parametrize("turns", range(-12, 13))
def test_a_stop_ends_at_a_commit_with_everybodys_inner_state_whatever_comes_in_its_moment(what, turns):
    world = Gated(what, turns)
    assert world.run() == "stopped"
    assert durable(world) in ([1, 2], [1, 2, 3]) and world.position.round == durable(world)[-1]
    assert all(all(files for files in entries.values()) and len(entries) == 2 for *_, entries in world.manifests)
    straight, (again, position) = finish(World(rounds=9)), resume(world)
    assert again.run(position) == "finished"
    np.testing.assert_array_equal(again.anchor, straight.anchor)
