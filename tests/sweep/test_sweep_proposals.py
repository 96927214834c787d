"""Which trial comes next: in order, or from Optuna, and what is asked when a sweep goes on."""

import threading

import pytest

from ray_diloco.config.sweep import read_sweep
from ray_diloco.sweep.proposals import Proposals
from ray_diloco.sweep.record import Record, read_record

SMALL = ["sweep.space.inner.H=null", "sweep.space.outer.momentum=null", "sweep.tokens=0"]


def asked(proposals, number=99):
    """Labels of what Tune would be given, and how to end them."""
    found = []
    for k in range(number):
        given = proposals.suggest(str(k))
        if given == "FINISHED":
            break
        found.append(given["trial"])
    return found


def admit_all(trial):
    return {"trial": trial.label}


def test_a_grid_comes_in_order_without_what_is_not_admitted():
    sweep = read_sweep([*SMALL, "sweep.space.outer.lr=[0.1,0.2,0.3]"])
    admit = lambda trial: None if trial.label == "lr0.2" else admit_all(trial)  # noqa: E731
    assert asked(Proposals(sweep, {}, admit, threading.Event())) == ["lr0.1", "lr0.3"]


def test_nothing_begins_once_a_sweep_is_to_stop():
    stop = threading.Event()
    proposals = Proposals(read_sweep(SMALL), {}, admit_all, stop)
    assert asked(proposals, 1) == ["lr0.4"]
    stop.set()
    assert asked(proposals) == []


@pytest.fixture
def learning():
    return read_sweep(
        [*SMALL, "sweep.search=optuna", "sweep.trials=6", "sweep.space.outer.lr={log_uniform: [0.1, 10]}"]
    )


def test_optuna_is_told_what_trials_came_to_and_proposes_each_once(learning, tmp_path):
    record = Record(tmp_path)
    proposals = Proposals(learning, record.entries, admit_all, threading.Event())
    labels = []
    for _k in range(6):
        labels += asked(proposals, 1)
        rate = float(labels[-1].removeprefix("lr"))
        result = {"status": "diverged"} if rate > 5 else {"status": "finished", "loss": abs(rate - 0.7)}
        proposals.on_trial_complete("0", result)
        record.note(labels[-1], {"outer.lr": rate}, result["status"], loss=result.get("loss"))
    assert len(set(labels)) == 6
    assert asked(proposals) == []
    states = [trial.state.name for trial in proposals._guide._search._ot_study.trials]
    assert states.count("COMPLETE") == sum(float(label.removeprefix("lr")) <= 5 for label in labels)

    # A sweep that goes on: what is known comes first, and Optuna knows it.
    record.close()
    entries = read_record(tmp_path)
    again = Proposals(learning, entries, admit_all, threading.Event())
    assert asked(again) == labels
    assert len(again._guide._search._ot_study.trials) == 6


def test_optuna_ends_when_nothing_is_left_to_propose():
    sweep = read_sweep([*SMALL, "sweep.search=optuna", "sweep.trials=9", "sweep.space.outer.lr=[0.1,0.2]"])
    assert sorted(asked(Proposals(sweep, {}, admit_all, threading.Event()))) == ["lr0.1", "lr0.2"]


def test_the_last_word_on_a_trial_counts_and_a_torn_line_is_none(tmp_path):
    record = Record(tmp_path)
    record.note("a", {"x": 1}, "begun")
    record.note("b", {"x": 2}, "begun")
    record.note("a", {"x": 1}, "finished", loss=1.5, tokens=10)
    record.note("a", {"x": 1}, "finished", loss=1.5, tokens=10)
    record.close()
    file = tmp_path / "trials.jsonl"
    assert len(file.read_text().splitlines()) == 3
    file.write_text(file.read_text() + '{"label": "b", "para')
    assert [(e.label, e.status, e.loss) for e in read_record(tmp_path).values()] == [
        ("a", "finished", 1.5),
        ("b", "begun", None),
    ]
