"""Gradient corrections and the evaluation mix: by hand on small tensors, then in engines against direct loops."""

import math
import time
from dataclasses import replace

import little_ranks
import numpy as np
import pytest
import torch
from torch import nn

from ray_diloco.config.schema import InnerConfig, InnerOptimizerConfig, InnerScheduleConfig
from ray_diloco.errors import InnerError
from ray_diloco.inner.corrections import (
    ControlVariate,
    EvaluationMix,
    Proximal,
    check_correction,
    next_control,
    over_slices,
)
from ray_diloco.inner.model import build_model
from ray_diloco.inner.rank import InnerRank
from ray_diloco.outer.exchange import Slice
from ray_diloco.outer.layout import Range, layout_of

LR = 0.25


@pytest.fixture(scope="module", autouse=True)
def as_before():
    """DeepSpeed at stage 3 replaces `linear` for the whole process, and ranks set the number of threads."""
    linear, threads = nn.functional.linear, torch.get_num_threads()
    yield
    nn.functional.linear = linear
    torch.set_num_threads(threads)


def two_slices():
    return (Slice(Range(0, 2), torch.tensor([1.0, 2.0])), Slice(Range(2, 3), torch.tensor([5.0])))


def test_the_proximal_term_adds_mu_times_the_way_from_the_base():
    gradients = {0: torch.tensor([0.5, 0.5]), 1: torch.tensor([0.0])}
    Proximal(0.1, lambda: [torch.tensor([0.0, 4.0]), torch.tensor([3.0])])(gradients, two_slices())
    torch.testing.assert_close(gradients, {0: torch.tensor([0.6, 0.3]), 1: torch.tensor([0.2])})


def test_a_control_variate_adds_the_shared_control_and_subtracts_ones_own():
    gradients = {1: torch.tensor([1.0])}
    own, shared = [torch.zeros(2), torch.tensor([0.25])], [torch.zeros(2), torch.tensor([2.0])]
    ControlVariate(lambda: own, lambda: shared)(gradients, two_slices())
    assert gradients[1].item() == 2.75
    assert own[1].item() == 0.25 and shared[1].item() == 2.0


def test_the_next_control_is_the_mean_gradient_that_was_stepped_against():
    own, shared, base, theta = (torch.tensor([x]) for x in (0.5, 0.125, 3.0, 2.0))
    assert next_control(own, shared, base, theta, rate_sum=0.5).item() == 0.5 - 0.125 + 1.0 / 0.5
    assert next_control(own, shared, base, base, rate_sum=0.0).item() == 0.5


def test_the_mix_writes_the_point_between_and_puts_theta_back_bit_by_bit():
    slices = two_slices()
    before = [s.values.clone() for s in slices]
    mix = EvaluationMix(0.25, lambda: [torch.tensor([5.0, 2.0]), torch.tensor([1.0])])
    for _ in range(2):
        mix.enter(slices)
        assert [s.values.tolist() for s in slices] == [[2.0, 2.0], [4.0]]
        mix.leave(slices)
        assert all(torch.equal(s.values, b) for s, b in zip(slices, before, strict=True))


def test_a_vector_of_what_is_emitted_becomes_one_of_what_is_held():
    layout = layout_of([("a", (2,)), ("b", (1,))])
    packed = torch.tensor([1.0, 2.0, 3.0])
    found = over_slices(packed, layout.whole, two_slices(), layout, None)
    packed[2] = 9.0
    assert [part.tolist() for part in found] == [[1.0, 2.0], [9.0]]


@pytest.mark.parametrize(("stage", "clip", "refused"), [(0, 1.0, False), (1, 0.0, False), (1, 1.0, True)])
def test_a_correction_that_would_come_after_clipping_is_refused(stage, clip, refused):
    inner = InnerConfig(correction="fedprox", zero_stage=stage, clip=clip)
    if not refused:
        check_correction(inner)
        return
    with pytest.raises(InnerError, match=r"RD-715.*fedprox.*zero_stage=1"):
        check_correction(inner)


