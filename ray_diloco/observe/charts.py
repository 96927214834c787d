"""Charts as inline SVG, by small functions: lines, stacked bars, lanes over time.

Colours are CSS variables of the page (`--c0` … `--c7`, `--ink`, `--faint`), so a chart follows the light or dark theme.
What has more points than the eye can tell apart is thinned, keeping the lowest and highest of each stretch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from ray_diloco.observe.units import show_number, show_seconds

Show = Callable[[float], str]
COLOURS = 8
# Seconds between two marks of a time axis, up to a day.
CLOCK_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
LEFT, RIGHT, TOP, BOTTOM = 80, 16, 12, 40
NOTHING = '<p class="empty">nothing to draw yet</p>'


@dataclass(frozen=True, slots=True)
class Series:
    """A named line; points whose y is None are left out.

    Args:
      colour: index of the page's colours, or the name of another CSS variable.
      dashed: drawn with gaps.
    """

    name: str
    points: Sequence[tuple[float, float | None]]
    colour: int | str = 0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """One stacked bar: what it is called, and the heights of its parts from the bottom up."""

    name: str
    parts: Sequence[float]


@dataclass(frozen=True, slots=True)
class Lane:
    """A row of a timeline: spans (start, end, CSS class) and marks (at, CSS class, words)."""

    name: str
    spans: Sequence[tuple[float, float, str]]
    marks: Sequence[tuple[float, str, str]]


def colour(index: int | str) -> str:
    """The CSS value of a colour."""
    return f"var(--c{index % COLOURS})" if isinstance(index, int) else f"var(--{index})"


def line_chart(
    series: Sequence[Series],
    x_name: str,
    y_name: str,
    *,
    levels: Sequence[tuple[float, str]] = (),
    show_x: Show = "{:g}".format,
    show_y: Show = show_number,
    show_tick: Show = "{:g}".format,
    from_zero: bool = False,
    width: int = 980,
    height: int = 360,
) -> str:
    """Lines over a common x axis of whole numbers, with horizontal `levels` (y, words).

    Args:
      show_x, show_y: a value in words; `show_tick`: a value of the y axis.
      from_zero: the y axis begins at zero.
      width, height: in CSS pixels before scaling.
    """
    drawn = [(each, thin([(x, y) for x, y in each.points if y is not None])) for each in series]
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for _, points in drawn for _, y in points] + [y for y, _ in levels]
    if not xs:
        return NOTHING
    low, high = _padded(min(ys), max(ys))
    frame = _Frame(width, height, (min(xs), max(xs)), (0.0 if from_zero else low, high))
    parts = [frame.axes(x_name, y_name, show_x, show_tick)]
    for y, words in levels:
        at = frame.y(y)
        parts.append(f'<line class="level" x1="{LEFT}" x2="{width - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(width - RIGHT, at - 5, words, "leveltext", "end"))
    for each, points in drawn:
        style = f"stroke:{colour(each.colour)}" + (";stroke-dasharray:5 4" if each.dashed else "")
        path = " ".join(f"{'M' if k == 0 else 'L'}{frame.x(x):.1f} {frame.y(y):.1f}" for k, (x, y) in enumerate(points))
        parts.append(f'<path class="line" style="{style}" d="{path}"/>')
    # After all lines, so that none of them lies over what can be pointed at.
    for each, points in drawn:
        kind = "dot alone" if len(points) == 1 else "dot"
        for x, y in points:
            words = f"{each.name}, {x_name} {show_x(x)}: {show_y(y)}"
            parts.append(_dot(frame.x(x), frame.y(y), 4, kind, words, f"fill:{colour(each.colour)}"))
    return _svg(width, height, f"{y_name} against {x_name}", parts)


def stacked_bars(
    bars: Sequence[Bar],
    part_names: Sequence[str],
    x_name: str,
    y_name: str,
    *,
    show_y: Show = show_number,
    width: int = 520,
    height: int = 220,
) -> str:
    """Bars in order; the parts of each stand on top of one another in the colours `--p0`, `--p1`, …"""
    if not bars:
        return NOTHING
    frame = _Frame(width, height, (0, len(bars)), (0.0, max(sum(bar.parts) for bar in bars) * 1.05 or 1.0))
    parts = [frame.axes(x_name, y_name, show_number, show_y, x_ticks=False)]
    every = math.ceil(len(bars) * max(len(bar.name) for bar in bars) / 36)
    for index, bar in enumerate(bars):
        left, right = frame.x(index + 0.12), frame.x(index + 0.88)
        words = ", ".join(f"{name} {show_y(part)}" for name, part in zip(part_names, bar.parts, strict=True))
        rows = [f"<title>{escape(f'{x_name} {bar.name}: {words}')}</title>"]
        low = 0.0
        for k, part in enumerate(bar.parts):
            box = _box(left, frame.y(low + part), right, frame.y(low))
            rows.append(f'<rect style="fill:var(--p{k})" {box}/>')
            low += part
        parts.append(f"<g>{''.join(rows)}</g>")
        if index % every == 0:
            parts.append(_text((left + right) / 2, height - BOTTOM + 16, bar.name, "tick"))
    return _svg(width, height, f"{y_name} per {x_name}", parts)


def timeline(lanes: Sequence[Lane], end_s: float, *, width: int = 980) -> str:
    """Lanes over time, from 0 to `end_s` seconds."""
    row, begin = 26, 80
    height = row * len(lanes) + 34
    scale = (width - begin - RIGHT) / (end_s or 1.0)
    parts = []
    for tick in second_ticks(end_s, 8):
        x = begin + tick * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height - 24}"/>')
        parts.append(_text(x, height - 8, show_seconds(tick), "tick"))
    for index, lane in enumerate(lanes):
        middle = 4 + row * (index + 0.5)
        parts.append(_text(0, middle + 4, _short(lane.name, 11), "lane", "start"))
        for start, stop, kind in lane.spans:
            x = begin + start * scale
            box = _box(x, middle - 5, max(x + 1.0, begin + stop * scale), middle + 5)
            parts.append(f'<rect class="span {kind}" {box} rx="2"/>')
        parts += [_dot(begin + at * scale, middle, 5.5, f"mark {kind}", words) for at, kind, words in lane.marks]
    return _svg(width, height, "what happened when", parts)


def thin(points: Sequence[tuple[float, float]], limit: int = 240) -> list[tuple[float, float]]:
    """At most about `limit` points: of each stretch the lowest and the highest, in order, and both ends."""
    if len(points) <= limit:
        return list(points)
    stretch = math.ceil(len(points) / (limit / 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        extremes = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(extremes | ({points[0]} if start == 0 else set()) | ({points[-1]} & set(part)))
    return kept


def ticks(low: float, high: float, count: int, finest: float = 0.0) -> list[float]:
    """About `count` round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten.

    Args:
      finest: smallest distance of two of them.
    """
    if not high > low:
        return [low]
    rough = max((high - low) / count, finest)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def second_ticks(end_s: float, count: int) -> list[float]:
    """About `count` times from 0 to `end_s` seconds, on steps that clocks have."""
    step = next((step for step in CLOCK_STEPS if step * count >= end_s), None)
    if step is None:
        return [day * 86_400 for day in ticks(0.0, end_s / 86_400, count)]
    return [float(k * step) for k in range(int(end_s // step) + 1)]


class _Frame:
    """The plot area: data to pixels, and the axes."""

    def __init__(self, width: int, height: int, x: tuple[float, float], y: tuple[float, float]) -> None:
        self._width, self._height = width, height
        self._x0, self._x1 = x if x[1] > x[0] else (x[0] - 0.5, x[0] + 0.5)
        self._y0, self._y1 = y

    def x(self, value: float) -> float:
        return LEFT + (value - self._x0) / (self._x1 - self._x0) * (self._width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self._height - BOTTOM - (value - self._y0) / (self._y1 - self._y0) * (self._height - TOP - BOTTOM)

    def axes(self, x_name: str, y_name: str, show_x: Show, show_y: Show, x_ticks: bool = True) -> str:
        right, bottom = self._width - RIGHT, self._height - BOTTOM
        parts = []
        for tick in ticks(self._y0, self._y1, 5):
            at = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(_text(LEFT - 8, at + 4, show_y(tick), "tick", "end"))
        for tick in ticks(self._x0, self._x1, 8, finest=1.0) if x_ticks else []:
            parts.append(_text(self.x(tick), bottom + 16, show_x(tick), "tick"))
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        middle = (TOP + bottom) / 2
        title = _text(0, 0, y_name, "name")
        parts.append(f'<g transform="translate(12 {middle:.0f}) rotate(-90)">{title}</g>')
        parts.append(_text((LEFT + right) / 2, self._height - 6, x_name, "name"))
        return "".join(parts)


def _padded(low: float, high: float) -> tuple[float, float]:
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    bottom = low - pad
    return (0.0 if bottom < 0 <= low else bottom), high + pad


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _text(x: float, y: float, words: str, kind: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _dot(x: float, y: float, radius: float, kind: str, words: str, style: str = "") -> str:
    """A circle that says `words` when pointed at."""
    title = f"<title>{escape(words)}</title>"
    return f'<circle class="{kind}" style="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{title}</circle>'


def _box(left: float, top: float, right: float, bottom: float) -> str:
    return f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}"'


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    opening = f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
    return f"{opening}{''.join(parts)}</svg>"
