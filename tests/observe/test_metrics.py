import json
import math
from pathlib import Path

from ray_diloco.observe.metrics import CommitMetrics, EvalMetrics, IslandMetrics, MetricsLog, perplexity


def island(round: int, name: str = "i0", loss: float = 3.0) -> IslandMetrics:
    return IslandMetrics(
        island=name,
        round=round,
        steps=50,
        tokens=51_200,
        loss=loss,
        pseudo_gradient_norm=0.5,
        train_s=20.0,
        send_s=0.1,
        wait_s=0.2,
        adopt_s=0.3,
        bytes_up=400,
        bytes_down=500,
        tokens_per_s=2560.0,
    )


def commit(round: int) -> CommitMetrics:
    return CommitMetrics(
        round=round,
        version=round,
        anchor_norm=10.0,
        update_norm=0.25,
        contributions=2,
        commit_s=0.05,
        tokens_committed=102_400 * round,
        bytes_up=800,
        bytes_down=1000,
    )


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_have_exactly_the_keys_that_scripts_rely_on(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", clock=lambda: 7.0)
    log.append(island(1))
    log.append(commit(1))
    log.append(EvalMetrics(round=1, loss=2.0, ppl=7.4, blocks=64, tokens=16_384))
    first, second, third = lines(tmp_path / "metrics.jsonl")
    common = {"kind", "round", "t"}
    assert first.keys() - common == {
        *("island", "steps", "tokens", "loss", "pseudo_gradient_norm", "train_s", "send_s", "wait_s", "adopt_s"),
        *("bytes_up", "bytes_down", "tokens_per_s", "wall_s"),
    }
    assert second.keys() - common == {
        *("version", "anchor_norm", "update_norm", "contributions", "commit_s", "tokens_committed"),
        *("bytes_up", "bytes_down", "fragment"),
    }
    assert third.keys() - common == {"loss", "ppl", "blocks", "tokens"}
    assert [line["kind"] for line in (first, second, third)] == ["island", "commit", "eval"]
    assert first["t"] == 7.0


def test_a_loss_that_is_not_a_number_is_null(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "metrics.jsonl").append(island(1, loss=math.nan))
    assert lines(tmp_path / "metrics.jsonl")[0]["loss"] is None


def test_resuming_drops_the_rounds_behind_the_commit_and_writes_them_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for round in (1, 2, 3):
        log.append(island(round))
        log.append(commit(round))
    assert log.truncate_after(2) == 2
    log.append(island(3))
    assert [(line["kind"], line["round"]) for line in lines(path)] == [
        ("island", 1),
        ("commit", 1),
        ("island", 2),
        ("commit", 2),
        ("island", 3),
    ]
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resuming_where_nothing_is_behind_changes_nothing(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(commit(1))
    assert log.truncate_after(1) == 0
    assert log.truncate_after(5) == 0
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


def test_a_torn_last_line_is_gone_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).append(commit(1))
    with path.open("a") as file:
        file.write('{"kind": "commit", "round": 2, "ver')
    log = MetricsLog(path)
    assert log.cut_bytes == 35
    assert [line["round"] for line in lines(path)] == [1]


def test_perplexity_of_an_absurd_loss_is_infinite_not_an_error() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(1e6) == math.inf
