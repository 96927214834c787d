import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_diloco.observe.charts import Bar, Lane, Series, line_chart, second_ticks, stacked_bars, thin, ticks, timeline


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (1.2, 5.8, [2, 3, 4, 5]),
        (0.0, 0.5, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        (3.0, 3.0, [3.0]),
    ],
)
def test_ticks_stand_on_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 5) == pytest.approx(expected)


def test_rounds_have_no_fractions_between_them() -> None:
    assert ticks(0.0, 2.0, 8, finest=1.0) == [0, 1, 2]


@pytest.mark.parametrize(
    ("end_s", "expected"), [(60, [0, 10, 20, 30, 40, 50, 60]), (250, [0, 60, 120, 180, 240]), (0.5, [0])]
)
def test_ticks_of_time_stand_where_clocks_have_them(end_s: float, expected: list[float]) -> None:
    assert second_ticks(end_s, 8) == expected


def test_ticks_of_weeks_stand_on_whole_days() -> None:
    assert [second / 86_400 for second in second_ticks(40 * 86_400, 8)] == [0, 5, 10, 15, 20, 25, 30, 35, 40]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000))
def test_thinning_keeps_order_ends_and_extremes(values: list[float]) -> None:
    points = [(float(k), value) for k, value in enumerate(values)]
    kept = thin(points)
    assert len(kept) <= 300
    assert kept == sorted(set(kept)) and set(kept) <= set(points)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert min(y for _, y in kept) == min(values) and max(y for _, y in kept) == max(values)


def test_a_line_goes_through_its_points_and_skips_what_is_missing() -> None:
    svg = line_chart([Series("i0", [(0, 4.0), (1, None), (2, 2.0)])], "round", "loss", width=100 + 96, height=152)
    path = re.search(r'<path[^>]* d="([^"]+)"', svg)
    assert path is not None
    numbers = [float(each) for each in re.findall(r"[\d.]+", path.group(1))]
    # x runs over 100 pixels from 80; y over 100 from 12 with 6 % of the range as margin on both sides.
    assert numbers == [80.0, pytest.approx(12 + 100 * 0.12 / 2.24, abs=0.1), 180.0, pytest.approx(106.6, abs=0.1)]


def test_names_and_words_are_escaped() -> None:
    nasty = '<b>"&'
    for svg in (
        line_chart([Series(nasty, [(0, 1.0), (1, 2.0)])], nasty, nasty, levels=[(1.5, nasty)]),
        stacked_bars([Bar(nasty, [1.0])], [nasty], nasty, nasty),
        timeline([Lane(nasty, [(0, 1, "up")], [(0.5, "info", nasty)])], 1.0),
    ):
        assert "<b>" not in svg
        ElementTree.fromstring(svg)


def test_a_chart_of_nothing_says_so() -> None:
    assert "nothing to draw" in line_chart([Series("i0", [])], "round", "loss")
    assert "nothing to draw" in stacked_bars([], ["train"], "round", "seconds")


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-12, 1e12])
def test_a_line_that_never_moves_can_be_drawn(value: float) -> None:
    ElementTree.fromstring(line_chart([Series("i0", [(1, value)])], "round", "loss"))
    ElementTree.fromstring(stacked_bars([Bar("1", [abs(value), 0.0])], ["a", "b"], "round", "seconds"))
