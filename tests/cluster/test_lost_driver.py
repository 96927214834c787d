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

    def kill_twice():
        tape = Tape(folder)
        ranks.append({p.pid for p in actor_processes("Rank")})
        actor_processes("Driver")[0].kill()
        tape.wait(lambda past: seen("run_resumed")(past) and seen("round_committed", 3)(past))
        ranks.append({p.pid for p in actor_processes("Rank")})
        actor_processes("Driver")[0].kill()

    with when(folder, seen("round_committed", 4), kill_twice):
        run = place.train("headless", {"run.rounds": ROUNDS, "checkpoint.progress_every": 1})
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
