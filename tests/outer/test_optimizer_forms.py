"""Momentum in its published forms, which differ in letters only, and on quadratics, where theory says how it ends."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outer_steps import bits, close, drawn, exact, run

from ray_diloco.errors import SyncError
from ray_diloco.outer.optimizer import DelayedNesterov, EmaNesterov, HeavyBall, LookaheadNesterov, Nesterov, Sgd


def test_nesterov_expanded():
    anchor, deltas = exact(14)
    a, u, eta, mu = anchor, torch.zeros(20, dtype=torch.float64), 0.7, 0.9
    for delta in deltas:
        a, u = a - eta * ((1 + mu) * delta + mu**2 * u), mu * u + delta
    close(run(Nesterov(eta, mu), anchor, deltas)[0], a)


def test_nesterov_is_the_look_ahead_sequence():
    # x⁺ = y − η g(y); y⁺ = x⁺ + μ (x⁺ − x): the anchor is y.
    curvature, eta, mu = torch.linspace(0.1, 1, 20, dtype=torch.float64), 0.7, 0.9
    anchor, _ = exact(15)
    x = y = anchor
    moved, state = anchor, [torch.zeros_like(anchor)]
    for version in range(8):
        x, before = y - eta * curvature * y, x
        y = x + mu * (x - before)
        out, state_out = torch.empty_like(anchor), [torch.empty_like(anchor)]
        Nesterov(eta, mu).step(moved, state, curvature * moved, out, state_out, version=version)
        moved, state = out, state_out
        close(moved, y)


def test_nesterov_with_the_rate_inside_the_buffer_is_the_same_at_a_constant_rate():
    # MuLoCo: u ← μu + ηΔ; A ← A − μu − ηΔ.
    anchor, deltas = exact(16)
    a, u, eta, mu = anchor, torch.zeros(20, dtype=torch.float64), 0.7, 0.6
    for delta in deltas:
        u = mu * u + eta * delta
        a = a - mu * u - eta * delta
    close(run(Nesterov(eta, mu), anchor, deltas)[0], a)


def test_the_form_of_the_survey():
    anchor, deltas = exact(17)
    a, m, eta, mu = anchor, torch.zeros(20, dtype=torch.float64), 0.7, 0.9
    for delta in deltas:
        a, m = a - mu * m - eta * delta, mu * m + delta
    moved, (buffer,) = run(LookaheadNesterov(eta, mu), anchor, deltas)
    close(moved, a)
    close(buffer, m)


def test_the_form_with_a_moving_average():
    anchor, deltas = exact(18)
    a, u, eta, mu = anchor, torch.zeros(20, dtype=torch.float64), 0.7, 0.9
    for delta in deltas:
        u = mu * u + (1 - mu) * delta
        a = a - eta * (delta + mu * u)
    close(run(EmaNesterov(eta, mu), anchor, deltas)[0], a)


@pytest.mark.parametrize(("buffer", "c"), [(1, 0.0), (1, 1.0), (3, 0.0), (3, 1 / 3), (4, 0.1)])
def test_delayed_nesterov_takes_the_steps_of_its_paper(buffer, c):
    anchor, deltas = exact(19, 9)
    a, eps, beta = anchor, 0.7, 0.9
    m = acc = torch.zeros(20, dtype=torch.float64)
    for t, g in enumerate(deltas):
        acc = acc + g
        if (t + 1) % buffer == 0:
            m = beta * m + acc / buffer
            a = a - eps * ((1 - c * buffer + c) * beta * m + g / buffer)
            acc = 0 * acc
        else:
            a = a - eps * (c * beta * m + g / buffer)
    moved, (momentum, kept) = run(DelayedNesterov(eps, beta, buffer, c), anchor, deltas)
    close(moved, a)
    close(momentum, m)
    close(kept, acc)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**31))
def test_delayed_nesterov_over_one_buffer_is_nesterov_on_its_mean(buffer, seed):
    anchor, deltas = exact(seed, 2 * buffer)
    means = [torch.stack(deltas[:buffer]).mean(0), torch.stack(deltas[buffer:]).mean(0)]
    close(run(DelayedNesterov(0.7, 0.9, buffer), anchor, deltas)[0], run(Nesterov(0.7, 0.9), anchor, means)[0])


@pytest.mark.parametrize("c", [0.0, 1.0])
def test_delayed_nesterov_with_a_buffer_of_one_has_the_bits_of_nesterov(c):
    anchor, deltas = drawn(20, 60, 7)
    moved, (u, _) = run(DelayedNesterov(0.7, 0.9, 1, c), anchor, deltas)
    expected, (buffer,) = run(Nesterov(0.7, 0.9), anchor, deltas)
    assert bits(moved) == bits(expected)
    assert bits(u) == bits(buffer)


@pytest.mark.parametrize(
    ("buffer", "c", "what"),
    [(0, 0.0, "a buffer of 0"), (4, 0.3, "c=0.3 and a buffer of 4"), (2, -0.1, "c=-0.1 and a buffer of 2")],
)
def test_delayed_nesterov_refuses_a_buffer_or_a_share_out_of_range(buffer, c, what):
    with pytest.raises(SyncError, match=f"RD-433: delayed_nesterov .*{what}"):
        DelayedNesterov(0.7, 0.9, buffer, c)


def iteration_matrix(optimizer, p):
    """What one round does to (A, u) when the islands contract towards 0 by 1 − p: Δ = p A."""
    columns = []
    for a, u in ((1.0, 0.0), (0.0, 1.0)):
        anchor = torch.tensor([a], dtype=torch.float64)
        state = [torch.tensor([u], dtype=torch.float64) for _ in optimizer.state_names]
        out, state_out = torch.empty_like(anchor), [torch.empty_like(s) for s in state]
        optimizer.step(anchor, state, p * anchor, out, state_out, version=0)
        columns.append([out.item(), *(s.item() for s in state_out)])
    return np.array(columns).T


def radius(optimizer, p):
    return max(abs(np.linalg.eigvals(iteration_matrix(optimizer, p)[: 1 + len(optimizer.state_names)])))


@pytest.mark.parametrize("mu", [0.3, 0.6, 0.9])
def test_stability_on_a_quadratic_is_lost_where_the_theory_says(mu):
    p = 0.8
    for make, limit in ((Nesterov, 2 * (1 + mu) / (1 + 2 * mu)), (HeavyBall, 2 * (1 + mu))):
        assert radius(make(0.999 * limit / p, mu), p) < 1
        assert radius(make(1.001 * limit / p, mu), p) > 1
        assert radius(make(0.001 / p, mu), p) < 1
    eta = 0.7
    assert np.linalg.det(iteration_matrix(Nesterov(eta, mu), p)) == pytest.approx(mu * (1 - eta * p))


def test_plain_sgd_is_stable_below_two_and_with_a_delay_of_one_below_one():
    def last(eta, delay):
        anchors = [torch.ones(1, dtype=torch.float64)]
        for version in range(4000):
            out = torch.empty(1, dtype=torch.float64)
            Sgd(eta).step(anchors[-1], [], anchors[max(0, version - delay)], out, [], version=version)
            anchors.append(out)
        return abs(anchors[-1].item())

    assert last(1.99, 0) < 1e-9
    assert last(2.01, 0) > 1e9
    assert last(0.98, 1) < 1e-9
    assert last(1.02, 1) > 1e9


@pytest.mark.parametrize(
    "optimizer", [Sgd(0.9), Nesterov(0.7, 0.9), Nesterov(0.3, 0.5), HeavyBall(0.7, 0.5), EmaNesterov(0.7, 0.9)], ids=str
)
def test_the_fixed_point_of_unequal_quadratics_does_not_depend_on_the_outer_optimiser(optimizer):
    # ½ λ_k (θ − c_k)², H steps at rate a: Δ_k = P_k (A − c_k), P_k = 1 − (1 − a λ_k)^H.
    curvatures, minima = np.array([1.0, 0.2, 0.5]), np.array([-1.0, 2.0, 5.0])
    P = 1 - (1 - 0.5 * curvatures) ** 7
    anchor, state = torch.zeros(1, dtype=torch.float64), [torch.zeros(1, dtype=torch.float64)]
    for version in range(1000):
        delta = torch.tensor([float((P * (anchor.item() - minima)).mean())], dtype=torch.float64)
        out, state_out = torch.empty_like(anchor), [torch.empty_like(anchor)]
        states, states_out = state[: len(optimizer.state_names)], state_out[: len(optimizer.state_names)]
        optimizer.step(anchor, states, delta, out, states_out, version=version)
        anchor, state = out, state_out
    assert anchor.item() == pytest.approx(float(P @ minima / P.sum()), abs=1e-9)
    assert anchor.item() != pytest.approx(float(curvatures @ minima / curvatures.sum()), abs=1e-2)


def test_the_first_delta_of_a_fresh_adamw_is_the_sign_of_its_gradient():
    theta = torch.nn.Parameter(torch.tensor([2.0, -1.0, 0.5]))
    base = theta.detach().clone()
    theta.grad = torch.tensor([3.0, -0.01, 20.0])
    torch.optim.AdamW([theta], lr=0.01, weight_decay=0.1).step()
    torch.testing.assert_close(base - theta.detach(), 0.01 * (theta.grad.sign() + 0.1 * base), rtol=1e-4, atol=1e-6)
