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

ROUNDS = 6
# Rounds that take longer than it takes to kill somebody within.
RUN = {"run.rounds": ROUNDS, "inner.H": 80}


def test_a_driver_that_is_killed_has_a_successor_that_takes_over_the_islands(place, quick):
    """Once in the first round, when nothing is durable but version 0, and once between others."""
    straight = quick.train("long-rounds", RUN)
    folder, ranks = place.folder("headless"), []

    def kill(tape):
        """As soon as a round is open and something is durable."""
        # Looked for before the time comes: that takes longer than some rounds.
        (driver,) = actor_processes("Driver")
        tape.wait(lambda past: seen("checkpoint_written")(past) and seen("round_opened")(past))
        driver.kill()
        ranks.append({p.pid for p in actor_processes("Rank")})

    def kill_twice():
        kill(tape)
        after = Tape(folder)
        after.wait(seen("run_resumed"))
        kill(after)

    tape = Tape(folder)
    with when(folder, seen("island_launching", 2), kill_twice):
        run = place.train("headless", RUN | {"run.fresh": True, "checkpoint.progress_every": 10})
    assert (run["status"], run["rounds"]) == ("finished", ROUNDS)
    assert ranks[0] == ranks[1] and len(ranks[0]) == 2, "the same processes"
    assert len(events(folder, "run_started")) == 1 and not events(folder, "island_lost")
    began = [event["round"] for event in events(folder, "run_resumed")]
    assert len(began) == 2 and began[0] < began[1]
    taken = [(event["island"], event["inner"]) for event in events(folder, "island_reattached")]
    inner = ["restored" if round_ else "new" for round_ in began]
    assert sorted(taken[:2]) == [("i0", inner[0]), ("i1", inner[0])]
    assert sorted(taken[2:]) == [("i0", inner[1]), ("i1", inner[1])]
    assert not events(folder, "inner_state_reset")
    assert run["anchor_digest"] == straight["anchor_digest"] == digest(folder, anchor(folder, ROUNDS))
    assert all(equal(anchor(folder, r), anchor(straight.folder, r)) for r in range(ROUNDS + 1))
    assert manifest(folder)["ledger"] == manifest(straight.folder)["ledger"]
    commits = [line["round"] for line in lines(folder / "metrics.jsonl") if line["kind"] == "commit"]
    assert commits == list(range(1, ROUNDS + 1)), "no round stands there twice"
    assert [event["seq"] for event in events(folder)] == list(range(len(events(folder))))
    assert not rank_processes(world=1)
