import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_diloco.errors import SyncError
from ray_diloco.outer.optimizer import (
    OPTIMIZERS,
    Adagrad,
    Adam,
    AdamW,
    DelayedNesterov,
    EmaNesterov,
    HeavyBall,
    LookaheadNesterov,
    Nesterov,
    Sgd,
    Sign,
    Yogi,
    outer_optimizer,
)

LINEAR = [
    Sgd(0.5),
    Nesterov(0.5, 0.75),
    HeavyBall(0.5, 0.75),
    LookaheadNesterov(0.5, 0.75),
    EmaNesterov(0.5, 0.75),
    DelayedNesterov(0.5, 0.75, 2),
    DelayedNesterov(0.5, 0.75, 4, 0.25),
]
ADAPTIVE = [
    AdamW(0.7, 0.9, 0.99, 0.1, 0.0),
    Adam(0.1, 0.9, 0.99, 1e-3),
    Yogi(0.01, 0.9, 0.99, 1e-3),
    Adagrad(0.1, 0.0, 1e-3),
    Sign(0.1),
]
ALL = [*LINEAR, *ADAPTIVE]


def name(optimizer):
    return type(optimizer).__name__


def run(optimizer, anchor, deltas, cuts=(), lrs=None):
    """Steps chunk by chunk, cut at `cuts`, with two sets of buffers that swap; returns anchor and states."""
    live = (anchor.clone(), [torch.full_like(anchor, initial) for initial in optimizer.initials])
    spare = (torch.empty_like(anchor), [torch.empty_like(anchor) for _ in optimizer.state_names])
    borders = [0, *sorted(cuts), anchor.numel()]
    for version, delta in enumerate(deltas):
        kept = [t.clone() for t in (live[0], *live[1], delta)]
        for a, b in pairwise(borders):
            state, state_out = ([s[a:b] for s in side[1]] for side in (live, spare))
            lr = None if lrs is None else lrs[version]
            optimizer.step(live[0][a:b], state, delta[a:b], spare[0][a:b], state_out, version=version, lr=lr)
        assert all(torch.equal(x, y) for x, y in zip(kept, (live[0], *live[1], delta), strict=True))
        live, spare = spare, live
    return live


def torch_sgd(anchor, deltas, lrs, momentum, nesterov):
    parameter = torch.nn.Parameter(anchor.clone())
    sgd = torch.optim.SGD([parameter], lr=lrs[0], momentum=momentum, nesterov=nesterov)
    for lr, delta in zip(lrs, deltas, strict=True):
        sgd.param_groups[0]["lr"] = lr
        parameter.grad = delta.clone()
        sgd.step()
    return parameter.detach(), sgd.state[parameter].get("momentum_buffer")


def bits(tensor):
    return tensor.view(torch.int32).tolist()


def drawn(seed, numel, rounds):
    """An anchor and outer gradients of very different sizes, with zeros of both signs among them."""
    g = torch.Generator().manual_seed(seed)
    deltas = [torch.randn(numel, generator=g) * 10.0 ** (-(r % 5)) for r in range(rounds)]
    for delta in deltas:
        delta[torch.rand(numel, generator=g) < 0.1] = 0.0
        delta[torch.rand(numel, generator=g) < 0.1] = -0.0
    anchor = torch.randn(numel, generator=g)
    anchor[torch.rand(numel, generator=g) < 0.1] = -0.0
    return anchor, deltas


@settings(deadline=None, max_examples=50)
@given(
    st.integers(0, 2**31),
    st.integers(1, 300),
    st.integers(1, 12),
    st.lists(st.integers(1, 299), max_size=6),
    st.floats(0.01, 2.0),
    st.floats(0.01, 0.99),
)
def test_nesterov_has_the_bits_of_torch_for_any_chunks(seed, numel, rounds, cuts, lr, momentum):
    anchor, deltas = drawn(seed, numel, rounds)
    moved, (u,) = run(Nesterov(lr, momentum), anchor, deltas, [c for c in cuts if c < numel])
    expected, buffer = torch_sgd(anchor, deltas, [lr] * rounds, momentum, nesterov=True)
    assert bits(moved) == bits(expected)
    assert bits(u) == bits(buffer)


