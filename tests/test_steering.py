"""What `scale`, `drain`, `status` and `stop` ask of a run, and what they print; the driver is a stand-in."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from ray_diloco.checkpoint.rundir import RunDirectory
from ray_diloco.cli import main
from ray_diloco.cluster import control
from ray_diloco.errors import CheckpointError, ClusterError, ConfigError
from ray_diloco.observe.view import IslandView, RunView
from ray_diloco.steering import numbers_of

VIEW = RunView(
    "long", "running", 3, 9, 1200,
    (IslandView("eu-0", "eu", "training", 4, 10), IslandView("us-10", "us", "lost", restarts=2)),
    waiting_for="us-10 (1 of 2 are here)",
)  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
    calls = []

    class Run:
        def scale(self, islands):
            calls.append(("scale", islands))
            return sorted(islands)

        def drain(self, island):
            calls.append(("drain", island))

        def stop(self):
            calls.append(("stop",))

        def view(self):
            return VIEW

    @contextmanager
    def found(run, root, address):
        calls.append((run, root, address))
        yield Run()

    monkeypatch.setattr(control, "control", found)
    return calls


def test_numbers_are_of_the_whole_run_or_of_regions():
    assert numbers_of(["3"]) == {"": 3}
    assert numbers_of(["eu=2", "us=0"]) == {"eu": 2, "us": 0}
    for wrong in (["eu"], ["eu=two"], ["-1"], ["3", "eu=2"], ["eu=1", "eu=2"]):
        with pytest.raises(ConfigError, match="RD-127"):
            numbers_of(wrong)


def test_each_command_asks_the_driver_of_that_run(asked, capsys):
    assert main(["scale", "long", "eu=2", "us=1", "--address", "head:6379"]) == 0
    assert main(["drain", "long", "eu-1", "--root", "elsewhere"]) == 0
    assert main(["stop", "long"]) == 0
    assert asked == [
        ("long", "runs", "head:6379"), ("scale", {"eu": 2, "us": 1}),
        ("long", "elsewhere", None), ("drain", "eu-1"),
        ("long", "runs", None), ("stop",),
    ]  # fmt: skip
    assert "wanted are now eu, us" in capsys.readouterr().out


def test_the_status_says_where_the_run_and_each_island_stand(asked, capsys):
    assert main(["status", "long"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "long running: round 3 of 9, 1200 tokens committed",
        "  waiting for us-10 (1 of 2 are here)",
        "  eu-0   training 4/10 in eu",
        "  us-10  lost in us, started again 2 times",
    ]
    assert main(["status", "long", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["islands"][1]["state"] == "lost"


def test_a_run_that_is_not_under_way_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(ClusterError) as refused, control.control("gone", tmp_path):
        pass
    assert (refused.value.number, "no run named 'gone' is under way" in refused.value.what) == (205, True)


def test_the_status_of_a_run_that_has_ended_is_read_from_its_tape(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    tape = [
        {"event": "run_started", "run": "past", "islands": ["a"], "rounds": 9},
        {"event": "round_committed", "round": 1, "rounds": 9, "tokens": 100},
        {"event": "run_stopped", "round": 1, "rounds": 9, "reason": "asked to"},
        {"event": "run_resumed", "run": "past", "round": 1, "rounds": 9, "tokens": 100},
        {"event": "round_committed", "round": 2, "rounds": 9, "tokens": 200},
    ]
    (tmp_path / "past").mkdir()

    def write(events):
        (tmp_path / "past" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))

    write(tape)
    assert main(["status", "past", "--root", str(tmp_path)]) == 4
    assert "RD-205" in capsys.readouterr().err, "it may be under way, or was killed"
    write([*tape, {"event": "run_failed", "round": 2, "reason": "no room"}])
    monkeypatch.chdir(tmp_path)
    for words in (["past", "--root", str(tmp_path)], ["past", "--root", "."], ["./past"]):
        assert main(["status", *words]) == 0
        assert capsys.readouterr().out == "past failed: round 2 of 9, 200 tokens committed\n"
    assert main(["stop", "past", "--root", str(tmp_path)]) == 4


@pytest.mark.parametrize(
    ("error", "left"), [(CheckpointError(530, "it is held", "wait"), "first:1"), (KeyboardInterrupt(), None)]
)
def test_only_a_command_that_is_refused_leaves_the_address_that_it_found(tmp_path, monkeypatch, error, left):
    directory = RunDirectory(tmp_path, "long")
    directory.path.mkdir()
    directory.address.write_text("first:1")
    monkeypatch.setattr(control.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="second:2"))
    with pytest.raises(type(error)), control.announced(directory):
        assert directory.address.read_text() == "second:2"
        raise error
    assert (directory.address.read_text() if directory.address.exists() else None) == left
