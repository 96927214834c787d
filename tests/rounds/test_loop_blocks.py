"""The run loop with the blocks that change it: overlap, lanes, carried offers, own pace, anchors per island."""

import numpy as np
import pytest
from loop_methods import (
    ALL,
    ASYNC,
    AT_OWN_PACE,
    BY_CHANGE,
    DYLU,
    NESTED,
    SPEEDS,
    STREAMING,
    THREE,
    finished,
)
from quadratics import DIM, PER_STEP, IslandLost, World

from ray_diloco.outer.layout import total

# Losses.


ONE, EVERY = (2, ("i0",)), (3, ("i0", "i1", "i2"))
LOSSES = [("launch", *ONE), ("train", *EVERY), ("step", *ONE), ("emit", *EVERY), ("adopt", *ONE), ("save", *ONE)]


@pytest.mark.parametrize("phase, call, who", [*LOSSES, ("evaluate", *EVERY)])
@pytest.mark.parametrize("method", ALL)
def test_a_loss_in_any_phase_leaves_the_books_closed(method, phase, call, who):
    faults = {(name, 0, phase, call): IslandLost(phase) for name in who}
    world = finished(World(*ALL[method], faults=faults, heldout=range(5), speed={"i1": 1.5}, rules={"max_losses": 9}))
    free = method in AT_OWN_PACE
    assert world.position.round == world.config.run.rounds * (3 if free else 1)
    assert [loss.block for loss in world.evaluations[world.position.round]] == list(range(5))
    assert world.saved[-1].snapshot.round == world.position.round
    if not free and len(who) < 3:
        assert len(world.evaluations) == world.config.run.rounds


@pytest.mark.parametrize("method", ALL)
def test_without_losses_every_block_is_credited(method):
    world = finished(World(*ALL[method], speed=SPEEDS if method in AT_OWN_PACE else {}))
    (ledger,) = world.position.ledgers.values()
    trained = sum(len(world.steps_of(name)) for name in world.names) * PER_STEP
    assert total(ledger.credited) == ledger.issued == trained
    assert not world.kinds("contribution_rejected", "round_aborted", "island_lost")


@pytest.mark.parametrize("method", ALL)
def test_a_refused_contribution_is_issued_again(method):
    world = finished(World(*ALL[method], refuse={("i1", 2), ("i1", 3)}))
    assert {event["island"] for event in world.kinds("contribution_rejected")} == {"i1"}


@pytest.mark.parametrize("method", ["streaming", "rebased", "delayed", "decoupled"])
def test_an_island_that_joins_between_emission_and_adoption_takes_the_anchor_as_it_is(method):
    faults = {("i1", 0, "step", 6): IslandLost("gone")}
    for seconds in np.arange(0.25, 12, 0.5):
        world = finished(World(*ALL[method], faults=faults, launch_s={("i1", 1): seconds}, commit_s=0.3, merge_s=0.4))
        # From anywhere near the anchor it comes near the minima; from zeros plus a difference it does not.
        assert np.abs(world.model).max() < 4
        for island in world.islands.values():
            assert np.abs(island.theta.numpy()).max() < 4


# Quorums.


def carried(**settings):
    quorum = ("quorum.kind=at_least", "quorum.n=2", "quorum.late=carry", "stale.age_power=0.5")
    return (*THREE, *quorum, "inner.H=3", "run.rounds=9", *(f"{k}={v}" for k, v in settings.items()))


@pytest.mark.parametrize("slow", [1.4, 2.3, 3.7, 7.1])
def test_a_late_contribution_is_carried_to_the_next_round_with_its_age(slow):
    world = finished(World("algorithm=diloco", *carried(), speed={"i2": slow}))
    rows = [
        row for event in world.kinds("round_committed") for row in zip(event["islands"], event["rounds"], strict=True)
    ]
    late = [event for event in world.kinds("round_committed") if "i2" in event["islands"]]
    assert late
    for event in late:
        k = event["islands"].index("i2")
        others = [w for w, name in zip(event["weights"], event["islands"], strict=True) if name != "i2"]
        age = event["version"] - 1 - event["bases"][k]
        assert age == event["round"] - event["rounds"][k] > 0
        assert event["weights"][k] / others[0] == pytest.approx((1 + age) ** -0.5)
    assert len(rows) == len(set(rows))
    # What came after the last round is issued again, and said.
    lost = [event["reason"] for event in world.kinds("contribution_rejected")]
    assert all("ended" in reason or "closed" in reason for reason in lost) and len(lost) <= 1


