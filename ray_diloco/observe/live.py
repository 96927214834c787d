"""The live picture of a run in a terminal, drawn with rich: islands, progress, the last round, what happened.

`picture` is a pure function from a view to something rich can draw, so that it can be tested and looked at without a
terminal.  `LiveDisplay` redraws it in place; warnings stay in the scroll-back above it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ray_diloco.observe.display import outcome, unseen
from ray_diloco.observe.summary import Summary
from ray_diloco.observe.units import show_bytes, show_count, show_number, show_percent, show_seconds
from ray_diloco.observe.view import CommitView, IslandView, Note, RunView, TimeSplit

STATE_STYLES = {
    "training": "green",
    "sending": "cyan",
    "adopting": "cyan",
    "evaluating": "magenta",
    "waiting": "yellow",
    "launching": "blue",
    "joining": "blue",
    "ready": "dim",
    "done": "dim",
    "lost": "bold red",
}
STATUS_STYLES = {"finished": "bold green", "failed": "bold red", "stopped": "bold yellow", "stopping": "yellow"}
NOTE_STYLES = {"info": "dim", "warning": "yellow", "error": "bold red"}
PHASE_STYLES = (("train", "green"), ("send", "cyan"), ("wait", "yellow"), ("adopt", "blue"))
SPARKS = "▁▂▃▄▅▆▇█"
SHOWN_ISLANDS = 16
SHOWN_NOTES = 5


class LiveDisplay:
    """A picture that is redrawn in place.

    Args:
      console: the terminal.
    """

    period_s = 0.25

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._losses: dict[int, float] = {}
        self._seen = -1
        self._progress = 0.0
        self._closed = False

    @classmethod
    def on(cls, stream: TextIO) -> LiveDisplay:
        """A live display on a terminal's stream."""
        return cls(Console(file=stream, highlight=False))

    def update(self, view: RunView) -> None:
        """Redraw."""
        if self._closed:
            return
        if not self._live.is_started:
            self._live.start()
        for note in unseen(view.notes, self._seen):
            if note.level != "info":
                self._console.print(_note_line(note))
            self._seen = note.seq
        if view.last_commit and view.last_commit.mean_loss is not None:
            self._losses[view.last_commit.round] = view.last_commit.mean_loss
        # A replaced island begins its steps anew; what is shown as done does not go back for that.
        self._progress = max(self._progress, view.progress)
        self._live.update(picture(view, tuple(self._losses.values()), self._progress), refresh=True)

    def note(self, text: str) -> None:
        """Print one line above the picture."""
        self._console.print(Text(text, style="dim"))

    def close(self, summary: Summary | None = None, folder: str = "") -> None:
        """Leave the last picture standing, and print the outcome below it."""
        if self._closed:
            return
        self._closed = True
        self._live.stop()
        if summary is not None:
            first, *rest = outcome(summary, folder)
            self._console.print(Text(first, style=STATUS_STYLES.get(summary.status, "bold")))
            for line in rest:
                self._console.print(Text(line))


