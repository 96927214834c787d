"""Small commits with values that can be told apart, for the tests of the store."""

from __future__ import annotations

import numpy as np
import pytest

from ray_diloco.checkpoint.manifest import Manifest
from ray_diloco.checkpoint.names import anchor_filename, inner_filename, outer_filename
from ray_diloco.checkpoint.store import CheckpointStore
from ray_diloco.errors import CheckpointError

LAYOUT = (("wte", (4, 2)), ("bias", ()), ("head", (2, 3)))
# wte and head on one shard, bias on the other, as shard_ranges would not do but a layout may.
SHARDS = (("wte", "head"), ("bias",))


def anchor(round: int) -> dict[str, np.ndarray]:
    """Each value of round r is r + its flat position / 100."""
    values, at = {}, 0
    for name, shape in LAYOUT:
        n = int(np.prod(shape))
        values[name] = (np.arange(at, at + n, dtype=np.float32) / 100 + round).reshape(shape).astype(np.float32)
        at += n
    return values


def write(store: CheckpointStore, round: int, shift: float = 0.0, run: str = "r", **fields) -> Manifest:
    """Writes the files of a round and returns its manifest, not committed."""
    values = {name: (array + np.float32(shift)).astype(np.float32) for name, array in anchor(round).items()}
    files = []
    for shard, names in enumerate(SHARDS):
        tensors = {name: values[name] for name in names}
        momentum = {f"momentum.{name}": -array for name, array in tensors.items()}
        name = anchor_filename(shard, len(SHARDS))
        files.append(store.write_tensors(round, name, tensors, kind="anchor"))
        files.append(store.write_tensors(round, outer_filename(shard, len(SHARDS)), momentum, kind="outer"))
    inner = {"step": np.array([round], np.int64), "exp_avg": np.full(5, round, np.float32)}
    for rank in range(2):
        files.append(store.write_tensors(round, inner_filename("i0", rank), inner, kind="inner", island="i0"))
    return Manifest(
        run=run,
        round=round,
        versions={"all": round},
        step=round * 50,
        layout=LAYOUT,
        files=tuple(files),
        ledger={"credited": [[0, round * 8]]},
        created=float(round),
        **fields,
    )


def commit(store: CheckpointStore, round: int, shift: float = 0.0, **fields) -> Manifest:
    """Writes and commits a round."""
    return store.commit(write(store, round, shift, **fields))


def number_of(call, *arguments, **options) -> int:
    """The number of the error that a call raises, which says what is wrong and how to mend it."""
    with pytest.raises(CheckpointError) as raised:
        call(*arguments, **options)
    assert raised.value.what
    assert raised.value.mend
    return raised.value.number