@pytest.mark.parametrize("slow", [1.4, 2.3, 3.7])
@pytest.mark.parametrize("method", ["decoupled", "streaming"])
def test_a_slow_island_among_fragments_that_take_turns_skips_to_where_the_others_are(method, slow):
    quorum = ("quorum.kind=at_least", "quorum.n=2", "quorum.grace_s=0", "quorum.late=carry")
    world = finished(World(*ALL[method], *quorum, speed={"i2": slow}))
    assert any("i2" in islands for fragment in range(2) for islands in world.merged(fragment))
    versions = {kept.version for kept in world.keeper.kept.values()}
    assert versions == {world.config.run.rounds}


def test_a_contribution_of_no_weight_is_left_out_and_issued_again():
    world = finished(World("algorithm=fedavg", *THREE, "inner.H=3", "run.rounds=3", shards={"i0": 1, "i2": 3}))
    assert world.merged() == [["i0", "i2"]] * 3
    assert {event["reason"] for event in world.kinds("contribution_rejected")} == {"its weight is 0"}


def test_no_segment_begins_below_the_least_number_of_islands():
    faults = {("i1", 0, "step", 5): IslandLost("gone")}
    for settings in (STREAMING, ASYNC):
        launch_s = {("i1", 1): 30.0}
        world = finished(World(*settings, "islands.min=3", faults=faults, launch_s=launch_s))
        (gone,) = (event["t"] for event in world.kinds("island_lost"))
        back = max(event["t"] for event in world.kinds("island_joined"))
        assert not [e for e in world.kinds("round_opened") if gone < e["t"] < back]


# At their own pace.


@pytest.mark.parametrize("method", AT_OWN_PACE)
def test_so_many_contributions_as_rounds_for_each_island(method):
    world = finished(World(*AT_OWN_PACE[method], speed=SPEEDS))
    islands = [name for (name,) in world.merged()]
    assert len(islands) == 18 == world.position.round
    assert sum(tally.rounds for tally in world.position.tallies.values()) == 18
    assert [event["version"] for event in world.kinds("round_committed")] == list(range(1, 19))


def test_islands_by_speed_finish_together():
    world = finished(World(*DYLU, speed={"i0": 1.0, "i1": 2.0, "i2": 3.0}))
    steps = {name: [len(s) for _, _, s in world.trained[name]] for name in world.names}
    assert all(found[0] == 6 for found in steps.values())
    assert [set(steps[name][1:]) for name in ("i0", "i1", "i2")] == [{6}, {3}, {2}]


def test_a_round_in_seconds_gives_back_the_blocks_that_it_had_no_time_for():
    settings = ("algorithm=diloco", *THREE, "inner.H=10", "run.rounds=4", "inner.round_seconds=6")
    world = finished(World(*settings, speed={"i0": 1.0, "i1": 2.0, "i2": 4.0}))
    steps = {name: [len(s) for _, _, s in world.trained[name]] for name in world.names}
    assert steps == {"i0": [6] * 4, "i1": [3] * 4, "i2": [2] * 4}
    (ledger,) = world.position.ledgers.values()
    assert total(ledger.credited) == 4 * 11 * PER_STEP and ledger.in_flight == 0
    assert ledger.returned == ledger.issued - total(ledger.credited)
    assert world.kinds("round_committed")[0]["weights"] == pytest.approx([6 / 11, 3 / 11, 2 / 11])


# Lanes, evaluation, anchors per island.


