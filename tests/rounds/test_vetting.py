"""Bad contributions are refused by name and number, repeated offenders go into quarantine, strays go back."""

import numpy as np
import pytest
from test_loop import assert_books_close
from world import World, replay

from ray_diloco.errors import SyncError
from ray_diloco.rounds.members import Member, State
from ray_diloco.rounds.ports import Emission, Offer, Report
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rules import Guard
from ray_diloco.rounds.vetting import ENOUGH_NORMS, NORMS, Vetting


def offer(norm=1.0, island="i0", incarnation=0, steps=4, finite=True):
    return Offer(island, incarnation, 0, 1, 0, steps, 40, 1.0, Emission((), norm, finite))


def vetting(members=None, **guard):
    members = {"i0": Member("i0", 0, State.SENDING)} if members is None else members
    banished = []
    judge = Vetting(Guard(**guard), Position(), members, lambda *said: not banished.append(said))
    return judge, banished


def rejected(world):
    return [(f["island"], f["round"], f["number"]) for f in world.kinds("contribution_rejected")]


@pytest.mark.parametrize(
    ("bad", "number", "said"),
    [
        (offer(incarnation=1), 437, "it is from incarnation 1, and incarnation 0 is sending"),
        (offer(island="i9"), 437, "it was given up"),
        (offer(finite=False), 438, "not finite"),
        (offer(steps=0), 436, "no inner step"),
    ],
)
def test_what_is_wrong_with_an_offer_has_a_number(bad, number, said):
    fault = vetting()[0].fault_of(bad)
    assert (fault.number, said in fault.what) == (number, True)
    assert vetting()[0].fault_of(offer()) is None


def test_an_island_that_was_lost_offers_nothing_any_more():
    judge, _ = vetting({"i0": Member("i0", 0, State.LOST)})
    assert judge.fault_of(offer()).what == "it is from incarnation 0, and incarnation 0 is lost"


def test_a_norm_is_measured_by_the_median_of_those_merged_lately():
    judge, _ = vetting(norm=10.0)
    judge.merged(0, [offer(1e6)] * (ENOUGH_NORMS - 1))
    assert judge.too_large(offer(1e9)) is None, "too few to say"
    judge.merged(0, [offer(2.0)] * NORMS)
    assert judge.too_large(offer(20.0)) is None
    fault = judge.too_large(offer(21.0))
    assert fault.number == 435
    assert "norm 21 is 10.5 times the median 2 of the last 16" in fault.what
    judge.merged(0, [offer(1e6)] * 3)
    assert judge.too_large(offer(21.0)) is not None, "a few bad ones do not move a median"
    assert vetting(norm=0.0)[0].too_large(offer(1e9)) is None


def test_a_loss_strays_from_its_own_and_the_others_median():
    judge, _ = vetting(loss=2.0)

    def strays(island, loss):
        return judge.strays(island, Report(1, 1, loss, 1.0))

    assert [strays("i0", loss) for loss in (4.0, 3.0, 2.0, 2.0)] == [None] * 4
    # Median of its own: 2.5.
    assert strays("i0", 5.1) == 2.5
    assert [strays("i0", loss) for loss in (5.1, 5.0, 5.2)] == [None] * 3, "from the anchor on, this is what is usual"
    assert strays("i0", float("nan")) == 5.1
    assert [strays("i0", loss) for loss in (4.0, 3.0, 2.0, 2.0, 4.9)] == [None] * 5
    # Others train on harder data: what is usual there is not strange here.
    assert strays("i1", 6.0) is None
    assert strays("i0", 7.0) is None


def test_strikes_of_the_last_rounds_count_and_lead_to_quarantine():
    judge, banished = vetting(strikes=2, rounds=5)
    judge.strike("i0", "norm")
    judge._position.round = 5
    judge.strike("i0", "norm")
    assert banished == []
    judge.strike("i0", "digest")
    assert banished == [("i0", "2 bad contributions, the last: digest")]


