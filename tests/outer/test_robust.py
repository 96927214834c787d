import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_diloco.outer.robust import (
    bulyan_selection,
    centred_clipping,
    geometric_median,
    krum,
    krum_ranking,
    mean_near_median,
    median,
    multi_krum,
    sorted_rows,
    squared_distances,
    trimmed_mean,
)

SEEDS = st.integers(0, 2**32 - 1)
# Outliers of several kinds: far in one direction, far in all, opposite, and one that is a huge multiple.
ATTACKS = st.sampled_from([lambda x: x + 100, lambda x: -50 * x, lambda x: 1e6 * x, lambda x: 1000 * np.sign(x)])


def gram_of(rows):
    rows = np.asarray(rows, dtype=np.float64)
    return rows @ rows.T


def drawn(seed, count, numel=12):
    return np.random.default_rng(seed).standard_normal((count, numel)).astype(np.float32)


def attacked(seed, honest, byzantine, attack, numel=12):
    """Rows of whom the first are wrong, in a random order; returns rows and which are honest."""
    rows = drawn(seed, honest + byzantine, numel)
    rows[:byzantine] = attack(rows[:byzantine])
    order = np.random.default_rng([seed, 1]).permutation(len(rows))
    return rows[order], order >= byzantine


def tensors(rows):
    return [torch.tensor(np.asarray(row), dtype=torch.float32) for row in rows]


def result(rule, rows, *settings):
    out = torch.full((len(rows[0]),), float("nan"))
    rule(tensors(rows), *settings, out)
    return out.numpy()


def krum_by_the_definition(rows, byzantine, among):
    """Argmin of the sum of squared distances to the n − f − 2 nearest others, by direct differences."""
    among = list(among)
    scores = []
    for i in among:
        others = sorted(float(((rows[i] - rows[j]) ** 2).sum()) for j in among if j != i)
        scores.append(sum(others[: len(among) - byzantine - 2]))
    return among[int(np.argmin(scores))]


def test_krum_by_hand():
    # On a line, f = 0 and n = 4: two nearest others each.  0: 1 + 4; 1: 1 + 1; 2: 1 + 4; 10: far.
    assert krum(gram_of([[0.0], [1.0], [2.0], [10.0]]), 0) == [0.0, 1.0, 0.0, 0.0]
    assert krum_ranking(squared_distances(gram_of([[0.0], [1.0], [2.5], [10.0]])), 0) == [1, 0, 2, 3]


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(0, 3), SEEDS)
def test_krum_is_its_definition(byzantine, more, seed):
    rows = drawn(seed, 2 * byzantine + 3 + more).astype(np.float64)
    best = krum_by_the_definition(rows, byzantine, range(len(rows)))
    assert krum(gram_of(rows), byzantine) == [float(k == best) for k in range(len(rows))]


@settings(deadline=None)
@given(st.integers(1, 3), ATTACKS, SEEDS)
def test_krum_chooses_an_honest_contribution(byzantine, attack, seed):
    rows, honest = attacked(seed, byzantine + 3, byzantine, attack)
    chosen = krum(gram_of(rows), byzantine)
    assert sorted(chosen)[-2:] == [0.0, 1.0]
    assert honest[np.argmax(chosen)]


@settings(deadline=None)
@given(SEEDS, st.floats(0.01, 100))
def test_krum_does_not_change_under_rotation_shift_and_scale(seed, scale):
    rows = drawn(seed, 7).astype(np.float64)
    rotation, _ = np.linalg.qr(np.random.default_rng([seed, 2]).standard_normal((12, 12)))
    assert krum(gram_of(scale * rows @ rotation + 3), 2) == krum(gram_of(rows), 2)


def test_krum_counts_duplicates_as_others():
    # Two equal ones have each other at distance 0; if a score left out the first of the sorted distances instead of
    # oneself, nothing would change, but a score that counts oneself would prefer the pair at 5 to the three around 0.
    rows = [[0.0], [0.1], [-0.1], [5.0], [5.0]]
    assert krum(gram_of(rows), 1) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert np.diag(squared_distances(gram_of(np.full((3, 2), 0.1)))).tolist() == [0.0] * 3


def test_krum_never_chooses_what_is_not_finite():
    rows = drawn(3, 6).astype(np.float64)
    rows[0, 0], rows[1, 0] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        assert krum(gram_of(rows), 1)[:2] == [0.0, 0.0]


@settings(deadline=None)
@given(st.integers(1, 2), ATTACKS, SEEDS)
def test_multi_krum_is_the_mean_of_honest_contributions(byzantine, attack, seed):
    rows, honest = attacked(seed, byzantine + 4, byzantine, attack)
    assert multi_krum(gram_of(rows), byzantine, 0) == [1 / (byzantine + 4) if h else 0.0 for h in honest]
    assert multi_krum(gram_of(rows), byzantine, 1) == krum(gram_of(rows), byzantine)


