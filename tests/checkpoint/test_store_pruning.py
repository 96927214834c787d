"""What is removed from a storage and when: old commits, unfinished ones, and a future that was passed over."""

import uuid

import pytest
from commits import commit, number_of, write

from ray_diloco.checkpoint.store import CheckpointStore


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [
        (2, 0, [8, 9]),
        (1, 0, [9]),
        (0, 0, [9]),
        (2, 4, [0, 4, 8, 9]),
        (1, 3, [0, 3, 6, 9]),
        (20, 0, list(range(10))),
    ],
)
def test_pruning_keeps_the_last_ones_and_every_nth(url, keep_last, keep_every, left):
    store = CheckpointStore(url)
    for round in range(10):
        commit(store, round)
    removed = store.prune(keep_last, keep_every, limit=10)
    assert store.rounds() == left
    assert removed == [round for round in range(10) if round not in left]
    assert store.newest().round == 9


def test_rounds_that_are_asked_for_stay_in_any_case(url):
    store = CheckpointStore(url)
    for round in range(6):
        commit(store, round)
    assert store.prune(keep_last=2, keep=(1, 3, 9)) == [0, 2]
    assert store.rounds() == [1, 3, 4, 5]


def test_a_call_removes_no_more_than_its_limit_and_begins_with_the_oldest(url):
    store = CheckpointStore(url)
    for round in range(6):
        commit(store, round)
    assert store.prune(keep_last=1, limit=2) == [0, 1]
    assert store.prune(keep_last=1, limit=2) == [2, 3]
    assert store.prune(keep_last=1, limit=2) == [4]
    assert store.prune(keep_last=1, limit=2) == []


def test_a_damaged_commit_does_not_count_as_one_of_the_last(tmp_path, folder):
    store = CheckpointStore(str(tmp_path))
    for round in range(5):
        commit(store, round)
    (folder / "round-000004" / "outer-00000-of-00002.safetensors").unlink()
    (folder / "round-000002" / "manifest.json").write_text("{")
    assert store.prune(keep_last=2) == [0, 2]
    assert store.rounds() == [1, 3, 4]


def test_pruning_where_nothing_was_committed_does_nothing(url):
    store = CheckpointStore(url)
    assert store.prune() == []
    write(store, 0)
    assert store.prune() == []
    assert store.commit(write(store, 0)).round == 0


def test_what_crashed_writers_left_goes_but_not_what_is_being_written(tmp_path, folder):
    store = CheckpointStore(str(tmp_path))
    commit(store, 0)
    write(store, 1)
    commit(store, 2)
    pending = write(store, 3)
    assert (folder / "round-000001.partial").is_dir()
    store.prune()
    assert not (folder / "round-000001.partial").exists()
    assert store.commit(pending).round == 3


def test_on_a_remote_storage_unfinished_rounds_go_once_they_are_old():
    store = CheckpointStore(f"memory://{uuid.uuid4().hex}")
    commit(store, 0)
    write(store, 1)
    commit(store, 2)
    pending = write(store, 3)
    assert store.prune(keep_last=2) == [1]
    assert store.commit(pending).round == 3


def test_an_abandoned_round_gives_its_space_back(url):
    store = CheckpointStore(url)
    commit(store, 0)
    manifest = write(store, 1)
    store.abandon(1)
    store.abandon(1)
    assert number_of(store.commit, manifest) == 513
    store.abandon(0)
    assert store.newest().round == 0


def test_discarding_leaves_the_round_that_the_run_continues_from(url):
    store = CheckpointStore(url)
    for round in range(4):
        commit(store, round)
    write(store, 4)
    assert store.discard_after(1) == [4, 3, 2]
    assert store.newest().round == 1
    assert commit(store, 2).previous_round == 1
    assert store.discard_after(2) == []
