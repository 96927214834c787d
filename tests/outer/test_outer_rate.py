import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_diloco.errors import SyncError
from ray_diloco.outer.rate import SHAPES, OuterRate


def test_a_constant_rate_is_constant():
    assert [OuterRate().factor(version) for version in (0, 1, 10**6)] == [1.0] * 3


def test_a_cosine_falls_to_its_last_value_and_stays_there():
    rate = OuterRate("cosine", rounds=8, final_ratio=0.2)
    assert rate.factor(0) == 1.0
    assert rate.factor(2) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert rate.factor(4) == pytest.approx(0.6)
    assert rate.factor(8) == rate.factor(100) == pytest.approx(0.2)


def test_warm_up_rises_from_above_zero_and_the_cosine_begins_after_it():
    assert [OuterRate(warmup_rounds=4).factor(v) for v in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    rate = OuterRate("cosine", rounds=8, warmup_rounds=4, final_ratio=0.0)
    assert [rate.factor(v) for v in (0, 3, 4, 6, 8)] == pytest.approx([0.25, 1.0, 1.0, 0.5, 0.0])


def test_warm_up_longer_than_the_run_is_only_warm_up():
    assert [OuterRate("cosine", rounds=2, warmup_rounds=4).factor(v) for v in range(3)] == [0.25, 0.5, 0.75]


@settings(deadline=None)
@given(st.sampled_from(sorted(SHAPES)), st.integers(0, 50), st.integers(0, 20), st.floats(0, 1), st.integers(0, 200))
def test_factors_stay_between_zero_and_one(kind, rounds, warmup, final, version):
    assert 0.0 <= OuterRate(kind, rounds, warmup, final).factor(version) <= 1.0


def test_an_unknown_schedule_is_an_error():
    with pytest.raises(SyncError, match=r"RD-434: there is no outer schedule 'cosin'\n.*constant, cosine"):
        OuterRate("cosin")
