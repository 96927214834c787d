import dataclasses
import json
from pathlib import Path

import pytest

from ray_diloco.errors import CheckpointError
from ray_diloco.observe.events import EventLog
from ray_diloco.observe.metrics import CommitMetrics, EvalMetrics, IslandMetrics, MetricsLog
from ray_diloco.observe.summary import (
    IslandSummary,
    Summary,
    active_seconds,
    mean_loss,
    read_summary,
    summarise,
    tally,
    write_summary,
)


def island(name: str, round: int, steps: int, tokens: int, loss: float, train_s: float, wait_s: float) -> IslandMetrics:
    return IslandMetrics(name, round, steps, tokens, loss, 1.0, train_s, 0.5, wait_s, 0.5, 100, 200, tokens / train_s)


def commit(round: int, tokens_committed: int) -> CommitMetrics:
    return CommitMetrics(round, round, 10.0, 0.1, 2, 0.01, tokens_committed, 200, 400)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two rounds; i1 takes fewer steps in the second, and was replaced once."""
    now = iter([0.0, 1.0, 50.0, 1000.0, 1030.0])
    events = EventLog(tmp_path / "events.jsonl", clock=lambda: next(now))
    events.append("run_started", run="demo")
    events.append("island_joined", island="i1", region="us")
    events.append("stop_requested")
    events.append("run_resumed", run="demo", round=1)
    events.append("island_lost", island="i1")
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    for line in (
        EvalMetrics(0, 5.5, 244.7, 8, 2048),
        island("i0", 1, 50, 500, 4.0, train_s=9.0, wait_s=0.0),
        island("i1", 1, 50, 500, 4.2, train_s=8.0, wait_s=1.0),
        commit(1, 1000),
        island("i0", 2, 50, 600, 3.0, train_s=9.0, wait_s=0.0),
        island("i1", 2, 20, 200, 3.4, train_s=4.0, wait_s=5.0),
        commit(2, 1800),
        EvalMetrics(2, 3.0, 20.1, 8, 2048),
    ):
        metrics.append(line)
    return tmp_path


def test_the_logs_determine_the_figures(directory: Path) -> None:
    counted = tally(directory)
    assert (counted.rounds, counted.steps, counted.tokens_committed) == (2, 100, 1800)
    assert counted.final_train_loss == pytest.approx((3.0 * 600 + 3.4 * 200) / 800)
    assert (counted.final_eval_loss, counted.final_eval_ppl) == (3.0, 20.1)
    assert (counted.bytes_up, counted.bytes_down) == (400, 800)
    assert counted.train_s == (18.0 + 12.0) / 2
    assert counted.utilisation == pytest.approx((18.0 / 20.0 + 12.0 / 20.0) / 2)


def test_the_measured_length_of_a_round_counts_where_there_is_one(tmp_path: Path) -> None:
    line = dataclasses.replace(island("i0", 1, 50, 500, 4.0, train_s=9.0, wait_s=0.0), wall_s=12.0)
    MetricsLog(tmp_path / "metrics.jsonl").append(line)
    assert tally(tmp_path).utilisation == 0.75


def test_islands_are_listed_with_region_work_and_restarts(directory: Path) -> None:
    assert tally(directory).islands == (
        IslandSummary("i0", "", 2, 100, 1100, 0),
        IslandSummary("i1", "us", 2, 70, 700, 1),
    )


def test_wall_time_leaves_out_the_time_between_two_processes(directory: Path) -> None:
    assert tally(directory).wall_s == 50.0 + 30.0


def test_wall_time_leaves_out_an_outage_that_a_torn_line_tells_of() -> None:
    events = [{"event": "run_started", "t": 0.0}, {"event": "warning", "t": 5.0}]
    events += [{"event": "log_repaired", "t": 900.0}, {"event": "run_resumed", "t": 901.0}]
    assert active_seconds([*events, {"event": "run_finished", "t": 911.0}]) == [0.0, 5.0, 5.0, 5.0, 15.0]
    assert active_seconds([]) == []


def test_a_run_that_did_nothing_has_a_summary_too(tmp_path: Path) -> None:
    counted = tally(tmp_path)
    assert (counted.rounds, counted.tokens_committed, counted.utilisation, counted.islands) == (0, 0, None, ())
    assert counted.final_train_loss is None


def test_a_loss_that_was_not_a_number_does_not_enter_the_mean() -> None:
    assert mean_loss([{"loss": None, "tokens": 5}, {"loss": 2.0, "tokens": 5}]) == 2.0
    assert mean_loss([{"loss": None, "tokens": 5}]) is None


def test_what_each_process_of_a_run_counted_on_the_network_adds_up(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl")
    events.append("run_started", run="demo")
    assert tally(tmp_path).bytes_network is None
    for sent in (1000, 234):
        events.append("network_counted", bytes_sent=sent, bytes_received=9, machines=2)
    assert tally(tmp_path).bytes_network == 1234


def test_the_file_has_the_keys_that_scripts_rely_on(directory: Path) -> None:
    summary = summarise(directory, run="demo", status="finished", anchor_digest="ab", export="export", parameters=12)
    write_summary(directory / "summary.json", summary)
    content = json.loads((directory / "summary.json").read_text())
    contract = {
        *("run", "status", "rounds", "steps", "tokens_committed", "final_train_loss", "final_eval_loss"),
        *("final_eval_ppl", "bytes_up", "bytes_down", "wall_s", "train_s", "utilisation", "anchor_digest", "islands"),
    }
    more = {
        *("reason", "unigram_entropy", "parameters", "export", "report", "sample", "wandb_run_id"),
        *("environment", "version", "expected", "bytes_network"),
    }
    assert content.keys() == contract | more
    assert all(
        row.keys() == {"name", "region", "rounds_contributed", "steps", "tokens", "restarts"}
        for row in content["islands"]
    )


def test_a_summary_reads_back_as_it_was(directory: Path) -> None:
    summary = summarise(directory, run="demo", status="stopped", anchor_digest="ab", reason="SIGTERM", sample="a < b")
    write_summary(directory / "summary.json", summary)
    assert read_summary(directory / "summary.json") == summary


def test_figures_that_are_no_numbers_are_null(directory: Path) -> None:
    summary = summarise(directory, run="demo", status="failed", anchor_digest="")
    write_summary(directory / "s.json", dataclasses.replace(summary, final_eval_loss=float("nan")))
    assert json.loads((directory / "s.json").read_text())["final_eval_loss"] is None


@pytest.mark.parametrize("content", [None, "{", "[]", '{"islands": [], "run": "x", "colour": 1}'])
def test_a_file_that_is_no_summary_is_a_numbered_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    with pytest.raises(CheckpointError, match="RD-583"):
        read_summary(tmp_path / "summary.json")


def test_every_figure_of_the_tally_is_in_the_summary() -> None:
    names = {field.name for field in dataclasses.fields(Summary)}
    assert {field.name for field in dataclasses.fields(tally(Path("/nonexistent")))} <= names
