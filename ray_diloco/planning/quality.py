"""What H and a codec cost in loss, as published: the rows, and which of them speak for a model and an H.

Nothing here is measured by this package.  A cost is the loss above that of synchronous training at equal tokens, as a
part of it.  Source of all rows: ../shared/algorithms.md §3.1, §3.5, §4.1, §11.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Published:
    """One published loss.

    Attributes:
      source: where it stands.
      parameters: of the model.
      islands: that trained it.
      H: inner steps of a round.
      cost: loss above that of synchronous training, as a part of it; negative: below.
    """

    source: str
    parameters: float
    islands: int
    H: int
    cost: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What the published rows say of an H.

    Attributes:
      cost: as in `Published`.
      source: of the rows.
      exact: whether a row has this H; else it lies between two, or is that of the nearest.
    """

    cost: float
    source: str
    exact: bool


_STREAMING = "Streaming DiLoCo (2501.18512), 2 islands, C4"
# Size: data parallel, DiLoCo at H = 30, Streaming in FP4 at H = 100.
_STREAMING_LOSS = {
    35e6: (3.51, 3.54, 3.56),
    100e6: (3.19, 3.21, 3.22),
    200e6: (2.97, 2.98, 3.00),
    300e6: (2.80, 2.81, 2.83),
    500e6: (2.67, 2.68, 2.69),
    1e9: (2.49, 2.49, 2.50),
    4e9: (2.25, None, 2.26),
}
_SCALING = "Scaling laws for DiLoCo (2503.09799), H 30"
# Size: data parallel, then 1, 2, 4 and 8 islands at H = 30.
_SCALING_LOSS = {
    35e6: (3.485, 3.482, 3.508, 3.554, 3.621),
    90e6: (3.167, 3.162, 3.182, 3.213, 3.265),
    180e6: (2.950, 2.943, 2.957, 2.981, 3.019),
    335e6: (2.784, 2.777, 2.788, 2.808, 2.841),
    550e6: (2.653, 2.645, 2.657, 2.673, 2.698),
    1.3e9: (2.460, 2.451, 2.464, 2.472, 2.493),
    2.4e9: (2.326, 2.317, 2.323, 2.332, 2.351),
    4e9: (2.224, 2.219, 2.220, 2.230, None),
    10e9: (2.090, 2.086, 2.086, 2.096, None),
}
_DILOCO = "DiLoCo (2311.08105), after 24k steps of one worker, C4"
# Perplexities of data parallel with as large a batch, and of DiLoCo with 8 islands at H = 500.
_DILOCO_PERPLEXITY = (15.30, 15.02)
_SMALL = "ft-diloco, third party, 51M, 2 islands, TinyStories, outer rate not tuned"
_SMALL_COST = {25: 0.028, 50: 0.047, 100: 0.063, 200: 0.074, 500: 0.094}


def _rows() -> Iterable[Published]:
    for size, (synchronous, at_30, at_100) in _STREAMING_LOSS.items():
        for H, loss in ((30, at_30), (100, at_100)):
            if loss is not None:
                yield Published(_STREAMING, size, 2, H, loss / synchronous - 1)
    for size, (synchronous, *others) in _SCALING_LOSS.items():
        for islands, loss in zip((1, 2, 4, 8), others, strict=True):
            if loss is not None:
                yield Published(_SCALING, size, islands, 30, loss / synchronous - 1)
    synchronous, diloco = map(math.log, _DILOCO_PERPLEXITY)
    yield Published(_DILOCO, 150e6, 8, 500, diloco / synchronous - 1)
    for H, cost in _SMALL_COST.items():
        yield Published(_SMALL, 51e6, 2, H, cost)


PUBLISHED: tuple[Published, ...] = tuple(_rows())

# What a codec of contributions adds, as a part of the loss, and who says so.
CODEC_COST: dict[str, tuple[float, str]] = {
    "fp32": (0.0, "exact"),
    "bf16": (0.0, "OpenDiLoCo (2407.07852) saw no loss in fp16"),
    "fp16": (0.0, "OpenDiLoCo (2407.07852)"),
    "int8": (0.0, "INTELLECT-1 (2412.01152) trained with 8 bits"),
    "int8_bin_mean": (0.0, "INTELLECT-1 (2412.01152)"),
    "int4": (0.0009, "Decoupled DiLoCo (2604.21428)"),
    "e3m0": (0.004, "Streaming DiLoCo (2501.18512): at most 0.01 nats of 2.5"),
    "1bit": (0.83, "Decoupled DiLoCo (2604.21428)"),
}

# How far in size and in number of islands a row may be to speak for a model, as a factor.
_NEAR_SIZE, _NEAR_ISLANDS = 2.0, 2.0


def near(parameters: int, islands: int) -> list[Published]:
    """The rows that speak for a model: within twice its size and number of islands, else of the nearest size."""
    fit = [row for row in PUBLISHED if _apart(row.islands, islands) <= _NEAR_ISLANDS] or list(PUBLISHED)
    close = [row for row in fit if _apart(row.parameters, parameters) <= _NEAR_SIZE]
    if close:
        return close
    distance = min(_apart(row.parameters, parameters) for row in fit)
    return [row for row in fit if _apart(row.parameters, parameters) <= distance * (1 + 1e-9)]


def cost_of(parameters: int, islands: int, H: int) -> Cost | None:
    """The highest cost that a source says of an H, for the budget; None beyond every published H.

    Below the smallest H of a source its cost is that of the smallest, since no shorter one was published.
    """
    by_source: dict[tuple[str, float, int], list[Published]] = {}
    for row in near(parameters, islands):
        by_source.setdefault((row.source, row.parameters, row.islands), []).append(row)
    found = [cost for rows in by_source.values() if (cost := _between(rows, H)) is not None]
    return max(found, key=lambda cost: cost.cost, default=None)


def _between(rows: Sequence[Published], H: int) -> Cost | None:
    """One source's cost of an H, linear in log H between its rows."""
    rows = sorted(rows, key=lambda row: row.H)
    source = rows[0].source
    if H > rows[-1].H:
        return None
    if H <= rows[0].H:
        return Cost(rows[0].cost, source, rows[0].H == H)
    for low, high in pairwise(rows):
        if low.H <= H <= high.H:
            part = math.log(H / low.H) / math.log(high.H / low.H)
            return Cost(low.cost + part * (high.cost - low.cost), source, H in (low.H, high.H))
    return None


def _apart(a: float, b: float) -> float:
    return max(a / b, b / a)
