import html.parser
import json
from pathlib import Path

import pytest
from observe_fake_run import SAMPLE, fake_run

from ray_diloco.observe.events import EventLog
from ray_diloco.observe.report import verdict, write_report


class Reader(html.parser.HTMLParser):
    """Collects text by tag and notices tags that are not closed, and addresses outside of the page."""

    VOID = frozenset({"meta", "input", "line", "rect", "path"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(directory: Path) -> tuple[Reader, str]:
    path = write_report(directory)
    reader = Reader()
    reader.feed(path.read_text())
    assert reader.open == []
    return reader, " ".join(" ".join(reader.text).split())


def test_the_page_says_what_a_person_wants_to_know(tmp_path: Path) -> None:
    _, text = read(fake_run(tmp_path / "demo"))
    for words in (
        *("demo", "finished", "below the unigram entropy of the text (3.310)", "held-out perplexity", "1.2M"),
        *("i0", "eu-central", "island i1 lost: rank 0 died (exit code -9) <kill>", "run demo goes on from round 23"),
        *(
            "contribution of island i0 to round 7 refused",
            "momentum: 0.9",
            "2 × CPU",
            "anchor SHA-256 9f86d081884c7d65",
        ),
    ):
        assert words in text, words


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    directory = fake_run(tmp_path / "demo")
    reader, _ = read(directory)
    assert reader.addresses == []
    assert not {"script", "link", "img", "iframe"} & set(reader.tags)
    content = (directory / "report.html").read_text()
    assert "url(" not in content and "@import" not in content and "http" not in content


def test_a_sample_is_shown_as_it_is_written_whatever_it_holds(tmp_path: Path) -> None:
    directory = fake_run(tmp_path / "demo", rounds=2)
    reader, _ = read(directory)
    assert SAMPLE in reader.text
    summary = json.loads((directory / "summary.json").read_text())
    summary["sample"] = "</pre><script>alert('&amp;')</script>"
    (directory / "summary.json").write_text(json.dumps(summary))
    reader, _ = read(directory)
    assert "</pre><script>alert('&amp;')</script>" in reader.text


def test_a_run_that_failed_says_why(tmp_path: Path) -> None:
    _, text = read(fake_run(tmp_path / "demo", rounds=5, status="failed"))
    assert "Failed with 5 rounds committed: no islands left: i0, i1 & i2 died <6 times>." in text


def test_a_run_without_a_summary_has_a_report_of_what_is_there(tmp_path: Path) -> None:
    directory = fake_run(tmp_path / "demo", rounds=4)
    (directory / "summary.json").unlink()
    (directory / "config.yaml").unlink()
    _, text = read(directory)
    assert "It has not ended; 4 rounds committed so far." in text


def test_an_earlier_summary_of_a_run_that_went_on_is_not_believed(tmp_path: Path) -> None:
    directory = fake_run(tmp_path / "demo", rounds=4)
    summary = json.loads((directory / "summary.json").read_text())
    (directory / "summary.json").write_text(json.dumps({**summary, "rounds": 2, "status": "stopped"}))
    _, text = read(directory)
    assert "It has not ended; 4 rounds committed so far." in text


def test_a_run_that_only_began_has_a_report(tmp_path: Path) -> None:
    EventLog(tmp_path / "events.jsonl").append("run_started", run="demo")
    _, text = read(tmp_path)
    assert "0 rounds committed" in text and "has not been evaluated" in text


def test_an_empty_folder_has_a_report(tmp_path: Path) -> None:
    _, text = read(tmp_path)
    assert "nothing to draw yet" in text


@pytest.mark.parametrize(("rounds", "islands", "limit"), [(1, 1, 60_000), (1000, 2, 600_000), (20, 60, 500_000)])
def test_long_and_wide_runs_stay_readable_in_size(tmp_path: Path, rounds: int, islands: int, limit: int) -> None:
    directory = fake_run(tmp_path / "demo", rounds=rounds, islands=islands)
    read(directory)
    assert (directory / "report.html").stat().st_size < limit


def test_losses_that_were_no_numbers_leave_a_gap_and_no_error(tmp_path: Path) -> None:
    directory = fake_run(tmp_path / "demo", rounds=6, islands=12)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] != "commit" and line["round"] in (3, 6):
            line["loss"] = None
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "summary.json").unlink()
    _, text = read(directory)
    assert "nan" not in text.split()


def test_the_verdict_compares_with_knowing_only_frequencies() -> None:
    figures = {"rounds": 1, "status": "stopped", "reason": "SIGINT", "final_eval_loss": 4.0, "unigram_entropy": 3.0}
    assert verdict(figures) == (
        "Stopped with 1 round committed: SIGINT. The same command goes on from there. The anchor's held-out loss of "
        "4.000 nats per token is 1.000 above the unigram entropy of the text (3.000): it has not yet learnt more than "
        "how frequent each token is."
    )
