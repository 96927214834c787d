"""The run loop on virtual time: rounds, losses, joins, stops and resumes, against an independent direct loop."""

import numpy as np
import pytest
from world import DIM, IslandLost, World, replay

from ray_diloco.errors import SyncError
from ray_diloco.outer.layout import Range, total
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rendezvous import Quorum


def assert_books_close(world):
    for ledger in world.position.ledgers.values():
        assert ledger.balanced()
    rows = [(n, i, w) for n, i, w in world.trained]
    blocks = [v for _, _, w in rows for r in w.lease.blocks for v in range(r.start, r.stop)]
    credited = world.position.ledgers["text"].credited
    assert {v for r in credited for v in range(r.start, r.stop)} <= set(blocks)
    assert world.position.tokens == 10 * total(credited)


def test_rounds_equal_a_direct_loop_whatever_the_speeds():
    slow, fast = World(speed={"i1": 7.0}), World(speed={"i0": 3.0})
    for world in (slow, fast):
        assert world.run() == "finished"
        np.testing.assert_array_equal(world.anchors, replay(world))
        assert world.position.ledgers["text"].credited == (Range(0, 2 * 2 * 4 * 5),)
        assert_books_close(world)
    np.testing.assert_array_equal(slow.anchors, fast.anchors)


def test_a_lost_island_is_replaced_and_joins_at_the_next_boundary():
    world = World(faults={("i1", 0, "train", 2): IslandLost("rank 0 died")}, rounds=6)
    assert world.run() == "finished"
    assert [f["reason"] for f in world.kinds("island_lost")] == ["rank 0 died"]
    assert [f["islands"] for f in world.kinds("round_committed")] == [["i0", "i1"], ["i0"]] + [["i0", "i1"]] * 4
    assert world.kinds("island_joined")[-1]["incarnation"] == 1
    np.testing.assert_array_equal(world.anchors, replay(world))
    assert world.position.ledgers["text"].credited == (Range(0, 2 * 4 * 11),)
    assert world.position.tallies["i1"].restarts == 1
    assert_books_close(world)


@pytest.mark.parametrize("phase", ["launch", "train", "emit", "adopt", "evaluate", "save"])
@pytest.mark.parametrize("round_", [1, 2, 5])
@pytest.mark.parametrize("who", [("i0",), ("i1",), ("i0", "i1")])
def test_every_loss_at_every_phase_leaves_the_books_closed(phase, round_, who):
    at = {"launch": 0, "evaluate": 0}.get(phase, round_)
    faults = {(name, 0, phase, at): IslandLost(phase) for name in who}
    world = World(faults=faults, evaluate_every=1, heldout=(0, 1, 2, 3, 4), speed={"i1": 1.5})
    assert world.run() == "finished"
    np.testing.assert_array_equal(world.anchors, replay(world))
    assert_books_close(world)
    assert world.manifests[-1][0].round == 5
    assert [loss.block for loss in world.evaluations[5]] == [0, 1, 2, 3, 4]


def test_a_fault_of_the_last_islands_repeats_the_segment():
    faults = {(name, 0, "train", 3): IslandLost("power cut") for name in ("i0", "i1")}
    world = World(faults=faults)
    assert world.run() == "finished"
    assert len(world.kinds("round_committed")) == 5
    np.testing.assert_array_equal(world.anchors, replay(world))


def test_a_contribution_that_is_not_finite_is_refused_and_its_blocks_are_issued_again():
    world = World(refuse={("i1", 2): "not finite"})
    assert world.run() == "finished"
    refused = world.kinds("contribution_rejected")
    assert [(f["island"], f["round"], f["reason"]) for f in refused] == [("i1", 2, "not finite")]
    assert world.kinds("round_committed")[1]["islands"] == ["i0"]
    np.testing.assert_array_equal(world.anchors, replay(world))
    assert_books_close(world)


