"""Whole runs against plain torch: every anchor of every round, and the arithmetic that the trace shows."""

import json
import math

import numpy as np
import pytest
import torch
from cluster_runs import LLAMA, anchor, contribution, digest, distance, equal, events, lines, manifest, traced_rounds
from reference import decayed, diloco

from ray_diloco.data.blocks import prepare
from ray_diloco.inner.model import build_model

pytestmark = pytest.mark.cluster


def parts_of(place, settings):
    """Initial model, blocks and their number, as a run with these settings has them."""
    config = place.config(settings)
    corpus = prepare(config.data, config.tokenizer)
    model = build_model(config.model, corpus.vocab_size, corpus.eos_id, config.data.sequence_length, config.run.seed)
    return model, corpus.open(), corpus.train_blocks


def warm_up(rate, steps):
    return lambda step: rate * min(1.0, (step + 1) / steps)


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def plain_loop(place, **changes):
    settings = {"islands": 2, "rounds": 6, "H": 4, "batch": 2, "lr": warm_up(0.01, 6), "clip": 1.0}
    settings |= {"inner": decayed(0.1), "outer": nesterov} | changes
    return diloco(*parts_of(place, {"model": LLAMA}), **settings)


def test_a_run_has_the_anchors_of_a_plain_loop_bit_by_bit(place, llama):
    # Bit by bit, because kernels and threads are the same and the mean over two islands is exact.
    expected = plain_loop(place)
    assert traced_rounds(llama.folder) == list(range(7))
    assert all(equal(anchor(llama.folder, r), expected[r]) for r in range(7))
    assert distance(expected[5], expected[6]) > 1e-3, "a loop that stands still shows nothing"


def test_a_loop_that_makes_inner_adam_anew_each_round_differs(place, llama):
    wrong = plain_loop(place, reset=True)
    assert equal(anchor(llama.folder, 1), wrong[1])
    assert distance(anchor(llama.folder, 2), wrong[2]) > 1e-3


def test_the_trace_replays_to_every_anchor_and_to_the_digest_of_the_summary(llama):
    a = anchor(llama.folder, 0)
    u = {name: np.zeros_like(tensor) for name, tensor in a.items()}
    for r in range(1, 7):
        about = json.loads((llama.folder / f"trace/round-{r:06d}/round.json").read_text())
        assert about == {"weights": {"i0": 0.5, "i1": 0.5}, "outer_lr": 0.7, "momentum": 0.9}
        eta, mu = np.float32(about["outer_lr"]), np.float32(about["momentum"])
        parts = [(np.float32(w), contribution(llama.folder, r, i)) for i, w in sorted(about["weights"].items())]
        for name in a:
            delta = sum(w * part[name] for w, part in parts)
            u[name] = mu * u[name] + delta
            a[name] = a[name] - eta * (delta + mu * u[name])
        assert distance(a, anchor(llama.folder, r)) < 1e-6
    assert not (llama.folder / "trace/round-000000/round.json").exists()
    assert digest(llama.folder, anchor(llama.folder, 6)) == llama["anchor_digest"]


def test_blocks_are_credited_once_in_one_stretch_and_tokens_count_them(llama):
    (ledger,) = manifest(llama.folder)["ledger"].values()
    assert ledger["credited"] == [[0, 2 * 6 * 4 * 2]]
    assert llama["tokens_committed"] == 2 * 6 * 4 * 2 * 32
    assert manifest(llama.folder)["counters"]["tokens"] == llama["tokens_committed"]


def test_the_summary_and_the_logs_keep_the_contract_with_scripts(llama):
    written = json.loads((llama.folder / "summary.json").read_text())
    assert written == dict(llama), "what train returns is what the file holds"
    assert {"run": "llama", "status": "finished", "rounds": 6, "steps": 24}.items() <= written.items()
    islands = [
        {"name": f"i{k}", "region": "", "rounds_contributed": 6, "steps": 24, "tokens": 24 * 64, "restarts": 0}
        for k in range(2)
    ]
    assert written["islands"] == islands
    metrics = lines(llama.folder / "metrics.jsonl")
    kinds = {kind: [line for line in metrics if line["kind"] == kind] for kind in ("island", "commit", "eval")}
    assert [line["round"] for line in kinds["commit"]] == [1, 2, 3, 4, 5, 6]
    assert sorted((line["round"], line["island"]) for line in kinds["island"]) == [
        (r, i) for r in range(1, 7) for i in ("i0", "i1")
    ]
    assert [line["round"] for line in kinds["eval"]] == [2, 4, 6]
    times = ("train_s", "send_s", "wait_s", "adopt_s")
    for line in kinds["island"]:
        assert (line["steps"], line["tokens"]) == (4, 4 * 64)
        assert line["loss"] > 0 and line["pseudo_gradient_norm"] > 0 and line["bytes_up"] > 0
        assert all(line[name] >= 0 for name in times)
    for line in kinds["commit"]:
        assert line["version"] == line["round"] and line["contributions"] == 2 and line["commit_s"] > 0
        assert line["anchor_norm"] > 0 and line["update_norm"] > 0
    last = kinds["eval"][-1]
    assert (written["final_eval_loss"], written["final_eval_ppl"]) == (last["loss"], last["ppl"])
    assert last["ppl"] == pytest.approx(math.exp(last["loss"]))
    assert written["bytes_up"] == sum(line["bytes_up"] for line in kinds["commit"])
    final = [line for line in kinds["island"] if line["round"] == 6]
    assert written["final_train_loss"] == pytest.approx(sum(line["loss"] for line in final) / 2)
    assert 0 < written["utilisation"] <= 1 and 0 < written["train_s"] <= written["wall_s"]


def test_norms_in_the_metrics_are_those_of_the_trace(llama):
    def norm(tensors):
        return math.sqrt(sum(float(np.sum(t.astype(np.float64) ** 2)) for t in tensors.values()))

    metrics = lines(llama.folder / "metrics.jsonl")
    for r in (1, 4):
        before, after = anchor(llama.folder, r - 1), anchor(llama.folder, r)
        (commit,) = (line for line in metrics if line["kind"] == "commit" and line["round"] == r)
        assert commit["anchor_norm"] == pytest.approx(norm(after), rel=1e-5)
        assert commit["update_norm"] == pytest.approx(norm({n: after[n] - before[n] for n in after}), rel=1e-5)
        for line in metrics:
            if line["kind"] == "island" and line["round"] == r:
                expected = norm(contribution(llama.folder, r, line["island"]))
                assert line["pseudo_gradient_norm"] == pytest.approx(expected, rel=1e-5)


def test_the_tape_tells_the_run_in_order(llama):
    tape = events(llama.folder)
    assert [event["seq"] for event in tape] == list(range(len(tape)))
    assert tape[0]["event"] == "run_started" and tape[-1]["event"] == "run_finished"
    of_rounds = [(event["event"], event["round"]) for event in tape if event["event"] == "round_committed"]
    assert of_rounds == [("round_committed", r) for r in range(1, 7)]
    # Version 0 and each round are made durable, or give way to a later commit where the disk is slower than rounds.
    commits = [event for event in tape if event["event"] in ("checkpoint_written", "checkpoint_postponed")]
    assert sorted(event["round"] for event in commits) == list(range(7))
    assert max(event["round"] for event in commits if event["event"] == "checkpoint_written") == 6
    assert {event["event"] for event in tape if event not in commits} | {"checkpoint_written"} == {
        "run_started", "island_launching", "island_joined", "round_opened", "round_closed", "round_committed",
        "evaluation", "checkpoint_written", "run_finished", "run_expected",
    }  # fmt: skip
