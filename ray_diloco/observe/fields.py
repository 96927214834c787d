"""Charts of many trials as inline SVG: a heat map over two settings, and parallel coordinates over all of them.

A shade says how good a loss is among those shown: `--heat` of the page's colours over its ground, strongest for the
lowest.  Colours are CSS variables, as in `charts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ray_diloco.observe.charts import NOTHING, ticks
from ray_diloco.observe.units import show_number

WIDTH = 980


@dataclass(frozen=True, slots=True)
class Cell:
    """What is known at one place of a heat map.

    Attributes:
      value: the best; None if there is none, and then `words` say why in a word.
      title: what is said when it is pointed at.
    """

    value: float | None
    words: str
    title: str


def heat_map(cells: Mapping[tuple[Any, Any], Cell], x_name: str, y_name: str, show: Callable[[Any], str] = str) -> str:
    """A cell for every pair (x, y); lower is better, and the best has a frame."""
    if not cells:
        return NOTHING
    xs, ys = sorted({x for x, _ in cells}, key=_order), sorted({y for _, y in cells}, key=_order, reverse=True)
    left, top, bottom = 90, 6, 46
    wide = min(220.0, (WIDTH - left - 10) / len(xs))
    tall = min(56.0, max(22.0, wide * 0.45))
    height = round(top + tall * len(ys) + bottom)
    known = [cell.value for cell in cells.values() if cell.value is not None]
    parts = []
    for row, y in enumerate(ys):
        middle = top + (row + 0.5) * tall
        parts.append(_text(left - 10, middle + 4, show(y), "tick", "end"))
        for column, x in enumerate(xs):
            cell = cells.get((x, y))
            at = f'x="{left + column * wide + 1.5:.1f}" y="{top + row * tall + 1.5:.1f}"'
            box = f'{at} width="{wide - 3:.1f}" height="{tall - 3:.1f}" rx="4"'
            center = left + (column + 0.5) * wide
            if cell is None:
                parts.append(f'<rect class="hollow" {box}/>')
                continue
            good = 0.0 if cell.value is None else goodness(cell.value, known)
            best = cell.value is not None and cell.value == min(known)
            style = "" if cell.value is None else f' style="fill:var(--heat);fill-opacity:{0.06 + 0.84 * good:.2f}"'
            kind = "hollow" if cell.value is None else "best" if best else "heat"
            parts.append(f'<g><title>{escape(cell.title)}</title><rect class="{kind}" {box}{style}/>')
            ink = "strong" if good > 0.62 else "lane" if cell.value is not None else "tick"
            shown = show_number(cell.value) if cell.value is not None else cell.words
            parts.append(_text(center, middle + 4, shown, ink) + "</g>")
    for column, x in enumerate(xs):
        parts.append(_text(left + (column + 0.5) * wide, height - bottom + 18, show(x), "tick"))
    parts.append(_text(left + wide * len(xs) / 2, height - 8, x_name, "name"))
    middle = top + tall * len(ys) / 2
    parts.append(f'<g transform="translate(14 {middle:.0f}) rotate(-90)">{_text(0, 0, y_name, "name")}</g>')
    return _svg(height, f"{y_name} against {x_name}", parts)


@dataclass(frozen=True, slots=True)
class Strand:
    """One trial in parallel coordinates: its values by axis; `loss` is None where it has none that counts."""

    name: str
    values: Mapping[str, Any]
    loss: float | None
    good: bool = True


def parallel(
    strands: Sequence[Strand], keys: Sequence[str], show: Callable[[Any], str] = str, loss_name: str = "loss"
) -> str:
    """A line per trial over an axis for each key and one for the loss; better ones are darker and lie on top."""
    drawn = [strand for strand in strands if strand.loss is not None]
    if not drawn:
        return NOTHING
    left, right, top, bottom, height = 70, 90, 34, 24, 360
    names = [*keys, loss_name]
    step = (WIDTH - left - right) / max(1, len(names) - 1)
    losses = [strand.loss for strand in drawn if strand.loss is not None]
    counted = [strand.loss for strand in drawn if strand.loss is not None and strand.good] or losses
    axes = [_axis([strand.values[key] for strand in drawn], top, height - bottom) for key in keys]
    axes.append(_axis(losses, top, height - bottom, plain=True))
    parts, texts = [], []
    for index, (name, axis) in enumerate(zip(names, axes, strict=True)):
        x = left + index * step
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - bottom}"/>')
        texts.append(_text(x, top - 16, name, "lane"))
        last = index == len(names) - 1
        for value in axis.marks:
            words = show_number(value) if last else show(value)
            at, anchor = (x + 9, "start") if last else (x - 9, "end")
            texts.append(_text(at, axis.y(value) + 4, words, "tick halo", anchor))
    for strand in sorted(drawn, key=lambda each: (each.good, -(each.loss or 0.0))):
        assert strand.loss is not None
        good = goodness(strand.loss, counted) if strand.good else 0.0
        ys = [axis.y(strand.values[key]) for key, axis in zip(keys, axes, strict=False)] + [axes[-1].y(strand.loss)]
        path = "".join(f"{'M' if k == 0 else 'L'}{left + k * step:.1f} {y:.1f}" for k, y in enumerate(ys))
        best = strand.good and strand.loss == min(counted)
        colour = "var(--good)" if best else "var(--heat)" if strand.good else "var(--c7)"
        dashes = "" if strand.good else ";stroke-dasharray:4 4"
        style = f"stroke:{colour};stroke-opacity:{1.0 if best else 0.18 + 0.6 * good:.2f}{dashes}"
        width = 3.5 if best else 2
        title = f"<title>{escape(f'{strand.name}: {show_number(strand.loss)}')}</title>"
        parts.append(f'<path class="line" style="{style};stroke-width:{width}" d="{path}">{title}</path>')
    # After all lines, so that none of them crosses a number out.
    return _svg(height, "all trials over all settings", [*parts, *texts])


def goodness(value: float, among: Sequence[float]) -> float:
    """1 for the lowest, 0 for the highest; by rank and by distance in equal parts: no outlier hides the others."""
    low, high = min(among), max(among)
    if not high > low:
        return 1.0
    distinct = sorted(set(among))
    rank = sum(each < value for each in distinct) / (len(distinct) - 1)
    distance = min(1.0, max(0.0, (value - low) / (high - low)))
    return 1.0 - (min(1.0, rank) + distance) / 2


@dataclass(frozen=True, slots=True)
class _Axis:
    """Values to pixels, and the values that are marked."""

    y: Callable[[Any], float]
    marks: Sequence[Any]


def _axis(values: Sequence[Any], top: float, bottom: float, plain: bool = False) -> _Axis:
    """An axis for numbers (few of them stand at equal distances, as words do) or words."""
    distinct = sorted(set(map(_hashable, values)), key=_order)
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in distinct)
    if numbers and (plain or len(distinct) > 8):
        low, high = float(distinct[0]), float(distinct[-1])
        log = not plain and low > 0 and high / low >= 20
        a, b = (math.log(low), math.log(high)) if log else (low, high)
        span = (b - a) or 1.0
        inner = [math.sqrt(low * high)] if log else ticks(low, high, 6)
        # Both ends, and what is far enough from them to be read.
        marks = [low, *(m for m in inner if low + 0.06 * span < m < high - 0.06 * span or log), high]
        return _Axis(lambda v: bottom - ((math.log(v) if log else v) - a) / span * (bottom - top), marks)
    place = {value: k for k, value in enumerate(distinct)}
    gap = (bottom - top) / max(1, len(distinct) - 1)
    middle = (bottom + top) / 2
    return _Axis(lambda v: middle if len(distinct) == 1 else bottom - place[_hashable(v)] * gap, distinct)


def _hashable(value: Any) -> Any:
    return value if isinstance(value, int | float | str) or value is None else str(value)


def _order(value: Any) -> tuple[int, float, str]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, float(value), "") if number else (1, 0.0, str(value))


def _text(x: float, y: float, words: str, kind: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(height: int, label: str, parts: Sequence[str]) -> str:
    opening = f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">'
    return f"{opening}{''.join(parts)}</svg>"
