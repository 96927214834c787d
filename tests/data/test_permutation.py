"""The seeded permutation of blocks: a bijection for every n, stateless, and the same for ever."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_diloco.data.permutation import virtual_to_block

MASK = (1 << 64) - 1


def reference(seed: int, virtual: int, n: int) -> int:
    """The same network in plain integers, written from its description."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
        return x ^ x >> 31

    epoch, x = divmod(virtual, n)
    key = mix((mix(seed & MASK) + epoch) & MASK)
    half = next(h for h in range(1, 33) if 4**h >= n)
    while True:
        left, right = x >> half, x % 2**half
        for number in range(1, 7):
            round_key = mix((key + number * 0x9E3779B97F4A7C15) & MASK)
            left, right = right, left ^ mix(right ^ round_key) % 2**half
        x = left << half | right
        if x < n:
            return x


def epoch_of(seed: int, epoch: int, n: int) -> np.ndarray:
    return virtual_to_block(seed, np.arange(epoch * n, (epoch + 1) * n), n)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 3000) | st.sampled_from([1, 2, 3, 17, 1024, 4096, 4097]),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**40),
)
def test_every_epoch_holds_every_block_exactly_once(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(epoch_of(seed, epoch, n)), np.arange(n))


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 2**62), seed=st.integers(0, MASK), virtual=st.integers(0, 2**63 - 1))
def test_the_vectorised_network_equals_plain_integers(n: int, seed: int, virtual: int) -> None:
    assert virtual_to_block(seed, np.array([virtual]), n).tolist() == [reference(seed, virtual, n)]


@settings(max_examples=50, deadline=None)
@given(n=st.integers(100, 5000), seed=st.integers(0, MASK))
def test_epochs_and_seeds_have_different_orders(n: int, seed: int) -> None:
    first = epoch_of(seed, 0, n)
    for other in (epoch_of(seed, 1, n), epoch_of(seed + 1, 0, n)):
        # Two random permutations agree at one position on average.
        assert np.count_nonzero(first == other) < 12


def test_the_values_never_change() -> None:
    assert virtual_to_block(0, np.arange(10), 10).tolist() == [7, 5, 1, 8, 6, 3, 4, 0, 9, 2]
    assert virtual_to_block(1234, np.array([0, 1, 46999, 47000, 10**12]), 47000).tolist() == [
        28037,
        28553,
        14392,
        19123,
        30432,
    ]


def test_any_part_can_be_read_alone_and_in_any_order() -> None:
    n, seed = 613, 5
    straight = virtual_to_block(seed, np.arange(3 * n), n)
    for start in (0, 1, 612, 613, 1000, 3 * n - 7):
        assert np.array_equal(virtual_to_block(seed, np.arange(start, start + 7), n), straight[start : start + 7])
    backwards = np.arange(3 * n)[::-1]
    assert np.array_equal(virtual_to_block(seed, backwards, n), straight[::-1])


def test_a_run_stopped_and_resumed_three_times_sees_the_uninterrupted_order() -> None:
    n, seed = 100, 9
    straight = virtual_to_block(seed, np.arange(2 * n), n).tolist()
    resumed: list[int] = []
    for start, stop in ((0, 33), (33, 34), (34, 130), (130, 200)):
        resumed += virtual_to_block(seed, np.arange(start, stop), n).tolist()
    assert resumed == straight


def test_neighbours_are_torn_apart() -> None:
    order = epoch_of(3, 0, 10_000)
    distance = np.abs(np.diff(order))
    # The mean distance of two random blocks of n is n / 3.
    assert 3200 < distance.mean() < 3470
    assert np.count_nonzero(distance == 1) < 12
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05


def test_shape_is_kept_and_the_result_is_int64() -> None:
    blocks = virtual_to_block(0, np.arange(12, dtype=np.uint32).reshape(3, 4), 5)
    assert blocks.shape == (3, 4)
    assert blocks.dtype == np.int64
    assert virtual_to_block(0, np.arange(0), 5).shape == (0,)


@pytest.mark.parametrize(
    ("virtual", "n", "text"),
    [([0], 0, "got 0"), ([0], -3, "got -3"), ([-1], 4, "got -1"), ([0.5], 4, "float64")],
)
def test_what_is_no_position_is_refused(virtual: list[float], n: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        virtual_to_block(0, np.array(virtual), n)
