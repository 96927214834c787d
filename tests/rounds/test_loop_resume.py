"""A run that is stopped and goes on is the run that was never stopped, and a tape replays what happened."""

import json

import pytest
from loop_methods import ALL, ASYNC, AT_OWN_PACE, DYLU, IN_STEP, SPEEDS, books, finished, state_of
from quadratics import World


def counted(order):
    """A tape without the segments that a stop has cut off: they are opened again."""
    kept, waiting = [], set()
    for kind, island in reversed(order):
        if kind == "round_committed":
            waiting.add(island)
        elif island not in waiting:
            continue
        else:
            waiting.discard(island)
        kept.append((kind, island))
    return kept[::-1]


def with_stops(settings, stops, **arguments):
    """The last world of a run that was asked to stop so many times, and the order of all that happened."""
    saved, order = [], []
    for stop_at in (*stops, None):
        world = World(*settings, saved=saved, stop_at=stop_at, **arguments)
        status = world.run()
        assert status == ("finished" if world.position.round == world.rules().schedule.rounds else "stopped")
        saved = world.saved
        # One that stopped before its first commit goes on from where it began.
        order += counted(world.order)
        books(world) if not world.began else None
    assert status == "finished"
    return world, order


@pytest.mark.parametrize(
    "stops, every",
    [((2.5, 4.1, 8.2), 1), ((6.3, 4.1, 8.2), 1), ((10.5, 3.3, 6.06), 2), ((5.02, 7.6, 9.7), 2)],
)
@pytest.mark.parametrize("method", IN_STEP)
def test_three_stops_change_no_bit(method, every, stops):
    settings = (*IN_STEP[method], f"checkpoint.every={every}")
    straight = finished(World(*settings))
    world, _ = with_stops(settings, stops)
    assert state_of(world) == state_of(straight)
    for name, island in world.islands.items():
        assert island.theta.tolist() == straight.islands[name].theta.tolist()


@pytest.mark.parametrize("method", [method for method in IN_STEP if method not in ("nested", "scaffold")])
def test_a_run_that_was_finished_and_is_lengthened_equals_one_that_was_long_from_the_start(method):
    straight = finished(World(*IN_STEP[method], "run.rounds=4"))
    saved = []
    for rounds in (1, 3, 4):
        world = World(*IN_STEP[method], f"run.rounds={rounds}", saved=saved)
        assert world.run() == "finished"
        saved = world.saved
    assert state_of(world) == state_of(straight)
    for name, island in world.islands.items():
        assert island.theta.tolist() == straight.islands[name].theta.tolist()


@pytest.mark.parametrize("merge_s", [1.6, 2.7])
@pytest.mark.parametrize("method", ["streaming", "rebased", "delayed", "decoupled", "sparse and delayed"])
def test_three_stops_change_no_bit_where_merges_take_longer_than_steps(method, merge_s):
    settings = ALL[method]
    straight = finished(World(*settings, merge_s=merge_s, speed={"i1": 1.3}))
    world, _ = with_stops(settings, (9.3, 12.1, 11.7), merge_s=merge_s, speed={"i1": 1.3})
    assert state_of(world) == state_of(straight)


@pytest.mark.parametrize("stops", [(), (6.3, 7.1, 9.2), (2.5, 7.1)])
@pytest.mark.parametrize("method", AT_OWN_PACE)
def test_a_tape_replays_a_run_at_its_own_pace_to_the_same_bytes(method, stops):
    settings = AT_OWN_PACE[method] if method != "dylu" else (*DYLU, "inner.work=fixed")
    # One after the other: a tape does not say who begins first of those who join at one moment.
    launch_s = {"i0": 1.0, "i1": 1.1, "i2": 1.2}
    world, order = with_stops(settings, stops, speed=SPEEDS, launch_s=launch_s)
    again = finished(World(*settings, tape=order, launch_s=launch_s))
    assert again.order == order
    assert state_of(again) == state_of(world)
    if not stops:
        one, other = (
            [(f, {n: a.tolist() for n, a in all_.items()}) for f, all_ in w.anchors_after] for w in (world, again)
        )
        assert json.dumps(one) == json.dumps(other)


def test_a_tape_of_islands_that_work_by_speed_replays_to_the_same_bytes():
    world = finished(World(*DYLU, speed=SPEEDS))
    again = finished(World(*DYLU, speed=SPEEDS, tape=world.order))
    assert state_of(again) == state_of(world)


def test_a_state_that_an_island_reached_by_itself_is_not_taken_up():
    world = World(*ASYNC, speed={"i0": 1.0, "i1": 1.0, "i2": 9.0}, stop_at=40.0)
    world.run()
    # Before the last commit, the slow island had still to hand over what it went on to.
    early = World(*ASYNC, saved=world.saved[:2], speed=world.speed)
    first = early.saved[1]
    versions = first.snapshot.versions
    assert early.run() == "finished"
    assert any(state[0]["versions"][0].version > versions[0] for state in first.inner.values() if state)