def test_an_island_that_overflowed_is_replaced_and_its_state_is_in_no_commit():
    world = World(overflows={("i1", 0, 2)})
    assert world.run() == "finished"
    reason = "the pseudo-gradient is not finite"
    assert [f["reason"] for f in world.kinds("contribution_rejected")] == [reason]
    assert [(f["island"], f["reason"]) for f in world.kinds("island_lost")] == [("i1", reason)]
    islands = [f["islands"] for f in world.kinds("round_committed")]
    assert islands[:2] + islands[-1:] == [["i0", "i1"], ["i0"], ["i0", "i1"]]
    assert [sorted(name for name, files in entries.items() if files) for *_, entries in world.manifests][1] == ["i0"]
    np.testing.assert_array_equal(world.anchors, replay(world))
    assert_books_close(world)


def test_a_run_that_diverges_everywhere_fails_with_that_reason():
    always = {(name, k, r) for name in ("i0", "i1") for k in range(20) for r in range(1, 30)}
    with pytest.raises(SyncError, match="not finite"):
        World(overflows=always, rounds=29).run()


def test_a_round_without_any_usable_contribution_is_void():
    world = World(refuse={("i0", 2): "bad", ("i1", 2): "bad"}, max_losses=3, rounds=3)
    with pytest.raises(SyncError, match="RD-490"):
        World(refuse={("i0", 2): "bad", ("i1", 2): "bad"}, max_losses=1, rounds=15).run()
    assert world.run() == "finished"
    assert world.version == 1
    assert len(world.kinds("round_aborted")) == 2


def test_too_many_losses_in_a_row_end_the_run_with_the_last_reason():
    faults = {("i0", k, "launch", 0): IslandLost(f"no such model, try {k}") for k in range(20)}
    with pytest.raises(SyncError, match="no such model, try 6"):
        World(names=("i0",), faults=faults).run()


def test_islands_that_are_lost_together_do_not_end_the_run():
    names = tuple(f"i{k}" for k in range(9))
    world = World(names=names, faults={(name, 0, "train", 1): IslandLost("its region is down") for name in names})
    assert world.run() == "finished"


def test_a_user_error_at_launch_ends_the_run_at_once():
    error = SyncError(499, "boom", "mend")
    with pytest.raises(SyncError, match="boom"):
        World(faults={("i1", 0, "launch", 0): error}).run()


def test_evaluation_is_shared_and_does_not_depend_on_who_does_it():
    one = World(names=("i0", "i1", "i2"), evaluate_every=2, heldout=tuple(range(9)), rounds=4)
    assert one.run() == "finished"
    assert sorted(one.evaluations) == [2, 4]
    for round_, losses in one.evaluations.items():
        expected = float(np.sum(one.anchors[round_]))
        assert [loss.nats for loss in losses] == [expected + b for b in range(9)]


def test_quorum_goes_on_without_the_slow_and_returns_their_blocks():
    world = World(names=("i0", "i1", "i2"), quorum=Quorum("at_least", n=2, grace_s=1.0), speed={"i2": 2.5}, rounds=8)
    assert world.run() == "finished"
    late = world.kinds("contribution_rejected")
    assert late and all(f["island"] == "i2" and "closed" in f["reason"] for f in late)
    assert world.position.ledgers["text"].balanced()


def resume(world, **changes):
    """A world that goes on from the newest manifest of another one."""
    snapshot, anchor, buffer, _ = world.manifests[-1]
    position = Position.resume(snapshot.round, snapshot.step, snapshot.versions, snapshot.ledgers, snapshot.counters)
    fresh = World(names=world.names, H=world.H, rounds=world.rounds, **changes)
    fresh.anchor, fresh.buffer, fresh.version, fresh.founded = anchor, buffer, snapshot.versions[0], True
    return fresh, position


