import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_diloco.outer.stale import (
    ISLAND_SCALES,
    DirectionSettings,
    age_weight,
    compensated,
    direction_factors,
    divergence_weights,
    own_fresh_factors,
    reanchor,
    too_old,
    wall_clock_weight,
)

SEEDS = st.integers(0, 2**32 - 1)


def test_weights_by_age():
    assert [age_weight(age, 0.5) for age in (0, 3, 8)] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert [age_weight(age, 0.0) for age in (0, 5)] == [1.0, 1.0]


def test_contributions_of_more_than_the_greatest_age_are_too_old():
    assert [too_old(age, 2) for age in (1, 2, 3)] == [False, False, True]
    assert not too_old(10**6, 0)


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


def eager(stale, fresh, own):
    factors, factor = own_fresh_factors([1 / len(stale)] * len(stale), own)
    return np.asarray(factors) @ stale + factor * fresh[own]


@settings(deadline=None)
@given(st.integers(1, 6), SEEDS)
def test_the_eager_swap_is_its_formula_and_its_mean_moves_by_a_share_of_the_news(count, seed):
    stale, fresh = np.random.default_rng(seed).standard_normal((2, count, 5))
    swapped = np.array([eager(stale, fresh, own) for own in range(count)])
    np.testing.assert_allclose(swapped, stale.mean(axis=0) + (fresh - stale) / count, atol=1e-12)
    news = (fresh.mean(axis=0) - stale.mean(axis=0)) / count
    np.testing.assert_allclose(swapped.mean(axis=0), stale.mean(axis=0) + news, atol=1e-12)


def test_eager_anchors_differ_by_the_last_differences_alone():
    # Outer SGD from a common start: A_m − A_n = −(η/M)(Δ_m − Δ_n) of the last round, by telescoping.
    rounds, eta = np.random.default_rng(1).standard_normal((6, 3, 4)), 0.7
    anchors, before = np.zeros((3, 4)), np.zeros((3, 4))
    for fresh in rounds:
        anchors = anchors - eta * np.array([eager(before, fresh, own) for own in range(3)])
        before = fresh
    np.testing.assert_allclose(anchors[0] - anchors[2], -eta / 3 * (rounds[-1, 0] - rounds[-1, 2]), atol=1e-12)


def test_eager_alone_is_fresh_and_eager_without_news_is_the_stale_mean():
    stale, fresh = np.random.default_rng(2).standard_normal((2, 3, 4))
    np.testing.assert_allclose(eager(stale[:1], fresh[:1], 0), fresh[0], atol=1e-12)
    np.testing.assert_allclose(eager(stale, stale, 1), stale.mean(axis=0), atol=1e-12)


def test_reanchoring_measures_from_the_anchor_as_it_is_now():
    base, theta, anchor, out = torch.tensor([1.0]), torch.tensor([-1.0]), torch.tensor([5.0]), torch.empty(1)
    reanchor(base - theta, anchor, base, out)
    assert out.item() == (anchor - theta).item() == 6.0


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


def adopted(anchor, theta, emitted, **settings):
    out = torch.empty_like(anchor)
    compensated(anchor, theta, emitted, out, **settings)
    return out


def test_without_strength_adoption_keeps_the_local_progress_exactly():
    anchor, theta, emitted = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1))
    got = adopted(anchor, theta, emitted, delay=3, steps=10, strength=0.0)
    assert torch.equal(got, anchor + (theta - emitted))
    assert torch.equal(adopted(anchor, emitted, emitted, delay=0, steps=10, strength=0.5), anchor)


def test_compensation_by_hand():
    # d = 0.5 in τ = 2 steps: g = 1/4; g_c = 1/4 − 8 · 1/16 · (3 − 1) / 10 = 0.15; θ = 3 + 2 · 0.15.
    anchor, theta, emitted = torch.tensor([3.0]), torch.tensor([1.5]), torch.tensor([1.0])
    assert adopted(anchor, theta, emitted, delay=2, steps=10, strength=8.0).item() == pytest.approx(3.3)


def test_compensation_may_write_where_it_reads():
    anchor, theta, emitted = torch.randn(3, 100, generator=torch.Generator().manual_seed(2))
    expected = adopted(anchor, theta, emitted, delay=2, steps=7, strength=0.9)
    compensated(anchor, theta, emitted, theta, delay=2, steps=7, strength=0.9)
    assert torch.equal(theta, expected)


def test_the_sign_of_the_compensation_leads_to_where_steps_from_the_anchor_would_have_led():
    # On ½ h θ² one step at rate a from A gives A − a h A.  One step from θ_emit, moved by rebase, gives A − a h θ_emit;
    # the correction has to bring that nearer, wherever A lies and whichever way the steps go.
    h, a, steps = 1.0, 0.1, 10
    for emitted, anchor in ((2.0, 1.5), (2.0, 2.5), (-2.0, -1.5), (-2.0, -2.5)):
        at = [torch.tensor([x], dtype=torch.float64) for x in (anchor, emitted - a * h * emitted, emitted)]
        right = anchor - a * h * anchor
        rebased = adopted(*at, delay=1, steps=steps, strength=0.0).item()
        # g² = (a h θ)²; the exact correction is −a h (A − θ_emit), that is λ/H = a h / g².
        strength = steps * a * h / (a * h * emitted) ** 2
        assert adopted(*at, delay=1, steps=steps, strength=strength).item() == pytest.approx(right, abs=1e-12)
        assert abs(adopted(*at, delay=1, steps=steps, strength=strength / 2).item() - right) < abs(rebased - right)
