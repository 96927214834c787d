"""A commit that was damaged after it had been written: its manifest looks well, and the one before it is used."""

from commits import commit

from ray_diloco.checkpoint.store import CheckpointStore
from ray_diloco.cluster.misfortune import rot


def test_a_commit_rots_behind_a_manifest_that_looks_well(tmp_path):
    store = CheckpointStore(str(tmp_path))
    commit(store, 1)
    newest = commit(store, 2)
    rot(store.url, newest)
    survey = CheckpointStore(str(tmp_path)).survey(full=True)
    assert (survey.manifest.round, [passed.round for passed in survey.skipped]) == (1, [2])
