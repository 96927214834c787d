"""Published tables of bandwidth and utilisation, computed anew from their inputs: what the formulas here are held to.

Streaming DiLoCo (2501.18512, ../shared/algorithms.md §4.1) simulates the bandwidth that a utilisation needs, on a grid
of 50 values from 0.1 to 1000 Gbit/s.  All of its methods reduce while the backward pass of the same step still runs:
with L layers and a backward pass of two thirds of a step, `h = ⅔ c (1 − 1/L)` of each reduction is hidden, and with
overlap τ steps more:

    CU = H c / (H c + P · max(0, S / (P B) − h − τ c)),    S = bits of all fragments

It meets the paper's cell or the next one of the grid, but for data parallel of 1B and 10B at 99 %, where it says too
little.  The layers are not in our notes of the paper: 24, 48 and 108 are assumed, in fragments of three.
INTELLECT-1 (2412.01152, §3.3): `CU = 2280 / (2280 + t)`, its 100 steps and the measured time of a synchronisation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

UTILISATIONS = (0.5, 0.8, 0.9, 0.95, 0.99)
_GRID_STEPS = 49
_LAYERS_PER_FRAGMENT = 3
_H = 100
_BACKWARD = 2 / 3


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of the paper: parameters, seconds of a step, and layers."""

    name: str
    parameters: float
    step_s: float
    layers: int


@dataclass(frozen=True, slots=True)
class Method:
    """A row: bits of an element, whether fragments take turns, and steps of overlap; `H` is 1 for data parallel."""

    name: str
    H: int
    bits: int
    fragmented: bool = False
    overlap: int = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """Gbit/s that a utilisation needs: by the formula, on the paper's grid, and as published."""

    model: str
    method: str
    utilisation: float
    formula: float
    grid: float
    published: float

    @property
    def steps_off(self) -> int:
        """Grid steps between the formula's value and the paper's."""
        return _grid_index(self.grid) - _grid_index(self.published)


MODELS = {
    "1B": Shape("1B", 1e9, 0.1, 24),
    "10B": Shape("10B", 10e9, 0.8, 48),
    "100B": Shape("100B", 100e9, 4.9, 108),
}
METHODS = {
    "data parallel": Method("data parallel", 1, 16),
    "DiLoCo": Method("DiLoCo", _H, 16),
    "Streaming": Method("Streaming", _H, 16, True),
    "+ overlap": Method("+ overlap", _H, 16, True, 1),
    "+ FP4": Method("+ FP4", _H, 4, True, 1),
}
# Gbit/s by model and method, at the utilisations above.
PUBLISHED: dict[tuple[str, str], tuple[float, ...]] = {
    ("1B", "data parallel"): (87, 153, 184, 222, 569),
    ("1B", "DiLoCo"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", "Streaming"): (1.4, 5.2, 9.1, 16, 28.1),
    ("1B", "+ overlap"): (1.4, 4.3, 6.2, 9.1, 11),
    ("1B", "+ FP4"): (0.4, 0.9, 1.7, 2, 3),
    ("10B", "data parallel"): (105, 222, 222, 268, 471),
    ("10B", "+ FP4"): (0.4, 0.9, 1.4, 1.4, 1.7),
    ("100B", "data parallel"): (184, 324, 391, 391, 472),
    ("100B", "+ FP4"): (0.5, 0.9, 1.1, 1.1, 1.4),
}
# Span, seconds of a synchronisation, published utilisation in percent; 100 steps took 38 minutes.
INTELLECT_1 = (("US", 103.0, 95.7), ("US + EU", 382.0, 85.6), ("global", 469.0, 83.0))
INTELLECT_1_STEPS_S = 2280.0


def needed_gbit(shape: Shape, method: Method, utilisation: float) -> float:
    """The bandwidth that a utilisation needs, by the formula above."""
    fragments = math.ceil(shape.layers / _LAYERS_PER_FRAGMENT) if method.fragmented else 1
    hidden = fragments * (_BACKWARD * shape.step_s * (1 - 1 / shape.layers) + method.overlap * shape.step_s)
    allowed = method.H * shape.step_s * (1 / utilisation - 1) + hidden
    return shape.parameters * method.bits / allowed / 1e9


def on_grid(gbit: float) -> float:
    """The first value of the paper's grid that is not below."""
    return _grid_value(math.ceil(_position(gbit) - 1e-9))


def bandwidth_table() -> list[Cell]:
    """All published cells beside the formula."""
    return [
        Cell(model, method, cu, needed, on_grid(needed), gbit)
        for (model, method), row in PUBLISHED.items()
        for cu, gbit in zip(UTILISATIONS, row, strict=True)
        for needed in [needed_gbit(MODELS[model], METHODS[method], cu)]
    ]


def intellect_1() -> list[tuple[str, float, float]]:
    """Span, utilisation in percent by the formula, and as published."""
    return [
        (span, 100 * INTELLECT_1_STEPS_S / (INTELLECT_1_STEPS_S + sync_s), published)
        for span, sync_s, published in INTELLECT_1
    ]


def _position(gbit: float) -> float:
    return _GRID_STEPS * (math.log10(gbit) + 1) / 4


def _grid_value(index: int) -> float:
    return float(10 ** (-1 + 4 * index / _GRID_STEPS))


def _grid_index(gbit: float) -> int:
    return round(_position(gbit))
