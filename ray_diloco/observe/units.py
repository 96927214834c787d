"""Quantities as people read them: decimal bytes, short seconds, short counts.

One place, so that the live display, plain lines and the report say the same thing the same way.  A missing or
non-finite value is a dash, never "nan".
"""

from __future__ import annotations

import math

MISSING = "–"


def show_bytes(value: float | None) -> str:
    """`value` bytes in decimal units: 512 B, 3.2 MB."""
    return _scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"), separator=" ")


def show_count(value: float | None) -> str:
    """A count (tokens, parameters, tokens per second) in short form: 950, 2.1k, 819k, 1.3M."""
    return _scaled(value, ("", "k", "M", "G", "T", "P"), separator="")


def show_seconds(value: float | None) -> str:
    """`value` seconds: 4 ms, 0.42 s, 12.3 s, 2m 05s, 1h 02m, 3d 04h; a time that is over is 0 s."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value < 0.0995:
        return f"{value * 1000:.0f} ms" if value > 0 else "0 s"
    if value < 9.95:
        return f"{value:.2g} s"
    if value < 59.95:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes}m {seconds:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h {minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02d}h"


def show_number(value: float | None, digits: int = 4) -> str:
    """A plain number with so many significant digits, without an exponent where that stays short."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 10**digits:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        return f"{value:.{decimals}f}"
    return f"{value:.{digits - 1}g}"


def show_percent(part: float | None) -> str:
    """A part of one as a percentage: 0.953 → 95%, 0.004 → 0.4%."""
    if part is None or not math.isfinite(part):
        return MISSING
    percent = part * 100
    return f"{percent:.1f}%" if 0 < percent < 9.95 else f"{percent:.0f}%"


def _scaled(value: float | None, units: tuple[str, ...], separator: str) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    for unit in units:
        # 999.5 would round to 1000 of this unit, so it is the next one's.
        if abs(value) < 999.5 or unit == units[-1]:
            break
        value /= 1000
    whole = unit == units[0] or abs(value) >= 99.95
    return f"{value:.0f}{separator}{unit}" if whole else f"{value:.1f}{separator}{unit}"