def test_nesterov_has_the_bits_of_torch_over_many_rounds_of_a_large_odd_tensor():
    anchor, deltas = drawn(3, 2 * 131072 + 1, 12)
    moved, (u,) = run(Nesterov(0.7, 0.9), anchor, deltas, [131072, 262144])
    expected, buffer = torch_sgd(anchor, deltas, [0.7] * 12, 0.9, nesterov=True)
    assert torch.equal(moved.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(u.view(torch.int32), buffer.view(torch.int32))


def test_a_schedule_overrides_the_learning_rate():
    anchor, deltas = drawn(4, 33, 4)
    lrs = [0.1, 0.7, 0.4, 0.05]
    moved, _ = run(Nesterov(9.0, 0.9), anchor, deltas, lrs=lrs)
    assert bits(moved) == bits(torch_sgd(anchor, deltas, lrs, 0.9, nesterov=True)[0])


def test_sgd_has_the_bits_of_torch():
    anchor, deltas = drawn(5, 101, 6)
    assert bits(run(Sgd(0.3), anchor, deltas, [7])[0]) == bits(torch_sgd(anchor, deltas, [0.3] * 6, 0, False)[0])


@pytest.mark.parametrize(
    "optimizer", [Nesterov(1.0, 0.0), Sgd(1.0), HeavyBall(1.0, 0.0), EmaNesterov(1.0, 0.0), LookaheadNesterov(1.0, 0.0)]
)
def test_lr_one_without_momentum_is_anchor_minus_delta(optimizer):
    anchor, (delta,) = drawn(6, 50, 1)
    assert torch.equal(run(optimizer, anchor, [delta])[0], anchor - delta)


def test_gain_of_the_first_steps_under_a_constant_delta():
    # Step k moves by η Σ_{i≤k} μ^i Δ; with η = μ = 1/2: 3/4, then 7/8, then 15/16.
    anchor, delta = torch.zeros(1), torch.ones(1)
    moved = [run(Nesterov(0.5, 0.5), anchor, [delta] * k)[0].item() for k in (1, 2, 3)]
    assert moved == [-0.75, -0.75 - 0.875, -0.75 - 0.875 - 0.9375]


@pytest.mark.parametrize(
    ("optimizer", "gain"),
    [
        (Sgd(0.7), 0.7),
        (Nesterov(0.7, 0.9), 7.0),
        (HeavyBall(0.7, 0.9), 7.0),
        (EmaNesterov(0.7, 0.9), 0.7 * 1.9),
        (LookaheadNesterov(0.7, 0.9), 9.7),
    ],
    ids=name,
)
def test_gain_of_a_step_in_the_end_under_a_constant_delta(optimizer, gain):
    one = torch.ones(1, dtype=torch.float64)
    before, after = (run(optimizer, 0 * one, [one] * k)[0].item() for k in (400, 401))
    assert before - after == pytest.approx(gain, abs=1e-9)


@pytest.mark.parametrize(
    ("optimizer", "gain"),
    [
        (Nesterov(0.7, 0.9), 1.9 * 0.7),
        (HeavyBall(0.7, 0.9), 0.7),
        (EmaNesterov(0.7, 0.9), 0.7 * (1 + 0.9 * 0.1)),
        (LookaheadNesterov(0.7, 0.9), 0.7),
    ],
    ids=name,
)
def test_gain_of_the_first_step(optimizer, gain):
    assert run(optimizer, torch.zeros(1), [torch.ones(1)])[0].item() == pytest.approx(-gain, rel=1e-6)


def test_four_equal_deltas_move_the_momentum_as_the_polynomial_says():
    # η = 1: moves sum to Σ_k Σ_{i≤k} μ^i for k = 1…4, that is 4 + 4μ + 3μ² + 2μ³ + μ⁴.
    mu = 0.5
    moved, _ = run(Nesterov(1.0, mu), torch.zeros(1), [torch.ones(1)] * 4)
    assert moved.item() == -(4 + 4 * mu + 3 * mu**2 + 2 * mu**3 + mu**4)


@pytest.mark.parametrize("optimizer", LINEAR, ids=name)
@given(st.integers(0, 2**31), st.sampled_from([0.5, 2.0, -4.0]))
@settings(deadline=None, max_examples=20)
def test_displacements_are_linear_in_delta(optimizer, seed, factor):
    _, deltas = drawn(seed, 20, 5)
    zero = torch.zeros(20)
    one, _ = run(optimizer, zero, deltas)
    scaled, _ = run(optimizer, zero, [factor * d for d in deltas])
    assert torch.equal(scaled, factor * one)


@pytest.mark.parametrize("optimizer", LINEAR, ids=name)
def test_displacements_of_a_sum_are_the_sum_of_displacements(optimizer):
    (_, one), (_, other), zero = drawn(21, 30, 6), drawn(22, 30, 6), torch.zeros(30)
    together, _ = run(optimizer, zero, [a + b for a, b in zip(one, other, strict=True)])
    apart = run(optimizer, zero, one)[0] + run(optimizer, zero, other)[0]
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-5)


