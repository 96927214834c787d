"""`kill -9` of the driver: its successor takes over the islands as they stand, and nobody sees a difference."""

import pytest
from cluster_runs import (
    Tape,
    actor_processes,
    anchor,
    digest,
    equal,
    events,
    lines,
    manifest,
    rank_processes,
    seen,
    when,
)

pytestmark = pytest.mark.cluster

ROUNDS = 60


def test_a_driver_that_is_killed_has_a_successor_that_takes_over_the_islands(place, straight):
    folder, ranks = place.folder("headless"), []

    def kill_when_a_round_is_durable():
        # Looked for before that: a round takes less time than the looking.
        (driver,) = actor_processes("Driver")
        ranks.append({p.pid for p in actor_processes("Rank")})
        Tape(folder).wait(seen("checkpoint_written"))
        driver.kill()

    def kill_twice():
        kill_when_a_round_is_durable()
        tape = Tape(folder)
        tape.wait(lambda past: seen("run_resumed")(past) and seen("island_joined", 2)(past))
        kill_when_a_round_is_durable()

    # However slow the writes are, no more rounds are ahead of them.
    settings = {"run.rounds": ROUNDS, "checkpoint.progress_every": 1, "checkpoint.max_lag": 2}
    with when(folder, seen("island_joined", 2), kill_twice):
        run = place.train("headless", settings)
    assert (run["status"], run["rounds"]) == ("finished", ROUNDS)
    assert ranks[0] == ranks[1] and len(ranks[0]) == 2, "the same processes"
    assert len(events(folder, "run_resumed")) == 2 and not events(folder, "island_lost")
    taken = [(event["island"], event["inner"]) for event in events(folder, "island_reattached")]
    assert sorted(taken) == [(island, "restored") for island in ("i0", "i0", "i1", "i1")]
    assert run["anchor_digest"] == straight["anchor_digest"] == digest(folder, anchor(folder, ROUNDS))
    assert all(equal(anchor(folder, r), anchor(straight.folder, r)) for r in range(ROUNDS + 1))
    assert manifest(folder)["ledger"] == manifest(straight.folder)["ledger"]
    commits = [line["round"] for line in lines(folder / "metrics.jsonl") if line["kind"] == "commit"]
    assert commits == list(range(1, ROUNDS + 1)), "no round stands there twice"
    assert [event["seq"] for event in events(folder)] == list(range(len(events(folder))))
    assert not rank_processes(world=1)
