"""What DiLoCo collapses to at its edges (../shared/algorithms.md §9.1, items 1 to 4, 6 and 7), by whole runs.

Tolerances: a run subtracts, sends and adds `A − θ`, which rounds by 2⁻²⁴ of `A` per element and round; items 4 and 6
as well, item 6 bit by bit, because the mean of two equal numbers is exact.
"""

import numpy as np
import pytest
import torch
from cluster_runs import anchor, contribution, distance, equal, events, lines, manifest, write_corpus
from reference import by_name, decayed

from ray_diloco.data.blocks import prepare
from ray_diloco.data.permutation import virtual_to_block
from ray_diloco.inner.model import build_model

pytestmark = pytest.mark.cluster

SGD = {
    "inner.optimizer.name": "sgd",
    "inner.optimizer.weight_decay": 0.0,
    "inner.clip": 0.0,
    "inner.schedule.warmup_steps": 0,
}
STEPWISE = {"inner.H": 1, "run.rounds": 8, "evaluate.every": 0, **SGD}
MEAN = {"outer.kind": "sgd", "outer.lr": 1.0}


def plain_training(quick, optimizer, *, steps, batch, clip=0.0, lr=None):
    """The model after each step of ordinary training on `batch` sequences, in the order that islands take them."""
    config = quick.config()
    corpus = prepare(config.data, config.tokenizer)
    model, blocks = build_model(config.model, corpus.vocab_size, corpus.eos_id, 32, 0), corpus.open()
    parameters = list(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    optimizer = optimizer(parameters)
    states = [by_name(names, parameters)]
    for step in range(steps):
        numbers = virtual_to_block(0, np.arange(step * batch, (step + 1) * batch), corpus.train_blocks)
        ids = torch.from_numpy(blocks.train(numbers))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        for group in optimizer.param_groups if lr else ():
            group["lr"] = lr(step)
        optimizer.step()
        states.append(by_name(names, parameters))
    return states


@pytest.mark.parametrize(
    ("name", "settings", "optimizer"),
    [
        (
            "large-batch SGD",
            {"inner.lr": 0.5, **MEAN},
            lambda p: torch.optim.SGD(p, lr=0.5),
        ),
        (
            "large-batch Nesterov",
            {"inner.lr": 0.5, "outer.lr": 0.25, "outer.momentum": 0.75},
            lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.75, nesterov=True),
        ),
        (
            # ε well above the rounding of `A − (A − g)`, which would decide the sign of a tiny gradient otherwise.
            "synchronous AdamW",
            {
                "inner.lr": 1.0,
                "outer.kind": "adamw",
                "outer.lr": 0.01,
                "outer.beta2": 0.95,
                "outer.eps": 1e-3,
                "outer.weight_decay": 0.1,
            },
            lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1),
        ),
    ],
)
def test_one_inner_step_of_sgd_is(quick, name, settings, optimizer):
    run = quick.train(name.replace(" ", "-"), STEPWISE | settings)
    # Two islands with two sequences each are one batch of four.
    expected = plain_training(quick, optimizer, steps=8, batch=4)
    for r in range(9):
        assert distance(anchor(run.folder, r), expected[r]) < 1e-6
    assert distance(expected[0], expected[8]) > 1e-2


@pytest.fixture(scope="module")
def alone(quick):
    """One island whose anchor is simply where it ended."""
    return quick.train("alone", {"islands.count": 1, **MEAN})


def test_one_island_with_outer_rate_one_is_plain_training(quick, alone):
    def warm_up(step):
        return 0.01 * min(1.0, (step + 1) / 6)

    expected = plain_training(quick, decayed(0.1), steps=12, batch=2, clip=1.0, lr=warm_up)
    for r in range(4):
        assert distance(anchor(alone.folder, r), expected[4 * r]) < 1e-6


def test_islands_with_equal_data_are_one_island(quick, alone):
    settings = {f"islands.overrides.{i}.data_settings": {"name": f"of-{i}"} for i in ("i0", "i1")}
    twins = quick.train("twins", MEAN | settings)
    assert all(equal(anchor(twins.folder, r), anchor(alone.folder, r)) for r in range(4))
    assert all(equal(*(contribution(twins.folder, r, i) for i in ("i0", "i1"))) for r in (1, 2, 3))
    ledgers = manifest(twins.folder)["ledger"]
    assert [name.split(":")[0] for name in ledgers] == ["of-i0", "of-i1"]
    assert all(ledger["credited"] == [[0, 24]] for ledger in ledgers.values())
    assert twins["tokens_committed"] == 2 * alone["tokens_committed"]


def test_federated_averaging_of_parameters_by_tokens(quick):
    """Two islands with sources, batches and ranks of their own."""
    other = write_corpus(quick.root / "other.txt", 40, seed=1)
    settings = {"islands.i1.data.path": str(other), "islands.i1.micro_batch": 3, "islands.i1.ranks": 2}
    run = quick.train("fedavg", MEAN | settings)
    for r in (1, 2, 3):
        before = anchor(run.folder, r - 1)
        ends = {i: {n: before[n] - d for n, d in contribution(run.folder, r, i).items()} for i in ("i0", "i1")}
        mean = {n: (2 * ends["i0"][n].astype(np.float64) + 6 * ends["i1"][n]) / 8 for n in before}
        assert distance(anchor(run.folder, r), mean) < 1e-6
    assert all(event["weights"] == {"i0": 0.25, "i1": 0.75} for event in events(run.folder, "round_committed"))
    first, second = manifest(run.folder)["ledger"].values()
    assert first["source"] != second["source"]
    assert sorted([first["credited"], second["credited"]]) == [[[0, 24]], [[0, 72]]]
    tokens = {
        line["island"]: line["tokens"] for line in lines(run.folder / "metrics.jsonl") if line["kind"] == "island"
    }
    assert tokens == {"i0": 4 * 2 * 32, "i1": 4 * 6 * 32}
    assert [island["tokens"] for island in run["islands"]] == [3 * 256, 3 * 768]
