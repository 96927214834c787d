"""The inner learning rate as a pure function of the run's global step.

No scheduler object: an island that restarts, or joins late, is at once where the run is.  Warm-up is linear and begins
above zero, since a step at rate 0 would train on blocks and learn nothing from them.  Sources: warm-up, stable,
1 − √ decay (2405.18392 §3); cosine (1608.03983).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ray_diloco.config.schema import InnerScheduleConfig


def learning_rate_factor(schedule: InnerScheduleConfig, step: int, total_steps: int) -> float:
    """What `inner.lr` is multiplied by in global step `step`, counted from 0.

    Args:
      schedule: kind (a key of `SCHEDULES`), length of warm-up and decay in steps, and the factor at the end.
      step: global inner step of the run.
      total_steps: length of the schedule in steps; from there on the factor stays `final_ratio` (wsd with decay,
        cosine) or 1.
    """
    warm_up = min(1.0, (step + 1) / schedule.warmup_steps) if schedule.warmup_steps > 0 else 1.0
    return min(warm_up, SCHEDULES[schedule.kind](schedule, step, total_steps))


def rewarm_factor(schedule: InnerScheduleConfig, left: int) -> float:
    """What the learning rate is multiplied by where `left` steps of a warm-up after a reset are still to come."""
    length = schedule.rewarm_steps
    return (length - left + 1) / length if 0 < left <= length else 1.0


def _constant(_schedule: InnerScheduleConfig, _step: int, _total_steps: int) -> float:
    return 1.0


def _wsd(schedule: InnerScheduleConfig, step: int, total_steps: int) -> float:
    progress = _progress(step, total_steps - schedule.decay_steps, schedule.decay_steps)
    return _down_to(schedule.final_ratio, 1.0 - math.sqrt(progress))


def _cosine(schedule: InnerScheduleConfig, step: int, total_steps: int) -> float:
    progress = _progress(step, schedule.warmup_steps, total_steps - schedule.warmup_steps)
    return _down_to(schedule.final_ratio, 0.5 * (1.0 + math.cos(math.pi * progress)))


def _progress(step: int, start: int, length: int) -> float:
    """Part of a phase that has passed before `step`, 0 to 1; a phase of no length never begins."""
    return min(1.0, max(0.0, (step - start) / length)) if length > 0 else 0.0


def _down_to(last: float, shape: float) -> float:
    """A shape that falls from 1 to 0, so that it falls from 1 to `last`."""
    return last + (1.0 - last) * shape


# By `inner.schedule.kind`: the factor after warm-up.
SCHEDULES: dict[str, Callable[[InnerScheduleConfig, int, int], float]] = {
    "wsd": _wsd,
    "cosine": _cosine,
    "constant": _constant,
}
