"""What lives and is of no use: numbers that overflow, a rank and a shard that are frozen; and runs that are refused."""

import pytest
import ray
from cluster_runs import (
    Tape,
    actor_processes,
    anchor,
    digest,
    distance,
    durable,
    events,
    rank_processes,
    replayed,
    seen,
    when,
)

from ray_diloco.errors import ClusterError

pytestmark = pytest.mark.cluster

HEARTBEAT_S = 8.0


def test_what_overflows_or_freezes_is_replaced(place):
    """First one loss becomes infinite; when that island is back, a rank stops in the midst of its work, and a shard."""
    flag, folder, frozen = place.root / "overflow", place.folder("troubled"), []
    tape = Tape(folder)

    def trouble():
        flag.touch()
        tape.wait(lambda events: seen("island_joined", 3)(events) and seen("round_committed", 5)(events))
        frozen.extend([rank_processes(world=1)[0], *actor_processes("Shard")])
        for process in frozen:
            process.suspend()

    settings = {
        "run.rounds": 20,
        "islands.min": 2,
        "deadlines.heartbeat_s": HEARTBEAT_S,
        # So that one stays in which the inner state of the lost island is, however slow the writes are.
        "checkpoint.keep_last": 40,
        "model.builder": "cluster_builders:overflows_once",
        "model.config": {"flag": str(flag)},
    }
    with when(folder, durable(), trouble):
        run = place.train("troubled", settings)
    assert (run["status"], run["rounds"]) == ("finished", 20)
    overflow, freeze = events(folder, "island_lost")
    (refused,) = events(folder, "contribution_rejected")
    assert overflow["reason"] == refused["reason"] == "the pseudo-gradient is not finite"
    assert "is frozen: its process lives and was silent for" in freeze["reason"]
    assert freeze["silent_s"] >= HEARTBEAT_S
    assert [event["how"] for event in events(folder, "anchor_shard_lost")] == ["frozen"]
    assert len(events(folder, "anchor_shard_replaced")) == 1
    restored = [event["island"] for event in events(folder, "inner_state_restored")]
    assert restored == [overflow["island"], freeze["island"]]
    for r, expected in enumerate(replayed(folder)):
        assert distance(anchor(folder, r), expected) < 1e-6
    assert digest(folder, anchor(folder, 20)) == run["anchor_digest"]
    assert len(frozen) == 2
    tape.wait(lambda _: not any(process.is_running() for process in frozen))


def test_a_run_has_one_driver_and_can_be_stopped_before_it_has_begun(place):
    refused = []

    def meddle():
        with pytest.raises(ClusterError) as error:
            place.train("single")
        refused.append(error.value.number)
        ray.get(ray.get_actor("single").stop.remote())

    with when(place.folder("single"), seen("island_launching", 2), meddle):
        run = place.train("single")
    assert refused == [203]
    assert (run["status"], run["rounds"], run["anchor_digest"]) == ("stopped", 0, "")