@pytest.mark.parametrize("stop_at", [0.5, 3.0, 9.1, 9.13, 9.4, 14.0])
@pytest.mark.parametrize("every", [1, 2])
def test_a_stopped_run_resumes_three_times_to_the_same_anchor(stop_at, every):
    straight = World(rounds=15)
    assert straight.run() == "finished"
    world, position = World(rounds=15, stop_at=stop_at, checkpoint_every=every), None
    for _ in range(3):
        assert world.run(position) == "stopped"
        if not world.manifests:
            world, position = World(rounds=15, stop_at=stop_at + 8, checkpoint_every=every), None
            continue
        assert world.manifests[-1][0].round == world.position.round
        world, position = resume(world, stop_at=stop_at, checkpoint_every=every)
    world.stop_at = None
    assert world.run(position) == "finished"
    np.testing.assert_array_equal(world.anchor, straight.anchor)
    assert world.position.ledgers["text"].to_json() == straight.position.ledgers["text"].to_json()
    assert world.position.tokens == straight.position.tokens
    assert world.position.tallies["i1"].steps == straight.position.tallies["i1"].steps


def test_more_rounds_continue_a_finished_run():
    short, straight = World(rounds=3), World(rounds=6)
    assert short.run() == "finished" and straight.run() == "finished"
    longer, position = resume(short)
    longer.rounds = 6
    assert longer.run(position) == "finished"
    np.testing.assert_array_equal(longer.anchor, straight.anchor)


def test_the_run_waits_below_the_minimum_number_of_islands():
    faults = {("i1", 0, "train", 2): IslandLost("gone")}
    world = World(faults=faults, min_islands=2, launch_s=30.0)
    assert world.run() == "finished"
    assert [f["islands"] for f in world.kinds("round_committed")] == [["i0", "i1"], ["i0"]] + [["i0", "i1"]] * 3


def test_every_island_saves_its_inner_state_with_every_commit():
    world = World()
    world.run()
    assert world.manifests[-1][3] == {"i0": ["inner-i0-5"], "i1": ["inner-i1-5"]}


def test_base_never_aliases_the_anchor():
    world = World(rounds=2)
    world.run()
    assert world.anchor.shape == (DIM,)
    assert not any(a is b for i, a in enumerate(world.anchors) for b in world.anchors[:i])


def test_a_commit_is_visible_after_metrics_and_trace_of_its_round():
    world = World(trace_s=30.0, write_s=0.0, rounds=3)
    assert world.run() == "finished"
    order = [(kind, fields["round"]) for kind, fields in world.events if kind in ("checkpoint_written", "traced")]
    assert [(kind, r) for kind, r in order if r] == [
        step for r in (1, 2, 3) for step in (("traced", r), ("checkpoint_written", r))
    ]


def test_an_evaluation_that_a_stop_cut_off_is_made_up_for_on_resume():
    world = World(evaluate_every=2, heldout=tuple(range(5)), rounds=5)
    assert world.run() == "finished"
    snapshot, anchor, buffer, _ = world.manifests[1]
    assert snapshot.round == 2
    world.manifests.append((snapshot, anchor, buffer, {}))
    again, position = resume(world, evaluate_every=2, heldout=tuple(range(5)), owes_evaluation=True)
    assert again.run(position) == "finished"
    assert sorted(again.evaluations) == [2, 4, 5]
    assert again.evaluations == {r: world.evaluations[r] for r in (2, 4, 5)}
    nothing_due, position = resume(world, evaluate_every=3, heldout=(0, 1), owes_evaluation=True)
    assert nothing_due.run(position) == "finished"
    assert sorted(nothing_due.evaluations) == [3, 5]


def test_a_run_that_is_over_does_not_wait_for_an_island_that_is_being_replaced():
    world = World(faults={("i1", 0, "train", 5): IslandLost("gone")}, launch_s=100.0)
    assert world.run() == "finished"
    assert world.kinds("island_launching")[-1] == {"island": "i1", "incarnation": 1}
    assert [f["incarnation"] for f in world.kinds("island_joined")] == [0, 0]
    np.testing.assert_array_equal(world.anchors, replay(world))
    assert_books_close(world)


@pytest.mark.filterwarnings("error")
def test_a_commit_that_cannot_be_written_costs_neither_rounds_nor_islands():
    world = World(unwritable={2, 3}, save_s=1.0)
    assert world.run() == "finished"
    assert not world.kinds("island_lost")
    assert [snapshot.round for snapshot, *_ in world.manifests] == [1, 4, 5]
    np.testing.assert_array_equal(world.anchors, replay(world))
