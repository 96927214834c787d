"""`kill -9` of ranks: the run finishes, every block is credited once, the anchors are those of the trace."""

import pytest
import ray
from cluster_runs import (
    Tape,
    anchor,
    digest,
    distance,
    durable,
    events,
    lines,
    manifest,
    rank_processes,
    replayed,
    seen,
    traced_rounds,
    when,
)

pytestmark = pytest.mark.cluster

ROUNDS = 16


@pytest.fixture(scope="module")
def wounded(place):
    """An island of one rank and one of two; each loses a rank, and the run waits for the new ones."""
    folder = place.folder("wounded")
    tape = Tape(folder)

    def kill_one_after_the_other():
        rank_processes(world=1)[0].kill()
        tape.wait(lambda seen_so_far: seen("island_joined", 3)(seen_so_far) and seen("round_opened", 6)(seen_so_far))
        rank_processes(world=2)[1].kill()

    def begun(tape):
        # A commit with the moments that the successor takes up.
        return seen("round_opened", 3)(tape) and durable()(tape)

    settings = {"run.rounds": ROUNDS, "islands.min": 2, "islands.i1.ranks": 2, "islands.i1.micro_batch": 1}
    # However slow the first write is, no more rounds are ahead of it.
    settings["checkpoint.max_lag"] = 3
    with when(folder, begun, kill_one_after_the_other):
        return place.train("wounded", settings)


def test_the_run_finishes_and_the_tape_tells_what_happened(wounded):
    assert (wounded["status"], wounded["rounds"]) == ("finished", ROUNDS)
    lost = events(wounded.folder, "island_lost")
    assert [(event["island"], event["incarnation"]) for event in lost] == [("i0", 0), ("i1", 0)]
    # Of two ranks, the one that lives may be the first to complain.
    reasons = [event["reason"] for event in lost]
    assert "rank 0 of i0 died: " in reasons[0] and "rank 1 of i1 died: " in reasons[1], reasons
    launched = events(wounded.folder, "island_launching")
    assert [(event["island"], event["incarnation"]) for event in launched[2:]] == [("i0", 1), ("i1", 1)]
    joined = events(wounded.folder, "island_joined")
    assert [(event["island"], event["incarnation"]) for event in joined[2:]] == [("i0", 1), ("i1", 1)]
    assert [(island["name"], island["restarts"]) for island in wounded["islands"]] == [("i0", 1), ("i1", 1)]
    restored = events(wounded.folder, "inner_state_restored")
    assert [event["island"] for event in restored] == ["i0", "i1"], "moments come back from the last commit"


def test_every_block_is_credited_once(wounded):
    (ledger,) = manifest(wounded.folder)["ledger"].values()
    ((start, stop),) = ledger["credited"]
    contributed = [len(event["islands"]) for event in events(wounded.folder, "round_committed")]
    assert (start, stop) == (0, 4 * 2 * sum(contributed))
    assert wounded["tokens_committed"] == 32 * stop
    assert sum(island["tokens"] for island in wounded["islands"]) == 32 * stop
    assert [island["rounds_contributed"] for island in wounded["islands"]] == [
        sum(name in event["islands"] for event in events(wounded.folder, "round_committed")) for name in ("i0", "i1")
    ]
    assert contributed.count(2) >= ROUNDS - 2, "the others go on, and new ones join at the next boundary"


def test_anchors_equal_a_replay_of_the_trace(wounded):
    assert traced_rounds(wounded.folder) == list(range(ROUNDS + 1))
    for r, expected in enumerate(replayed(wounded.folder)):
        assert distance(anchor(wounded.folder, r), expected) < 1e-6
    assert digest(wounded.folder, anchor(wounded.folder, ROUNDS)) == wounded["anchor_digest"]
    commits = [line for line in lines(wounded.folder / "metrics.jsonl") if line["kind"] == "commit"]
    assert [line["version"] for line in commits] == list(range(1, ROUNDS + 1))


def test_nothing_of_the_run_stays_on_the_cluster(wounded):
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}
    from ray._private.state import actors

    def left():
        """Actors that live; processes that wait for the next test's run are none of this one."""
        warm = {"WarmRank", "WarmShard"}
        return [a for a in actors().values() if a["State"] != "DEAD" and a["ActorClassName"] not in warm]

    tape = Tape(wounded.folder)
    tape.wait(lambda _: not left())
    assert ray.cluster_resources()["CPU"] == 8
    tape.wait(lambda _: ray.available_resources().get("CPU") == 8)
