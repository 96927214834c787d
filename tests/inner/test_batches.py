import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_diloco.data.permutation import virtual_to_block
from ray_diloco.errors import InnerError
from ray_diloco.inner.batches import Batches, positions
from ray_diloco.outer.layout import Range, normalise


class Numbered:
    """Blocks of 3 tokens that say their own number."""

    def train(self, indices):
        return np.repeat(np.asarray(indices, dtype=np.uint16)[:, None], 3, axis=1)


def batches(lease, rank=0, world=1, accumulation=1, micro_batch=1):
    return Batches(Numbered(), 10, lease, 5, rank, world, accumulation, micro_batch)


def numbers(found, step):
    ids = found(step)
    assert ids.dtype == torch.int64
    return ids[..., 0].tolist()


def test_a_lease_is_consumed_in_order_across_its_ranges():
    lease = (Range(2, 5), Range(20, 23))
    order = virtual_to_block(5, np.array([2, 3, 4, 20, 21, 22]), 10).tolist()
    found = batches(lease, micro_batch=2)
    assert found.steps == 3
    assert [numbers(found, k) for k in range(3)] == [[order[0:2]], [order[2:4]], [order[4:6]]]


def test_a_rank_takes_its_consecutive_part_of_every_step():
    order = virtual_to_block(5, np.arange(16), 10).tolist()
    lease = (Range(0, 16),)
    second = batches(lease, rank=1, world=2, accumulation=2, micro_batch=2)
    assert second.steps == 2
    assert numbers(second, 0) == [order[4:6], order[6:8]]
    assert numbers(second, 1) == [order[12:14], order[14:16]]


@given(
    cuts=st.lists(st.integers(0, 60), min_size=2, max_size=6, unique=True),
    shape=st.sampled_from([(1, 1, 4), (2, 1, 2), (1, 4, 1), (4, 1, 1), (2, 2, 1)]),
)
def test_an_island_trains_on_the_same_blocks_in_a_step_however_it_is_cut(cuts, shape):
    cuts = sorted(cuts)
    lease = normalise(Range(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False))
    world, accumulation, micro_batch = shape
    steps = sum(r.numel for r in lease) // 4
    for step in range(steps):
        whole = np.ravel(numbers(batches(lease, micro_batch=4), step))
        parts = [numbers(batches(lease, r, world, accumulation, micro_batch), step) for r in range(world)]
        np.testing.assert_array_equal(np.ravel(parts), whole)


def test_a_lease_that_is_no_whole_number_of_steps_is_refused():
    with pytest.raises(InnerError, match="RD-750"):
        _ = batches((Range(0, 7),), world=2).steps


def test_a_step_beyond_the_lease_is_refused():
    with pytest.raises(IndexError):
        batches((Range(0, 4),), micro_batch=2)(2)


def test_positions_of_nothing_are_nothing():
    assert positions((), 0, 0).tolist() == []
    assert positions((Range(3, 5),), 1, 0).tolist() == []
