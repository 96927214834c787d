"""`kill -9` of the driver: its successor takes over the islands as they stand, and nobody sees a difference."""

import psutil
import pytest
from cluster_runs import (
    Tape,
    actor_processes,
    anchor,
    digest,
    durable,
    equal,
    events,
    lines,
    manifest,
    seen,
    when,
)

pytestmark = pytest.mark.cluster

ROUNDS = 6
# Rounds of a second, with a progress point every 50 ms, of which every second one is durable.
RUN = {"run.rounds": ROUNDS, "inner.H": 400, "checkpoint.every": 2}


def test_a_driver_that_is_killed_has_a_successor_that_takes_over_the_islands(place, quick):
    """Once in the first round, when nothing is durable but version 0, and once between others."""
    straight = quick.train("long-rounds", RUN)
    folder, ranks = place.folder("headless"), []

    def kill(begun):
        # Looked for before the time comes: a round may take less time than the looking.
        (driver,) = actor_processes("Driver")
        begun()
        driver.kill()
        ranks.append({p.pid for p in actor_processes("Rank")})

    def points():
        return all(list(folder.glob(f"points/{island}/*.json")) for island in ("i0", "i1"))

    def kill_twice():
        tape = Tape(folder)
        kill(lambda: tape.wait(lambda past: seen("checkpoint_written", round=0)(past) and points()))
        tape.wait(seen("run_resumed"))
        after = Tape(folder)
        kill(lambda: after.wait(durable()))

    settings = {"run.fresh": True, "checkpoint.progress_every": 20}
    with when(folder, seen("island_launching", 2), kill_twice):
        run = place.train("headless", RUN | settings)
    assert (run["status"], run["rounds"]) == ("finished", ROUNDS)
    assert ranks[0] == ranks[1] and len(ranks[0]) == 2, "the same processes"
    assert len(events(folder, "run_started")) == 1 and not events(folder, "island_lost")
    first, second = [event["round"] for event in events(folder, "run_resumed")]
    assert first == 0 < second
    taken = [(event["island"], event["inner"]) for event in events(folder, "island_reattached")]
    assert sorted(taken[:2]) == [("i0", "new"), ("i1", "new")]
    assert sorted(taken[2:]) == [("i0", "restored"), ("i1", "restored")]
    assert not events(folder, "inner_state_reset")
    assert [event["segment"] for event in events(folder, "progress_taken_up")][:2] == [1, 1]
    assert run["expected"] and len(events(folder, "run_expected")) == 1
    assert run["anchor_digest"] == straight["anchor_digest"] == digest(folder, anchor(folder, ROUNDS))
    assert all(equal(anchor(folder, r), anchor(straight.folder, r)) for r in range(ROUNDS + 1))
    assert manifest(folder)["ledger"] == manifest(straight.folder)["ledger"]
    commits = [line["round"] for line in lines(folder / "metrics.jsonl") if line["kind"] == "commit"]
    assert commits == list(range(1, ROUNDS + 1)), "no round stands there twice"
    assert [event["seq"] for event in events(folder)] == list(range(len(events(folder))))
    # A kill is on its way when the driver ends.  Ranks that it forgot would live on as orphans, for longer than this.
    _, alive = psutil.wait_procs(actor_processes("Rank"), timeout=60)
    assert not alive
