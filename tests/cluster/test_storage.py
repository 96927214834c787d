"""Commits elsewhere than in the run directory: file:// on disk, memory:// in the process that starts the run."""

import fsspec
import pytest
import ray
from cluster_runs import events, lines, seen, when

from ray_diloco.checkpoint.store import CheckpointStore
from ray_diloco.errors import CheckpointError

pytestmark = pytest.mark.cluster

ROUNDS = 100
LONG = {"run.rounds": ROUNDS, "trace.contributions": False, "evaluate.every": 0}


def stopped_and_continued(place, name, storage):
    def stop():
        ray.get(ray.get_actor(name).stop.remote())

    settings = LONG | {"run.storage": storage}
    with when(place.folder(name), seen("round_committed", 3), stop):
        part = place.train(name, settings)
    assert part["status"] == "stopped"
    assert CheckpointStore(storage).newest().round == part["rounds"]
    return place.train(name, settings)


def assert_went_on(place, name, storage, summary, straight):
    assert (summary["status"], summary["anchor_digest"]) == ("finished", straight["anchor_digest"])
    assert not (place.folder(name) / "checkpoints").exists()
    assert len(events(place.folder(name), "run_resumed")) == 1
    assert CheckpointStore(storage).newest(full=True).round == ROUNDS
    commits = [line for line in lines(place.folder(name) / "metrics.jsonl") if line["kind"] == "commit"]
    assert [line["round"] for line in commits] == list(range(1, ROUNDS + 1))


def test_a_file_url_holds_the_commits_and_a_run_goes_on_from_them(place, straight):
    storage = f"file://{place.root}/elsewhere"
    summary = stopped_and_continued(place, "in-files", storage)
    assert_went_on(place, "in-files", storage, summary, straight)
    assert not events(place.folder("in-files"), "warning")


def test_memory_holds_the_commits_for_as_long_as_this_process_lives(place, straight):
    storage = "memory://of-a-test/run"
    summary = stopped_and_continued(place, "in-memory", storage)
    assert_went_on(place, "in-memory", storage, summary, straight)
    assert any("manifest.json" in path for path in fsspec.filesystem("memory").find("of-a-test/run"))
    (first, again) = events(place.folder("in-memory"), "warning")
    assert "memory" in first["text"] and again["text"] == first["text"]


def test_a_run_whose_last_rounds_cannot_be_written_has_failed_and_goes_on_when_they_can(place, straight):
    folder, away = place.folder("no-disk"), place.root / "taken-away"

    def break_storage():
        (folder / "checkpoints").rename(away)
        (folder / "checkpoints").write_text("no folder any more")

    with when(folder, seen("checkpoint_written", 3), break_storage), pytest.raises(CheckpointError) as failed:
        place.train("no-disk", LONG)
    assert (failed.value.number, failed.value.exit_code) == (564, 4)
    assert events(folder, "checkpoint_failed"), "and the rounds went on meanwhile"
    assert events(folder, "round_committed")[-1]["round"] == ROUNDS

    (folder / "checkpoints").unlink()
    away.rename(folder / "checkpoints")
    again = place.train("no-disk", LONG)
    (resumed,) = events(folder, "run_resumed")
    assert 3 <= resumed["round"] < ROUNDS
    assert (again["status"], again["anchor_digest"]) == ("finished", straight["anchor_digest"])
