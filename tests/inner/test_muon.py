"""Muon alone against formulas, and in real engines, ZeRO stage 0 to 3 and one or two ranks, against a plain loop."""

import threading

import little_ranks
import numpy as np
import pytest
import torch
from torch import nn

from ray_diloco.inner.model import build_model
from ray_diloco.inner.muon import HIDDEN, MuonAdamW, Place, hidden_matrices, orthogonalise


def newton_schulz(update):
    """NS5 of algorithms.md §6.1, in float64."""
    x = update / np.linalg.norm(update)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(6, 6), (3, 8), (9, 4)])
def test_five_rounds_bring_all_singular_values_near_one(shape):
    update = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    found = orthogonalise(update)
    torch.testing.assert_close(found, torch.from_numpy(newton_schulz(update.double().numpy())).float())
    singular = torch.linalg.svdvals(found)
    assert singular.min() > 0.5 and singular.max() < 1.3


def test_the_size_of_the_update_does_not_matter_and_zero_stays_zero():
    update = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(orthogonalise(update * 1e4), orthogonalise(update))
    assert not orthogonalise(torch.zeros(3, 2)).any()


def group_of(parameter, **changes):
    return {"params": [parameter], HIDDEN: True, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0} | changes


def gradients(shape, count=3):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("shape", [(3, 8), (9, 4)])
def test_a_step_is_nesterov_momentum_orthogonalised_scaled_and_decayed(shape):
    parameter = nn.Parameter(torch.ones(*shape))
    optimizer = MuonAdamW([group_of(parameter, weight_decay=0.5)])
    theta, momentum = np.ones(shape), np.zeros(shape)
    for g in gradients(shape):
        parameter.grad = g
        optimizer.step()
        momentum = 0.9 * momentum + g.numpy()
        step = newton_schulz(g.numpy() + 0.9 * momentum)
        theta = (1 - 0.1 * 0.5) * theta - 0.1 * max(1, shape[0] / shape[1]) ** 0.5 * step
    np.testing.assert_allclose(parameter.detach().numpy(), theta, atol=1e-5)
    np.testing.assert_allclose(optimizer.state[parameter]["momentum_buffer"].numpy(), momentum, atol=1e-6)


def test_in_bf16_it_follows_torchs_muon():
    ours, theirs = nn.Parameter(torch.ones(9, 4)), nn.Parameter(torch.ones(9, 4))
    optimizers = (
        MuonAdamW([group_of(ours)], torch.bfloat16),
        torch.optim.Muon([theirs], lr=0.1, momentum=0.9, weight_decay=0.0),
    )
    for g in gradients((9, 4)):
        ours.grad, theirs.grad = g, g.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-2)
    assert (ours - 1).abs().max() > 0.1


