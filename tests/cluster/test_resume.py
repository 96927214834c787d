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


def evaluations(folder):
    return {line["round"]: line["loss"] for line in metrics_of(folder) if line["kind"] == "eval"}


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


def test_a_run_in_five_parts_equals_an_uninterrupted_one(place, straight):
    """Finished short, lengthened and signalled, killed, signalled again, and finished; then it is over."""
    name = "parts"
    folder = place.folder(name)
    joined = RUN | {"ray.address": ray.get_runtime_context().gcs_address}

    short = place.train(name, {"run.rounds": 6})
    assert (short["status"], short["rounds"], short["steps"]) == ("finished", 6, 24)
    assert short["final_eval_loss"] == evaluations(straight.folder)[6]

    with when(folder, seen("round_opened", 4), lambda: os.kill(os.getpid(), signal.SIGINT)):
        part = place.train(name, RUN)
    assert part["status"] == "stopped" and 6 < part["rounds"] < ROUNDS
    assert manifest(folder)["round"] == part["rounds"]
    assert digest(folder, anchor(folder, part["rounds"])) == part["anchor_digest"]

    def interrupted(settings, send, number):
        tape, process = Tape(folder), place.command(name, settings)
        tape.wait(seen("round_committed", 3), lambda: process.poll() is None)
        send(process.pid, number)
        return ended(process)

    # On a Ray of its own, which hears what the whole group of the command is told; then on one that outlives it.
    assert interrupted(RUN, kill_tree, signal.SIGKILL)[0] == -signal.SIGKILL
    code, output = interrupted(RUN, os.killpg, signal.SIGTERM)
    assert code == 130 and "stopped" in output and "Traceback" not in output, output
    code, output = ended(place.command(name, joined))
    assert code == 0, output
    kinds = [event["event"] for event in events(folder)]
    assert kinds.count("run_started") == 1 and "inner_state_reset" not in kinds
    resumed = [event["round"] for event in events(folder, "run_resumed")]
    restored = [event["round"] for event in events(folder, "inner_state_restored")]
    assert len(resumed) == 4 and sorted(restored) == sorted(2 * resumed), "everybody's, and of no older commit"
    summary = json.loads((folder / "summary.json").read_text())
    assert_equal(folder, summary, straight)

    code, output = ended(place.command(name, RUN))
    assert code == 0 and "finished" in output, output
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert [event["event"] for event in events(folder)] == kinds, "nothing was started for a run that is over"

    code, output = ended(place.command(name, RUN | {"run.fresh": "true"}))
    assert code == 2 and "RD-562" in output, output
