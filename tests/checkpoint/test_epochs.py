"""One driver at a time may commit: the one with the highest epoch."""

import pytest
from commits import commit, number_of, write

from ray_diloco.checkpoint.epochs import KEPT
from ray_diloco.checkpoint.store import CheckpointStore


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    return CheckpointStore(str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}")


def test_epochs_count_up_from_one_and_outlive_who_opened_the_storage(store):
    assert store.epochs.newest() == 0
    assert [store.epochs.claim() for _ in range(3)] == [1, 2, 3]
    assert CheckpointStore(store.url).epochs.newest() == 3


def test_a_driver_that_has_been_succeeded_cannot_commit(store):
    first = store.epochs.claim()
    assert store.commit(write(store, 1), epoch=first).round == 1
    second = CheckpointStore(store.url).epochs.claim()
    late = write(store, 2)
    assert number_of(store.commit, late, epoch=first) == 565
    assert store.newest().round == 1
    assert store.commit(late, epoch=second).round == 2


def test_epochs_are_no_commits_and_old_ones_go(store):
    for _ in range(KEPT + 4):
        store.epochs.claim()
    commit(store, 1)
    store.prune()
    assert store.rounds() == [1]
    assert store.epochs.claim() == KEPT + 5
