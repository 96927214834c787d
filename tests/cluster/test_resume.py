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

ROUNDS = 100
RUN = {"run.rounds": ROUNDS}
TIMES = {"t", "tokens_per_s", "commit_s", "train_s", "send_s", "wait_s", "adopt_s", "wall_s", "utilisation"}
# What depends on the number of shards: each adds a header to what is sent, and norms are sums of their parts.
OF_SHARDS = {"bytes_up", "bytes_down", "anchor_norm", "update_norm", "pseudo_gradient_norm"}


def without(fields, *names):
    return {key: value for key, value in fields.items() if key not in set().union(*names)}


def metrics_of(folder, *left_out):
    found = [without(line, TIMES, *left_out) for line in lines(folder / "metrics.jsonl")]
    return sorted(found, key=lambda line: (line["round"], line["kind"], line.get("island", "")))


def evaluations(folder):
    return {line["round"]: line["loss"] for line in lines(folder / "metrics.jsonl") if line["kind"] == "eval"}


def assert_equal(folder, summary, straight, *left_out):
    """Everything but times is as if nothing had happened."""
    own = {"run", "environment"}
    assert without(summary, TIMES, own, *left_out) == without(straight, TIMES, own, *left_out)
    assert manifest(folder)["ledger"] == manifest(straight.folder)["ledger"]
    assert manifest(folder)["counters"]["tokens"] == manifest(straight.folder)["counters"]["tokens"]
    assert metrics_of(folder, *left_out) == metrics_of(straight.folder, *left_out)
    assert traced_rounds(folder) == list(range(ROUNDS + 1))
    assert all(equal(anchor(folder, r), anchor(straight.folder, r)) for r in range(ROUNDS + 1))


def kill_tree(pid, number):
    """A power cut: the command and everything that it has started, at once."""
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def test_a_run_stopped_three_times_equals_an_uninterrupted_one(place, straight):
    folder, reached = place.folder("stopped"), 0

    def stop():
        ray.get(ray.get_actor("stopped").stop.remote())

    def signal_self():
        os.kill(os.getpid(), signal.SIGINT)

    # Another number of anchor shards each time: commits are by tensor name.
    for shards, act, moment in (
        (1, stop, seen("round_committed", 3)),
        (3, signal_self, seen("round_opened", 5)),
        (2, stop, seen("round_closed", 4)),
    ):
        with when(folder, moment, act):
            part = place.train("stopped", RUN | {"anchor.shards": shards})
        assert part["status"] == "stopped" and reached < part["rounds"] < ROUNDS
        reached = part["rounds"]
        assert manifest(folder)["round"] == reached
        assert digest(folder, anchor(folder, reached)) == part["anchor_digest"]
    summary = place.train("stopped", RUN)
    assert summary["status"] == "finished"
    assert_equal(folder, summary, straight, OF_SHARDS)
    restored = events(folder, "inner_state_restored")
    assert [event["island"] for event in restored].count("i0") == 3 and restored[-1]["round"] == reached
    assert not events(folder, "inner_state_reset")


def test_a_longer_run_continues_a_shorter_one(place, straight):
    assert place.train("longer", {"run.rounds": 3})["rounds"] == 3
    longer = place.train("longer", {"run.rounds": 6})
    assert (longer["status"], longer["rounds"], longer["steps"]) == ("finished", 6, 24)
    assert all(equal(anchor(longer.folder, r), anchor(straight.folder, r)) for r in range(7))
    assert longer["final_eval_loss"] == evaluations(straight.folder)[6]


def test_signals_and_a_kill_of_the_command_leave_a_run_that_goes_on(place, straight):
    folder = place.folder("signalled")
    joined = RUN | {"ray.address": ray.get_runtime_context().gcs_address}

    def interrupted(settings, send, number):
        tape, process = Tape(folder), place.command("signalled", settings)
        tape.wait(seen("round_committed", 3), lambda: process.poll() is None)
        send(process.pid, number)
        return ended(process)

    assert interrupted(RUN, kill_tree, signal.SIGKILL)[0] == -signal.SIGKILL
    for settings, number in ((joined, signal.SIGINT), (RUN, signal.SIGTERM)):
        code, output = interrupted(settings, os.kill, number)
        assert code == 130, output
        assert "stopped" in output and "Traceback" not in output
    code, output = ended(place.command("signalled", joined))
    assert code == 0, output
    summary = json.loads((folder / "summary.json").read_text())
    assert_equal(folder, summary, straight)
    kinds = [event["event"] for event in events(folder)]
    assert kinds.count("run_resumed") == 3 and kinds.count("run_started") == 1

    code, output = ended(place.command("signalled", RUN))
    assert code == 0 and "finished" in output, output
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert [event["event"] for event in events(folder)] == kinds, "nothing was started for a run that is over"

    code, output = ended(place.command("signalled", RUN | {"run.fresh": "true"}))
    assert code == 2 and "RD-562" in output, output
