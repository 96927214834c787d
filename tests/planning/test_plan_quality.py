"""Published costs of H."""

import pytest

from ray_diloco.planning.quality import PUBLISHED, cost_of, near


def test_a_published_row_is_its_own_cost():
    # Streaming DiLoCo at 4B: 2.25 data parallel, 2.26 at H = 100.
    found = cost_of(4 * 10**9, 2, 100)
    assert found.cost == pytest.approx(2.26 / 2.25 - 1)
    assert found.exact and "2501.18512" in found.source


def test_between_two_rows_the_cost_is_linear_in_the_logarithm_of_H():
    # 51M of ft-diloco alone reaches 200: 6.3 % at 100, 7.4 % at 200.
    middle = cost_of(51_000_000, 2, 141)
    assert middle.cost == pytest.approx(0.0685, abs=1e-3)
    assert not middle.exact and middle.source.startswith("ft-diloco")


def test_the_highest_of_several_sources_counts():
    # At H = 30 and 35M to 100M: up to 0.9 % elsewhere, 2.8 to 4.7 % in ft-diloco.
    assert cost_of(51_000_000, 2, 30).source.startswith("ft-diloco")


def test_nothing_is_said_beyond_what_was_published():
    assert cost_of(10**10, 2, 500) is None


def test_a_small_model_hears_of_the_smallest_that_was_published():
    assert {row.parameters for row in near(1_000_000, 2)} == {35e6}


def test_many_islands_cost_more():
    assert cost_of(35_000_000, 8, 30).cost > cost_of(35_000_000, 2, 30).cost


def test_no_row_is_beyond_belief():
    assert len(PUBLISHED) > 50
    assert all(-0.02 < row.cost < 0.1 for row in PUBLISHED)