def rank_of(stage=0, precision="fp32", **changes):
    """One rank on the little model of little_ranks, with plain SGD unless said otherwise."""
    s = little_ranks.settings(stage, precision, 0, 1)
    settings = {
        "optimizer": InnerOptimizerConfig(name="sgd", weight_decay=0.0),
        "schedule": InnerScheduleConfig(kind="constant", warmup_steps=0),
        "lr": LR,
        "clip": 0.0,
    }
    return InnerRank(replace(s, inner=replace(s.inner, **(settings | changes))))


def batches(start=0):
    return lambda k: little_ranks.tokens(start + k).reshape(2, 2, little_ranks.SEQUENCE)


def theta_of(rank):
    return torch.cat([s.values.clone() for s in rank.slices])


def build():
    s = little_ranks.settings(0, "fp32", 0, 1)
    return build_model(s.model, s.vocab_size, 0, s.sequence_length, s.seed)


@pytest.fixture(scope="module")
def model():
    return build()


def gradient_at(model, theta, step):
    """Mean gradient of the two micro-batches of a step, flat."""
    nn.utils.vector_to_parameters(theta.clone(), model.parameters())
    model.zero_grad()
    for half in little_ranks.tokens(step).chunk(2):
        (model(half, half).loss / 2).backward()
    return torch.cat([p.grad.view(-1) for p in model.parameters()])


def vectors(rank, flat):
    """`Vectors` of a flat canonical vector of which the rank holds everything."""
    return lambda: [flat[s.range.start : s.range.stop] for s in rank.slices]


def some(numel, seed):
    return 0.1 * torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fedprox_and_scaffold_equal_direct_loops_at_every_stage(model, stage):
    rank = rank_of(stage, correction="scaffold")
    base, numel = theta_of(rank), rank.layout.numel
    own, shared = some(numel, 1), some(numel, 2)
    rank.correction = ControlVariate(vectors(rank, own), vectors(rank, shared))
    rank.train(0, 3, batches())
    theta = base.clone()
    for step in range(3):
        theta -= LR * (gradient_at(model, theta, step) - own + shared)
    torch.testing.assert_close(theta_of(rank), theta, rtol=0, atol=1e-6)
    assert rank.rate_sum == 3 * LR
    control = next_control(own, shared, base, theta_of(rank), rank.rate_sum)
    torch.testing.assert_close(control, own - shared + (base - theta) / (3 * LR), rtol=0, atol=1e-5)

    rank.correction = Proximal(0.5, vectors(rank, base))
    rank.train(3, 2, batches(3))
    rank.close()
    for step in (3, 4):
        theta -= LR * (gradient_at(model, theta, step) + 0.5 * (theta - base))
    torch.testing.assert_close(theta_of(rank), theta, rtol=0, atol=1e-6)


def test_at_stage_0_clipping_is_that_of_the_corrected_gradient(model):
    rank = rank_of(correction="scaffold", clip=0.05)
    theta, own, shared = theta_of(rank), some(rank.layout.numel, 1), some(rank.layout.numel, 2)
    rank.correction = ControlVariate(vectors(rank, own), vectors(rank, shared))
    report = rank.train(0, 1, batches())
    rank.close()
    corrected = gradient_at(model, theta, 0) - own + shared
    assert report.grad_norm_last == pytest.approx(float(corrected.norm()), rel=1e-5)
    theta -= LR * corrected * 0.05 / corrected.norm()
    torch.testing.assert_close(theta_of(rank), theta, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gpa_equals_its_two_buffer_form(model, stage):
    """`x` moves after each step by outer SGD with rate 1 − μ_x, `z` is kept: algorithms.md §6.3."""
    mu_x, mu_y = 0.9, 0.7
    rank = rank_of(stage, mix=mu_y)
    x = theta_of(rank)
    y, z = x.clone(), x.clone()
    rank.mix = EvaluationMix(mu_y, vectors(rank, x))
    for step in range(4):
        rank.train(step, 1, batches(step))
        x.mul_(mu_x).add_(theta_of(rank), alpha=1 - mu_x)
        g = gradient_at(model, y, step)
        y, z = y + (1 - mu_x) * (z - y) + LR * (mu_x * mu_y - 1) * g, z - LR * g
    torch.testing.assert_close(theta_of(rank), z, rtol=0, atol=1e-6)
    torch.testing.assert_close(x, y + (1 - 1 / mu_y) * (z - y), rtol=0, atol=1e-6)
    rank.close()


def test_in_bf16_the_mix_leaves_no_trace_in_the_master_weights():
    """With a rate of nearly 0 nothing but the mix could move them."""
    rank = rank_of(1, "bf16", mix=0.5, lr=1e-30)
    before = theta_of(rank)
    blocks = little_ranks.tokens(50).numpy()
    losses = rank.evaluate(blocks)
    rank.mix = EvaluationMix(0.5, vectors(rank, before + 1.0))
    rank.train(0, 2, batches())
    assert torch.equal(theta_of(rank), before)
    assert rank.evaluate(blocks) == losses
    rank.close()


def test_a_raw_step_has_the_gradient_as_its_pseudo_gradient_whatever_the_schedule(model):
    schedule = InnerScheduleConfig(kind="constant", warmup_steps=10)
    rank = rank_of(optimizer=InnerOptimizerConfig(name="raw"), schedule=schedule)
    base = theta_of(rank)
    rank.train(0, 1, batches())
    assert torch.equal(theta_of(rank), base - gradient_at(model, base, 0))
    assert rank.rate_sum == 1.0
    rank.close()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1])