def test_a_faster_channel_has_rounds_of_its_own():
    world = finished(World(*NESTED))
    side = [event for event in world.kinds("fragment_committed") if event["fragment"] == 1]
    assert [event["round"] for event in side] == list(range(1, 21))
    assert [event["round"] for event in world.kinds("round_committed")] == list(range(1, 6))
    # The channel that emits first is credited with the blocks.
    assert sum(event["steps"][0] for event in side) == 20
    assert [event["steps"] for event in world.kinds("round_committed")] == [[4, 4, 4]] * 5


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("method", ALL)
def test_every_round_is_evaluated_once(method, every):
    # `World.evaluated` refuses a second time.
    world = finished(World(*ALL[method], f"evaluate.every={every}", heldout=range(7), speed={"i1": 1.4}))
    each = every * (3 if method in AT_OWN_PACE else 1)
    assert sorted(world.evaluations) == sorted({*range(each, world.position.round, each), world.position.round})
    last = world.evaluations[world.position.round]
    assert [loss.block for loss in last] == list(range(7))


@pytest.mark.parametrize("method", ["streaming", "delayed", "rebased", "nested"])
def test_stops_neither_repeat_nor_lose_an_evaluation(method):
    settings, found = ALL[method], []
    straight = finished(World(*settings, heldout=range(3)))
    saved: list = []
    for stop_at in (6.3, 4.1, 8.2, 5.5, None):
        owes = bool(saved) and saved[-1].snapshot.round not in [round_ for one in found for round_ in one]
        world = World(*settings, saved=saved, stop_at=stop_at, heldout=range(3), owes_evaluation=owes)
        world.run()
        saved = world.saved
        # What was measured of rounds behind the newest commit is dropped with their metrics.
        kept = saved[-1].snapshot.round if saved else 0
        found.append([round_ for round_ in world.evaluations if round_ <= kept])
    rounds = [round_ for one in found for round_ in one]
    assert sorted(rounds) == sorted(straight.evaluations)


@pytest.mark.parametrize("method", ["eager", "noloco"])
def test_an_anchor_waits_for_its_island_to_come_back(method):
    faults = {("i1", 0, "step", 5): IslandLost("gone")}
    world = finished(World(*ALL[method], faults=faults, launch_s={("i1", 1): 4.5}))
    merged = world.merged()
    assert ["i0", "i2"] in merged and merged[-1] == ["i0", "i1", "i2"]
    versions = {name: kept.version for (_, name), kept in world.keeper.kept.items()}
    assert versions == dict.fromkeys(world.names, 6)
    for (fragment, round_), moves in world.movements.items():
        assert fragment == 0
        if method == "noloco" and "i1" not in merged[round_ - 1]:
            assert moves["i1"] == []
    before, after = (world.anchors_after[merged.index(["i0", "i2"]) + k][1]["i1"] for k in (-1, 0))
    assert (method == "eager") == (before.tolist() != after.tolist())
    assert world.model.shape == (DIM,)


def test_rounds_shorten_as_the_loss_falls():
    world = finished(World("algorithm=diloco", *THREE, "inner.H=8", "run.rounds=6", "schedule.adaptive=loss"))
    ends = [max(event["emissions"]) for event in world.events if event["event"] == "round_laid_out"]
    lengths = [after - before for before, after in zip((0, *ends), ends, strict=False)]
    losses = [np.mean([t.loss for r, _, t in world.metrics if r == round_]) for round_ in range(1, 7)]
    assert lengths == [8, *(int(np.ceil(8 * np.sqrt(loss / losses[0]))) for loss in losses[:-1])]
    assert lengths[-1] < 8


def test_the_fragment_whose_anchor_moved_fastest_goes_first():
    world = finished(World(*BY_CHANGE, "schedule.delay=0", "adopt.kind=overwrite", "run.rounds=9"))
    legs = [event["emissions"] for event in world.events if event["event"] == "round_laid_out"]
    anchors = {p: [kept[""] for fragment, kept in world.anchors_after if fragment == p] for p in range(len(legs[0]))}
    for k in range(2, 9):
        moved = {p: np.linalg.norm(after[k - 1] - after[k - 2]) for p, after in anchors.items()}
        rates = {p: moved[p] / (legs[k - 1][p] - legs[k - 2][p]) for p in moved}
        assert sorted(rates, key=lambda p: -rates[p]) == sorted(rates, key=lambda p: legs[k][p])
    assert len({tuple(np.argsort(leg)) for leg in legs}) > 1
