"""The founding commit: a run that ends in its first round goes on from version 0, and not with another model."""

import numpy as np
from test_loop import assert_books_close, resume
from world import World, replay


def begun(world):
    """A world that goes on from the founding commit of another one, whose first round came to nothing."""
    world.manifests = [world.beginning]
    return resume(world)


def test_version_0_is_durable_before_a_round_is():
    world = World()
    assert world.run() == "finished"
    snapshot, anchor, buffer, entries = world.beginning
    assert (snapshot.round, snapshot.step, snapshot.versions, snapshot.members) == (0, 0, {0: 0}, ())
    assert snapshot.ledgers["text"]["credited"] == []
    np.testing.assert_array_equal(anchor, world.anchors[0])
    assert not buffer.any() and entries == {}
    assert [f["round"] for f in world.kinds("checkpoint_written")] == list(range(6))


def test_a_run_that_ends_in_its_first_round_goes_on_from_there():
    straight = World(rounds=3)
    assert straight.run() == "finished"
    lost = World(rounds=3, stop_at=2.5)
    lost.run()
    again, position = begun(lost)
    assert again.run(position) == "finished"
    np.testing.assert_array_equal(again.anchor, straight.anchor)
    assert again.position.ledgers["text"].to_json() == straight.position.ledgers["text"].to_json()
    assert_books_close(again)


def test_a_founding_commit_that_cannot_be_written_costs_nothing():
    world = World(unwritable={0})
    assert world.run() == "finished"
    assert world.beginning is None and [snapshot.round for snapshot, *_ in world.manifests] == [1, 2, 3, 4, 5]
    np.testing.assert_array_equal(world.anchors, replay(world))


def test_the_founding_anchor_is_not_evaluated_on_resume():
    lost = World(stop_at=2.5, evaluate_every=2, heldout=(0, 1, 2))
    lost.run()
    again, position = begun(lost)
    again.evaluate_every, again.heldout, again.owes_evaluation = 2, (0, 1, 2), True
    assert again.run(position) == "finished"
    assert sorted(again.evaluations) == [2, 4, 5]
