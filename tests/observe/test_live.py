import io

import pytest
from rich.console import Console

from ray_diloco.observe.live import LiveDisplay, picture, sparkline
from ray_diloco.observe.view import CommitView, IslandView, Note, RunView, TimeSplit

VIEW = RunView(
    run="demo",
    status="running",
    round=12,
    rounds=40,
    tokens=819_200,
    islands=(
        IslandView("i0", "eu", "training", 31, 50, 3.2141, 2143.2),
        IslandView("i1", "us", "waiting", 50, 50, 3.198, 1990.1, restarts=1, waiting_for="i0 to offer"),
    ),
    last_commit=CommitView(12, 3.2211, 0.4132, 3_212_400, 6_424_800, TimeSplit(23.0, 0.5, 1.0, 0.5)),
    eval_loss=3.301,
    eval_ppl=27.13,
    elapsed_s=134.2,
    eta_s=310.5,
    notes=(Note(1, 0.0, "island [bold]i1[/bold] lost: exit code -9", "warning"), Note(2, 1.0, "round 12/40 committed")),
)


def draw(view: RunView, width: int = 100, losses: tuple[float, ...] = ()) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True)
    console.print(picture(view, losses))
    return console.export_text()


def test_each_island_has_a_row_with_state_step_loss_and_speed() -> None:
    rows = [line for line in draw(VIEW).splitlines() if line.startswith("i")]
    assert rows[0].split() == ["island", "region", "inner", "step", "loss", "tokens/s", "state"]
    assert [word for word in rows[1].split() if "━" not in word] == ["i0", "eu", "31/50", "3.214", "2.1k", "training"]
    assert [word for word in rows[2].split() if "━" not in word] == (
        ["i1", "↻1", "us", "50/50", "3.198", "2.0k", "waiting", "for", "i0", "to", "offer"]
    )


def test_the_last_round_says_loss_bytes_and_where_its_time_went() -> None:
    text = draw(VIEW)
    assert "train loss 3.221" in text
    assert "held-out 3.301 (perplexity 27.13)" in text
    assert "up 3.2 MB, down 6.4 MB" in text
    assert "train 92%  send 2.0%  wait 4.0%  adopt 2.0%" in text
    assert "819k tokens committed" in text
    assert "round 12/40" in text and "ETA 5m 10s" in text


def test_words_of_an_event_are_not_taken_for_markup() -> None:
    assert "island [bold]i1[/bold] lost" in draw(VIEW)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_no_line_is_wider_than_the_terminal_and_figures_are_never_cut(width: int) -> None:
    lines = draw(VIEW, width).splitlines()
    assert max(len(line) for line in lines) <= width
    assert any("31/50" in line and "3.214" in line and "2.1k" in line for line in lines)


def test_before_anything_has_happened_there_is_a_picture_all_the_same() -> None:
    text = draw(RunView("demo", "starting", 0, 40))
    assert "no islands yet" in text and "round 0/40" in text and "ETA –" in text


def test_of_a_thousand_islands_the_first_are_shown_and_the_rest_counted() -> None:
    islands = tuple(IslandView(f"i{k:03}", "", "training", 1, 50) for k in range(1000))
    text = draw(RunView("demo", "running", 0, 40, islands=islands))
    assert "i015" in text and "i016" not in text and "… and 984 more" in text
    assert "region" not in text


def test_a_sparkline_spans_low_to_high_and_thins_out_what_is_too_long() -> None:
    assert sparkline([3.0]) == ""
    assert sparkline([1.0, 2.0]) == "▁█"
    assert sparkline([2.0, 2.0, 2.0]) == "▁▁▁"
    assert sparkline([float(k) for k in range(1000)], width=8) == "▁▂▃▄▅▆▇█"


def test_warnings_stay_above_the_picture_and_the_outcome_below() -> None:
    console = Console(width=100, record=True, file=io.StringIO(), force_terminal=False)
    display = LiveDisplay(console)
    display.note("preparing data")
    display.update(VIEW)
    display.update(VIEW)
    display.close()
    display.close()
    display.update(VIEW)
    text = console.export_text()
    assert text.index("preparing data") < text.index("demo  running")
    assert text.index("lost: exit code -9") < text.index("demo  running")


def test_the_bar_does_not_go_back_when_a_replaced_island_begins_its_steps_anew() -> None:
    console = Console(width=100, record=True, file=io.StringIO(), force_terminal=False)
    display = LiveDisplay(console)
    display.update(RunView("demo", "running", 0, 2, islands=(IslandView("i0", "", "training", 50, 50),)))
    display.update(RunView("demo", "running", 0, 2, islands=(IslandView("i0", "", "launching", 0, 50),)))
    display.close()
    text = console.export_text()
    assert "launching" in text and "50%" in text
