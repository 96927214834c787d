"""Losses beside killed ranks: a frozen rank, numbers that overflow, and the actors without which a run cannot go on."""

import pytest
from cluster_runs import (
    Tape,
    actor_processes,
    anchor,
    digest,
    distance,
    events,
    manifest,
    rank_processes,
    replayed,
    seen,
    when,
)

import ray_diloco
from ray_diloco.errors import ClusterError

pytestmark = pytest.mark.cluster


def test_a_run_that_lost_shard_or_driver_fails_and_the_same_command_goes_on(place, straight):
    settings, folder = {"run.rounds": 100, "trace.contributions": False}, place.folder("unkept")
    for kind, number in (("Shard", 222), ("Driver", 204)):

        def kill(kind=kind):
            for process in actor_processes(kind):
                process.kill()

        with when(folder, seen("checkpoint_written", 3), kill), pytest.raises(ClusterError) as failed:
            place.train("unkept", settings)
        assert (failed.value.number, failed.value.exit_code) == (number, 4)
        assert manifest(folder)["round"] < 100
    again = place.train("unkept", settings)
    assert (again["status"], again["anchor_digest"]) == ("finished", straight["anchor_digest"])
    assert again["tokens_committed"] == straight["tokens_committed"]


def test_a_frozen_rank_is_noticed_ended_and_replaced(place):
    frozen = []

    def freeze():
        frozen.append(rank_processes(world=1)[0])
        frozen[0].suspend()

    settings = {"run.rounds": 6, "islands.i1.ranks": 2, "islands.min": 2, "deadlines.silence_s": 2.0}
    with when(place.folder("frozen"), seen("round_opened", 2), freeze):
        run = place.train("frozen", settings)
    assert (run["status"], run["rounds"]) == ("finished", 6)
    (lost,) = events(run.folder, "island_lost")
    assert lost["island"] == "i0" and "2 s" in lost["reason"]
    Tape(run.folder).wait(lambda _: not frozen[0].is_running())


def test_an_island_that_overflowed_comes_back_with_moments_that_are_numbers(place):
    flag = place.root / "overflow"
    settings = {"run.rounds": 8, "islands.min": 2, "model.builder": "cluster_builders:overflows_once"}
    with when(place.folder("overflowed"), seen("round_committed", 2), flag.touch):
        run = place.train("overflowed", settings | {"model.config": {"flag": str(flag)}})
    assert (run["status"], run["rounds"]) == ("finished", 8)
    (lost,) = events(run.folder, "island_lost")
    (refused,) = events(run.folder, "contribution_rejected")
    assert lost["reason"] == refused["reason"] == "the pseudo-gradient is not finite"
    assert [event["island"] for event in events(run.folder, "inner_state_restored")] == [lost["island"]]
    for r, expected in enumerate(replayed(run.folder)):
        assert distance(anchor(run.folder, r), expected) < 1e-6
    assert digest(run.folder, anchor(run.folder, 8)) == run["anchor_digest"]


def test_a_run_has_one_driver_and_can_be_stopped_before_it_has_begun(place):
    refused = []

    def meddle():
        with pytest.raises(ClusterError) as error:
            place.train("single")
        refused.append(error.value.number)
        import ray

        ray.get(ray.get_actor("single").stop.remote())

    with when(place.folder("single"), seen("island_launching", 2), meddle):
        run = place.train("single")
    assert refused == [203]
    assert (run["status"], run["rounds"], run["anchor_digest"]) == ("stopped", 0, "")
    assert place.train("single")["rounds"] == 3
    assert ray_diloco.evaluate(str(run.folder))["round"] == 3
