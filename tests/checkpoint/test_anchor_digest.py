"""The digest by which anchors are compared."""

import dataclasses
import hashlib

import numpy as np
import pytest
from commits import LAYOUT, anchor, commit, write

from ray_diloco.checkpoint.anchor import anchor_digest
from ray_diloco.checkpoint.store import CheckpointStore
from ray_diloco.errors import CheckpointError


def test_anchor_digest_is_sha256_of_the_fp32_values_in_canonical_order(url):
    store = CheckpointStore(url)
    manifest = commit(store, 7)
    values = anchor(7)
    flat = np.concatenate([values[name].reshape(-1) for name, _ in LAYOUT]).astype("<f4")
    assert anchor_digest(store, manifest) == hashlib.sha256(flat.tobytes()).hexdigest()


def test_anchor_digest_does_not_depend_on_shards_but_on_each_value(tmp_path):
    store, other = CheckpointStore(str(tmp_path / "a")), CheckpointStore(str(tmp_path / "b"))
    one = other.write_tensors(7, "anchor-00000-of-00001.safetensors", anchor(7), kind="anchor")
    single = other.commit(dataclasses.replace(write(other, 7), files=(one,)))
    assert anchor_digest(store, commit(store, 7)) == anchor_digest(other, single)
    assert anchor_digest(store, commit(store, 8, shift=-1)) != anchor_digest(store, store.read(7))


@pytest.mark.parametrize(("array", "words"), [(np.zeros(6, np.float32), "(6,)"), (np.zeros((2, 3)), "float64")])
def test_an_anchor_that_is_not_as_the_layout_says_has_no_digest(tmp_path, array, words):
    store = CheckpointStore(str(tmp_path))
    values = {**anchor(0), "head": array}
    entry = store.write_tensors(0, "anchor-00000-of-00001.safetensors", values, kind="anchor")
    manifest = store.commit(dataclasses.replace(write(store, 0), files=(entry,)))
    with pytest.raises(CheckpointError, match="head") as raised:
        anchor_digest(store, manifest)
    assert raised.value.number == 517
    assert words in raised.value.what
