"""`ray-diloco audit`: each way in which what a run has left can be wrong is found and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ray_diloco.auditing import audit
from ray_diloco.checkpoint.anchor import anchor_digest
from ray_diloco.checkpoint.manifest import Manifest
from ray_diloco.checkpoint.store import CheckpointStore
from ray_diloco.cli import main
from ray_diloco.config.compose import compose

LENGTH, PER_ROUND = 256, 8
LR, MU = 0.5, 0.9


def commit(store: CheckpointStore, round_: int, change: Callable[[Manifest], Manifest] = lambda m: m) -> Manifest:
    """A commit of a run of one island, in which every round has credited eight blocks."""
    entry = store.write_tensors(
        round_, "anchor-0-of-1.safetensors", {"w": np.full(4, round_, np.float32)}, kind="anchor"
    )
    blocks = round_ * PER_ROUND
    return store.commit(
        change(
            Manifest(
                run="r",
                round=round_,
                versions={"0": round_},
                step=50 * round_,
                layout=(("w", (4,)),),
                files=(entry,),
                ledger={"stdlib": {"source": "stdlib", "credited": [[0, blocks]]}},
                counters={"tokens": blocks * LENGTH, "islands": {"i0": {"tokens": blocks * LENGTH}}},
            )
        )
    )


def trace(folder: Path, off: float = 0.0) -> None:
    """Three rounds of a Nesterov run of two islands by hand; in the last, the anchor is off by so much."""
    anchor, u = np.array([1.0, -2.0]), np.zeros(2)
    for round_ in range(4):
        place = folder / f"trace/round-{round_:06d}"
        place.mkdir(parents=True)
        if round_:
            sent = {"a": np.array([0.25, round_]), "b": np.array([-1.0, 0.5])}
            for island, values in sent.items():
                save_file({"w": values.astype(np.float32)}, place / f"island-{island}.safetensors")
            delta = 0.75 * sent["a"] + 0.25 * sent["b"]
            u = MU * u + delta
            anchor = anchor - LR * (delta + MU * u)
            about = {"weights": {"a": 0.75, "b": 0.25}, "outer_lr": LR, "momentum": MU}
            (place / "round.json").write_text(json.dumps(about))
        save_file({"w": (anchor + off * (round_ == 3)).astype(np.float32)}, place / "anchor.safetensors")


def found(folder: Path, *settings: str) -> dict[str, tuple[str, str]]:
    """Status and words of each check; of several with one name, the last."""
    config = compose([f"run.root={folder.parent}", f"run.name={folder.name}", *settings]).config
    return {check.name: (check.status, check.said) for check in audit(folder, config)}


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, CheckpointStore]:
    return tmp_path / "r", CheckpointStore(str(tmp_path / "r"))


def test_what_is_whole_passes(run: tuple[Path, CheckpointStore]) -> None:
    folder, store = run
    newest = [commit(store, round_) for round_ in (1, 2, 3)][-1]
    summary = {"rounds": 3, "tokens_committed": 24 * LENGTH, "anchor_digest": anchor_digest(store, newest)}
    (folder / "summary.json").write_text(json.dumps(summary))
    trace(folder)
    checks = found(folder)
    assert {name: status for name, (status, _) in checks.items()} == dict.fromkeys(
        ("commits", "history", "ledger", "summary", "trace"), "pass"
    )
    assert "3 whole" in checks["commits"][1] and "24 blocks" in checks["ledger"][1]
    assert "3 rounds replayed" in checks["trace"][1]


def test_a_file_that_has_changed_is_named(run: tuple[Path, CheckpointStore]) -> None:
    folder, store = run
    for round_ in (1, 2):
        commit(store, round_)
    (file,) = folder.glob("checkpoints/*2/*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    config = compose([]).config
    (bad,) = [check for check in audit(folder, config) if check.status == "fail"]
    assert (bad.name, bad.where) == ("commits", "round 2")
    assert "digest" in bad.said and bad.mend


def later(**fields: Any) -> Callable[[Manifest], Manifest]:
    return lambda manifest: replace(manifest, **fields)


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (later(versions={"0": 1}), "history", "version of fragment 0 went back from round 2 to round 3"),
        (later(step=0), "history", "the step went back"),
        (
            later(ledger={"stdlib": {"source": "stdlib", "credited": [[3, 24]]}}),
            "history",
            "3 blocks that were credited",
        ),
        (later(ledger={"stdlib": {"source": "stdlib", "credited": [[0, 20], [16, 24]]}}), "ledger", "credited twice"),
        (later(ledger={"stdlib": {"source": "stdlib", "credited": [[0, 25]]}}), "ledger", "25 blocks of 256"),
        (
            later(counters={"tokens": 24 * LENGTH, "islands": {"i0": {"tokens": 1}}}),
            "ledger",
            "islands are credited with 1 tokens",
        ),
    ],
)
def test_books_that_do_not_hold_are_found(
    run: tuple[Path, CheckpointStore], change: Callable[[Manifest], Manifest], name: str, words: str
) -> None:
    folder, store = run
    for round_ in (1, 2):
        commit(store, round_)
    commit(store, 3, change)
    status, said = found(folder)[name]
    assert status == "fail" and words in said


def test_a_commit_that_another_run_has_replaced_is_found(tmp_path: Path) -> None:
    first, second = (CheckpointStore(str(tmp_path / name)) for name in ("r", "other"))
    for round_ in (1, 2):
        commit(first, round_)
    commit(second, 1, later(created=7.0))
    kept, new = (next((tmp_path / name / "checkpoints").glob("*1")) for name in ("r", "other"))
    (kept / "manifest.json").write_bytes((new / "manifest.json").read_bytes())
    status, said = found(tmp_path / "r")["history"]
    assert status == "fail" and "round 2 follows" in said


def test_a_summary_of_an_older_commit_is_a_warning(run: tuple[Path, CheckpointStore]) -> None:
    folder, store = run
    commit(store, 1)
    (folder / "summary.json").write_text(json.dumps({"rounds": 7}))
    status, said = found(folder)["summary"]
    assert status == "warn" and "rounds 7, the newest commit 1" in said


def test_an_anchor_that_does_not_follow_from_its_contributions_is_found(run: tuple[Path, CheckpointStore]) -> None:
    folder, store = run
    commit(store, 1)
    trace(folder, off=0.01)
    config = compose([]).config
    (bad,) = [check for check in audit(folder, config) if check.status == "fail"]
    assert (bad.name, bad.where) == ("trace", "round-000003")


@pytest.mark.parametrize("name", ["island-a.safetensors", "round.json", "anchor.safetensors"])
@pytest.mark.parametrize("left", [None, b"", b"{"])
def test_a_trace_that_is_half_written_is_said(run: tuple[Path, CheckpointStore], name: str, left: bytes | None) -> None:
    folder, store = run
    commit(store, 1)
    trace(folder)
    file = folder / "trace/round-000003" / name
    file.unlink()
    if left is not None:
        file.write_bytes(left)
    (folder / "summary.json").write_text("{")
    checks = found(folder)
    assert checks["trace"][0] == checks["summary"][0] == "fail"
    assert "cannot be read" in checks["trace"][1] and "no JSON" in checks["summary"][1]


def test_commits_that_a_run_removes_while_they_are_read_are_none(
    run: tuple[Path, CheckpointStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, store = run
    for round_ in (1, 2):
        commit(store, round_)
    listed = CheckpointStore.rounds
    before = listed(store)
    store.prune(keep_last=1)
    # What was there when the audit began, then what is.
    looks = iter([before])
    monkeypatch.setattr(CheckpointStore, "rounds", lambda self: next(looks, None) or listed(self))
    (read,) = [check for check in audit(folder, compose([]).config) if check.name == "commits"]
    assert (read.status, read.said[:7]) == ("pass", "1 whole")


@pytest.mark.parametrize("setting", ["outer.kind=adam", "merge.kind=median", "codec.down.kind=bf16"])
def test_what_the_replay_does_not_know_is_said(run: tuple[Path, CheckpointStore], setting: str) -> None:
    folder, store = run
    commit(store, 1)
    trace(folder, off=0.01)
    status, said = found(folder, setting)["trace"]
    assert status == "pass" and f"not replayed: {setting}" in said


def test_the_command_says_it_and_fails(run: tuple[Path, CheckpointStore], capsys: pytest.CaptureFixture[str]) -> None:
    folder, store = run
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("run: {name: r}\n")
    assert main(["audit", str(folder)]) == 2
    assert "RD-563" in capsys.readouterr().err
    commit(store, 1)
    assert main(["audit", str(folder)]) == 0
    assert "3 passed, 0 warned, 0 failed" in capsys.readouterr().out
    commit(store, 2, later(step=0))
    assert main(["audit", str(folder), "--json"]) == 4
    assert [check["status"] for check in json.loads(capsys.readouterr().out)] == ["pass", "fail", "pass"]
