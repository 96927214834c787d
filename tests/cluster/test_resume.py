"""Resume = no interruption: runs that were stopped, signalled or killed, against one that was not."""

import contextlib
import json
import os
import signal

import psutil
import pytest
import ray
from cluster_runs import Tape, anchor, digest, ended, equal, events, lines, manifest, seen, traced_rounds, when

pytestmark = pytest.mark.cluster

ROUNDS = 60
RUN = {"run.rounds": ROUNDS}
TIMES = {"t", "tokens_per_s", "commit_s", "train_s", "send_s", "wait_s", "adopt_s", "wall_s", "utilisation"}


def without(fields, names):
    return {key: value for key, value in fields.items() if key not in names}


def metrics_of(folder):
    found = [without(line, TIMES) for line in lines(folder / "metrics.jsonl")]
    return sorted(found, key=lambda line: (line["round"], line["kind"], line.get("island", "")))


def assert_equal(folder, summary, straight):
    """Everything but times is as if nothing had happened."""
    own = TIMES | {"run", "environment"}
    assert without(summary, own) == without(straight, own)
    assert manifest(folder)["ledger"] == manifest(straight.folder)["ledger"]
    assert manifest(folder)["counters"]["tokens"] == manifest(straight.folder)["counters"]["tokens"]
    assert metrics_of(folder) == metrics_of(straight.folder)
    assert traced_rounds(folder) == list(range(ROUNDS + 1))
    assert all(equal(anchor(folder, r), anchor(straight.folder, r)) for r in range(ROUNDS + 1))


def kill_tree(pid, number):
    """A power cut: the command and everything that it has started, at once."""
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def test_a_run_that_was_stopped_killed_and_signalled_equals_an_uninterrupted_one(place, straight):
    name = "interrupted"
    folder, reached = place.folder(name), 0
    joined = RUN | {"ray.address": ray.get_runtime_context().gcs_address}

    def stop():
        ray.get(ray.get_actor(name).stop.remote())

    def signal_self():
        os.kill(os.getpid(), signal.SIGINT)

    for moment, act in ((seen("round_committed", 3), stop), (seen("round_opened", 4), signal_self)):
        with when(folder, moment, act):
            part = place.train(name, RUN)
        assert part["status"] == "stopped" and reached < part["rounds"] < ROUNDS
        reached = part["rounds"]
        assert manifest(folder)["round"] == reached
        assert digest(folder, anchor(folder, reached)) == part["anchor_digest"]

    def interrupted(settings, send, number):
        tape, process = Tape(folder), place.command(name, settings)
        tape.wait(seen("round_committed", 3), lambda: process.poll() is None)
        send(process.pid, number)
        return ended(process)

    # On a Ray of its own; then on one that outlives it.
    assert interrupted(RUN, kill_tree, signal.SIGKILL)[0] == -signal.SIGKILL
    code, output = interrupted(joined, os.kill, signal.SIGTERM)
    assert code == 130 and "stopped" in output and "Traceback" not in output, output
    code, output = ended(place.command(name, joined))
    assert code == 0, output
    summary = json.loads((folder / "summary.json").read_text())
    assert_equal(folder, summary, straight)
    kinds = [event["event"] for event in events(folder)]
    assert kinds.count("run_started") == 1 and kinds.count("run_resumed") == 4
    assert kinds.count("inner_state_restored") == 8 and "inner_state_reset" not in kinds

    code, output = ended(place.command(name, RUN))
    assert code == 0 and "finished" in output, output
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert [event["event"] for event in events(folder)] == kinds, "nothing was started for a run that is over"

    code, output = ended(place.command(name, RUN | {"run.fresh": "true"}))
    assert code == 2 and "RD-562" in output, output


def test_a_longer_run_with_other_anchor_shards_continues_a_shorter_one(place, straight):
    """Commits are by tensor name, whoever kept the tensors."""
    shorter = place.train("longer", {"run.rounds": 3, "anchor.shards": 3})
    assert shorter["rounds"] == 3
    kept = shorter.folder / "checkpoints/round-000003"
    assert [len(list(kept.glob(f"{kind}-*"))) for kind in ("anchor", "outer")] == [3, 3]
    longer = place.train("longer", {"run.rounds": 6, "anchor.shards": 2})
    assert (longer["status"], longer["rounds"], longer["steps"]) == ("finished", 6, 24)
    assert all(equal(anchor(longer.folder, r), anchor(straight.folder, r)) for r in range(7))
    loss = {line["round"]: line["loss"] for line in metrics_of(straight.folder) if line["kind"] == "eval"}
    assert longer["final_eval_loss"] == loss[6]
