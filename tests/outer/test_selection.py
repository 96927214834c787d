"""Which elements travel in a round of random fragments."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outer_world import dealt

from ray_diloco.errors import SyncError
from ray_diloco.outer.layout import Range, total
from ray_diloco.outer.selection import BLOCK, Selection

# Three blocks and a part of a fourth.
NUMEL = 3 * BLOCK + 1000
WHOLE = (Range(0, NUMEL),)

draws = st.sampled_from(["bernoulli", "partitioned"])
parts = st.sampled_from([1.0, 0.5, 0.3, 0.01, 0.005, 1e-5])
selections = st.builds(Selection, draws, parts, st.integers(0, 2**64 - 1), st.integers(0, 10**6))
# Sets that cut blocks anywhere, dealt out to up to three holders.
cuts = st.lists(st.integers(0, NUMEL - 1), max_size=9)
owners = st.lists(st.integers(0, 2), min_size=1, max_size=9)


@settings(deadline=None, max_examples=40)
@given(selections, cuts, owners)
def test_the_same_elements_are_selected_however_the_model_is_cut(selection, borders, holders):
    whole = selection.positions(WHOLE)
    assert np.all(np.diff(whole) > 0)
    for held in dealt(NUMEL, borders, holders, 3):
        inside = np.zeros(NUMEL, bool)
        for r in held:
            inside[r.start : r.stop] = True
        found = selection.positions(held)
        assert found.dtype == np.int64
        assert found.tolist() == whole[inside[whole]].tolist()
        packed = np.concatenate([np.arange(r.start, r.stop) for r in held] or [np.empty(0, int)])
        assert packed[selection.packed(held)].tolist() == found.tolist()
        assert total(held) == packed.size
        assert selection.count(held) == found.size


@settings(deadline=None, max_examples=20)
@given(selections)
def test_the_same_seed_selects_the_same_elements_from_the_header(selection):
    header = json.loads(json.dumps(selection.to_params()))
    again = Selection.from_params(header)
    assert again == selection
    assert again.positions(WHOLE).tolist() == selection.positions(WHOLE).tolist()


def test_other_seeds_rounds_and_blocks_select_other_elements():
    for draw in ("bernoulli", "partitioned"):
        one = Selection(draw, 0.1, 7, 0)
        first = one.positions((Range(0, BLOCK),))
        for other in (Selection(draw, 0.1, 8, 0).positions, Selection(draw, 0.1, 7, 1).positions):
            assert other((Range(0, BLOCK),)).tolist() != first.tolist()
        assert (one.positions((Range(BLOCK, 2 * BLOCK),)) - BLOCK).tolist() != first.tolist()


def test_selections_never_change():
    # Part of what a payload means: another version of the program or of numpy has to find the same elements.
    assert Selection("bernoulli", 1e-4, 1, 2).positions((Range(0, BLOCK),)).tolist() == [
        16836,
        16959,
        41791,
        44325,
        51597,
    ]
    found = Selection("partitioned", 1e-4, 1, 2).positions((Range(0, BLOCK),)).tolist()
    assert found == [10003, 31087, 36173, 49104, 58712, 61469, 63515]


def test_a_bernoulli_draw_compares_forty_bits_of_each_element_with_p():
    # p lies between two values of the high 8 bits, so that some elements are decided by the low 32.
    selection, block = Selection("bernoulli", 0.3, 5, 11), 2
    words = np.random.Philox(key=np.array([5, 0], np.uint64), counter=np.array([0, block, 0, 11], np.uint64))
    raw = b"".join(int(word).to_bytes(8, "little") for word in words.random_raw(BLOCK // 8))
    threshold = round(0.3 * 2**40)
    ties = [k for k in range(BLOCK) if raw[k] == threshold >> 32]
    low = b"".join(int(word).to_bytes(8, "little") for word in words.random_raw(math.ceil(len(ties) / 2)))
    number = {k: raw[k] << 32 for k in range(BLOCK)}
    for i, k in enumerate(ties):
        number[k] |= int.from_bytes(low[4 * i : 4 * i + 4], "little")
    expected = [block * BLOCK + k for k in range(BLOCK) if number[k] < threshold]
    assert selection.positions((Range(block * BLOCK, (block + 1) * BLOCK),)).tolist() == expected


def test_a_partitioned_draw_deals_the_permuted_elements_of_a_block_to_rounds_in_turn():
    selection, block = Selection("partitioned", 0.01, 5, 1234), 2
    words = np.random.Philox(key=np.array([5, 0], np.uint64), counter=np.array([0, block, 1, 12], np.uint64))
    raw = b"".join(int(word).to_bytes(8, "little") for word in words.random_raw(6 * 256 // 8))
    expected = []
    for rank in range(BLOCK):
        if (block * BLOCK + rank) % 100 == 34:
            left, right = divmod(rank, 256)
            for k in range(6):
                left, right = right, left ^ raw[256 * k + right]
            expected.append(block * BLOCK + 256 * left + right)
    assert selection.positions((Range(block * BLOCK, (block + 1) * BLOCK),)).tolist() == sorted(expected)


@pytest.mark.parametrize("p", [0.5, 0.1, 0.005, 0.9])
def test_a_bernoulli_draw_selects_a_part_p_and_covers_as_expected(p):
    # Within six standard deviations of a sum of independent draws.
    numel, rounds = 4 * BLOCK, 6
    covered = np.zeros(numel, bool)
    for k in range(rounds):
        found = Selection("bernoulli", p, 3, k).positions((Range(0, numel),))
        assert abs(found.size - p * numel) < 6 * math.sqrt(numel * p * (1 - p))
        covered[found] = True
    share = 1 - (1 - p) ** rounds
    assert abs(int(covered.sum()) - share * numel) < 6 * math.sqrt(numel * share * (1 - share)) + 1


def test_two_rounds_of_a_bernoulli_draw_are_independent():
    numel, p = 4 * BLOCK, 0.3
    one, two = (set(Selection("bernoulli", p, 3, k).positions((Range(0, numel),)).tolist()) for k in (0, 1))
    assert abs(len(one & two) - p * p * numel) < 6 * math.sqrt(numel * p * p)


@settings(deadline=None, max_examples=12)
@given(st.sampled_from([1.0, 0.5, 0.34, 0.1, 1 / 37]), st.integers(0, 2**64 - 1), st.integers(0, 50))
def test_a_partitioned_draw_takes_each_element_once_in_its_period(p, seed, epoch):
    n = round(1 / p)
    counts = np.zeros(NUMEL, int)
    for k in range(n):
        selection = Selection("partitioned", p, seed, epoch * n + k)
        assert selection.period == n
        counts[selection.positions(WHOLE)] += 1
    assert np.all(counts == 1)


def test_the_rounds_of_a_partitioned_draw_are_equally_large_over_whole_blocks():
    n, numel = 200, 4 * BLOCK
    sizes = [Selection("partitioned", 1 / n, 9, k).positions((Range(0, numel),)).size for k in range(n)]
    assert sum(sizes) == numel and max(sizes) - min(sizes) <= 1


def test_a_period_longer_than_a_block_is_a_partition_too():
    n = 2 * BLOCK
    taken = np.concatenate(
        [Selection("partitioned", 1 / n, 9, k).positions((Range(0, 2 * BLOCK),)) for k in range(0, n, BLOCK // 8)]
    )
    assert taken.size == 16 and np.unique(taken).size == 16


def test_a_new_period_has_a_new_order():
    first, second = (Selection("partitioned", 0.5, 9, k).positions((Range(0, BLOCK),)) for k in (0, 2))
    # Two independent halves share a quarter.
    common = np.intersect1d(first, second).size
    assert first.size == second.size == BLOCK // 2
    assert abs(common - BLOCK / 4) < 6 * math.sqrt(BLOCK / 16)


def test_a_partitioned_draw_has_no_pattern():
    # Every bit of a position is set in half of a random half.
    found = Selection("partitioned", 0.5, 4, 0).positions((Range(0, BLOCK),))
    for bit in range(16):
        ones = int(((found >> bit) & 1).sum())
        assert abs(ones - BLOCK / 4) < 6 * math.sqrt(BLOCK / 16)


def test_all_elements_are_selected_at_p_one():
    for draw in ("bernoulli", "partitioned"):
        assert Selection(draw, 1.0, 0, 5).positions((Range(10, 20),)).tolist() == list(range(10, 20))


def test_positions_cannot_be_written():
    # They are handed out again.
    assert not Selection("bernoulli", 0.5, 0, 0).positions((Range(0, 9),)).flags.writeable


def test_nothing_is_selected_from_nothing():
    selection = Selection("bernoulli", 0.5, 0, 0)
    assert selection.positions(()).size == selection.packed(()).size == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"draw": "dice"},
        {"p": 0.0},
        {"p": 1.5},
        {"p": float("nan")},
        {"seed": -1},
        {"round": -1},
        {"seed": "x"},
        {"more": 1},
    ],
)
def test_impossible_selections_are_refused(wrong):
    with pytest.raises(SyncError) as caught:
        Selection.from_params({"draw": "bernoulli", "p": 0.5, "seed": 0, "round": 0, **wrong})
    assert caught.value.number == 455


def test_a_header_without_a_selection_is_refused():
    with pytest.raises(SyncError) as caught:
        Selection.from_params({"p": 0.5})
    assert caught.value.number == 455