def picture(view: RunView, losses: Sequence[float] = (), progress: float | None = None) -> RenderableType:
    """A run as rich draws it.

    Args:
      losses: mean loss of the committed rounds that were seen, in order.
      progress: part of the run that is done, 0 to 1; default: the view's own.
    """
    parts: list[RenderableType] = [_header(view), Text(), _islands(view.islands), Text()]
    parts.append(_progress(view, view.progress if progress is None else progress))
    parts.append(_figures(view, losses))
    if view.last_commit is not None:
        parts.append(_last_round(view.last_commit))
    if view.notes:
        parts += [Text(), *(_one_line(_note_line(note)) for note in view.notes[-SHOWN_NOTES:])]
    return Group(*parts)


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The last values as a row of bars, at most `width` wide; older ones are thinned out."""
    if len(values) < 2:
        return ""
    count = min(width, len(values))
    chosen = [values[round(k * (len(values) - 1) / (count - 1))] for k in range(count)]
    low, high = min(chosen), max(chosen)
    span = (high - low) or 1.0
    return "".join(SPARKS[round((value - low) / span * (len(SPARKS) - 1))] for value in chosen)


def _header(view: RunView) -> Table:
    header = Table.grid(expand=True)
    header.add_column(no_wrap=True)
    header.add_column(justify="right", no_wrap=True)
    header.add_row(
        Text.assemble(
            (view.run, "bold"),
            "  ",
            (view.status, STATUS_STYLES.get(view.status, "green")),
            (f"  waiting for {view.waiting_for}" if view.waiting_for else "", "yellow"),
        ),
        Text(show_seconds(view.elapsed_s), style="dim"),
    )
    return header


def _islands(islands: Sequence[IslandView]) -> RenderableType:
    if not islands:
        return Text("no islands yet", style="dim")
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim", pad_edge=False, expand=True)
    regions = any(island.region for island in islands)
    table.add_column("island", no_wrap=True)
    if regions:
        table.add_column("region", no_wrap=True)
    table.add_column("inner step", no_wrap=True)
    for name in ("loss", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    # The only column that may be cut: the others hold what is compared down the rows.
    table.add_column("state", no_wrap=True, overflow="ellipsis", ratio=1)
    for island in islands[:SHOWN_ISLANDS]:
        table.add_row(
            _name(island),
            *([Text(island.region)] if regions else []),
            _steps(island),
            Text(show_number(island.loss)),
            Text(show_count(island.tokens_per_s)),
            _state(island),
        )
    if len(islands) <= SHOWN_ISLANDS:
        return table
    return Group(table, Text(f"… and {len(islands) - SHOWN_ISLANDS} more", style="dim"))


def _name(island: IslandView) -> Text:
    name = Text(island.name, style="bold")
    return name.append(f" ↻{island.restarts}", "not bold dim") if island.restarts else name


def _state(island: IslandView) -> Text:
    words = f"waiting for {island.waiting_for}" if island.waiting_for else island.state
    return Text(words, style=STATE_STYLES.get(island.state, ""))


def _steps(island: IslandView) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    width = len(str(island.steps))
    bar = ProgressBar(
        total=island.steps or 1, completed=island.step, width=12, complete_style="green", finished_style="green"
    )
    grid.add_row(bar, Text(f"{island.step:>{width}}/{island.steps}"))
    return grid


def _progress(view: RunView, progress: float) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    finished = view.round >= view.rounds
    if finished:
        right = ""
    elif view.eta_s is None:
        right = "ETA –"
    else:
        right = f"ETA {show_seconds(view.eta_s)}"
    grid.add_row(
        Text.assemble("round ", (f"{view.round}/{view.rounds}", "bold")),
        ProgressBar(total=1.0, completed=progress, complete_style="cyan", finished_style="green"),
        Text.assemble((f"{progress * 100:3.0f}% ", ""), (right, "dim")),
    )
    return grid


def _figures(view: RunView, losses: Sequence[float]) -> Text:
    line = Text()
    if view.last_commit is not None and view.last_commit.mean_loss is not None:
        line.append("train loss ", "dim").append(show_number(view.last_commit.mean_loss), "bold")
        line.append(f"  {sparkline(losses)}   " if len(losses) > 1 else "   ", "cyan")
    if view.eval_loss is not None:
        line.append("held-out ", "dim").append(show_number(view.eval_loss), "bold")
        line.append(f" (perplexity {show_number(view.eval_ppl)})   ", "dim")
    line.append(show_count(view.tokens), "bold").append(" tokens committed", "dim")
    return line


def _last_round(commit: CommitView) -> RenderableType:
    line = Text()
    line.append(f"round {commit.round}  ", "dim")
    line.append(f"up {show_bytes(commit.bytes_up)}, down {show_bytes(commit.bytes_down)}")
    line.append(f"   moved {show_number(commit.update_norm, 3)}", "dim")
    if not commit.time.total_s:
        return line
    line.append(f"   {show_seconds(commit.time.total_s)}", "dim")
    return Group(_one_line(line), _split(commit.time))


def _split(split: TimeSplit, width: int = 24) -> Text:
    """The four phases as one coloured bar whose parts add up to `width`, and their percentages."""
    seconds = (split.train_s, split.send_s, split.wait_s, split.adopt_s)
    line = Text()
    done = 0.0
    drawn = 0
    for (_, style), part in zip(PHASE_STYLES, seconds, strict=True):
        done += part
        upto = round(done / split.total_s * width)
        line.append("━" * (upto - drawn), style)
        drawn = upto
    for (name, style), part in zip(PHASE_STYLES, seconds, strict=True):
        line.append(f"  {name} ", style).append(show_percent(part / split.total_s))
    return line


def _one_line(text: Text) -> Text:
    """Cut at the edge instead of wrapped, so that the picture keeps its height."""
    text.no_wrap = True
    text.overflow = "ellipsis"
    return text


def _note_line(note: Note) -> Text:
    when = time.strftime("%H:%M:%S", time.localtime(note.t))
    return Text.assemble((f"{when}  ", "dim"), (note.text, NOTE_STYLES[note.level]))
