"""Progress points of simulated islands: where a segment began, and how many of its steps are done.

What a segment comes to follows in closed form from where it began, so the rest of it needs nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ray_diloco.outer.layout import Ranges
from ray_diloco.rounds.ports import Work


@dataclass(frozen=True, eq=False)
class Point:
    """A progress point.

    Attributes:
      work: what it belongs to; `life`: of the driver that gave it.
      steps: how many of it are done.
      theta, base, emitted: as the segment began.
      blocks, trained_steps, trained_tokens: trained before it and not yet sent.
    """

    work: Work
    life: int
    steps: int
    theta: np.ndarray
    base: np.ndarray
    emitted: np.ndarray
    blocks: tuple[Ranges, ...]
    trained_steps: int
    trained_tokens: int


def reached(work: Work, every: int, seconds: float, pace: float) -> int:
    """The step of a segment, counted with those that had been done, whose point is whole after some seconds."""
    done = min(work.steps - 1, work.done + int(max(0.0, seconds) / pace))
    return done // every * every if every else 0


def fits(point: Point, work: Work, base: np.ndarray | None, life: int) -> str:
    """Why a point is not one of a piece of work; empty: it is.  `base`: what it must have begun from, if not the same
    driver says so."""
    mine, its = work, point.work
    if (mine.start_step, mine.steps, mine.lease.blocks, mine.bases, mine.before) != (
        its.start_step, its.steps, its.lease.blocks, its.bases, its.before
    ):  # fmt: skip
        return "its point is of other work"
    if (point.life != life) if base is None else not np.array_equal(base, point.base):
        return "its point began from another anchor"
    return "" if point.steps > work.done else "it had got no further than the one before it"