def test_an_absurd_norm_costs_the_island_its_round_and_nothing_else():
    world = World(names=("i0", "i1", "i2"), rounds=8, norms={("i1", 0, 5): 1e7}, changes={"guard": Guard(norm=30.0)})
    assert world.run() == "finished"
    assert rejected(world) == [("i1", 5, 435)]
    assert world.kinds("round_committed")[4]["islands"] == ["i0", "i2"]
    np.testing.assert_array_equal(world.anchors, replay(world))
    assert_books_close(world)


def test_the_default_norm_takes_what_early_training_brings():
    """From a first step at a thousandth of the rate to the full one, over the rounds of a warm-up."""
    for growth in (1.0, 1.3, 2.0):
        norms = {(name, 0, r): min(growth**r, 1000.0) for r in range(1, 31) for name in ("i0", "i1")}
        world = World(rounds=30, norms=norms, changes={"guard": Guard(norm=30.0)})
        assert world.run() == "finished"
        assert rejected(world) == []


def test_norms_survive_a_stop():
    world = World(rounds=5)
    assert world.run() == "finished"
    again = Position.resume(5, 20, {0: 5}, {}, world.manifests[-1][0].counters)
    assert again.norms == world.position.norms
    assert len(again.norms[0]) == 10


def test_a_repeated_offender_leaves_and_comes_back_after_so_many_rounds():
    refuse = {("i1", version): "wrong digest" for version in (2, 3, 4)}
    world = World(names=("i0", "i1", "i2"), rounds=12, refuse=refuse, changes={"guard": Guard(strikes=3, rounds=4)})
    assert world.run() == "finished"
    (quarantined,) = world.kinds("island_quarantined")
    assert (quarantined["island"], quarantined["until"]) == ("i1", 7)
    assert "3 bad contributions, the last: wrong digest" in quarantined["reason"]
    merged = [f["islands"] for f in world.kinds("round_committed")]
    assert merged[4:7] == [["i0", "i2"]] * 3 and merged[-1] == ["i0", "i1", "i2"]
    assert [f["incarnation"] for f in world.kinds("island_joined") if f["island"] == "i1"] == [0, 1]
    np.testing.assert_array_equal(world.anchors, replay(world))
    assert_books_close(world)


def test_nobody_goes_into_quarantine_where_too_few_would_be_left():
    refuse = {("i0", version): "wrong digest" for version in range(2, 20)}
    world = World(names=("i0",), rounds=4, refuse=refuse, changes={"guard": Guard(strikes=2)}, max_losses=2)
    with pytest.raises(SyncError, match=r"RD-490[^\n]*wrong digest"):
        world.run()
    assert not world.kinds("island_quarantined")


def test_an_island_that_overflows_again_and_again_is_quarantined_though_it_is_lost_each_time():
    overflows = {("i1", k, r) for k in (0, 1) for r in range(1, 30)}
    world = World(rounds=20, overflows=overflows, changes={"guard": Guard(strikes=2, rounds=6)})
    assert world.run() == "finished"
    assert [f["number"] for f in world.kinds("contribution_rejected")] == [438, 438]
    assert len(world.kinds("island_quarantined")) == 1
    assert world.kinds("round_committed")[-1]["islands"] == ["i0", "i1"]
    np.testing.assert_array_equal(world.anchors, replay(world))


def test_an_island_whose_loss_strays_goes_back_to_the_anchor_with_fresh_moments():
    losses = {(name, 0, r): 3.0 for name in ("i0", "i1") for r in range(1, 9)} | {("i1", 0, 5): 80.0}
    world = World(rounds=8, losses=losses, changes={"guard": Guard(loss=3.0)})
    assert world.run() == "finished"
    assert world.kinds("island_strayed") == [{"island": "i1", "incarnation": 0, "loss": 80.0, "usual": 3.0}]
    assert rejected(world) == [("i1", 5, 439)]
    assert world.reset == [("i1", 0)]
    assert [f["island"] for f in world.kinds("inner_state_reset")] == ["i1"]
    assert [f["islands"] for f in world.kinds("round_committed")][4:6] == [["i0"], ["i0", "i1"]]
    np.testing.assert_array_equal(world.anchors, replay(world))
    assert_books_close(world)