@pytest.mark.parametrize("optimizer", ALL, ids=name)
def test_nothing_moves_without_delta(optimizer):
    anchor, _ = drawn(8, 40, 1)
    moved, state = run(optimizer, anchor, [torch.zeros(40)] * 4)
    assert torch.equal(moved, anchor)
    if optimizer.momentum_state:
        assert all(torch.equal(s, torch.zeros(40)) for s in state)


@pytest.mark.parametrize("optimizer", ALL, ids=name)
def test_chunks_of_any_length_give_the_same_bits(optimizer):
    anchor, deltas = drawn(9, 100, 5)
    whole, states = run(optimizer, anchor, deltas)
    cut, cut_states = run(optimizer, anchor, deltas, [1, 7, 40, 41])
    assert bits(cut) == bits(whole)
    assert [bits(s) for s in cut_states] == [bits(s) for s in states]


@pytest.mark.parametrize("optimizer", [o for o in ALL if o.momentum_state], ids=name)
def test_look_ahead_is_where_the_momentum_alone_takes_the_anchor(optimizer):
    anchor, deltas = drawn(10, 30, 4)
    moved, state = run(optimizer, anchor, deltas)
    momentum, out = state[optimizer.state_names.index(optimizer.momentum_state)], torch.empty(30)
    scaled = 1.0 if isinstance(optimizer, LookaheadNesterov) else 0.25
    optimizer.lookahead(moved, state, out, 0.25)
    torch.testing.assert_close(out, moved - scaled * 0.75 * momentum, rtol=0, atol=1e-6)


@pytest.mark.parametrize("optimizer", [o for o in ALL if not o.momentum_state], ids=name)
def test_look_ahead_without_momentum_is_the_anchor(optimizer):
    anchor, _ = drawn(11, 30, 0)
    out = torch.empty(30)
    optimizer.lookahead(anchor, [torch.zeros(30) for _ in optimizer.state_names], out)
    assert bits(out) == bits(anchor)


def test_heavy_ball_has_the_bits_of_torch():
    anchor, deltas = drawn(12, 101, 8)
    lrs = [0.7, 0.3, 0.7, 0.1, 0.7, 0.5, 0.7, 0.7]
    moved, (u,) = run(HeavyBall(9.0, 0.5), anchor, deltas, [7], lrs)
    expected, buffer = torch_sgd(anchor, deltas, lrs, 0.5, nesterov=False)
    assert bits(moved) == bits(expected)
    assert bits(u) == bits(buffer)


def test_slowmo_at_a_constant_inner_rate_is_heavy_ball():
    anchor, deltas = drawn(13, 20, 6)
    a, u, gamma = anchor.double(), 0.0, 0.05
    for delta in deltas:
        u = 0.6 * u + delta.double() / gamma
        a = a - 0.8 * gamma * u
    torch.testing.assert_close(run(HeavyBall(0.8, 0.6), anchor, deltas)[0].double(), a, rtol=0, atol=1e-5)


def exact(seed, rounds=6):
    """An anchor and outer gradients in float64."""
    g = torch.Generator().manual_seed(seed)
    anchor, *deltas = torch.randn(rounds + 1, 20, generator=g, dtype=torch.float64)
    return anchor, deltas


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


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


def fedopt(kind, anchor, deltas, eta, beta1, beta2, tau):
    """The paper's algorithm 2, with its sign: d is end minus start and is added."""
    x, m, v = anchor.double().numpy(), 0.0, tau**2
    for delta in deltas:
        d = -delta.double().numpy()
        m = beta1 * m + (1 - beta1) * d
        v = {
            "adagrad": lambda v=v, d=d: v + d**2,
            "yogi": lambda v=v, d=d: v - (1 - beta2) * d**2 * np.sign(v - d**2),
            "adam": lambda v=v, d=d: beta2 * v + (1 - beta2) * d**2,
        }[kind]()
        x = x + eta * m / (np.sqrt(v) + tau)
    return x


@pytest.mark.parametrize("kind", ["adam", "yogi", "adagrad"])
@given(st.integers(0, 2**31), st.sampled_from([1e-3, 0.1]), st.sampled_from([0.0, 0.9]))
@settings(deadline=None, max_examples=25)
def test_fedopt_is_the_paper(kind, seed, tau, beta1):
    anchor, deltas = drawn(seed, 30, 6)
    optimizer = outer_optimizer(kind, lr=0.1, beta1=beta1, beta2=0.99, tau=tau)
    expected = fedopt(kind, anchor, deltas, 0.1, beta1, 0.99, tau)
    np.testing.assert_allclose(run(optimizer, anchor, deltas)[0].double().numpy(), expected, rtol=0, atol=2e-5)


