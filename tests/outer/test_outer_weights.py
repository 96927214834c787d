import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_diloco.errors import SyncError
from ray_diloco.outer.weights import WEIGHTS, Work, factors, normalised, weights


def test_weights_by_kind():
    work = {"i1": Work(steps=10, tokens=300), "i0": Work(steps=30, tokens=100)}
    assert weights("tokens", work) == {"i0": 0.25, "i1": 0.75}
    assert weights("steps", work) == {"i0": 0.75, "i1": 0.25}
    assert weights("uniform", work) == {"i0": 0.5, "i1": 0.5}
    assert list(weights("tokens", work)) == ["i0", "i1"]


def test_tokens_squared_per_step_prefers_large_batches():
    # 600 · 600 / 10 = 36000 against 300 · 300 / 10 = 9000.
    assert weights("tokens2_per_step", {"i0": Work(10, 600), "i1": Work(10, 300)}) == {"i0": 0.8, "i1": 0.2}


@settings(deadline=None)
@given(st.integers(1, 1000), st.integers(1, 10**6), st.integers(1, 9))
def test_tokens_squared_per_step_are_uniform_for_equal_work(steps, tokens, islands):
    got = weights("tokens2_per_step", {f"i{k}": Work(steps, tokens) for k in range(islands)})
    assert list(got.values()) == pytest.approx([1 / islands] * islands, rel=1e-15)


def test_shard_sizes_weigh_the_data_that_an_island_has_not_what_it_did():
    work = {"i0": Work(10, 300, shard=3), "i1": Work(50, 900, shard=1)}
    assert weights("shard_size", work) == {"i0": 0.75, "i1": 0.25}
    with pytest.raises(SyncError, match="RD-413"):
        weights("shard_size", {"i0": Work(10, 300)})


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=2, max_size=6), st.integers(0, 2**32 - 1))
def test_the_mean_of_means_weighted_by_counts_is_the_pooled_mean(counts, seed):
    groups = [np.random.default_rng([seed, k]).standard_normal(count) for k, count in enumerate(counts)]
    share = weights("tokens", {f"i{k}": Work(1, count) for k, count in enumerate(counts)})
    means = sum(share[f"i{k}"] * group.mean() for k, group in enumerate(groups))
    assert means == pytest.approx(np.concatenate(groups).mean(), abs=1e-12)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_an_island_that_took_no_step_is_left_out(kind):
    assert weights(kind, {"i0": Work(5, 50, 1), "i1": Work(0, 70, 1)}) == {"i0": 1.0}


def test_nobody_trained_is_an_error():
    with pytest.raises(SyncError, match="RD-413: 0 contributions have weight"):
        weights("uniform", {"i0": Work(0, 0)})
    with pytest.raises(SyncError, match="RD-413: 0 contributions have weight"):
        weights("tokens", {"i0": Work(3, 0)})


def test_unknown_weights_are_an_error():
    with pytest.raises(SyncError, match=r"RD-414: there are no weights by 'tokans'\n.*shard_size, steps, tokens, "):
        weights("tokans", {"i0": Work(1, 1)})


@settings(deadline=None)
@given(st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=9))
def test_normalising_twice_changes_no_bit(raw):
    once = normalised(raw)
    assert normalised(once) == once
    assert sum(once) == pytest.approx(1, abs=1e-12)
    assert factors(raw) == [float(np.float32(w)) for w in once]
