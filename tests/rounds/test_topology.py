"""Who meets whom in a round: the eager swap as its formula, pairs by seed and round."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ray_diloco.rounds.ports import Emission, Offer
from ray_diloco.rounds.topology import Meeting, Pairs, eager, everybody, star

SEEDS = st.integers(0, 2**32 - 1)


def names(count):
    return tuple(f"i{k}" for k in range(count))


def weighed(rows):
    """Contributions of equal weight whose emission holds its vector where a norm would be."""
    return [
        (Offer(name, 0, 0, 1, 0, 1, 1, 0.0, Emission((), row, True)), 1 / len(rows))
        for name, row in zip(names(len(rows)), rows, strict=True)
    ]


def merged(movement):
    return sum(factor * offer.emission.norm for offer, factor in movement.contributions)


def swapped(stale, fresh):
    before = () if stale is None else weighed(stale)
    return np.array([merged(m) for m in eager(Meeting(2, names(len(fresh)), weighed(fresh), before))])


@given(st.integers(1, 6), SEEDS)
def test_the_eager_swap_is_its_formula_and_its_mean_moves_by_a_share_of_the_news(count, seed):
    stale, fresh = np.random.default_rng(seed).standard_normal((2, count, 5))
    found = swapped(stale, fresh)
    np.testing.assert_allclose(found, stale.mean(axis=0) + (fresh - stale) / count, atol=1e-12)
    news = (fresh.mean(axis=0) - stale.mean(axis=0)) / count
    np.testing.assert_allclose(found.mean(axis=0), stale.mean(axis=0) + news, atol=1e-12)


def test_eager_anchors_differ_by_the_last_differences_alone():
    # Outer SGD from a common start: A_m − A_n = −(η/M)(Δ_m − Δ_n) of the last round, by telescoping.
    rounds, eta = np.random.default_rng(1).standard_normal((6, 3, 4)), 0.7
    anchors, before = np.zeros((3, 4)), None
    for fresh in rounds:
        anchors, before = anchors - eta * swapped(before, fresh), fresh
    np.testing.assert_allclose(anchors[0] - anchors[2], -eta / 3 * (rounds[-1, 0] - rounds[-1, 2]), atol=1e-12)


def test_eager_alone_is_fresh_and_eager_without_news_is_the_stale_mean():
    stale, fresh = np.random.default_rng(2).standard_normal((2, 3, 4))
    np.testing.assert_allclose(swapped(stale[:1], fresh[:1])[0], fresh[0], atol=1e-12)
    np.testing.assert_allclose(swapped(stale, stale)[1], stale.mean(axis=0), atol=1e-12)


def test_an_anchor_for_each_that_everybody_moves_is_the_shared_one():
    rows = np.random.default_rng(3).standard_normal((4, 5))
    meeting = Meeting(1, names(4), weighed(rows))
    (shared,) = star(meeting)
    assert [m.contributions for m in everybody(meeting)] == [shared.contributions] * 4


@given(st.integers(1, 9), SEEDS)
def test_pairs_are_mutual_and_depend_on_seed_and_round_alone(count, seed):
    meeting = Meeting(7, names(count), weighed(np.eye(count)))
    found = {m.anchor: m.neighbours for m in Pairs(seed)(meeting)}
    assert found == {
        m.anchor: m.neighbours for m in Pairs(seed)(Meeting(7, names(count), weighed(np.eye(count))[::-1]))
    }
    assert all(name in pair and found[other] == pair for name, pair in found.items() for other in pair)
    assert sorted(len(pair) for pair in found.values()) == sorted([2] * (count // 2 * 2) + [1] * (count % 2))