def test_multi_krum_of_all_is_the_mean():
    assert multi_krum(gram_of(drawn(1, 4)), 0, 0) == [0.25] * 4


def test_sorted_rows_are_sorted_and_leave_their_sources_alone():
    rows = drawn(4, 9, 50)
    sources = tensors(rows)
    assert np.array_equal(torch.stack(sorted_rows(sources)).numpy(), np.sort(rows, axis=0))
    assert np.array_equal(torch.stack(sources).numpy(), rows)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_median_is_that_of_each_coordinate(count):
    rows = drawn(count, count, 50)
    np.testing.assert_allclose(result(median, rows), np.median(rows, axis=0), rtol=1e-6)


def test_trimmed_mean_by_hand():
    rows = [[9.0, -9.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [-50.0, 50.0]]
    assert result(trimmed_mean, rows, 1).tolist() == [2.0, 2.0]
    assert result(trimmed_mean, rows, 0) == pytest.approx([-7.0, 9.4])


@settings(deadline=None)
@given(st.integers(1, 8), SEEDS)
def test_trimming_nothing_is_the_mean_and_all_but_one_the_median(count, seed):
    rows = drawn(seed, count, 30)
    np.testing.assert_allclose(result(trimmed_mean, rows, 0), rows.mean(axis=0, dtype=np.float64), rtol=0, atol=1e-6)
    if count % 2:
        assert np.array_equal(result(trimmed_mean, rows, count // 2), np.median(rows, axis=0))


@pytest.mark.parametrize("count", [3, 5, 6, 7, 9])
def test_sorting_rules_give_back_identical_contributions_bit_for_bit(count):
    rows = drawn(count, 1, 500).repeat(count, axis=0)
    assert np.array_equal(result(median, rows), rows[0])
    assert np.array_equal(result(trimmed_mean, rows, 1), rows[0])
    assert np.array_equal(result(mean_near_median, rows, 2), rows[0])


@settings(deadline=None)
@given(st.integers(1, 3), ATTACKS, SEEDS)
def test_median_and_trimmed_mean_stay_in_the_range_of_the_honest(byzantine, attack, seed):
    rows, honest = attacked(seed, byzantine + 1, byzantine, attack)
    low, high = rows[honest].min(axis=0), rows[honest].max(axis=0)
    for got in (result(median, rows), result(trimmed_mean, rows, byzantine)):
        assert np.all((low <= got) & (got <= high))


def near_median(rows, drop):
    """Per coordinate the mean of the values nearest to the median, by sorting distances, in float64."""
    rows = np.asarray(rows, dtype=np.float64)
    nearest = np.argsort(np.abs(rows - np.median(rows, axis=0)), axis=0, kind="stable")[: len(rows) - drop]
    return np.take_along_axis(rows, nearest, axis=0).mean(axis=0)


@settings(deadline=None)
@given(st.integers(3, 9), st.integers(0, 6), SEEDS)
def test_the_mean_near_the_median_is_that_of_the_nearest_values(count, drop, seed):
    rows = drawn(seed, count, 30)
    # One value that is kept of an even number would be either of two at the same distance.
    drop = min(drop, count - 2 if count % 2 == 0 else count - 1)
    drop -= (count - drop) % 2 if count % 2 == 0 else 0
    np.testing.assert_allclose(
        result(mean_near_median, rows, max(drop, 0)), near_median(rows, max(drop, 0)), rtol=0, atol=2e-6
    )


@given(st.integers(1, 2), ATTACKS, SEEDS)
@settings(deadline=None, max_examples=50)
def test_bulyan_stays_in_the_range_of_the_honest(byzantine, attack, seed):
    rows, honest = attacked(seed, 3 * byzantine + 3, byzantine, attack)
    chosen = [row for row, factor in zip(rows, bulyan_selection(gram_of(rows), byzantine), strict=True) if factor]
    assert len(chosen) == len(rows) - 2 * byzantine
    got = result(mean_near_median, chosen, 2 * byzantine)
    assert np.all((rows[honest].min(axis=0) <= got) & (got <= rows[honest].max(axis=0)))


@settings(deadline=None)
@given(SEEDS)
def test_bulyan_takes_the_choice_of_krum_out_and_scores_again(seed):
    rows = drawn(seed, 11).astype(np.float64)
    left, chosen = set(range(11)), set()
    for _ in range(6):
        best = krum_by_the_definition(rows, 2, sorted(left))
        left.remove(best)
        chosen.add(best)
    # The seventh has one other in its score, which the two that are nearest to each other share.
    got = {k for k, factor in enumerate(bulyan_selection(gram_of(rows), 2)) if factor}
    assert chosen < got
    assert len(got) == 7


def test_bulyan_is_not_one_shot():
    # f = 1.  Scored once, the pair at 4 ranks last.  Scored again when the three around 0 are gone, each of the pair
    # has the other as its one nearest, at distance 0, and is chosen before those at ±1.5.
    rows = np.array([[0.0], [0.1], [-0.1], [1.5], [-1.5], [4.0], [4.0]])
    once = krum_ranking(squared_distances(gram_of(rows)), 1)[:5]
    assert sorted(once) == [0, 1, 2, 3, 4]
    assert bulyan_selection(gram_of(rows), 1) == [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0]


def point(rows, found):
    return np.asarray(found) @ np.asarray(rows, dtype=np.float64)


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 3), min_size=1, max_size=7), st.integers(0, 5), SEEDS)
def test_geometric_median_takes_the_steps_of_weiszfeld(weights, iterations, seed):
    rows = drawn(seed, len(weights)).astype(np.float64)
    z = np.average(rows, axis=0, weights=weights)
    for _ in range(iterations):
        distances = np.linalg.norm(rows - z, axis=1)
        if not distances.all() or len(rows) == 1:
            break
        z = np.average(rows, axis=0, weights=np.array(weights) / distances)
    found = geometric_median(gram_of(rows), weights, iterations)
    assert sum(found) == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(point(rows, found), z, atol=1e-6)


