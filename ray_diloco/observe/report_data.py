"""What a report is made of: the files of a run directory, and the series, bars and lanes that its charts show.

A run of thousands of rounds or islands gives charts of the same size as a small one: rounds are grouped, and of many
islands the mean and the outermost are shown.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ray_diloco.observe.charts import Bar, Lane, Series
from ray_diloco.observe.events import level_of
from ray_diloco.observe.lines import read_lines
from ray_diloco.observe.narration import narrate
from ray_diloco.observe.summary import read_summary, tally
from ray_diloco.observe.units import show_seconds

PHASES = ("train_s", "send_s", "wait_s", "adopt_s")
# Beyond so many islands their lines give way to the mean and the two outermost.
FEW = 8
MOST_BARS = 60
# Told by charts, or too frequent for a list of what happened.
FREQUENT = frozenset(
    {"island_launching", "round_committed", "evaluation", "checkpoint_written", "inner_state_restored"}
)

Line = dict[str, Any]


@dataclass(frozen=True)
class Records:
    """What a report is made of: lines of metrics by kind, events, figures by name, the configuration as text."""

    islands: dict[str, list[Line]]
    commits: list[Line]
    evaluations: list[Line]
    events: list[Line]
    figures: dict[str, Any]
    config: str

    @cached_property
    def tokens(self) -> dict[int, int]:
        """Tokens committed by the end of each round; none before the first."""
        return {0: 0} | {line["round"]: line["tokens_committed"] for line in self.commits}

    @cached_property
    def by_round(self) -> dict[int, list[Line]]:
        """The islands' lines of each round, rounds in order."""
        rounds: defaultdict[int, list[Line]] = defaultdict(list)
        for lines in self.islands.values():
            for line in lines:
                rounds[line["round"]].append(line)
        return dict(sorted(rounds.items()))


def load_records(directory: Path) -> Records:
    """Read a run directory; a file that is not there yet counts as empty.

    Raises:
      CheckpointError: RD-581 or RD-583, a file is broken.
    """
    metrics = list(read_lines(directory / "metrics.jsonl"))
    islands: defaultdict[str, list[Line]] = defaultdict(list)
    for line in metrics:
        if line["kind"] == "island":
            islands[line["island"]].append(line)
    counted = asdict(tally(directory))
    figures: dict[str, Any] = {"run": directory.name, "status": "running", **counted}
    if (directory / "summary.json").exists():
        figures |= asdict(read_summary(directory / "summary.json"))
    if figures["rounds"] < counted["rounds"]:
        # A run that went on has left its earlier summary behind.
        figures |= {**counted, "status": "running", "reason": None}
    config = directory / "config.yaml"
    return Records(
        islands=dict(sorted(islands.items())),
        commits=[line for line in metrics if line["kind"] == "commit"],
        evaluations=[line for line in metrics if line["kind"] == "eval"],
        events=list(read_lines(directory / "events.jsonl")),
        figures=figures,
        config=config.read_text(encoding="utf-8", errors="replace") if config.exists() else "",
    )


def per_island(records: Records, key: str, mean: Callable[[Iterable[Line]], float | None]) -> list[Series]:
    """A line per island against the round; of many islands the mean and the two outermost values."""
    if len(records.islands) <= FEW:
        return [
            Series(name, [(line["round"], line[key]) for line in lines], index)
            for index, (name, lines) in enumerate(records.islands.items())
        ]
    known = {r: [line for line in lines if line[key] is not None] for r, lines in records.by_round.items()}
    known = {round: lines for round, lines in known.items() if lines}
    return [
        Series("mean of all islands", [(round, mean(lines)) for round, lines in known.items()], 0),
        Series("highest", [(r, max(line[key] for line in lines)) for r, lines in known.items()], 7, dashed=True),
        Series("lowest", [(r, min(line[key] for line in lines)) for r, lines in known.items()], 7, dashed=True),
    ]


def mean_norm(lines: Iterable[Line]) -> float | None:
    """Mean of the pseudo-gradients' norms."""
    values = [line["pseudo_gradient_norm"] for line in lines]
    return sum(values) / len(values) if values else None


def move_x(series: Series, x: Callable[[int], float | None]) -> Series:
    """A series against the round, drawn against `x(round)` instead; rounds without one are left out."""
    placed = [(at, y) for round, y in series.points if (at := x(int(round))) is not None]
    return Series(series.name, placed, series.colour, series.dashed)


def time_bars(lines: Sequence[Line]) -> list[Bar]:
    """Mean seconds per phase of each round, or of each run of rounds if there are many."""
    rounds: defaultdict[int, list[Line]] = defaultdict(list)
    for line in lines:
        rounds[line["round"]].append(line)
    numbers = sorted(rounds)
    size = math.ceil(len(numbers) / MOST_BARS)
    bars = []
    for start in range(0, len(numbers), size or 1):
        group = numbers[start : start + size]
        members = [line for number in group for line in rounds[number]]
        name = str(group[0]) if len(group) == 1 else f"{group[0]}–{group[-1]}"
        bars.append(Bar(name, [sum(line[phase] for line in members) / len(members) for phase in PHASES]))
    return bars


def phase_shares(lines: Sequence[Line]) -> list[float]:
    """Each phase's part of the whole time of these lines."""
    seconds = [sum(line[phase] for line in lines) for phase in PHASES]
    return [value / (sum(seconds) or 1.0) for value in seconds]


def is_notable(kind: str) -> bool:
    """Whether an event of this kind belongs into a list of what happened."""
    return kind not in FREQUENT


def lanes_of(events: Sequence[Line], seconds: Sequence[float]) -> list[Lane]:
    """A lane for the run and one per island: when it launched, when it was up, what befell it."""
    spans: defaultdict[str, list[tuple[float, float, str]]] = defaultdict(list)
    marks: defaultdict[str, list[tuple[float, str, str]]] = defaultdict(list)
    since: dict[str, tuple[float, str]] = {"run": (0.0, "run")}

    def end(name: str, at: float) -> None:
        start, state = since.pop(name, (at, ""))
        if state and at > start:
            spans[name].append((start, at, state))

    for at, event in zip(seconds, events, strict=True):
        kind, name = event["event"], event.get("island") or "run"
        if kind in ("run_resumed", "run_started"):
            for each in [each for each in since if each != "run"]:
                end(each, at)
        if kind in ("island_launching", "island_joined", "island_lost"):
            end(name, at)
        if kind in ("island_launching", "island_joined"):
            since[name] = (at, "launch" if kind == "island_launching" else "up")
        text = narrate(event)
        if text and is_notable(kind) and kind not in ("run_started", "island_joined"):
            marks[name].append((at, level_of(kind), f"{show_seconds(at)}: {text}"))
    for name in list(since):
        end(name, seconds[-1])
    names = ["run", *sorted({*spans, *marks} - {"run"})]
    return [Lane(name, spans[name], marks[name]) for name in names]
