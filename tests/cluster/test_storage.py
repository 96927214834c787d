"""Commits elsewhere than in the run directory, and runs that lose their storage, an anchor shard or their driver.

Each time the run fails with a number, and the same command goes on from the newest commit to the anchor of a run that
nothing befell.
"""

import os
import signal

import fsspec
import pytest
from cluster_runs import Tape, actor_processes, durable, events, lines, seen, when

from ray_diloco.checkpoint.store import CheckpointStore
from ray_diloco.errors import DilocoError

pytestmark = pytest.mark.cluster

ROUNDS = 60
RUN = {"run.rounds": ROUNDS, "trace.contributions": False}


def kill_all(kind):
    def kill():
        for process in actor_processes(kind):
            process.kill()

    return kill


def fails(place, name, settings, act):
    """Trains until `act`, when three rounds are durable, ends it; returns the number of the error."""
    with when(place.folder(name), durable(3), act), pytest.raises(DilocoError) as failed:
        place.train(name, settings)
    assert failed.value.exit_code == 4
    assert 3 <= CheckpointStore(settings["run.storage"]).newest().round < ROUNDS
    return failed.value.number


def assert_went_on(place, name, settings, straight):
    summary = place.train(name, settings)
    assert (summary["status"], summary["anchor_digest"]) == ("finished", straight["anchor_digest"])
    assert summary["tokens_committed"] == straight["tokens_committed"]
    assert not (place.folder(name) / "checkpoints").exists()
    assert CheckpointStore(settings["run.storage"]).newest(full=True).round == ROUNDS
    commits = [line for line in lines(place.folder(name) / "metrics.jsonl") if line["kind"] == "commit"]
    assert [line["round"] for line in commits] == list(range(1, ROUNDS + 1))


def test_a_file_url_outlives_a_lost_shard_and_its_own_absence(place, straight):
    name, settings = "in-files", RUN | {"run.storage": f"file://{place.root}/elsewhere"}
    here, away = place.root / "elsewhere/checkpoints", place.root / "taken-away"
    assert fails(place, name, settings | {"anchor.shards": 3, "deadlines.losses": 1}, kill_all("Shard")) == 222

    def take_away():
        here.rename(away)
        here.write_text("no folder any more")

    # Another number of shards each time: commits are by tensor name, whoever kept the tensors.
    with when(place.folder(name), durable(3), take_away), pytest.raises(DilocoError) as failed:
        place.train(name, settings | {"anchor.shards": 2, "checkpoint.max_lag": 0})
    assert (failed.value.number, failed.value.exit_code) == (564, 4)
    tape = events(place.folder(name))
    assert seen("checkpoint_failed")(tape) and seen("round_committed", round=ROUNDS)(tape), "the rounds went on"
    here.unlink()
    away.rename(here)
    assert_went_on(place, name, settings, straight)


def test_memory_holds_the_commits_for_as_long_as_this_process_lives_also_without_a_driver(place, straight):
    name, settings = "in-memory", RUN | {"run.storage": "memory://of-a-test/run"}
    settings |= {"anchor.shards": 3}
    assert fails(place, name, settings | {"run.max_restarts": 0}, kill_all("Driver")) == 204
    assert_went_on(place, name, settings, straight)
    kept = CheckpointStore(settings["run.storage"]).newest()
    assert [len(kept.files_of(kind)) for kind in ("anchor", "outer")] == [3, 3]
    assert any("manifest.json" in path for path in fsspec.filesystem("memory").find("of-a-test/run"))
    warnings = [event["text"] for event in events(place.folder(name), "warning")]
    assert sum("is memory" in text for text in warnings) == 2, warnings


def test_a_stop_before_the_first_round_needs_no_storage(place):
    """Nothing was trained that could be lost, so a version 0 that could not be written is no failure of the run."""
    name = "unfounded"
    folder, tape = place.folder(name), Tape(place.folder(name))

    def obstruct_and_stop():
        (folder / "checkpoints/round-000000.partial").write_text("no folder")
        tape.wait(lambda past: seen("checkpoint_failed", round=0)(past) and seen("round_opened")(past))
        os.kill(os.getpid(), signal.SIGINT)

    # A round that is far from its end then.
    with when(folder, seen("island_launching"), obstruct_and_stop):
        run = place.train(name, {"run.rounds": 1, "inner.H": 40_000})
    assert (run["status"], run["rounds"], run["anchor_digest"]) == ("stopped", 0, "")
    assert events(folder)[-1]["event"] == "run_stopped"
