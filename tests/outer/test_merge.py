import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_diloco.errors import SyncError
from ray_diloco.outer.merge import MERGES, mean
from ray_diloco.outer.weights import Work, factors, normalised, weights


def test_mean_is_the_weighted_sum():
    out = torch.empty(3)
    mean([torch.tensor([4.0, 8.0, -4.0]), torch.tensor([0.0, 4.0, 12.0])], [0.75, 0.25], out)
    assert out.tolist() == [3.0, 7.0, 0.0]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_mean_of_equal_contributions_is_that_contribution_bit_for_bit(count):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(count))
    out = torch.empty(1000)
    mean([values] * count, factors([3.0] * count), out)
    assert torch.equal(out, values)


@pytest.mark.parametrize("count", [3, 8, 16])
def test_mean_of_more_equal_contributions_is_that_contribution_to_the_last_bits(count):
    values = torch.rand(1000, generator=torch.Generator().manual_seed(count)) + 1
    out = torch.empty(1000)
    mean([values] * count, factors([3.0] * count), out)
    assert (out - values).abs().max().item() <= count * 2.0**-24


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_mean_equals_float64_arithmetic_to_fp32(raw, seed):
    values = np.random.default_rng(seed).standard_normal((len(raw), 50)).astype(np.float32)
    out = torch.empty(50)
    mean([torch.from_numpy(row) for row in values], factors(raw), out)
    expected = np.average(values.astype(np.float64), axis=0, weights=raw)
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=2e-6)


def test_mean_needs_only_the_sum():
    assert not MERGES["mean"].needs_individuals
    assert not MERGES["mean"].needs_whole_vector


def test_weights_by_kind():
    work = {"i1": Work(steps=10, tokens=300), "i0": Work(steps=30, tokens=100)}
    assert weights("tokens", work) == {"i0": 0.25, "i1": 0.75}
    assert weights("steps", work) == {"i0": 0.75, "i1": 0.25}
    assert weights("uniform", work) == {"i0": 0.5, "i1": 0.5}
    assert list(weights("tokens", work)) == ["i0", "i1"]


@pytest.mark.parametrize("kind", ["tokens", "steps", "uniform"])
def test_an_island_that_took_no_step_is_left_out(kind):
    assert weights(kind, {"i0": Work(5, 50), "i1": Work(0, 70)}) == {"i0": 1.0}


def test_nobody_trained_is_an_error():
    with pytest.raises(SyncError, match="RD-413: 0 contributions have weight"):
        weights("uniform", {"i0": Work(0, 0)})
    with pytest.raises(SyncError, match="RD-413: 0 contributions have weight"):
        weights("tokens", {"i0": Work(3, 0)})


def test_unknown_weights_are_an_error():
    with pytest.raises(SyncError, match=r"RD-414: there are no weights by 'tokans'\n.*steps, tokens, uniform"):
        weights("tokans", {"i0": Work(1, 1)})


@given(st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=9))
def test_normalising_twice_changes_no_bit(raw):
    once = normalised(raw)
    assert normalised(once) == once
    assert sum(once) == pytest.approx(1, abs=1e-12)
    assert factors(raw) == [float(np.float32(w)) for w in once]
