import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ray_diloco.observe.display import PlainDisplay, QuietDisplay, open_display, outcome
from ray_diloco.observe.summary import IslandSummary, Summary
from ray_diloco.observe.view import IslandView, Note, RunView

SUMMARY = Summary(
    run="demo",
    status="finished",
    rounds=40,
    steps=2000,
    tokens_committed=4_096_000,
    final_train_loss=1.9,
    final_eval_loss=1.954,
    final_eval_ppl=7.057,
    bytes_up=128_000_000,
    bytes_down=128_000_000,
    wall_s=201.4,
    train_s=190.0,
    utilisation=0.961,
    anchor_digest="ab" * 32,
    islands=(IslandSummary("i0", "eu", 40, 2000, 2_048_000, 0),),
    unigram_entropy=3.31,
    export="runs/demo/export",
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def view(*notes: Note, islands: tuple[IslandView, ...] = (), eta_s: float | None = None) -> RunView:
    return RunView("demo", "running", 3, 40, islands=islands, eta_s=eta_s, notes=notes)


def text_of(stream: io.StringIO) -> list[str]:
    return [line.split("  ", 1)[-1] for line in stream.getvalue().splitlines()]


def test_plain_lines_tell_each_event_once_however_often_the_view_comes() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream, clock=Clock())
    first, second = Note(4, 0.0, "round 3 committed"), Note(9, 1.0, "island i1 lost")
    display.update(view(first))
    display.update(view(first))
    display.update(view(first, second))
    assert text_of(stream) == ["round 3 committed", "island i1 lost"]


def test_a_line_begins_with_the_local_time_of_its_event() -> None:
    stream = io.StringIO()
    PlainDisplay(stream, clock=Clock()).update(view(Note(0, 0.0, "hello")))
    assert stream.getvalue()[2:3] == ":" and stream.getvalue()[8:] == "  hello\n"


def test_silence_is_broken_every_ten_seconds_by_who_does_what_and_who_waits_for_whom() -> None:
    stream, clock = io.StringIO(), Clock()
    display = PlainDisplay(stream, clock=clock)
    islands = (
        IslandView("i0", "eu", "training", 31, 50),
        IslandView("i1", "us", "waiting", 50, 50, waiting_for="i0"),
        IslandView("i2", "us", "launching", 0, 50),
    )
    for now in (0.0, 9.9, 10.0, 19.9, 20.0):
        clock.now = now
        display.update(view(islands=islands, eta_s=310.5))
    expected = "… running, 3/40 rounds · 5m 10s to go · i0 training 31/50 · i1 waiting for i0 · i2 launching"
    assert text_of(stream) == [expected, expected]


def test_a_heartbeat_names_a_few_of_many_islands() -> None:
    stream, clock = io.StringIO(), Clock()
    display = PlainDisplay(stream, clock=clock)
    clock.now = 60.0
    display.update(view(islands=tuple(IslandView(f"i{k}", "eu", "lost") for k in range(100))))
    assert text_of(stream)[0].endswith("i5 lost · … 94 more islands")


def test_an_event_puts_the_heartbeat_off() -> None:
    stream, clock = io.StringIO(), Clock()
    display = PlainDisplay(stream, clock=clock)
    clock.now = 9.0
    display.update(view(Note(1, 0.0, "event")))
    clock.now = 18.0
    display.update(view(Note(1, 0.0, "event")))
    assert text_of(stream) == ["event"]


def test_the_outcome_says_first_what_is_enough_alone() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream)
    display.close(SUMMARY)
    display.close(SUMMARY)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "demo finished: 40 rounds, 4.1M tokens, held-out loss 1.954"
    assert "  held-out    loss 1.954 nats per token, perplexity 7.057" in lines
    assert "  traffic     128 MB up, 128 MB down" in lines
    assert "  time        3m 21s, islands trained 96% of their rounds" in lines
    assert len(lines) == len(set(lines))


def test_the_outcome_lays_a_round_beside_what_was_expected_of_it() -> None:
    expected = {"bytes_up": 3_200_000, "bytes_down": 3_100_000, "round_s": 5.2, "train_s": 5.0}
    (line,) = [line for line in outcome(replace(SUMMARY, expected=expected)) if line.startswith("  a round")]
    assert "3.2 MB up (expected 3.2 MB), 3.2 MB down (expected 3.1 MB)" in line
    assert "(expected 5.2 s)" in line
    without = replace(SUMMARY, expected=expected | {"round_s": None, "train_s": None})
    (line,) = [line for line in outcome(without) if line.startswith("  a round")]
    assert line.endswith("(expected 3.1 MB)")


def test_quiet_says_only_errors() -> None:
    errors = io.StringIO()
    display = QuietDisplay(errors)
    display.note("preparing data")
    display.update(view(Note(1, 0.0, "round 1 committed"), Note(2, 0.0, "failed: no islands", "error")))
    display.update(view(Note(2, 0.0, "failed: no islands", "error")))
    display.close(SUMMARY)
    assert errors.getvalue() == "failed: no islands\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("quiet", "stream", "kind"),
    [
        (False, io.StringIO(), "PlainDisplay"),
        (True, Terminal(), "QuietDisplay"),
        (False, Terminal(), "LiveDisplay"),
    ],
)
def test_the_display_suits_where_it_writes(quiet: bool, stream: io.StringIO, kind: str) -> None:
    assert type(open_display(quiet, stream)).__name__ == kind


def test_rich_is_not_loaded_for_plain_lines() -> None:
    code = (
        "import io, sys; from ray_diloco.observe.display import open_display; "
        "open_display(stream=io.StringIO()); assert 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])
