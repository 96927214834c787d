"""The books of a run: opened where a commit left them, closed with what commits have counted."""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_diloco.checkpoint.manifest import Manifest
from ray_diloco.checkpoint.rundir import RunDirectory
from ray_diloco.checkpoint.store import CheckpointStore
from ray_diloco.cluster.books import Books, Ending, close_books, open_books
from ray_diloco.config.compose import compose
from ray_diloco.errors import ClusterError
from ray_diloco.observe.metrics import EvalMetrics, MetricsLog
from ray_diloco.rounds.members import Tally
from ray_diloco.rounds.position import Position

CONFIG = compose(["run.name=books", "run.rounds=5"]).config
FACTS = {"environment": {"versions": {}}, "parameters": 4}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path, "books")
    directory.make()
    return directory


def position() -> Position:
    """After two rounds of ten steps by one island, the other of which was lost once."""
    tallies = {"i0": Tally(rounds=2, steps=10, tokens=80), "i1": Tally(restarts=1)}
    return Position(
        round=2, step=10, versions={0: 2}, tallies=tallies, tokens=80, bytes_up=7, bytes_down=9, founded=True
    )


def committed(directory: RunDirectory) -> Manifest:
    store, stand = CheckpointStore(str(directory.path)), position().snapshot(2, ["i0"])
    entry = store.write_tensors(2, "anchor-00000-of-00001.safetensors", {"w": np.ones(4, np.float32)}, kind="anchor")
    layout = (("w", (4,)),)
    return store.commit(Manifest("books", 2, {"0": 2}, 10, layout, (entry,), counters=dict(stand.counters)))


def with_books(directory: RunDirectory, manifest: Manifest | None, warnings: Sequence[str] = ()) -> Books:
    """Opens and closes the books, and returns what they were."""

    async def once() -> Books:
        with open_books(CONFIG, directory, manifest, warnings) as books:
            return books

    return asyncio.run(once())


def tape(directory: RunDirectory) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in directory.events.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("t", "seq")} for line in lines]


def evaluated(directory: RunDirectory, *rounds: int) -> None:
    log = MetricsLog(directory.metrics)
    for round in rounds:
        log.append(EvalMetrics(round, 2.0, 7.4, 4, 100))
    log.close()


def test_a_new_run_begins_at_nothing(directory: RunDirectory) -> None:
    books = with_books(directory, None)
    assert tape(directory) == [{"event": "run_started", "run": "books", "islands": ["i0", "i1"], "rounds": 5}]
    assert books.position == Position()
    assert not books.owes_evaluation


def test_a_resumed_run_stands_where_its_commit_stood_and_says_what_it_left_behind(directory: RunDirectory) -> None:
    evaluated(directory, 2, 3, 4)
    books = with_books(directory, committed(directory), ["commit of round 3 is not usable: torn"])
    assert books.position == position()
    assert tape(directory) == [
        {"event": "run_resumed", "run": "books", "round": 2, "rounds": 5, "tokens": 80},
        {"event": "warning", "text": "commit of round 3 is not usable: torn"},
        {"event": "metrics_truncated", "round": 2, "lines": 2},
    ]
    assert not books.owes_evaluation


def test_a_commit_without_its_evaluation_is_owed_one(directory: RunDirectory) -> None:
    evaluated(directory, 1)
    assert with_books(directory, committed(directory)).owes_evaluation


@pytest.mark.parametrize(
    ("ending", "last", "reason"),
    [
        (Ending("finished"), {"event": "run_finished", "rounds": 2, "tokens": 80, "wall_s": 1.5}, None),
        (Ending("stopped"), {"event": "run_stopped", "round": 2, "rounds": 5, "reason": "asked to"}, None),
        (
            Ending("failed", ClusterError(222, "a shard died", "again")),
            {"event": "run_failed", "round": 2, "reason": "a shard died"},
            "a shard died",
        ),
        (
            Ending("failed", KeyError("x")),
            {"event": "run_failed", "round": 2, "reason": "KeyError: 'x'"},
            "KeyError: 'x'",
        ),
    ],
)
def test_the_summary_has_the_figures_of_the_commits_and_the_tape_the_ending(
    directory: RunDirectory, ending: Ending, last: dict[str, Any], reason: str | None
) -> None:
    manifest = committed(directory)

    async def close() -> None:
        with open_books(CONFIG, directory, manifest, ()) as books:
            await close_books(books, ending, CheckpointStore(str(directory.path)), manifest, 1.5, FACTS)

    asyncio.run(close())
    summary = json.loads(directory.summary.read_text())
    assert tape(directory)[-1] == last
    assert (summary["status"], summary["reason"], summary["parameters"]) == (ending.status, reason, 4)
    assert ending.status in (directory.path / summary["report"]).read_text()
    figures = ("rounds", "steps", "tokens_committed", "bytes_up", "bytes_down")
    assert [summary[name] for name in figures] == [2, 10, 80, 7, 9]
    assert summary["anchor_digest"] == hashlib.sha256(np.ones(4, "<f4").tobytes()).hexdigest()
    islands = [(i["name"], i["rounds_contributed"], i["restarts"]) for i in summary["islands"]]
    assert islands == [("i0", 2, 0), ("i1", 0, 1)]
