"""Islands that are lost in the midst of a segment: their successors go on from progress points, or do not, and why."""

import numpy as np
import pytest
from world import IslandLost, World, replay

from ray_diloco.rounds.rendezvous import Quorum

WAIT_S = 10.0


def lost_at(step, *, island="i0", segment=2, incarnation=0):
    return {(island, incarnation, f"step {step}", segment): IslandLost("it died")}


def finish(world, wait_s=WAIT_S):
    world.changes = {"points": True, "point_wait_s": wait_s} | world.changes
    assert world.run() == "finished"
    ledger = world.position.ledgers["text"]
    assert ledger.balanced() and ledger.in_flight == 0
    return world


def taken_up(world):
    return [(e["island"], e["incarnation"], e["segment"], e["done"]) for e in world.kinds("progress_taken_up")]


def reasons(world):
    return [e["reason"] for e in world.kinds("progress_ignored")]


def same_run(world, other):
    """Whether two runs have made the same of the same blocks."""
    ours, theirs = world.position, other.position
    assert ours.ledgers["text"].to_json() == theirs.ledgers["text"].to_json()
    assert [t.steps for t in ours.tallies.values()] == [t.steps for t in theirs.tallies.values()]
    return all(np.array_equal(a, b) for a, b in zip(world.anchors, other.anchors, strict=True))


@pytest.mark.parametrize("island", ["i0", "i1"])
@pytest.mark.parametrize("step", range(1, 8))
@pytest.mark.parametrize("names", [("i0", "i1"), ("i0", "i1", "i2")])
def test_a_run_in_which_an_island_died_equals_one_in_which_none_did(names, step, island):
    whole = finish(World(names, H=8, rounds=3))
    world = finish(World(names, H=8, rounds=3, every=2, faults=lost_at(step, island=island)))
    done = step // 2 * 2
    if done:
        assert taken_up(world) == [(island, 1, 2, done)] and not reasons(world)
        assert same_run(world, whole)
    else:
        assert reasons(world) == ["other work"], "its newest one is of the segment before"
    assert all(np.array_equal(a, b) for a, b in zip(world.anchors, replay(world), strict=True))


def test_without_points_the_round_goes_on_without_it():
    world = World(H=8, rounds=3, faults=lost_at(5))
    assert world.run() == "finished" and not world.points
    assert [e["islands"] for e in world.kinds("round_committed")][1] == ["i1"]


def test_the_last_round_and_a_run_of_one_island_are_taken_up_as_well():
    whole = finish(World(("i0",), H=8, rounds=3))
    world = finish(World(("i0",), H=8, rounds=3, faults=lost_at(6, segment=3)), wait_s=0.0)
    assert taken_up(world) == [("i0", 1, 3, 6)] and same_run(world, whole)


def test_all_islands_may_die_at_once():
    whole = finish(World(H=8, rounds=3))
    world = finish(World(H=8, rounds=3, faults=lost_at(5) | lost_at(3, island="i1")))
    assert sorted(taken_up(world)) == [("i0", 1, 2, 5), ("i1", 1, 2, 3)] and same_run(world, whole)


def test_a_successor_that_dies_further_on_is_succeeded_as_well():
    whole = finish(World(H=8, rounds=3))
    world = finish(World(H=8, rounds=3, faults=lost_at(3) | lost_at(6, incarnation=1)))
    assert taken_up(world) == [("i0", 1, 2, 3), ("i0", 2, 2, 6)] and same_run(world, whole)


def test_one_that_gets_no_further_than_its_point_is_not_tried_again():
    world = finish(World(H=8, rounds=3, every=4, faults=lost_at(5) | lost_at(6, incarnation=1)))
    assert taken_up(world) == [("i0", 1, 2, 4)] and reasons(world) == ["no further"]


def test_a_point_that_ends_whoever_takes_it_up_is_not_tried_again():
    world = finish(World(H=8, rounds=3, faults=lost_at(5) | {("i0", 1, "recover", 2): IslandLost("out of memory")}))
    assert not taken_up(world) and len(world.kinds("island_lost")) == 2
    assert len(world.kinds("round_committed")) == 3


def test_a_round_waits_only_so_long_and_then_goes_on_without_it():
    world = finish(World(H=8, rounds=4, launch_s=30.0, faults=lost_at(5)), wait_s=5.0)
    assert [e["islands"] for e in world.kinds("round_committed")][1] == ["i1"]
    assert reasons(world) == ["the others have concluded its segment without it"]
    assert all(np.array_equal(a, b) for a, b in zip(world.anchors, replay(world), strict=True))


