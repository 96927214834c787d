"""A trial as Tune sees it, over a run that a test plays: results, divergence, and ends."""

import json
from types import SimpleNamespace

import pytest

from ray_diloco.config.compose import compose
from ray_diloco.errors import DataError, SyncError
from ray_diloco.observe.view import IslandView, RunView
from ray_diloco.sweep.trial import RunTrial, Task, room_of


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Plays a run: `act(write, display, stop)` returns its summary; gives the results up to the one that is done."""
    monkeypatch.chdir(tmp_path)
    composed = compose([f"run.root={tmp_path}", "run.name=it", "islands.count=2", "islands.ranks=2"])
    metrics = tmp_path / "it/metrics.jsonl"
    metrics.parent.mkdir()

    def write(round_, loss):
        lines = [
            {"kind": "commit", "round": round_, "tokens_committed": 10 * round_, "bytes_up": 1, "bytes_down": 1},
            {"kind": "eval", "round": round_, "loss": loss},
        ]
        with metrics.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def play_(act):
        def run(composed, *, display, stop):
            return act(write, display, stop)

        trial = object.__new__(RunTrial)
        trial.setup({"task": Task(composed, run, 8.0, str(tmp_path), ())})
        results = [trial.step()]
        while not results[-1].get("done"):
            results.append(trial.step())
        trial.cleanup()
        return results

    return SimpleNamespace(play=play_, write=write, config=composed.config)


def ended(status, loss=1.0):
    return {"status": status, "reason": None, "final_eval_loss": loss}


def test_each_evaluation_is_a_result_and_the_end_is_one_more(play):
    def act(write, display, stop):
        write(1, 3.0)
        write(2, 2.0)
        return ended("finished")

    assert play.play(act) == [
        {"loss": 3.0, "tokens": 10, "round": 1},
        {"loss": 2.0, "tokens": 20, "round": 2},
        {"loss": 2.0, "tokens": 20, "round": 2, "done": True, "status": "finished", "reason": None},
    ]


def test_what_was_evaluated_before_an_interruption_is_not_reported_again(play):
    play.write(1, 3.0)

    def act(write, display, stop):
        write(2, 2.0)
        return ended("stopped")

    assert [(r["round"], r.get("status")) for r in play.play(act)] == [(2, None), (2, "stopped")]


def seen(loss):
    return RunView("it", "running", 3, 9, islands=(IslandView("i0", "", "training", loss=loss),))


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (lambda write, display: write(1, 8.5), "the held-out loss after round 1 is 8.500, above 8.000"),
        (lambda write, display: write(1, None), "the held-out loss after round 1 is not a number"),
        (lambda write, display: display.update(seen(float("nan"))), "the training loss of i0 is nan after round 3"),
    ],
)
def test_a_run_that_loses_its_way_is_asked_to_stop(play, trouble, reason):
    def act(write, display, stop):
        trouble(write, display)
        assert stop.wait(60), "it is not asked to stop"
        return ended("stopped")

    last = play.play(act)[-1]
    assert (last["status"], last["reason"]) == ("diverged", reason)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (SyncError(417, "an infinite anchor", "lower outer.lr"), "diverged", "RD-417: an infinite anchor"),
        (DataError(302, "no file matches", "correct the path"), "failed", "RD-302: no file matches"),
        (ZeroDivisionError("x"), "failed", "ZeroDivisionError: x"),
        (KeyboardInterrupt(), "stopped", None),
    ],
)
def test_an_error_ends_a_trial_and_says_why(play, error, status, reason):
    def act(write, display, stop):
        raise error

    assert play.play(act) == [{"done": True, "status": status, "reason": reason}]


def test_the_room_of_a_trial_is_a_bundle_here_and_one_for_each_rank(play):
    room = room_of(play.config, "node:here", 0.5)
    assert room.bundles == [{"node:here": 0.001, "CPU": 0.5}, *[{"CPU": 1.0}] * 4]
