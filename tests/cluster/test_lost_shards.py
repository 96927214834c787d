"""`kill -9` of anchor shards: successors take over, and no island notices."""

import pytest
from cluster_runs import Tape, actor_processes, anchor, digest, distance, events, manifest, replayed, seen, when

pytestmark = pytest.mark.cluster

ROUNDS = 14


def test_shards_that_are_killed_have_successors(place):
    """Rounds that no durable commit holds are done again from what was kept, with the same bits."""
    folder = place.folder("shardless")
    tape = Tape(folder)

    def kill_one_and_then_both():
        actor_processes("Shard")[0].kill()
        tape.wait(seen("anchor_shard_replaced"))
        # Looked for before the time comes: a round takes less time than the looking.
        processes = actor_processes("Shard")
        tape.wait(seen("round_committed", 8))
        for process in processes:
            process.kill()

    settings = {"run.rounds": ROUNDS, "anchor.shards": 2, "checkpoint.every": 5}
    with when(folder, seen("round_committed", 3), kill_one_and_then_both):
        run = place.train("shardless", settings)
    assert (run["status"], run["rounds"]) == ("finished", ROUNDS)
    assert not events(folder, "island_lost")
    assert [event["how"] for event in events(folder, "anchor_shard_lost")] == ["died"] * 3
    assert len(events(folder, "anchor_shard_replaced")) == 3
    assert [event["round"] for event in events(folder, "round_committed")] == list(range(1, ROUNDS + 1))
    for r, expected in enumerate(replayed(folder)):
        assert distance(anchor(folder, r), expected) < 1e-6
    assert digest(folder, anchor(folder, ROUNDS)) == run["anchor_digest"]
    (ledger,) = manifest(folder)["ledger"].values()
    assert ledger["credited"] == [[0, 4 * 2 * 2 * ROUNDS]]
