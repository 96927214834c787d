"""Who goes on and who is asked to stop, with stand-ins for Tune's trials and for drivers."""

import threading
from types import SimpleNamespace

import pytest
from ray.tune.experiment import Trial

from ray_diloco.config.sweep import SweepOptions
from ray_diloco.observe.comparison import Point
from ray_diloco.sweep import gate as module
from ray_diloco.sweep.gate import Gate, judge_of

OPTIONS = SweepOptions(scheduler="asha", grace_tokens=10, reduction=2)


class Driver:
    """A driver that is asked to stop."""

    def __init__(self, asked, name):
        self.stop = SimpleNamespace(remote=lambda: asked.append(name))


@pytest.fixture
def world(monkeypatch):
    asked, ended, points, absent = [], [], {}, set()

    def get_actor(name, namespace):
        if name in absent:
            raise ValueError
        return Driver(asked, name)

    monkeypatch.setattr(module.ray, "get_actor", get_actor)
    stop = threading.Event()
    gate = Gate(
        judge_of(OPTIONS, 80),
        stop,
        lambda label, status, reason, loss, tokens: ended.append((label, status, reason, loss)),
        lambda config: points.get(config.run.name, ()),
    )
    return SimpleNamespace(gate=gate, stop=stop, asked=asked, ended=ended, points=points, absent=absent)


def trial(name, status=Trial.RUNNING):
    composed = SimpleNamespace(config=SimpleNamespace(run=SimpleNamespace(name=name)))
    config = {"trial": name, "task": SimpleNamespace(composed=composed)}
    return SimpleNamespace(trial_id=f"id of {name}", status=status, config=config)


def controller(*trials):
    stopped = []
    return SimpleNamespace(get_trials=lambda: list(trials), stop_trial=stopped.append, stopped=stopped)


def report(world, each, loss, tokens, **more):
    return world.gate.on_trial_result(None, each, {"loss": loss, "tokens": tokens, **more})


def test_a_trial_that_is_behind_is_asked_to_stop_and_its_ending_is_a_halt(world):
    good, bad = trial("good"), trial("bad")
    for each, loss in ((good, 1.0), (bad, 2.0)):
        world.gate.on_trial_add(None, each)
        assert report(world, each, loss, 10) == "CONTINUE"
    assert world.asked == ["bad"]
    world.gate.on_trial_complete(None, bad, {"status": "stopped", "reason": None, "loss": 1.9, "tokens": 20})
    world.gate.on_trial_complete(None, good, {"status": "finished", "reason": None, "loss": 0.5, "tokens": 80})
    (label, status, reason, loss), finished = world.ended
    assert (label, status, loss) == ("bad", "halted", 1.9)
    assert reason == "others were ahead of its loss 2.000 at 10 tokens"
    assert finished == ("good", "finished", None, 0.5)


def test_who_finished_before_it_could_stop_has_finished(world):
    for each, loss in ((trial("good"), 1.0), (bad := trial("bad"), 2.0)):
        world.gate.on_trial_add(None, each)
        report(world, each, loss, 10)
    world.gate.on_trial_complete(None, bad, {"status": "finished", "reason": None, "loss": 1.5, "tokens": 80})
    assert world.ended == [("bad", "finished", None, 1.5)]


def test_trials_of_before_count_and_those_that_go_on_are_judged_by_what_they_have_evaluated(world):
    world.points |= {"old": [Point(1, 10, 0, 1.0)], "again": [Point(1, 10, 0, 3.0)]}
    world.gate.knows("old", SimpleNamespace(run=SimpleNamespace(name="old")))
    again = trial("again", Trial.PENDING)
    world.gate.on_trial_add(None, again)
    tune = controller(again)
    world.gate.choose_trial_to_run(tune)
    assert tune.stopped == [again]
    world.gate.on_trial_remove(None, again)
    assert world.ended == [("again", "halted", "others were ahead of its loss 3.000 at 10 tokens", 3.0)]


def test_an_interrupted_sweep_asks_every_driver_once_and_begins_nothing(world):
    running, starting, waiting = trial("running"), trial("starting"), trial("waiting", Trial.PENDING)
    for each in (running, starting, waiting):
        world.gate.on_trial_add(None, each)
    world.stop.set()
    world.absent.add("starting")
    tune = controller(running, starting, waiting)
    world.gate.choose_trial_to_run(tune)
    assert (world.asked, tune.stopped) == (["running"], [waiting])
    world.absent.clear()
    world.gate.choose_trial_to_run(tune)
    assert world.asked == ["running", "starting"]
    world.gate.on_trial_complete(None, running, {"status": "stopped", "reason": None, "loss": 1.0, "tokens": 20})
    assert world.ended == [("running", "stopped", None, 1.0)]


def test_a_process_that_died_is_a_failure_only_when_no_other_takes_its_place(world):
    each = trial("one")
    each.last_result, each.num_failures = {"loss": 1.0, "tokens": 10}, 1
    world.gate.on_trial_add(None, each)
    each.should_recover = lambda: True
    world.gate.on_trial_error(None, each)
    assert world.ended == []
    world.gate.on_trial_add(None, each)
    each.should_recover, each.num_failures = lambda: False, 3
    world.gate.on_trial_error(None, each)
    assert world.ended == [("one", "failed", "its process died 3 times", 1.0)]
