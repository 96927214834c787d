from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_diloco.errors import SyncError
from ray_diloco.outer.optimizer import AdamW, Nesterov, Sgd, outer_optimizer


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


@pytest.mark.parametrize("optimizer", [Nesterov(1.0, 0.0), Sgd(1.0)])
def test_lr_one_without_momentum_is_anchor_minus_delta(optimizer):
    anchor, (delta,) = drawn(6, 50, 1)
    assert torch.equal(run(optimizer, anchor, [delta])[0], anchor - delta)


def test_gain_of_the_first_steps_under_a_constant_delta():
    # Step k moves by η Σ_{i≤k} μ^i Δ; with η = μ = 1/2: 3/4, then 7/8, then 15/16.
    anchor, delta = torch.zeros(1), torch.ones(1)
    moved = [run(Nesterov(0.5, 0.5), anchor, [delta] * k)[0].item() for k in (1, 2, 3)]
    assert moved == [-0.75, -0.75 - 0.875, -0.75 - 0.875 - 0.9375]


def test_gain_tends_to_seven_at_the_published_values():
    run_of = [
        run(Nesterov(0.7, 0.9), torch.zeros(1, dtype=torch.float64), [torch.ones(1, dtype=torch.float64)] * k)[0]
        for k in (300, 301)
    ]
    assert (run_of[0] - run_of[1]).item() == pytest.approx(7.0, abs=1e-9)


def test_four_equal_deltas_move_the_momentum_as_the_polynomial_says():
    # η = 1: moves sum to Σ_k Σ_{i≤k} μ^i for k = 1…4, that is 4 + 4μ + 3μ² + 2μ³ + μ⁴.
    mu = 0.5
    moved, _ = run(Nesterov(1.0, mu), torch.zeros(1), [torch.ones(1)] * 4)
    assert moved.item() == -(4 + 4 * mu + 3 * mu**2 + 2 * mu**3 + mu**4)


@given(st.integers(0, 2**31), st.sampled_from([0.5, 2.0, 4.0]))
def test_displacements_are_linear_in_delta(seed, factor):
    _, deltas = drawn(seed, 20, 5)
    zero = torch.zeros(20)
    one, _ = run(Nesterov(0.5, 0.75), zero, deltas)
    scaled, _ = run(Nesterov(0.5, 0.75), zero, [factor * d for d in deltas])
    assert torch.equal(scaled, factor * one)


@pytest.mark.parametrize("optimizer", [Nesterov(0.7, 0.9), Sgd(0.7), AdamW(0.7, 0.9, 0.99, 0.1, 0.0)])
def test_nothing_moves_without_delta(optimizer):
    anchor, _ = drawn(8, 40, 1)
    moved, state = run(optimizer, anchor, [torch.zeros(40)] * 3)
    assert torch.equal(moved, anchor)
    assert all(torch.equal(s, torch.zeros(40)) for s in state)


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
    with pytest.raises(SyncError, match=r"RD-415: there is no outer optimiser 'adam9'\n.*adagrad, adam, adamw, "):
        outer_optimizer("adam9", **section)