def test_ranks_that_each_have_a_part_of_the_vectors_mix_and_correct_alike(model, little_worlds, world, stage):
    records = [record["corrected", stage] for record in little_worlds[world]]
    theta = nn.utils.parameters_to_vector(build().parameters()).detach()
    mixed, own, shared = little_ranks.vectors(theta.numel())
    for step in range(2):
        g = gradient_at(model, little_ranks.MIX * mixed + (1 - little_ranks.MIX) * theta, step)
        theta = theta - little_ranks.LR * (g - own + shared)
    found = torch.full_like(theta, math.nan)
    for held in records:
        for first, values in held:
            there = found[first : first + values.numel()]
            assert there.isnan().all() or torch.equal(there, values)
            there.copy_(values)
    torch.testing.assert_close(found, theta, rtol=0, atol=1e-6)


def test_ranks_end_after_the_same_step_when_time_is_up(little_worlds):
    assert [record["timed"] for record in little_worlds[1]] == [1]
    assert [record["timed"] for record in little_worlds[2]] == [2, 2]


@pytest.mark.parametrize(("changes", "key"), [({"correction": "fedprox"}, "correction=fedprox"), ({"mix": 0.5}, "mix")])
def test_training_without_the_vectors_that_the_settings_want_is_refused(changes, key):
    rank = rank_of(**changes)
    with pytest.raises(InnerError, match=rf"RD-716.*inner\.{key}"):
        rank.train(0, 1, batches())
    rank.close()


def test_a_segment_ends_when_its_time_is_up_but_not_before_one_step():
    rank = rank_of()
    assert rank.train(0, 3, batches(), seconds=1e-9).steps == 1
    assert rank.train(0, 3, batches(), seconds=3600.0).steps == 3
    began = time.perf_counter()
    report = rank.train(0, 10**6, lambda k: batches()(k % 8), seconds=0.3)
    assert report.stopped and 1 < report.steps < 10**6
    assert report.seconds >= 0.3 and time.perf_counter() - began >= 0.3
    assert math.isfinite(report.loss_mean)
    rank.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_bf16_every_micro_batch_counts_once(model, stage):
    rank = rank_of(stage, "bf16")
    theta = theta_of(rank)
    found = rank.train(0, 1, batches()).grad_norm_last
    rank.close()
    assert found == pytest.approx(float(gradient_at(model, theta, 0).norm()), rel=0.01)


def test_a_model_with_an_odd_number_of_elements_trains_from_stage_1_on():
    assert sum(p.numel() for p in little_ranks.Model(little_ranks.VOCAB).parameters()) % 2 == 1
    rank = rank_of(1)
    assert np.isfinite(rank.train(0, 1, batches()).loss_mean)
    rank.close()
