import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_diloco.config.schema import InnerScheduleConfig
from ray_diloco.inner.schedule import SCHEDULES, learning_rate_factor, rewarm_factor


def wsd(**changes):
    return InnerScheduleConfig(kind="wsd", **({"warmup_steps": 4, "decay_steps": 0, "final_ratio": 0.1} | changes))


def test_warm_up_is_linear_and_its_first_step_is_not_zero():
    assert [learning_rate_factor(wsd(), step, 100) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_wsd_without_decay_stays_at_one():
    assert learning_rate_factor(wsd(), 99, 100) == 1.0
    assert learning_rate_factor(wsd(), 1000, 100) == 1.0


@pytest.mark.parametrize(
    ("step", "factor"),
    [(83, 1.0), (84, 1.0), (88, 0.1 + 0.9 * 0.5), (93, 0.1 + 0.9 * 0.25), (100, 0.1), (500, 0.1)],
)
def test_wsd_decays_by_one_minus_root_to_the_final_ratio(step, factor):
    """16 steps of decay from step 84: √(4/16) = 1/2, √(9/16) = 3/4."""
    assert learning_rate_factor(wsd(decay_steps=16), step, 100) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize(("step", "factor"), [(4, 1.0), (12, 0.55), (20, 0.1), (99, 0.1), (9, None)])
def test_cosine_goes_from_one_to_the_final_ratio(step, factor):
    """16 steps after 4 of warm-up: half-way at step 12, (1 + cos π/2) / 2 = 1/2."""
    schedule = InnerScheduleConfig(kind="cosine", warmup_steps=4, final_ratio=0.1)
    expected = 0.1 + 0.9 * (1 + math.cos(math.pi * 5 / 16)) / 2 if factor is None else factor
    assert learning_rate_factor(schedule, step, 20) == pytest.approx(expected, abs=1e-12)


def test_constant_is_one_after_warm_up():
    schedule = InnerScheduleConfig(kind="constant", warmup_steps=2)
    assert [learning_rate_factor(schedule, step, 3) for step in (0, 1, 2, 3, 50)] == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_no_warm_up_begins_at_one():
    assert learning_rate_factor(wsd(warmup_steps=0), 0, 10) == 1.0


@given(
    kind=st.sampled_from(sorted(SCHEDULES)),
    warmup=st.integers(0, 30),
    decay=st.integers(0, 30),
    final=st.floats(0.01, 1.0),
    step=st.integers(0, 200),
    total=st.integers(0, 100),
)
def test_a_factor_is_above_zero_and_at_most_one(kind, warmup, decay, final, step, total):
    schedule = InnerScheduleConfig(kind=kind, warmup_steps=warmup, decay_steps=decay, final_ratio=final)
    assert 0.0 < learning_rate_factor(schedule, step, total) <= 1.0 + 1e-12


def test_a_rate_is_warmed_up_again_step_by_step():
    schedule = InnerScheduleConfig(rewarm_steps=4)
    assert [rewarm_factor(schedule, left) for left in (4, 3, 2, 1, 0)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rewarm_factor(InnerScheduleConfig(rewarm_steps=0), 3) == 1.0