def test_second_moments_of_fedopt_begin_at_tau_squared():
    for optimizer in (Adam(0.1, 0.9, 0.99, 0.5), Yogi(0.1, 0.9, 0.99, 0.5), Adagrad(0.1, 0.9, 0.5)):
        assert optimizer.initials == (0.0, 0.25)
    # m = 2, v = 1/4 + 2² = 4.25 of Adagrad without momentum: A moves by 2 / (√4.25 + 1/2).
    moved, _ = run(Adagrad(1.0, 0.0, 0.5), torch.zeros(1), [torch.full((1,), 2.0)])
    assert moved.item() == pytest.approx(-2 / (math.sqrt(4.25) + 0.5), rel=1e-6)


def test_the_sign_moves_every_element_by_the_rate_after_decay():
    anchor, delta = torch.tensor([8.0, 8.0, -4.0]), torch.tensor([1e-9, -7.0, 0.0])
    moved, _ = run(Sign(0.5, 0.25), anchor, [delta])
    assert moved.tolist() == [7.0 - 0.5, 7.0 + 0.5, -3.5]
    assert run(Sign(0.5), anchor, [delta])[0].tolist() == [7.5, 8.5, -4.0]


def test_what_optimisers_say_of_asynchronous_rounds():
    said = {kind: o.compounds_when_async for kind, o in OPTIMIZERS.items()}
    assert {kind for kind, compounds in said.items() if compounds} == {"nesterov", "heavy_ball", "lookahead_nesterov"}
    assert {kind for kind, o in OPTIMIZERS.items() if not o.order_sensitive} == {"sgd"}


@settings(deadline=None, max_examples=50)
@given(
    st.integers(0, 2**31),
    st.integers(1, 300),
    st.integers(1, 8),
    st.lists(st.integers(1, 299), max_size=4),
    st.sampled_from([0.0, 0.1]),
)
def test_adamw_has_the_bits_of_torch_for_any_chunks(seed, numel, rounds, cuts, weight_decay):
    anchor, deltas = drawn(seed, numel, rounds)
    lrs = [0.3, 0.1, 0.7, 0.01, 0.2, 0.3, 0.3, 0.5][:rounds]
    optimizer = AdamW(0.3, 0.9, 0.95, 1e-3, weight_decay)
    moved, (m, v) = run(optimizer, anchor, deltas, [c for c in cuts if c < numel], lrs)
    parameter = torch.nn.Parameter(anchor.clone())
    adamw = torch.optim.AdamW([parameter], betas=(0.9, 0.95), eps=1e-3, weight_decay=weight_decay)
    for lr, delta in zip(lrs, deltas, strict=True):
        adamw.param_groups[0]["lr"] = lr
        parameter.grad = delta.clone()
        adamw.step()
    assert bits(moved) == bits(parameter.detach())
    assert bits(m) == bits(adamw.state[parameter]["exp_avg"])
    assert bits(v) == bits(adamw.state[parameter]["exp_avg_sq"])


def test_the_first_step_of_adamw_has_the_length_of_its_rate():
    # m̂ = Δ and v̂ = Δ²: 2 moves by 1/2 · 2/(2 + 2) = 1/4, and decay takes 1/2 · 1/4 of 8 off first.
    moved, _ = run(AdamW(0.5, 0.9, 0.99, 2.0, 0.25), torch.full((1,), 8.0), [torch.full((1,), 2.0)])
    assert moved.item() == pytest.approx(8 - 1 - 0.25, rel=1e-6)


def test_optimisers_are_built_from_a_configuration():
    section = {"lr": 0.7, "momentum": 0.9, "beta1": 0.8, "beta2": 0.95, "eps": 0.1, "weight_decay": 0.0}
    assert outer_optimizer("nesterov", **section) == Nesterov(0.7, 0.9)
    assert outer_optimizer("sgd", **section) == Sgd(0.7)
    assert outer_optimizer("adamw", **section) == AdamW(0.7, 0.8, 0.95, 0.1, 0.0)
    more = {**section, "tau": 0.01, "buffer": 3, "c": 0.25, "schedule": {"kind": "constant"}}
    assert outer_optimizer("delayed_nesterov", **more) == DelayedNesterov(0.7, 0.9, 3, 0.25)
    assert outer_optimizer("yogi", **more) == Yogi(0.7, 0.8, 0.95, 0.01)
    assert all(type(outer_optimizer(kind, **more)) is made for kind, made in OPTIMIZERS.items())
    with pytest.raises(SyncError, match=r"RD-415: there is no outer optimiser 'adam9'\n.*adagrad, adam, adamw, "):
        outer_optimizer("adam9", **section)