def test_without_waiting_it_is_taken_up_where_the_others_still_train():
    world = finish(World(H=8, rounds=3, launch_s=1.0, speed={"i1": 3.0}, faults=lost_at(5)), wait_s=0.0)
    assert taken_up(world) == [("i0", 1, 2, 5)]


def test_a_quorum_that_is_reached_waits_for_no_wreck():
    quorum = Quorum("at_least", n=2)
    world = finish(World(("i0", "i1", "i2"), H=8, rounds=4, launch_s=9.0, quorum=quorum, faults=lost_at(5)))
    assert [e["islands"] for e in world.kinds("round_committed")][1] == ["i1", "i2"]
    assert reasons(world) == ["the others have concluded its segment without it"]


def test_a_loss_while_it_sends_costs_no_more_than_the_steps_since_the_point():
    whole = finish(World(H=8, rounds=3))
    world = finish(World(H=8, rounds=3, every=3, faults={("i0", 0, "emit", 2): IslandLost("it died")}))
    assert taken_up(world) == [("i0", 1, 2, 6)] and same_run(world, whole)


def test_what_was_lost_after_it_was_offered_is_merged_and_not_taken_up():
    world = finish(World(H=8, rounds=3, faults={("i0", 0, "adopt", 2): IslandLost("it died")}))
    assert not taken_up(world) and not reasons(world)
    assert [e["islands"] for e in world.kinds("round_committed")][1] == ["i0", "i1"]


def test_an_island_that_is_asked_to_leave_leaves_no_wreck():
    world = World(H=8, rounds=3, faults=lost_at(5), changes={"drain_s": 100.0})
    world.script = [(12.0, lambda run: run.drain("i0"))]
    finish(world)
    assert not taken_up(world) and len(world.kinds("island_launching")) == 2


@pytest.mark.parametrize("stop_round", [0, 1, 2])
def test_a_run_that_was_cut_off_goes_on_in_the_midst_of_its_round(stop_round):
    whole = finish(World(H=8, rounds=4))
    cut = World(H=8, rounds=4, every=2, changes={"points": True})
    fatal = RuntimeError("the driver is gone")
    cut.faults = {("i0", 0, "step 5", stop_round + 1): fatal}
    with pytest.raises(RuntimeError, match="the driver is gone"):
        cut.run()
    again = resumed(cut, stop_round)
    finish(again)
    assert sorted(taken_up(again)) == [("i0", 0, 1, 4), ("i1", 0, 1, 6)]
    assert np.array_equal(again.anchors[-1], whole.anchors[-1])
    assert again.position.ledgers["text"].to_json() == whole.position.ledgers["text"].to_json()


def resumed(cut, round_):
    """A world that goes on from a commit of another one, whose points are still there."""
    from ray_diloco.rounds.position import Position

    snapshot, anchor, buffer, _ = next(m for m in (cut.beginning, *cut.manifests) if m[0].round == round_)
    again = World(H=cut.H, rounds=cut.rounds, points=cut.points, founded=True, version=round_)
    again.anchor, again.buffer, again.anchors = anchor.copy(), buffer.copy(), [anchor]
    position = Position.resume(snapshot.round, snapshot.step, snapshot.versions, snapshot.ledgers, snapshot.counters)
    run = again.run
    again.run = lambda: run(position)
    return again


def test_a_point_of_another_anchor_is_not_taken_up_by_a_run_that_was_cut_off():
    cut = World(H=8, rounds=4, every=2, changes={"points": True})
    cut.faults = {("i0", 0, "step 5", 3): RuntimeError("the driver is gone")}
    with pytest.raises(RuntimeError):
        cut.run()
    again = resumed(cut, 2)
    work, steps, theta, base = again.points["i0"]
    again.points["i0"] = (work, steps, theta, base + 1e-9)
    finish(again)
    assert [name for name, *_ in taken_up(again)] == ["i1"] and reasons(again) == ["another anchor"]


def test_islands_at_their_own_pace_go_on_too_and_the_run_does_not_wait_for_one_that_never_comes():
    free = {"free": True, "point_wait_s": 3.0}
    world = finish(World(H=8, rounds=6, launch_s=1.0, faults=lost_at(5), changes=dict(free)))
    assert [(e[0], e[1], e[3]) for e in taken_up(world)] == [("i0", 1, 5)]
    never = {"i0": [(0.0, 6.0)]}
    world = finish(World(H=8, rounds=6, rooms=never, faults=lost_at(5), changes=dict(free)))
    assert not taken_up(world) and world.position.round == 6