def test_geometric_median_of_a_triangle_is_its_fermat_point():
    # Equilateral with one corner moved out along its axis: the point from which all sides look 120° wide stays.
    rows = [[0.0, 1.0], [0.0, -1.0], [5.0, 0.0]]
    found = point(rows, geometric_median(gram_of(rows), [1, 1, 1], 200))
    np.testing.assert_allclose(found, [1 / 3**0.5, 0.0], atol=1e-9)


def test_geometric_median_tends_to_what_most_agree_on():
    rows = [[1.0, 2.0]] * 3 + [[900.0, -500.0]] * 2
    np.testing.assert_allclose(point(rows, geometric_median(gram_of(rows), [1] * 5, 100)), [1.0, 2.0], atol=1e-2)


def test_one_attacker_moves_the_geometric_median_little_however_far_away_it_is():
    rows = drawn(5, 7).astype(np.float64)
    moved = []
    for distance in (1e3, 1e6):
        rows[0] = distance
        moved.append(point(rows, geometric_median(gram_of(rows), [1] * 7, 60)))
    assert np.linalg.norm(moved[0] - moved[1]) < 1e-2


@settings(deadline=None)
@given(st.integers(1, 7), SEEDS)
def test_centred_clipping_without_a_limit_is_the_mean_after_one_round(count, seed):
    rows = drawn(seed, count + 1)
    found = centred_clipping(gram_of(rows), [1] * count, 1, np.inf, 1.0)
    assert found == pytest.approx([1 / count] * count + [0.0], abs=1e-12)


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 3), min_size=1, max_size=7), st.integers(1, 4), st.floats(0.1, 10), SEEDS)
def test_centred_clipping_takes_its_steps(weights, iterations, tau, seed):
    rows = drawn(seed, len(weights) + 1).astype(np.float64)
    v, w = rows[-1].copy(), np.array(weights) / sum(weights)
    for _ in range(iterations):
        apart = rows[:-1] - v
        clip = np.minimum(1, tau / np.maximum(np.linalg.norm(apart, axis=1), 1e-300))
        v = v + (w * clip) @ apart
    found = centred_clipping(gram_of(rows), weights, iterations, tau, 1.0)
    assert sum(found) == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(point(rows, found), v, atol=1e-6)


@settings(deadline=None)
@given(st.integers(3, 9), st.integers(1, 3), st.floats(0.1, 5), ATTACKS, SEEDS)
def test_an_attacker_moves_centred_clipping_by_no_more_than_twice_the_radius_over_n_a_round(
    count, iterations, tau, attack, seed
):
    rows = drawn(seed, count + 1).astype(np.float64)
    other = rows.copy()
    other[0] = attack(rows[0])
    start = centred_clipping(gram_of(rows), [1] * count, 1, tau, 1.0)
    moved = centred_clipping(gram_of(other), [1] * count, 1, tau, 1.0)
    assert np.linalg.norm(point(rows, start) - point(other, moved)) <= 2 * tau / count + 1e-6


def test_centred_clipping_rests_where_all_contributions_are():
    rows = drawn(6, 1).repeat(5, axis=0)
    np.testing.assert_allclose(point(rows, centred_clipping(gram_of(rows), [1] * 4, 3, 0.0, 1.0)), rows[0], rtol=1e-6)


def test_a_relative_radius_is_the_median_distance_at_the_beginning():
    # From 0: distances 1, 2, 300; median 2, so that 300 is pulled to 2: (1 + 2 + 2) / 3.
    rows = [[1.0], [2.0], [300.0], [0.0]]
    assert point(rows, centred_clipping(gram_of(rows), [1] * 3, 1, 0.0, 1.0)) == pytest.approx([5 / 3])
    assert point(rows, centred_clipping(gram_of(rows), [1] * 3, 1, 0.0, 0.5)) == pytest.approx([1.0])
