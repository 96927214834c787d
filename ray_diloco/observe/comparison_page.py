"""A comparison for people: `compare.md`, `compare.html`, two charts, and a part of a page of documentation.

All of it is made from `Results` alone.  The charts are files of their own, which bring their colours along.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from ray_diloco.observe.charts import COLOURS, Series, colour, line_chart
from ray_diloco.observe.comparison import Outcome, Point, Results, Verdict
from ray_diloco.observe.lines import replace_text, to_json
from ray_diloco.observe.report import table
from ray_diloco.observe.report_style import CHARTS, PALETTE, STYLE
from ray_diloco.observe.units import MISSING, show_bytes, show_count, show_number, show_percent, show_seconds

HEAD = ("variant", "held-out loss", "tokens", "up", "down", "exposed", "utilisation", "wall time", "rounds")
# The steep beginning, where all variants are alike, would leave no room for what tells them apart.
CHARTED_FROM = 0.25
EXPLANATION = (
    "Held-out loss at the end in nats per token; payload bytes of all islands together; exposed: seconds in which an "
    "island sent, waited or adopted instead of training, mean over islands. One run of each with the same seed."
)
WIDTH, HEIGHT, LEGEND_ROW, MARGIN = 980, 360, 20, 12


def write_results(folder: Path, results: Results) -> None:
    """Write `compare.json`, `compare.md`, `compare.html` and the charts into the folder of a comparison.

    Raises:
      CheckpointError: RD-582, the disk refuses.
    """
    drawn = charts(results)
    for name, chart in drawn.items():
        replace_text(folder / f"{name}.svg", standalone(chart))
    images = "".join(f"![{name.replace('_', ' ')}]({name}.svg)\n\n" for name in drawn)
    replace_text(folder / "compare.json", to_json(asdict(results), indent=2) + "\n")
    replace_text(folder / "compare.md", f"# {results.comparison}\n\n{markdown(results)}\n{images}".rstrip("\n") + "\n")
    replace_text(folder / "compare.html", html(results, drawn))


def has_marks(text: str, comparison: str) -> bool:
    """Whether a page has a place for this comparison."""
    return _marked(comparison).search(text) is not None


def write_page(page: Path, results: Results) -> None:
    """Write a comparison between its marks in a page, and its charts into `figures/` beside the page.

    Raises:
      CheckpointError: RD-582, the disk refuses.
    """
    parts = [markdown(results)]
    for name, chart in charts(results).items():
        figure = Path("figures", f"{results.comparison}_{name}.svg")
        replace_text(page.parent / figure, standalone(chart))
        parts.append(f"![{name.replace('_', ' ')} of {results.comparison}]({figure.as_posix()})\n")
    text = page.read_text(encoding="utf-8")
    inside = "\n".join(parts)
    written = _marked(results.comparison).sub(lambda mark: f"{mark[1]}\n{inside}\n{mark[2]}", text)
    replace_text(page, written)


def _marked(comparison: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- comparison: {re.escape(comparison)} -->\n).*?(<!-- end of comparison -->)", re.DOTALL)


# Tables.


def rows(results: Results) -> list[list[str]]:
    """The table of variants as text, without its head."""
    return [_row(each) for each in results.variants]


def plain(results: Results) -> str:
    """The results for a console."""
    lines = _aligned([list(HEAD), *rows(results)])
    lines += [f"{each.name} {each.status}: {each.reason or 'no reason given'}" for each in _unfinished(results)]
    lines += [f"{_words(each)}: {each.claim} ({_numbers(each)})" for each in results.orderings]
    return "\n".join(lines)


def markdown(results: Results) -> str:
    """Command, machine and day, the table of variants, and the orderings."""
    parts = [f"{_provenance(results)} by\n\n    {results.command}\n", f"{EXPLANATION}\n"]
    body = [[f"`{row[0]}`", *row[1:], _code(each.settings)] for row, each in _paired(results)]
    parts.append(_markdown_table((*HEAD, "what it sets"), body))
    parts += [
        f"- `{each.name}` {each.status}: {_cell(each.reason or 'no reason given')}\n" for each in _unfinished(results)
    ]
    if results.orderings:
        head = ("claim", "source", "measured", "holds")
        claims = [
            [_cell(each.claim), _cell(each.source), _cell(_numbers(each)), _holds(each)] for each in results.orderings
        ]
        parts.append(_markdown_table(head, claims))
    if results.common:
        parts.append(f"All variants: {_code(results.common)}.\n")
    return "\n".join(parts)


def html(results: Results, drawn: dict[str, str]) -> str:
    """The whole page; `drawn` are the charts."""
    name = escape(results.comparison)
    body = [[*row, " ".join(each.settings)] for row, each in _paired(results)]
    claims = [[each.claim, each.source, _numbers(each), _holds(each)] for each in results.orderings]
    reasons = "".join(
        f'<p class="{escape(each.status)}">{escape(f"{each.name} {each.status}: {each.reason}")}</p>'
        for each in _unfinished(results)
    )
    links = " · ".join(
        f'<a href="{escape(each.name)}/report.html">{escape(each.name)}</a>' for each in results.variants
    )
    sections = [
        f'<header><h1>{name}</h1><p class="lead">{len(results.variants)} variants at equal tokens</p>'
        f'<p class="soft">{escape(_provenance(results))}</p><pre>{escape(results.command)}</pre></header>',
        f'<h2>Variants</h2><div class="card scroll">{table([*HEAD, "what it sets"], body, numbers=range(1, 9))}</div>',
        f'<p class="soft">{escape(EXPLANATION)}</p>{reasons}',
        *(f'<h2>{_title(key)}</h2><div class="card scroll wide">{chart}</div>' for key, chart in drawn.items()),
    ]
    if claims:
        shown = table(["claim", "source", "measured", "holds"], claims)
        sections.append(f'<h2>Orderings</h2><div class="card scroll">{shown}</div>')
    sections.append(
        f"<h2>Reports</h2><p>{links}</p><footer>{escape('All variants: ' + ' '.join(results.common))}</footer>"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name} · ray_diloco</title><style>{STYLE}</style></head><body><main>{''.join(sections)}</main>"
        "</body></html>\n"
    )


def _provenance(results: Results) -> str:
    machine = f" on {results.machine}" if results.machine else ""
    return f"Measured {results.measured or 'not yet'}{machine}"


def _paired(results: Results) -> list[tuple[list[str], Outcome]]:
    return [(_row(each), each) for each in results.variants]


def _row(each: Outcome) -> list[str]:
    loss = show_number(each.loss) if each.status == "finished" else each.status
    return [
        each.name,
        loss,
        show_count(each.tokens),
        show_bytes(each.bytes_up),
        show_bytes(each.bytes_down),
        show_seconds(each.exposed_s),
        show_percent(each.utilisation),
        show_seconds(each.wall_s),
        str(each.rounds),
    ]


def _unfinished(results: Results) -> list[Outcome]:
    return [each for each in results.variants if each.status != "finished"]


def _numbers(each: Verdict) -> str:
    low, high = show_number(each.loss_of_better), show_number(each.loss_of_worse)
    allowed = f", allowed {each.within:g} above" if each.within else ""
    return f"{each.better} {low}, {each.worse} {high}{allowed}"


def _holds(each: Verdict) -> str:
    return MISSING if each.holds is None else "yes" if each.holds else "no"


def _words(each: Verdict) -> str:
    return "not measured" if each.holds is None else "holds" if each.holds else "does not hold"


def _code(settings: Sequence[str]) -> str:
    return " ".join(f"`{_cell(setting)}`" for setting in settings) or MISSING


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def _markdown_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ("---",) * len(head), *body))


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width: names to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if k == 0 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]


# Charts.


def charts(results: Results) -> dict[str, str]:
    """Loss over tokens and over bytes of what has finished, by name of file, as SVG; none where there are no points."""
    finished = [each for each in results.variants if each.status == "finished"]
    whole = max((each.tokens for each in finished), default=0)

    def chart(x_name: str, x: Callable[[Point], float | None], show_x: Callable[[float], str]) -> str:
        series = [
            Series(each.name, _placed(each.points, x, CHARTED_FROM * whole), k % COLOURS, dashed=k // COLOURS % 2 == 1)
            for k, each in enumerate(finished)
        ]
        if not any(each.points for each in series):
            return ""
        drawn = line_chart(series, x_name, "held-out loss, nats per token", show_x=show_x, width=WIDTH, height=HEIGHT)
        return _with_legend(drawn, series)

    found = {
        "loss_over_tokens": chart("tokens", lambda point: point.tokens, show_count),
        # Methods differ by orders of magnitude: the axis has decades.
        "loss_over_bytes": chart(
            "payload bytes, up and down",
            lambda point: math.log10(point.bytes) if point.bytes else None,
            lambda x: show_bytes(10**x),
        ),
    }
    return {name: drawn for name, drawn in found.items() if drawn}


def _placed(
    points: Sequence[Point], x: Callable[[Point], float | None], from_tokens: float
) -> list[tuple[float, float | None]]:
    shown = [(x(point), point.loss) for point in points if point.tokens >= from_tokens]
    return [(at, loss) for at, loss in shown if at is not None]


def standalone(chart: str) -> str:
    """A chart as a file of its own: with a name space, its colours, a ground to stand on and a margin."""
    opening, inside = chart.split(">", 1)
    width, height = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', opening)[0])
    box = f"{-MARGIN} {-MARGIN} {width + 2 * MARGIN} {height + 2 * MARGIN}"
    opening = opening.replace(f'viewBox="0 0 {width} {height}"', f'viewBox="{box}" xmlns="http://www.w3.org/2000/svg"')
    ground = f'<rect x="{-MARGIN}" y="{-MARGIN}" width="100%" height="100%" style="fill:var(--card)"/>'
    return f"{opening}><style>{PALETTE}{CHARTS}</style>{ground}{inside}\n"


def _with_legend(chart: str, series: Sequence[Series]) -> str:
    """A chart of `WIDTH` and `HEIGHT` with the names of its lines below it, inside the same picture."""
    columns = 4
    parts = []
    for k, each in enumerate(series):
        x, y = 80 + (k % columns) * 225, HEIGHT + 16 + k // columns * LEGEND_ROW
        style = f"stroke:{colour(each.colour)}" + (";stroke-dasharray:5 4" if each.dashed else "")
        parts.append(f'<path class="line" style="{style}" d="M{x} {y}L{x + 22} {y}"/>')
        parts.append(f'<text class="lane" x="{x + 30}" y="{y + 4}">{escape(each.name)}</text>')
    height = HEIGHT + 16 + math.ceil(len(series) / columns) * LEGEND_ROW
    taller = chart.replace(f'viewBox="0 0 {WIDTH} {HEIGHT}"', f'viewBox="0 0 {WIDTH} {height}"', 1)
    return taller.removesuffix("</svg>") + "".join(parts) + "</svg>"


def _title(name: str) -> str:
    return escape(name.replace("_", " ").capitalize())
