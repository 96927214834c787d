"""The step in one pass: bits of torch's own operations, whatever the numbers, and used where it says so."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from outer_world import LAYOUT, chunk_size, founded, offer

from ray_diloco.outer import step, step_kernels
from ray_diloco.outer.average import OuterAverage
from ray_diloco.outer.optimizer import HeavyBall, Nesterov
from ray_diloco.outer.recipe import Recipe


@given(st.integers(1, 400), st.integers(0, 2**32 - 1), st.integers(-30, 30), st.floats(0, 1), st.floats(-1, 0))
def test_the_bits_are_those_of_torch(numel, seed, exponent, momentum, rate):
    numbers = torch.Generator().manual_seed(seed)
    a, b, u, anchor = torch.randn(4, numel, generator=numbers).mul_(10.0**exponent).unbind()
    if exponent > 25:
        a[0], b[-1], u[0] = torch.inf, torch.nan, -0.0
    outs = [[torch.empty(numel) for _ in range(4)] for _ in range(2)]
    step_kernels.by_torch(a, 0.25, b, 0.75, u, momentum, anchor, rate, *outs[0])
    step_kernels.fused(a, 0.25, b, 0.75, u, momentum, anchor, rate, *outs[1])
    for expected, found in zip(*outs, strict=True):
        np.testing.assert_array_equal(found.isnan(), expected.isnan())
        kept = ~expected.isnan()
        assert torch.equal(found[kept].view(torch.int32), expected[kept].view(torch.int32))


@pytest.fixture
def passes(monkeypatch):
    """Counts the chunks that went through the kernel."""
    assert step_kernels.same_bits()
    monkeypatch.setattr(step, "AT_ONCE", 1)
    seen = []
    kernel = step_kernels.fused
    monkeypatch.setattr(step_kernels, "fused", lambda *tensors: (seen.append(1), kernel(*tensors)))
    return seen


@pytest.mark.parametrize("count", [2, 3, 5])
def test_three_rounds_are_those_of_torch_sgd(count, passes):
    rows = np.random.default_rng(count).standard_normal((3, count, LAYOUT.numel)).astype(np.float32)
    start = np.linspace(-1, 1, LAYOUT.numel, dtype=np.float32)
    parameter = torch.nn.Parameter(torch.tensor(start))
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    factors = [np.float32(1 / count)] * count
    with chunk_size(4):
        shard = founded(LAYOUT, Recipe(Nesterov(0.7, 0.9)), start)
        for k, of_round in enumerate(rows):
            contributions = [offer(f"i{j}", row, 1.0, k) for j, row in enumerate(of_round)]
            shard.prepare(f"r{k}", 0, contributions, scale=[float(f) for f in factors])
            shard.commit(f"r{k}")
            gradient = torch.tensor(of_round[0]) * float(factors[0])
            for row, factor in zip(of_round[1:], factors[1:], strict=True):
                gradient.add_(torch.tensor(row), alpha=float(factor))
            parameter.grad = gradient
            sgd.step()
    found = np.concatenate([array.ravel() for array in shard.tensors().values()])
    np.testing.assert_array_equal(found, parameter.detach().numpy())
    assert len(passes) == 3 * 2


@pytest.mark.parametrize(
    ("recipe", "count"),
    [
        (Recipe(Nesterov(0.7, 0.9)), 1),
        (Recipe(HeavyBall(0.7, 0.9)), 2),
        (Recipe(Nesterov(0.7, 0.9), "median"), 2),
        (Recipe(Nesterov(0.7, 0.9), "rda"), 2),
        (Recipe(Nesterov(0.7, 0.9), lookahead=True), 2),
        (Recipe(Nesterov(0.7, 0.9), average=OuterAverage("ema", decay=0.5)), 2),
    ],
)
def test_what_the_kernel_does_not_do_goes_another_way(recipe, count, passes):
    shard = founded(LAYOUT, recipe, np.zeros(LAYOUT.numel))
    shard.prepare("r", 0, [offer(f"i{j}", np.ones(LAYOUT.numel), 1.0, 0) for j in range(count)])
    assert not passes


def test_small_fragments_do_without_numba():
    code = (
        "import sys, numpy as np; from outer_world import LAYOUT, founded, offer\n"
        "from ray_diloco.outer.optimizer import Nesterov; from ray_diloco.outer.recipe import Recipe\n"
        "shard = founded(LAYOUT, Recipe(Nesterov(0.7, 0.9)), np.zeros(LAYOUT.numel))\n"
        "shard.prepare('r', 0, [offer(f'i{j}', np.ones(LAYOUT.numel), 1.0, 0) for j in range(2)])\n"
        "assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True, timeout=60)


def test_where_the_bits_differ_torch_does_the_work(monkeypatch, passes):
    monkeypatch.setattr(step_kernels, "same_bits", lambda: False)
    shard = founded(LAYOUT, Recipe(Nesterov(0.7, 0.9)), np.zeros(LAYOUT.numel))
    shard.prepare("r", 0, [offer(f"i{j}", np.ones(LAYOUT.numel), 1.0, 0) for j in range(2)])
    assert not passes
