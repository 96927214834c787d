"""What all outer optimisers have in common, and those that have the bits of torch's."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outer_steps import bits, drawn, run, torch_sgd

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
