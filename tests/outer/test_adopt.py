"""How θ and the base follow an anchor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_diloco.errors import SyncError
from ray_diloco.outer.adopt import ADOPTS, AdoptChunk, adopt_of

numbers = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=6)
seeds = st.integers(0, 10_000)


def adopted(rule, theta, anchor, emitted=None, base=True):
    """θ and B after a rule; the anchor must stay as it is."""
    chunk = AdoptChunk(
        torch.tensor(theta),
        torch.full((len(theta),), 77.0) if base else None,
        torch.tensor(anchor),
        None if emitted is None else torch.tensor(emitted),
    )
    rule.apply(chunk)
    assert torch.equal(chunk.anchor, torch.tensor(anchor))
    return chunk.theta, chunk.base


def drawn(seed, count=3, numel=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).tolist() for _ in range(count)]


def bits(values):
    return values.view(torch.int32).tolist()


def test_overwriting_takes_the_anchor_for_both():
    theta, base = adopted(adopt_of("overwrite"), [1.0, 2.0], [5.0, -6.0])
    assert theta.tolist() == [5.0, -6.0] and base.tolist() == [5.0, -6.0]


def test_mixing_keeps_alpha_of_what_the_rank_has():
    theta, base = adopted(adopt_of("mix", alpha=0.25), [4.0, 8.0], [0.0, 16.0])
    assert theta.tolist() == [1.0, 14.0] and base.tolist() == [0.0, 16.0]


def test_keeping_moves_only_the_base():
    theta, base = adopted(adopt_of("keep"), [1.0, 2.0], [5.0, 6.0])
    assert theta.tolist() == [1.0, 2.0] and base.tolist() == [5.0, 6.0]


def test_keeping_ones_own_measures_from_what_the_rank_has():
    theta, base = adopted(adopt_of("keep_own"), [1.0, 2.0], [5.0, 6.0])
    assert theta.tolist() == [1.0, 2.0] and base.tolist() == [1.0, 2.0]


def test_rebasing_adds_the_steps_since_the_emission_to_the_anchor():
    theta, base = adopted(adopt_of("rebase"), [1.5, 2.0], [10.0, 20.0], emitted=[1.0, 4.0])
    assert theta.tolist() == [10.5, 18.0] and base.tolist() == [10.0, 20.0]


def test_the_compensated_rebase_shortens_steps_that_the_anchor_has_already_made():
    # d = 2, A − θ_emit = 4, λ/(τH) = 0.5/(2·4) = 1/16: 7 + 2 − 4·4/16 = 8.  Against the direction of d it lengthens.
    rule = adopt_of("compensated_rebase", strength=0.5, delay=2, H=4)
    theta, base = adopted(rule, [5.0, 5.0], [7.0, -1.0], emitted=[3.0, 3.0])
    assert theta.tolist() == [8.0, -1.0 + 2.0 + 4 * 4 / 16] and base.tolist() == [7.0, -1.0]


def test_the_compensation_replays_the_steps_of_a_quadratic_nearer_to_the_truth():
    # One dimension, f = h x²/2, SGD with rate a: τ steps from θ_emit, against the same steps from A.  With λ' g² = h
    # at θ_emit the guess of the curvature is right; λ/H = λ'/a.
    h, a, H, steps, start, anchor = 2.0, 0.01, 10, 3, 1.0, 0.8
    slope = h * start
    strength = H * h / slope**2 / a
    shrink = (1 - a * h) ** steps
    plain, _ = adopted(adopt_of("rebase"), [start * shrink], [anchor], emitted=[start])
    rule = adopt_of("compensated_rebase", strength=strength, delay=steps, H=H)
    compensated, _ = adopted(rule, [start * shrink], [anchor], emitted=[start])
    truth = anchor * shrink
    assert abs(float(compensated) - truth) < 0.1 * abs(float(plain) - truth)


@settings(deadline=None)
@given(seeds, st.floats(0, 1), st.floats(-3, 3), st.integers(1, 9), st.integers(1, 50))
def test_rules_agree_with_their_formulas(seed, alpha, strength, delay, H):
    theta, anchor, emitted = drawn(seed)
    t, a, e = (torch.tensor(v, dtype=torch.float64) for v in (theta, anchor, emitted))
    velocity = (t - e) / delay
    expected = {
        "mix": alpha * t + (1 - alpha) * a,
        "rebase": a + t - e,
        "compensated_rebase": a + delay * (velocity - strength * velocity * velocity * (a - e) / H),
    }
    for kind, values in expected.items():
        rule = adopt_of(kind, alpha=alpha, strength=strength, delay=delay, H=H)
        found, base = adopted(rule, theta, anchor, emitted)
        torch.testing.assert_close(found.double(), values, rtol=1e-6, atol=1e-5)
        assert bits(base) == bits(torch.tensor(anchor))


@given(numbers, seeds)
def test_mixing_at_its_ends_is_overwriting_and_keeping_bit_for_bit(anchor, seed):
    anchor = [*anchor, -0.0, 0.0]
    theta = [*drawn(seed, 1, len(anchor) - 1)[0], float("nan")]
    for alpha, kind in ((0.0, "overwrite"), (1.0, "keep")):
        mixed, other = adopt_of("mix", alpha=alpha), adopt_of(kind)
        assert mixed == other
        one, two = adopted(mixed, theta, anchor), adopted(other, theta, anchor)
        assert [bits(values) for values in one] == [bits(values) for values in two]


@given(seeds, st.floats(0, 1))
def test_a_rank_that_is_where_the_anchor_is_stays_bit_for_bit(seed, alpha):
    (theta,) = drawn(seed, 1)
    found, _ = adopted(adopt_of("mix", alpha=alpha), theta, theta)
    assert bits(found) == bits(torch.tensor(theta))


@given(seeds)
def test_without_steps_since_the_emission_a_rebase_overwrites_bit_for_bit(seed):
    theta, anchor = drawn(seed, 2)
    for rule in (adopt_of("rebase"), adopt_of("compensated_rebase", strength=0.7, delay=3, H=5)):
        found, _ = adopted(rule, theta, anchor, emitted=theta)
        assert bits(found) == bits(torch.tensor(anchor))


@given(seeds, st.integers(0, 9))
def test_compensation_of_strength_zero_is_the_rebase_bit_for_bit(seed, delay):
    theta, anchor, emitted = drawn(seed)
    rule = adopt_of("compensated_rebase", strength=0.0, delay=delay, H=5)
    assert rule == adopt_of("rebase")
    one, two = adopted(rule, theta, anchor, emitted), adopted(adopt_of("rebase"), theta, anchor, emitted)
    assert [bits(values) for values in one] == [bits(values) for values in two]


@pytest.mark.parametrize("kind", sorted(ADOPTS))
def test_a_rank_that_does_not_emit_has_no_base(kind):
    rule = adopt_of(kind, strength=1.0, delay=1)
    theta, base = adopted(rule, [1.0], [3.0], emitted=[1.0], base=False)
    assert base is None and theta.tolist() in ([1.0], [2.0], [3.0])


@pytest.mark.parametrize("kind", sorted(ADOPTS))
def test_the_base_has_memory_of_its_own(kind):
    chunk = AdoptChunk(torch.ones(2), torch.zeros(2), torch.full((2,), 3.0), torch.ones(2))
    adopt_of(kind, strength=1.0, delay=1).apply(chunk)
    before = chunk.base.clone()
    chunk.theta.fill_(9.0)
    chunk.anchor.fill_(9.0)
    assert torch.equal(chunk.base, before)


@pytest.mark.parametrize("kind", sorted(ADOPTS))
def test_a_rule_that_says_that_it_does_not_read_theta_does_not(kind):
    rule = adopt_of(kind, strength=1.0, delay=1)
    if rule.reads_theta:
        return
    once = adopted(rule, [1.0], [3.0])
    again = adopted(rule, once[0].tolist(), [3.0])
    assert once == again


def test_a_lookahead_adopts_the_point_that_the_keeper_sent():
    rule = adopt_of("lookahead")
    assert rule.from_lookahead and rule.reads_outer_state
    theta, base = adopted(rule, [1.0], [4.0])
    assert theta.tolist() == base.tolist() == [4.0]
    assert not any(adopt_of(kind).reads_outer_state for kind in ADOPTS if kind != "lookahead")


def test_only_rebases_need_theta_of_the_emission():
    found = {kind for kind in ADOPTS if adopt_of(kind, strength=1.0, delay=1).reads_emitted}
    assert found == {"rebase", "compensated_rebase"}


def test_a_rebase_without_theta_of_the_emission_is_refused():
    for rule in (adopt_of("rebase"), adopt_of("compensated_rebase", strength=1.0, delay=1)):
        with pytest.raises(SyncError) as caught:
            adopted(rule, [1.0], [3.0])
        assert caught.value.number == 454


@pytest.mark.parametrize(
    ("kind", "given_settings"),
    [
        ("copy", {}),
        ("mix", {"alpha": 1.5}),
        ("mix", {"alpha": float("nan")}),
        ("compensated_rebase", {"strength": float("inf")}),
        ("compensated_rebase", {"strength": 1.0, "delay": -1}),
        ("compensated_rebase", {"strength": 1.0, "delay": 1, "H": 0}),
    ],
)
def test_rules_that_there_are_not_are_refused(kind, given_settings):
    with pytest.raises(SyncError) as caught:
        adopt_of(kind, **given_settings)
    assert caught.value.number == 453


def test_the_sign_of_the_compensation_leads_to_where_steps_from_the_anchor_would_have_led():
    # On ½ h θ² one step at rate a from A gives A − a h A.  One step from θ_emit, moved by rebase, gives A − a h θ_emit;
    # the correction has to bring that nearer, wherever A lies and whichever way the step goes.
    h, a, steps = 1.0, 0.1, 10
    for emitted, anchor in ((2.0, 1.5), (2.0, 2.5), (-2.0, -1.5), (-2.0, -2.5)):

        def adopted(strength, emitted=emitted, anchor=anchor):
            at = [torch.tensor([x], dtype=torch.float64) for x in (emitted - a * h * emitted, anchor, emitted)]
            adopt_of("compensated_rebase", strength=strength, delay=1, H=steps).apply(AdoptChunk(at[0], None, *at[1:]))
            return at[0].item()

        right, rebased = anchor - a * h * anchor, adopted(0.0)
        # g² = (a h θ)²; the exact correction is −a h (A − θ_emit), that is λ/H = a h / g².
        strength = steps * a * h / (a * h * emitted) ** 2
        assert abs(adopted(strength) - right) < 1e-12
        assert abs(adopted(strength / 2) - right) < abs(rebased - right)
