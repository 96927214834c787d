"""A sweep for people: `sweep.html` and `sweep.md`, and its table for a console.

All of it is made from `SweepResults` alone.  The page needs nothing from outside.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from ray_diloco.config.space import short_names, shown
from ray_diloco.observe.charts import COLOURS, Series, line_chart
from ray_diloco.observe.fields import Cell, Strand, heat_map, parallel
from ray_diloco.observe.lines import replace_text, to_json
from ray_diloco.observe.report_style import STYLE
from ray_diloco.observe.sweep import SweepResults, TrialOutcome, counts
from ray_diloco.observe.units import MISSING, show_bytes, show_count, show_number, show_percent, show_seconds

# Beyond so many the lines of loss over tokens could not be told apart; these are the best.
FEW = 8
# Which pair of keys a heat map is drawn of, if both are tried; else of the first two.
_PAIR = ("inner.H", "outer.lr")
EXPLANATION = (
    "Held-out loss in nats per token. Only trials that finished are compared: at fewer tokens a loss says less. A "
    "halted trial was behind others at equal tokens; a diverged one lost its way; a refused one was never begun."
)


def write_sweep(folder: Path, results: SweepResults) -> None:
    """Write `sweep.json`, `sweep.md` and `sweep.html` into the folder of a sweep.

    Raises:
      CheckpointError: RD-582, the disk refuses.
    """
    replace_text(folder / "sweep.json", to_json(asdict(results), indent=2) + "\n")
    replace_text(folder / "sweep.md", markdown(results))
    replace_text(folder / "sweep.html", html(results))


def head(results: SweepResults) -> list[str]:
    """Names of the columns."""
    short = short_names(results.keys)
    return ["trial", *(short[key] for key in results.keys), "held-out loss", "tokens", "rounds", "up", "busy", "time"]


def row(results: SweepResults, number: int, trial: TrialOutcome) -> list[str]:
    """The cells of a trial."""
    loss = show_number(trial.loss)
    run = trial.run
    return [
        str(number),
        *(shown(trial.parameters[key]) if key in trial.parameters else MISSING for key in results.keys),
        loss if trial.status == "finished" else f"{trial.status}{'' if trial.loss is None else f' ({loss})'}",
        show_count(run.tokens),
        str(run.rounds),
        show_bytes(run.bytes_up),
        show_percent(run.utilisation),
        show_seconds(run.wall_s),
    ]


def plain(results: SweepResults) -> str:
    """The table for a console, and why trials did not finish."""
    lines = [head(results), *(row(results, k, trial) for k, trial in enumerate(results.trials, start=1))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([*text, *(f"{k} {reason}" for k, reason in _reasons(results))])


def markdown(results: SweepResults) -> str:
    """Command, machine and day, and the table of trials."""
    names = head(results)
    cells = [row(results, k, trial) for k, trial in enumerate(results.trials, start=1)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in (names, ["---"] * len(names), *cells))
    parts = [
        f"# {results.sweep}\n",
        f"{_provenance(results)} by\n\n    {results.command}\n",
        f"{results.chosen}: {counts(results)}. {EXPLANATION}\n",
        table,
    ]
    reasons = "".join(f"- {k} {_one_line(reason)}\n" for k, reason in _reasons(results))
    return "\n".join([*parts, *([reasons] if reasons else []), f"All trials: `{' '.join(results.common)}`.\n"])


def html(results: SweepResults) -> str:
    """The whole page."""
    name = escape(results.sweep)
    sections = [
        f'<header><h1>{name}</h1><p class="lead">{_lead(results)}</p>'
        f'<p class="soft">{escape(_provenance(results))}. {escape(results.chosen)}: {escape(counts(results))}.</p>'
        f"<pre>{escape(results.command)}</pre></header>",
        _heat(results),
        _card("All settings", parallel(strands(results), results.keys, shown, "held-out loss")),
        _curves(results),
        f'<h2>Trials</h2><div class="card scroll">{_table(results)}</div><p class="soft">{escape(EXPLANATION)}</p>',
        f"<footer>{escape('All trials: ' + ' '.join(results.common))}</footer>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name} · ray_diloco</title><style>{STYLE}</style></head><body><main>{''.join(sections)}</main>"
        "</body></html>\n"
    )


def strands(results: SweepResults) -> list[Strand]:
    """Trials that have a loss, those that did not finish as such."""
    return [
        Strand(_words(results, trial), trial.parameters, trial.loss, trial.status == "finished")
        for trial in results.trials
        if trial.loss is not None and trial.status != "diverged" and trial.parameters.keys() >= set(results.keys)
    ]


def pair_of(keys: Sequence[str]) -> tuple[str, str] | None:
    """The two keys that a heat map is drawn of."""
    if set(_PAIR) <= set(keys):
        return _PAIR
    return (keys[0], keys[1]) if len(keys) > 1 else None


def cells(results: SweepResults, x: str, y: str) -> dict[tuple[Any, Any], Cell]:
    """For every pair of values the best of the trials that have them, and how many more there are."""
    groups: dict[tuple[Any, Any], list[TrialOutcome]] = {}
    for trial in results.trials:
        if x in trial.parameters and y in trial.parameters:
            groups.setdefault((_plain(trial.parameters[x]), _plain(trial.parameters[y])), []).append(trial)
    found = {}
    for place, trials in groups.items():
        losses = [trial.loss for trial in trials if trial.status == "finished" and trial.loss is not None]
        title = "; ".join(f"{_words(results, t)}: {show_number(t.loss)} {t.status}" for t in trials)
        found[place] = Cell(min(losses) if losses else None, trials[0].status, title)
    return found


def _heat(results: SweepResults) -> str:
    pair = pair_of(results.keys)
    if pair is None:
        return ""
    x, y = pair
    # A picture of draws, each at a place of its own, would be a diagonal of cells.
    if any(len({_plain(t.parameters.get(key)) for t in results.trials}) > 12 for key in pair):
        return ""
    others = [key for key in results.keys if key not in pair]
    best = f"; the best over {' and '.join(others)} counts" if others else ""
    chart = heat_map(cells(results, x, y), x, y, shown)
    return _card(f"{x} × {y}", f'<p class="soft">held-out loss at the end{escape(best)}</p>{chart}')


def _curves(results: SweepResults) -> str:
    few = [trial for trial in results.trials if trial.run.points and trial.status != "diverged"][:FEW]
    if not few:
        return ""
    series = [
        Series(_words(results, trial), [(point.tokens, point.loss) for point in trial.run.points], k % COLOURS)
        for k, trial in enumerate(few)
    ]
    legend = "".join(
        f'<span><i style="background:var(--c{k % COLOURS})"></i>{escape(_words(results, trial))}</span>'
        for k, trial in enumerate(few)
    )
    # The steep beginning, where all are alike, would leave no room for what tells them apart.
    ends = [trial.run.points[-1].tokens for trial in few]
    shown_from = 0.2 * statistics.median(ends)
    cut = [
        Series(each.name, [(x, y) for x, y in each.points if x >= shown_from or len(each.points) < 3], each.colour)
        for each in series
    ]
    chart = line_chart(cut, "tokens", "held-out loss", show_x=show_count)
    title = "Loss over tokens" if len(few) == len(results.trials) else f"Loss over tokens, the first {len(few)}"
    return _card(title, f'<div class="legend">{legend}</div>{chart}')


def _table(results: SweepResults) -> str:
    names, short = head(results), len(results.keys)
    titles = "".join(f'<th class="n">{escape(name)}</th>' for name in names[1:])
    lines = []
    for k, trial in enumerate(results.trials, start=1):
        texts = row(results, k, trial)
        first = f'<td><a href="{escape(trial.run.name)}/report.html">{escape(texts[0])}</a></td>'
        if not trial.run.rounds and not trial.run.points:
            first = f"<td>{escape(texts[0])}</td>"
        middle = "".join(
            f'<td class="n{f" {escape(trial.status)}" if j == short + 1 else ""}">{escape(text)}</td>'
            for j, text in enumerate(texts)
            if j
        )
        best = ' class="best"' if trial.label == results.best else ""
        lines.append(f"<tr{best}>{first}{middle}<td>{escape(_one_line(trial.reason or ''))}</td></tr>")
    return f"<table><tr><th>{escape(names[0])}</th>{titles}<th>why</th></tr>{''.join(lines)}</table>"


def _lead(results: SweepResults) -> str:
    best = next((trial for trial in results.trials if trial.label == results.best), None)
    if best is None:
        return "No trial has finished yet"
    words = escape(_words(results, best))
    return f"Best of {len(results.trials)}: <b>{words}</b>, held-out loss <b>{show_number(best.loss)}</b>"


def _words(results: SweepResults, trial: TrialOutcome) -> str:
    short = short_names(results.keys)
    return ", ".join(f"{short[key]} {shown(trial.parameters[key])}" for key in results.keys if key in trial.parameters)


def _reasons(results: SweepResults) -> list[tuple[int, str]]:
    numbered = enumerate(results.trials, start=1)
    return [(k, f"{trial.status}: {trial.reason}") for k, trial in numbered if trial.reason]


def _provenance(results: SweepResults) -> str:
    machine = f" on {results.machine}" if results.machine else ""
    return f"Measured {results.measured or 'not yet'}{machine}"


def _card(title: str, inside: str) -> str:
    return f'<h2>{escape(title)}</h2><div class="card scroll wide">{inside}</div>'


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str) or value is None else str(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())
