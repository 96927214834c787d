import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_diloco.observe.lines import to_json
from ray_diloco.observe.wandb_mirror import WandbMirror, mirror_metrics

LINES = [
    {"kind": "island", "island": "i0", "round": 1, "loss": 3.0, "tokens": 512, "t": 9.0},
    {"kind": "commit", "round": 1, "version": 1, "tokens_committed": 1024, "t": 9.0},
    {"kind": "eval", "round": 1, "loss": 2.5, "ppl": None, "t": 9.0},
]


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.metrics: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.finished = False

    def define_metric(self, name: str, step_metric: str | None = None, hidden: bool = False) -> None:
        self.metrics[name] = step_metric

    def log(self, values: dict[str, Any], **more: Any) -> None:
        self.logged.append((values, more))

    def finish(self) -> None:
        self.finished = True


class FakeWandb:
    """Stands for the library: `gate` holds its `init` up, `error` makes it fail."""

    def __init__(self, gate: threading.Event | None = None, error: Exception | None = None) -> None:
        self.run = FakeRun()
        self.settings: dict[str, Any] = {}
        self.started = threading.Event()
        self._gate = gate
        self._error = error
        self.Settings = SimpleNamespace

    def init(self, **settings: Any) -> FakeRun:
        self.settings = settings
        self.started.set()
        if self._gate is not None:
            self._gate.wait(10)
        if self._error is not None:
            raise self._error
        return self.run

    def teardown(self) -> None:
        assert self.run.finished


class Warnings:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.came = threading.Event()

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        self.came.set()


def mirror(wandb: FakeWandb, warn: Warnings, tmp_path: Path, **more: Any) -> WandbMirror:
    settings = {"mode": "online", "project": "p", "name": "demo", "run_id": None, "config": {"a": 1}, **more}
    return WandbMirror(**settings, directory=tmp_path, warn=warn, load=lambda: wandb)


def test_lines_go_under_their_kind_with_our_own_steps_and_never_with_the_librarys(tmp_path: Path) -> None:
    wandb, warn = FakeWandb(), Warnings()
    opened = mirror(wandb, warn, tmp_path)
    for line in LINES:
        opened.log(line)
    assert opened.finish(10, {"status": "finished", "islands": [1]})
    assert wandb.run.logged == [
        ({"round": 1, "tokens": 0, "island/i0/loss": 3.0, "island/i0/tokens": 512}, {}),
        ({"round": 1, "tokens": 1024, "commit/version": 1, "commit/tokens_committed": 1024}, {}),
        ({"round": 1, "tokens": 1024, "eval/loss": 2.5}, {}),
    ]
    assert wandb.run.metrics == {
        "round": None,
        "tokens": None,
        "island/*": "round",
        "commit/*": "round",
        "eval/*": "tokens",
    }
    assert wandb.run.summary == {"status": "finished"}
    assert wandb.run.finished and warn.texts == []


def test_a_new_run_gets_an_id_of_ours_and_a_resumed_one_keeps_its_own(tmp_path: Path) -> None:
    first, second = FakeWandb(), FakeWandb()
    new = mirror(first, Warnings(), tmp_path)
    assert new.run_id is not None and len(new.run_id) == 8
    again = mirror(second, Warnings(), tmp_path, run_id=new.run_id)
    assert new.finish(10) and again.finish(10)
    assert second.settings["id"] == first.settings["id"] == new.run_id
    assert second.settings["resume"] == "allow"


def test_a_run_after_a_roll_back_joins_the_group_and_names_its_parent(tmp_path: Path) -> None:
    wandb = FakeWandb()
    assert mirror(wandb, Warnings(), tmp_path, parent="abcd1234").finish(10)
    assert wandb.settings["group"] == "demo"
    assert wandb.settings["config"] == {"a": 1, "parent_run": "abcd1234"}


def test_the_trials_of_a_sweep_are_one_group(tmp_path: Path) -> None:
    wandb, warn = FakeWandb(), Warnings()
    mirror(wandb, warn, tmp_path, group="outer").finish(5)
    assert (wandb.settings["group"], wandb.settings["name"]) == ("outer", "demo")


def test_what_comes_before_a_slow_start_is_sent_after_it_and_the_slowness_is_said(tmp_path: Path) -> None:
    gate = threading.Event()
    wandb, warn = FakeWandb(gate), Warnings()
    opened = mirror(wandb, warn, tmp_path, init_limit_s=0.01)
    opened.log(LINES[0])
    assert warn.came.wait(10)
    assert warn.texts == ["wandb has not opened within 0.01 s; the run goes on and lines are kept for it."]
    assert wandb.run.logged == []
    gate.set()
    assert opened.finish(10)
    assert len(wandb.run.logged) == 1


def test_a_start_that_never_ends_costs_a_warning_and_the_time_limit(tmp_path: Path) -> None:
    gate = threading.Event()
    wandb, warn = FakeWandb(gate, RuntimeError("connection lost")), Warnings()
    opened = mirror(wandb, warn, tmp_path)
    opened.log(LINES[0])
    assert not opened.finish(0.01)
    gate.set()
    assert not opened.finish(10)
    assert warn.texts == ["wandb did not take the rest within 0.01 s; metrics.jsonl has all of it."]


def test_a_start_that_fails_is_one_warning_and_later_lines_are_dropped(tmp_path: Path) -> None:
    wandb, warn = FakeWandb(error=RuntimeError("no key")), Warnings()
    opened = mirror(wandb, warn, tmp_path)
    assert warn.came.wait(10)
    opened.log(LINES[0])
    assert not opened.finish(10)
    assert warn.texts == ["the wandb mirror is off: RuntimeError: no key"]


def test_a_library_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'wandb'")

    warn = Warnings()
    opened = WandbMirror("online", "p", "demo", None, {}, tmp_path, warn=warn, load=missing)
    assert not opened.finish(10)
    assert warn.texts == ["the wandb mirror is off: ModuleNotFoundError: No module named 'wandb'"]


def test_off_opens_nothing(tmp_path: Path) -> None:
    wandb = FakeWandb()
    opened = mirror(wandb, Warnings(), tmp_path, mode="off")
    opened.log(LINES[0])
    assert opened.finish(0) and opened.run_id is None and not wandb.started.is_set()


def test_a_metrics_file_can_be_played_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(to_json(line) + "\n" for line in LINES) + '{"torn')
    wandb = FakeWandb()
    opened = mirror(wandb, Warnings(), tmp_path)
    assert mirror_metrics(path, opened) == 3
    assert opened.finish(10)
    assert [values["round"] for values, _ in wandb.run.logged] == [1, 1, 1]


def test_the_real_library_writes_offline_and_goes_on_under_the_same_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    warn = Warnings()
    run_id = None
    for part in ("first", "second"):
        (tmp_path / part).mkdir()
        opened = WandbMirror("offline", "p", "demo", run_id, {"a": {"b": 1}}, tmp_path / part, warn=warn)
        run_id = opened.run_id
        for line in LINES:
            opened.log(line)
        assert opened.finish(60), warn.texts
    assert warn.texts == []
    files = list(tmp_path.glob(f"*/wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert sorted(file.relative_to(tmp_path).parts[0] for file in files) == ["first", "second"]
    for file in files:
        content = file.read_bytes()
        # The transaction log is not compressed: keys and values of a line stand in it as they are.
        assert b"island/i0/loss" in content and b"eval/*" in content and json.dumps(2.5).encode() in content
