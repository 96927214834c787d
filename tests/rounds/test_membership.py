"""Islands come, go and are asked to, on virtual time: the books close, anchors are those of the committed work."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loop import assert_books_close, resume
from world import IslandLost, World, replay

from ray_diloco.errors import ClusterError, InfeasibleError, SyncError
from ray_diloco.rounds.members import TRANSITIONS, Member, State
from ray_diloco.rounds.rendezvous import Quorum
from ray_diloco.rounds.rules import IslandPlan

ALWAYS = float("inf")


def merged(world):
    return [f["islands"] for f in world.kinds("round_committed")]


def elastic(most=4, initial=("i0", "i1"), **changes):
    world = World(names=tuple(f"i{k}" for k in range(most)), rounds=changes.pop("rounds", 8))
    world.changes = {"initial": initial, "grows": True, "most": most} | changes.pop("changes", {})
    for key, value in changes.items():
        setattr(world, key, value)
    return world


def finish(world):
    assert world.run() == "finished"
    np.testing.assert_array_equal(world.anchors, replay(world))
    assert_books_close(world)
    return world


def test_an_island_takes_the_transitions_of_the_table_and_no_others():
    member = Member("i0", 0)
    assert member.to(State.LAUNCHING) == "island_launching"
    assert member.to(State.LAUNCHING) == ""
    with pytest.raises(ValueError, match="i0 cannot go from launching to training"):
        member.to(State.TRAINING)
    assert member.to(State.LOST) == "island_lost"
    assert (member.successor().incarnation, member.successor().state) == (1, State.LOST)
    assert Member("i0", 2).successor().incarnation == 2
    # Every state but the last can be left, and every one but the first is reached.
    assert {state for state, to in TRANSITIONS.items() if not to} == {State.DONE}
    assert {state for to in TRANSITIONS.values() for state in to} == set(State)


def test_room_that_appears_becomes_an_island_at_the_next_boundary():
    world = finish(elastic(rooms={"i2": [(9.0, ALWAYS)], "i3": [(ALWAYS, ALWAYS)]}))
    assert merged(world)[:2] == [["i0", "i1"]] * 2
    assert merged(world)[-1] == ["i0", "i1", "i2"]
    (joined,) = [f for f in world.kinds("island_joined") if f["island"] == "i2"]
    assert joined["incarnation"] == 0
    assert not world.kinds("island_unplaced") and not world.kinds("island_lost")


def test_no_more_islands_come_than_the_run_may_have():
    world = elastic(most=5, changes={"most": 3})
    finish(world)
    assert max(len(islands) for islands in merged(world)) == 3


def test_an_island_whose_room_vanished_waits_for_some_and_fails_nothing():
    faults = {("i1", k, "train", r): IslandLost("its node died") for k in (0,) for r in (3,)}
    world = World(faults=faults, rooms={"i1": [(0.0, 9.0), (25.0, ALWAYS)]}, rounds=9, max_losses=1)
    finish(world)
    assert [f["island"] for f in world.kinds("island_unplaced")] == ["i1"]
    assert merged(world)[-1] == ["i0", "i1"]
    assert [f["incarnation"] for f in world.kinds("island_joined") if f["island"] == "i1"] == [0, 1]


def test_a_run_that_cannot_place_what_it_begins_with_fails_unless_it_may_grow():
    rooms = {"i1": [(30.0, ALWAYS)]}
    with pytest.raises(InfeasibleError, match="RD-211"):
        World(rooms=rooms).run()
    world = finish(elastic(rooms=rooms, rounds=10, most=2))
    assert merged(world)[0] == ["i0"] and merged(world)[-1] == ["i0", "i1"]
    assert [f["island"] for f in world.kinds("island_unplaced")] == ["i1"]


def test_a_drained_island_finishes_its_segment_and_it_counts():
    world = World(rounds=6, script=[(7.0, lambda run: run.drain("i1", "the rack is moved"))])
    finish(world)
    assert merged(world) == [["i0", "i1"]] * 2 + [["i0"]] * 4
    assert world.kinds("drain_requested") == [{"island": "i1", "reason": "the rack is moved"}]
    assert world.kinds("island_left") == [{"island": "i1", "incarnation": 0, "reason": "the rack is moved"}]
    assert not world.kinds("island_lost") and not world.kinds("contribution_rejected")


def test_a_drained_island_that_is_too_slow_is_dropped_and_its_blocks_are_issued_again():
    world = World(rounds=4, speed={"i1": 50.0}, script=[(7.0, lambda run: run.drain("i1"))], changes={"drain_s": 10.0})
    finish(world)
    assert merged(world) == [["i0"]] * 4
    assert world.times[[kind for kind, _ in world.events].index("island_left")] == 17.0
    assert sum(total.stop - total.start for total in world.position.ledgers["text"].credited) == 4 * 4 * 2


@pytest.mark.parametrize("at", [0.5, 1.03, 3.0, 5.2, 9.0])
def test_an_island_can_be_drained_whatever_it_is_doing(at):
    world = World(names=("i0", "i1", "i2"), rounds=4, script=[(at, lambda run: run.drain("i1"))])
    finish(world)
    assert merged(world)[-1] == ["i0", "i2"]


def test_a_spot_notice_empties_the_slot_for_a_while():
    notice = [(7.0, lambda run: run.drain("i1", "its machine goes", returns=True))]
    world = World(rounds=12, script=notice, changes={"away_s": 20.0})
    finish(world)
    (left,) = world.kinds("island_left")
    assert left["reason"] == "its machine goes"
    again = [t for (kind, f), t in zip(world.events, world.times, strict=True)
             if kind == "island_launching" and f["incarnation"] == 1]  # fmt: skip
    assert again == [27.0]
    assert merged(world)[-1] == ["i0", "i1"]


def test_scaling_up_and_down_keeps_those_that_are_there():
    world = elastic(rounds=12, most=6, changes={"grows": False})
    world.script = [(6.0, lambda run: run.scale({"": 4})), (20.0, lambda run: run.scale({"": 1}))]
    finish(world)
    assert merged(world)[0] == ["i0", "i1"]
    assert ["i0", "i1", "i2", "i3"] in merged(world)
    assert merged(world)[-1] == ["i0"]
    assert [f["islands"] for f in world.kinds("scale_requested")] == [["i0", "i1", "i2", "i3"], ["i0"]]


def regions(**more):
    world = elastic(**more, changes={"grows": False, "initial": ("eu-0", "us-0"), "most": 4})
    world.names = ("eu-0", "eu-1", "eu-2", "us-0", "us-1")
    world.changes["islands"] = {name: IslandPlan("text", 2, name[:2]) for name in world.names}
    return world


def test_regions_are_scaled_apart_and_what_cannot_be_is_refused_by_number():
    refused = []

    def ask(asked):
        def act(run):
            try:
                run.scale(asked)
            except ClusterError as error:
                refused.append((error.number, error.what))

        return act

    asked = [{"eu": 2}, {"mars": 1}, {"eu": 4}, {"eu": 3, "us": 2}, {"us": 0}]
    world = regions(rounds=10, script=[(6.0 + k, ask(each)) for k, each in enumerate(asked)])
    finish(world)
    assert [number for number, _ in refused] == [208, 207, 207]
    assert "'mars'" in refused[0][1] and "islands.max=4" in refused[2][1]
    assert merged(world)[-1] == ["eu-0", "eu-1"]


def test_an_island_that_is_not_there_cannot_be_drained():
    def drain(run):
        with pytest.raises(ClusterError, match=r"RD-208: the run has no island 'i7'[\s\S]*islands: i0, i1"):
            run.drain("i7")

    finish(World(script=[(6.0, drain)]))


def test_where_every_island_has_its_anchor_their_number_is_fixed():
    def scale(run):
        with pytest.raises(ClusterError, match="RD-209"):
            run.scale({"": 3})

    finish(World(script=[(6.0, scale)], changes={"fixed": True}))


def test_joiners_are_admitted_so_many_at_a_time():
    world = elastic(most=6, rounds=12, changes={"joins": 1, "grows": False}, script=[(6.0, lambda r: r.scale({"": 6}))])
    finish(world)
    assert sorted({len(islands) for islands in merged(world)}) == [2, 3, 4, 5, 6]
    sizes = [len(f["islands"]) for f in world.kinds("round_opened")]
    assert max(b - a for a, b in itertools.pairwise(sizes)) == 1


def test_below_the_minimum_the_run_waits_and_says_for_whom():
    said = []
    world = World(
        faults={("i1", 0, "train", 2): IslandLost("gone")}, min_islands=2, launch_s=30.0, rounds=5,
        script=[(50.0, lambda run: said.append(run.waiting))],
    )  # fmt: skip
    finish(world)
    assert world.kinds("islands_awaited") == [{"have": 1, "need": 2, "islands": ["i1"]}]
    assert said == ["i1 (1 of 2 are here)"]
    (enough,) = world.kinds("islands_enough")
    assert enough["have"] == 2 and enough["waited_s"] > 25
    assert [f["islands"] for f in world.kinds("round_opened")][2] == ["i0", "i1"]


def test_a_run_goes_on_with_other_islands_than_it_had():
    first = finish(World(rounds=4))
    first.rounds = 8
    world, position = resume(first)
    world.names, world.rounds = ("i0", "i2", "i3"), 8
    assert world.run(position) == "finished"
    assert merged(world) == [["i0", "i2", "i3"]] * 4
    assert position.tallies["i1"].rounds == 4 and position.tallies["i3"].rounds == 4
    assert position.ledgers["text"].balanced()


def test_a_free_run_takes_islands_in_and_lets_them_go():
    world = elastic(rounds=24, most=4, changes={"free": True, "exact": False, "grows": False})
    world.script = [(6.0, lambda run: run.scale({"": 4})), (16.0, lambda run: run.drain("i0"))]
    assert world.run() == "finished"
    assert_books_close(world)
    assert {name for islands in merged(world) for name in islands} == {"i0", "i1", "i2", "i3"}
    assert len(merged(world)) == 24


@settings(max_examples=6)
@given(st.data())
def test_whatever_is_asked_the_books_close_and_the_anchor_is_that_of_the_committed_work(data):
    names = ("i0", "i1", "i2", "i3")
    times = st.floats(0.1, 60.0, allow_nan=False)
    world = elastic(rounds=10, launch_s=data.draw(st.sampled_from([0.5, 3.0])))
    world.changes |= {
        "grows": data.draw(st.booleans()), "joins": data.draw(st.integers(0, 2)), "min_islands": 1,
        "drain_s": data.draw(st.sampled_from([0.0, 2.0, 30.0])), "away_s": 5.0,
    }  # fmt: skip
    world.speed = {name: data.draw(st.sampled_from([0.5, 1.0, 3.0])) for name in names}
    world.max_losses = 50

    def drain(name, returns):
        def act(run):
            if run.members[name].alive and not run.members[name].leaving:
                run.drain(name, returns=returns)

        return act

    def scale(count):
        return lambda run: run.scale({"": count})

    acts = st.one_of(st.builds(drain, st.sampled_from(names), st.booleans()), st.builds(scale, st.integers(1, 4)))
    world.script = data.draw(st.lists(st.tuples(times, acts), max_size=5))
    # At the end everybody may come again, so that no run waits for ever.
    world.script.append((70.0, scale(2)))
    world.faults = {
        (name, data.draw(st.integers(0, 1)), phase, data.draw(st.integers(1, 8))): IslandLost(phase)
        for name in data.draw(st.lists(st.sampled_from(names), max_size=3))
        for phase in data.draw(st.lists(st.sampled_from(["train", "emit", "adopt", "save"]), max_size=2))
    }
    try:
        finish(world)
    except SyncError as error:
        assert error.number == 490


def test_a_part_of_the_islands_is_one_of_those_that_are_present():
    assert [Quorum("at_least", fraction=0.5).enough(n) for n in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]
    assert [Quorum("at_least", n=2).enough(n) for n in (1, 5)] == [2, 2]
    # Of two islands one is half; when two more have come it takes two.
    world = elastic(rounds=8, changes={"grows": False, "quorum": Quorum("at_least", fraction=0.5)})
    world.speed = {"i0": 1.0, "i1": 1.5, "i2": 1.5, "i3": 1.5}
    world.script = [(9.0, lambda run: run.scale({"": 4}))]
    assert world.run() == "finished"
    closed = [len(f["islands"]) for f in world.kinds("round_closed")]
    assert closed[0] == 1 and closed[-1] >= 2


def test_islands_that_live_on_from_an_earlier_driver_are_wanted_too():
    world = elastic(rounds=4, changes={"grows": False})
    world.before = lambda run: run.keep(["i2", "elsewhere"])
    finish(world)
    assert merged(world)[-1] == ["i0", "i1", "i2"]


def test_nobody_is_started_at_the_end_whom_nobody_has_asked_for():
    """While the others evaluate for the last time, slots that were never filled stay empty."""
    world = finish(elastic(most=4, changes={"grows": False}))
    assert {fields["island"] for fields in world.kinds("island_launching")} == {"i0", "i1"}