def test_what_is_not_hidden_is_stepped_by_adamw():
    matrix, vector, plain = (nn.Parameter(torch.ones(4)) for _ in range(3))
    matrix = nn.Parameter(torch.ones(2, 2))
    rest = {"lr": 0.3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    ours = MuonAdamW([group_of(matrix), {"params": [vector], HIDDEN: False, **rest}])
    theirs = torch.optim.AdamW([{"params": [plain], **rest}], fused=True)
    for g in gradients((4,)):
        matrix.grad, vector.grad, plain.grad = g.view(2, 2), g.clone(), g.clone()
        ours.step()
        theirs.step()
    assert torch.equal(vector, plain)


def test_ranks_that_share_matrices_step_as_one_that_has_them_whole():
    """Matrices [3, 4], [5, 3] and [2, 2], laid out one behind the other and cut after 14 of 31 elements."""
    shapes, cut = [(3, 4), (5, 3), (2, 2)], 14
    wholes = [nn.Parameter(torch.ones(*shape)) for shape in shapes]
    alone = MuonAdamW([group_of(p) for p in wholes])
    barrier, sums = threading.Barrier(2), []

    def reduce(buffer):
        sums.append(buffer.clone())
        barrier.wait(timeout=10)
        total = sums[-1] + sums[-2]
        barrier.wait(timeout=10)
        buffer.copy_(total)

    flats = [nn.Parameter(torch.ones(n)) for n in (cut, 31 - cut)]
    halves = [MuonAdamW([group_of(flat)], reduce=reduce) for flat in flats]
    halves[0].place(flats[0], (Place((3, 4), 0, 0, 12), Place((5, 3), 12, 0, 2, split=True)))
    halves[1].place(flats[1], (Place((5, 3), 0, 2, 13, split=True), Place((2, 2), 13, 0, 4)))
    for g in gradients((31,)):
        for p, part in zip(wholes, g.split([12, 15, 4]), strict=True):
            p.grad = part.view(p.shape)
        alone.step()
        for flat, part in zip(flats, g.split([cut, 31 - cut]), strict=True):
            flat.grad = part.clone()
        threads = [threading.Thread(target=half.step) for half in halves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=10)
    expected = torch.cat([p.detach().view(-1) for p in wholes])
    assert torch.equal(torch.cat([flat.detach() for flat in flats]), expected)


def test_embeddings_and_the_output_head_are_not_hidden_also_when_tied():
    model = little_ranks.Model(32)
    assert hidden_matrices(model) == {"wide.weight", "tall.weight", "square.weight"}
    model.embed, model.head = nn.Embedding(32, 22), nn.Linear(22, 32, bias=False)
    model.head.weight = model.embed.weight
    assert hidden_matrices(model) == {"wide.weight", "tall.weight", "square.weight"}
    model.wide.weight.requires_grad_(False)
    model.get_output_embeddings = lambda: model.square
    assert hidden_matrices(model) == {"tall.weight"}


@pytest.fixture(scope="module")
def plain():
    """The flat parameters after the same steps of a plain loop with two optimisers."""
    s = little_ranks.settings(0, "fp32", 0, 1)
    model = build_model(s.model, s.vocab_size, 0, s.sequence_length, s.seed)
    hidden = {name: p for name, p in model.named_parameters() if name in hidden_matrices(model)}
    rest = [p for name, p in model.named_parameters() if name not in hidden]
    o = s.inner.optimizer
    decayed = [{"params": [p], "weight_decay": o.weight_decay if p.ndim > 1 else 0.0} for p in rest]
    adamw = torch.optim.AdamW(decayed, betas=(o.beta1, o.beta2), eps=o.eps)
    momenta = {name: torch.zeros_like(p) for name, p in hidden.items()}
    for step, factor in enumerate(little_ranks.RATES):
        for half in little_ranks.tokens(step).chunk(2):
            (model(half, half).loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), s.inner.clip)
        with torch.no_grad():
            for name, p in hidden.items():
                momenta[name] = o.muon_momentum * momenta[name] + p.grad
                o_step = newton_schulz((p.grad + o.muon_momentum * momenta[name]).double().numpy())
                rate = factor * o.muon_lr
                p.mul_(1 - rate * o.muon_weight_decay)
                p.sub_(torch.from_numpy(o_step).float() * rate * max(1, p.shape[0] / p.shape[1]) ** 0.5)
        for group in adamw.param_groups:
            group["lr"] = factor * s.inner.lr
        adamw.step()
        model.zero_grad()
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


def vector(records, engine, which):
    numel = sum(p.numel() for p in little_ranks.Model(little_ranks.VOCAB).parameters())
    whole = torch.full((numel,), float("nan"))
    for record in records:
        for first, values in record[engine][which]:
            whole[first : first + values.numel()] = values
    return whole


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("engine", little_ranks.ENGINES, ids=lambda e: f"stage{e[0]}-{e[1]}")
def test_training_equals_a_plain_loop_at_every_stage(little_worlds, plain, world, engine):
    found = vector(little_worlds[world], engine, 0)
    difference = (found - plain).abs()
    if engine[1] == "fp32":
        assert difference.max() < 1e-3 and difference.mean() < 1e-5
    else:
        assert difference.mean() < 2e-3


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("engine", little_ranks.ENGINES, ids=lambda e: f"stage{e[0]}-{e[1]}")
def test_both_kinds_of_state_are_restored_bit_by_bit(little_worlds, world, engine):
    records = little_worlds[world]
    assert torch.equal(vector(records, engine, 0), vector(records, engine, 1))
    kinds = {tuple(key.split("|")[::2]) for key in records[0][engine][2]}
    assert {("momentum_buffer", "wide.weight"), ("exp_avg", "embed.weight"), ("exp_avg_sq", "wide.bias")} <= kinds
    assert not {("exp_avg", "wide.weight"), ("momentum_buffer", "head.weight")} & kinds


def test_two_ranks_do_share_a_matrix_at_stage_1(little_worlds):
    assert [record[1, "fp32"][3] for record in little_worlds[2]] == [1, 1]
    assert [record[3, "fp32"][3] for record in little_worlds[2]] == [3, 3]
