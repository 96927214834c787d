"""Every published method of `conf/algorithm/` trains `model=tiny` on real islands, and the loss falls."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from cluster_runs import events, lines

import ray_diloco

ALGORITHMS = sorted(path.stem for path in (Path(__file__).parents[2] / "conf/algorithm").glob("*.yaml"))
ALONE = ("gpa", "lookahead", "snoo")
EVERY_STEP = ("demo", "gpa", "sparta", "sync_dp")

# Shorter than published: what matters is that a method moves, not how far.
COMMON = {
    "model": "tiny",
    "model.config.hidden_size": 64,
    "model.config.intermediate_size": 128,
    "model.config.num_attention_heads": 4,
    "model.config.num_key_value_heads": 4,
    "data": "text",
    "data.sequence_length": 32,
    "data.heldout_blocks": 8,
    "inner.schedule.warmup_steps": 2,
    "inner.schedule.kind": "constant",
    "evaluate.every": 4,
    "checkpoint.every": 4,
    "export.enabled": False,
    "observe.quiet": True,
}
# Rates that move so small a model in so few steps.
RATES = {
    "demo": {"outer.lr": 0.003, "codec.up.scale": 0.003},
    "gpa": {"inner.lr": 0.01, "outer.lr": 0.2},
    "sparta": {"inner.lr": 0.003},
    "sync_dp": {"outer.lr": 0.003},
    "scaffold": {"channels.control.H": 6},
    "fedadam": {"outer.lr": 0.003},
    "fedyogi": {"outer.lr": 0.003},
}


# With processes of their own, as a user has them.
COLD = ("streaming",)
AT_OWN_PACE = ("async_dn_dylu", "async_nesterov", "easgd", "heloco", "mla")
# What is late, kept, or left out of a contribution is part of a commit.
REMEMBERING = ("dilocox", "eager", "streaming")


def train(place, name, run, rounds, ranks=1):
    settings = {
        "algorithm": name,
        "run.rounds": rounds,
        "run.name": run,
        "islands.count": 1 if name in ALONE or ranks > 1 else 2,
        "islands.ranks": ranks,
        "inner.H": 1 if name in EVERY_STEP else 24 if name == "decoupled" else 6,
    }
    return ray_diloco.train(place.common | COMMON | settings | RATES.get(name, {}))


@pytest.mark.parametrize("name", REMEMBERING)
def test_a_run_that_is_lengthened_equals_one_that_was_long_from_the_start(place, warm, name):
    # Of two ranks each has its own half of what is late and of the error memory.
    ranks = 2 if name == "dilocox" else 1
    with warm.runs():
        straight = train(place, name, f"straight-{name}", 4, ranks)
    for rounds in (2, 4):
        with warm.runs():
            parts = train(place, name, f"parts-{name}", rounds, ranks)
    for key in ("anchor_digest", "tokens_committed", "bytes_up", "bytes_down", "final_eval_loss"):
        assert parts[key] == straight[key], key
    assert events(place.folder(f"parts-{name}"), "inner_state_reset") == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_published_method_trains_on_real_islands(place, warm, name):
    rounds = 12 if name in EVERY_STEP else 2 if name == "decoupled" else 4
    # A run at its own pace counts rounds by island, which a longer one must not take for its end.
    for asked in (rounds // 2, rounds) if name == "async_nesterov" else (rounds,):
        with nullcontext() if name in COLD else warm.runs():
            summary = train(place, name, f"preset-{name}", asked)
    folder = place.folder(f"preset-{name}")
    assert summary["rounds"] == (2 * rounds if name in AT_OWN_PACE else rounds)
    losses = [line["loss"] for line in lines(folder / "metrics.jsonl") if line["kind"] == "eval"]
    assert summary["status"] == "finished"
    assert losses[-1] < 5.4, "below that of guessing one of 258 tokens"
    # Who is carried on from the last round has no round to be carried to.
    late = "the run ended before the round that it was carried to"
    assert {event["reason"] for event in events(folder, "contribution_rejected")} <= {late}
    assert events(folder, "island_lost") == []
