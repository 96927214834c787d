import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_diloco.outer.stale import (
    ISLAND_SCALES,
    DirectionSettings,
    age_weight,
    direction_factors,
    divergence_weights,
    wall_clock_weight,
)

SEEDS = st.integers(0, 2**32 - 1)


def test_weights_by_age():
    assert [age_weight(age, 0.5) for age in (0, 3, 8)] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert [age_weight(age, 0.0) for age in (0, 5)] == [1.0, 1.0]


def test_weights_by_the_clock_halve():
    assert [wall_clock_weight(age_s, 60.0) for age_s in (-1.0, 0.0, 60.0, 120.0)] == [1.0, 1.0, 0.5, 0.25]
    assert wall_clock_weight(1e9, 0.0) == 1.0


def test_a_loss_above_the_median_weighs_less():
    assert divergence_weights([2.0, 3.0, 4.0], 0.5) == pytest.approx([1.0, 1.0, math.exp(-0.5)])
    assert divergence_weights([1.0, 2.0, 3.0, math.nan, math.inf], 1.0) == pytest.approx([1, 1, math.exp(-1), 0, 0])
    assert divergence_weights([1.0, 9.0, math.nan], 0.0) == [1.0, 1.0, 1.0]
    assert divergence_weights([math.nan], 1.0) == [0.0]


def test_scales_by_the_number_of_islands():
    assert {kind: scale(4) for kind, scale in ISLAND_SCALES.items()} == {"none": 1.0, "inverse_sqrt_islands": 0.5}


def corrected(delta, momentum, settings):
    both = np.stack([delta, momentum])
    factors = direction_factors(both @ both.T, settings)
    return np.asarray(factors) @ both


def cosine(a, b):
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def heloco(delta, momentum, s):
    """The rule of the paper on vectors."""
    n, m = np.linalg.norm(delta), np.linalg.norm(momentum)
    if n < s.eps or m < s.eps:
        return delta
    u, v = delta / n, momentum / m
    c, conf = float(u @ v), n / (n + s.kappa * m + s.eps)
    if c >= s.c_ok:
        return delta
    if c < 0:
        return delta - min(s.k_s * (-c) * conf, s.beta_max) * c * n * v
    turn = min(s.k_d * (1 - c) * conf, 1)
    mixed = (1 - turn) * u + turn * v
    return n * mixed / np.linalg.norm(mixed)


CONSTANTS = st.builds(
    DirectionSettings,
    c_ok=st.floats(-1, 1),
    k_s=st.floats(0, 3),
    k_d=st.floats(0, 3),
    kappa=st.floats(0, 5),
    beta_max=st.floats(0, 1),
)


@settings(deadline=None)
@given(SEEDS, st.floats(0.01, 100), CONSTANTS)
def test_the_correction_by_direction_is_the_rule_of_the_paper(seed, scale, constants):
    delta, momentum = np.random.default_rng(seed).standard_normal((2, 4))
    got = corrected(scale * delta, momentum, constants)
    np.testing.assert_allclose(got, heloco(scale * delta, momentum, constants), rtol=0, atol=1e-7 * scale)


def test_a_contribution_along_the_momentum_passes():
    assert direction_factors(np.array([[1.0, 0.2], [0.2, 1.0]]), DirectionSettings()) == (1.0, 0.0)
    assert direction_factors(np.array([[4.0, 3.0], [3.0, 9.0]]), DirectionSettings()) == (1.0, 0.0)


@pytest.mark.parametrize("gram", [[[0.0, 0.0], [0.0, 4.0]], [[4.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
def test_without_a_momentum_or_a_contribution_there_is_nothing_to_correct(gram):
    assert direction_factors(np.array(gram), DirectionSettings()) == (1.0, 0.0)


def test_everything_passes_when_every_cosine_is_good_enough():
    gram = np.array([[2.0, -2.0], [-2.0, 2.0]])
    assert direction_factors(gram, DirectionSettings(c_ok=-1.0)) == (1.0, 0.0)


@settings(deadline=None)
@given(SEEDS)
def test_an_opposing_component_shrinks_without_a_flip(seed):
    delta, momentum = np.random.default_rng(seed).standard_normal((2, 5))
    delta = -delta if delta @ momentum > 0 else delta
    along = momentum / np.linalg.norm(momentum)
    before, after = delta @ along, corrected(delta, momentum, DirectionSettings()) @ along
    assert before - 1e-12 <= after <= 1e-12
    across = corrected(delta, momentum, DirectionSettings()) - after * along
    np.testing.assert_allclose(across, delta - before * along, atol=1e-9)


@settings(deadline=None)
@given(SEEDS, st.floats(0.0, 0.199))
def test_turning_keeps_the_norm_and_never_lowers_the_cosine(seed, c):
    momentum, other = np.random.default_rng(seed).standard_normal((2, 5))
    along = momentum / np.linalg.norm(momentum)
    across = other - (other @ along) * along
    delta = 3 * (c * along + math.sqrt(1 - c**2) * across / np.linalg.norm(across))
    got = corrected(delta, momentum, DirectionSettings())
    assert np.linalg.norm(got) == pytest.approx(3, rel=1e-9)
    assert cosine(got, momentum) >= cosine(delta, momentum) - 1e-12
