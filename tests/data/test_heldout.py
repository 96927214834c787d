"""The held-out split: every block once, evenly spread, in runs, the same for ever."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_diloco.data.heldout import Split


def places(split: Split) -> tuple[np.ndarray, np.ndarray]:
    return split.place_of_train(np.arange(split.train)), split.place_of_heldout(np.arange(split.heldout))


@given(train=st.integers(1, 400), heldout=st.integers(0, 400))
def test_every_block_is_either_a_training_or_a_held_out_block(train: int, heldout: int) -> None:
    for_training, held = places(Split(train + heldout, heldout))
    assert sorted([*for_training, *held]) == list(range(train + heldout))


@given(train=st.integers(1, 400), heldout=st.integers(0, 400))
def test_both_kinds_are_numbered_in_the_order_of_the_corpus(train: int, heldout: int) -> None:
    for part in places(Split(train + heldout, heldout)):
        assert np.all(np.diff(part) > 0)


def test_nine_of_thirty_are_three_runs_of_three_each_in_the_middle_of_a_third() -> None:
    _, held = places(Split(30, 9))
    # 21 training blocks: 3 before the first run, 7 between runs, 4 behind the last.
    assert held.tolist() == [3, 4, 5, 13, 14, 15, 23, 24, 25]


def test_the_default_number_of_blocks_is_eight_runs_over_the_whole_corpus() -> None:
    _, held = places(Split(47_341, 64))
    starts = held[np.flatnonzero(np.diff(held, prepend=-2) > 1)]
    assert len(starts) == 8
    assert np.diff(starts).min() > 5_900
    assert starts[0] < 3_000
    assert held[-1] > 44_000


def test_any_shape_can_be_asked_for_and_nothing_outside() -> None:
    split = Split(30, 9)
    assert split.place_of_heldout(np.array([[8, 0], [3, 3]])).tolist() == [[25, 3], [13, 13]]
    assert split.place_of_train(np.empty(0, dtype=np.int64)).shape == (0,)
    for ask, text in (
        (lambda: split.place_of_train(np.array([0, 21])), r"training blocks are 0\.\.20, asked for 0\.\.21"),
        (lambda: split.place_of_train(np.array([-1])), r"asked for -1\.\.-1"),
        (lambda: split.place_of_heldout(np.array([9])), r"held-out blocks are 0\.\.8"),
        (lambda: Split(30, 0).place_of_heldout(np.array([0])), r"held-out blocks are 0\.\.-1"),
    ):
        with pytest.raises(IndexError, match=text):
            ask()
