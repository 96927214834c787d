"""What a person sees while a run goes on: a live picture in a terminal, plain lines elsewhere, or nothing.

A display is fed with views (`update`), may be told something in words (`note`), and ends with the summary (`close`).
Plain lines are the narrated events; when nothing has happened for ten seconds, one line says what is going on and who
waits for whom.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TextIO

from ray_diloco.observe.summary import Summary
from ray_diloco.observe.units import show_bytes, show_count, show_number, show_percent, show_seconds
from ray_diloco.observe.view import IslandView, Note, RunView

HEARTBEAT_S = 10.0


class Display(Protocol):
    """Whoever shows a run.

    Attributes:
      period_s: seconds between two updates.
    """

    period_s: float

    def update(self, view: RunView) -> None:
        """Show this state; called every `period_s`."""

    def note(self, text: str) -> None:
        """Say one line, now."""

    def close(self, summary: Summary | None = None, folder: str = "") -> None:
        """Show how it ended and give the terminal back; safe to call twice."""


def open_display(quiet: bool = False, stream: TextIO | None = None) -> Display:
    """The display that suits `stream` (default: standard output): live on a terminal, else plain; or a quiet one."""
    stream = stream or sys.stdout
    if quiet:
        return QuietDisplay()
    if not stream.isatty():
        return PlainDisplay(stream)
    from ray_diloco.observe.live import LiveDisplay

    return LiveDisplay.on(stream)


class PlainDisplay:
    """One line per event, and a heartbeat.

    Args:
      stream: where lines go; each is flushed.
      clock: seconds that never go back, for the heartbeat.
      wall_clock: unix seconds, for the time in front of lines that carry none.
      heartbeat_s: seconds of silence after which a line says what is going on.
    """

    period_s = 0.5

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._wall_clock = wall_clock
        self._heartbeat_s = heartbeat_s
        self._seen = -1
        self._spoke = clock()
        self._closed = False

    def update(self, view: RunView) -> None:
        """Print the events that are new, or a heartbeat."""
        for note in unseen(view.notes, self._seen):
            self._say(note.text, note.t)
            self._seen = note.seq
        if self._clock() - self._spoke >= self._heartbeat_s:
            self._say(heartbeat(view), self._wall_clock())

    def note(self, text: str) -> None:
        """Print one line."""
        self._say(text, self._wall_clock())

    def close(self, summary: Summary | None = None, folder: str = "") -> None:
        """Print the outcome."""
        if summary is not None and not self._closed:
            self._stream.write("".join(f"{line}\n" for line in outcome(summary, folder)))
            self._stream.flush()
        self._closed = True

    def _say(self, text: str, t: float) -> None:
        self._stream.write(f"{time.strftime('%H:%M:%S', time.localtime(t))}  {text}\n")
        self._stream.flush()
        self._spoke = self._clock()


class QuietDisplay:
    """Nothing but errors."""

    period_s = 1.0

    def __init__(self, errors: TextIO | None = None) -> None:
        self._errors = errors or sys.stderr
        self._seen = -1

    def update(self, view: RunView) -> None:
        """Print new events that are errors to standard error."""
        for note in unseen(view.notes, self._seen):
            if note.level == "error":
                print(note.text, file=self._errors, flush=True)
            self._seen = note.seq

    def note(self, text: str) -> None:
        """Say nothing."""

    def close(self, summary: Summary | None = None, folder: str = "") -> None:
        """Say nothing."""


def unseen(notes: Iterable[Note], seen: int) -> list[Note]:
    """The notes that came after the one with number `seen`."""
    return [note for note in notes if note.seq > seen]


def heartbeat(view: RunView) -> str:
    """What goes on, in one line: where each of the first islands is, and for whom it waits."""
    shown = view.islands[:6]
    doing = [describe_island(island) for island in shown]
    if len(view.islands) > len(shown):
        doing.append(f"… {len(view.islands) - len(shown)} more islands")
    where = f"{view.status}, {view.round}/{view.rounds} rounds"
    where += f", waiting for {view.waiting_for}" if view.waiting_for else ""
    eta = f" · {show_seconds(view.eta_s)} to go" if view.eta_s is not None else ""
    return f"… {where}{eta} · " + " · ".join(doing or ["no islands yet"])


def describe_island(island: IslandView) -> str:
    """An island in a few words: `i0 training 31/50`, `i1 waiting for i0`."""
    if island.waiting_for:
        return f"{island.name} waiting for {island.waiting_for}"
    steps = f" {island.step}/{island.steps}" if island.steps and island.state == "training" else ""
    return f"{island.name} {island.state}{steps}"


def outcome(summary: Summary, folder: str = "") -> list[str]:
    """How a run ended: first a line that is enough alone, then what else a person wants to know.

    Args:
      folder: the run directory, as a person would type it.
    """
    words = [f"{summary.rounds} rounds", f"{show_count(summary.tokens_committed)} tokens"]
    if summary.final_eval_loss is not None:
        words.append(f"held-out loss {show_number(summary.final_eval_loss)}")
    reason = f" ({summary.reason})" if summary.reason else ""
    rows = [f"  {name:<11} {value}" for name, value in _details(summary, folder)]
    return [f"{summary.run} {summary.status}: {', '.join(words)}{reason}", *rows]


def _details(summary: Summary, folder: str) -> Iterator[tuple[str, str]]:
    if summary.final_train_loss is not None:
        yield "train loss", show_number(summary.final_train_loss)
    if summary.final_eval_loss is not None:
        loss, ppl = show_number(summary.final_eval_loss), show_number(summary.final_eval_ppl)
        yield "held-out", f"loss {loss} nats per token, perplexity {ppl}"
    if summary.unigram_entropy is not None:
        entropy = show_number(summary.unigram_entropy)
        yield "unigram", f"entropy {entropy} nats: the loss of knowing only token frequencies"
    network = "" if summary.bytes_network is None else f"; {show_bytes(summary.bytes_network)} on the network in all"
    yield "traffic", f"{show_bytes(summary.bytes_up)} up, {show_bytes(summary.bytes_down)} down{network}"
    time_line = show_seconds(summary.wall_s)
    if summary.utilisation is not None:
        time_line += f", islands trained {show_percent(summary.utilisation)} of their rounds"
    yield "time", time_line
    if summary.expected is not None and summary.rounds:
        yield "a round", _beside_the_plan(summary)
    if summary.export:
        yield "export", str(Path(folder, summary.export))
    if summary.report:
        yield "report", str(Path(folder, summary.report))


def _beside_the_plan(summary: Summary) -> str:
    """What a round was, and what it was expected to be."""
    plan, n = summary.expected or {}, summary.rounds
    words = [
        f"{show_bytes(summary.bytes_up / n)} up (expected {show_bytes(plan['bytes_up'])})",
        f"{show_bytes(summary.bytes_down / n)} down (expected {show_bytes(plan['bytes_down'])})",
    ]
    if plan["round_s"] and plan["train_s"] and summary.utilisation:
        round_s = summary.train_s / summary.utilisation / n
        words.append(f"{show_seconds(round_s)} (expected {show_seconds(plan['round_s'])})")
    return ", ".join(words)
