import math

import pytest

from ray_diloco.observe.units import show_bytes, show_count, show_number, show_percent, show_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (3_212_400, "3.2 MB"),
        (999_600, "1.0 MB"),
        (250e9, "250 GB"),
        (None, "–"),
    ],
)
def test_bytes_are_shown_in_decimal_units(value: float | None, text: str) -> None:
    assert show_bytes(value) == text


@pytest.mark.parametrize(("value", "text"), [(950, "950"), (2143, "2.1k"), (819_200, "819k"), (1.3e6, "1.3M")])
def test_counts_are_short(value: float, text: str) -> None:
    assert show_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (-1, "0 s"),
        (0.0042, "4 ms"),
        (0.42, "0.42 s"),
        (12.34, "12.3 s"),
        (59.96, "1m 00s"),
        (125, "2m 05s"),
        (3720, "1h 02m"),
        (90_000, "1d 01h"),
        (math.nan, "–"),
    ],
)
def test_seconds_are_read_at_a_glance(value: float, text: str) -> None:
    assert show_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.21456, "3.215"),
        (27.1262, "27.13"),
        (0.0, "0"),
        (1234.5, "1234"),
        (1e-9, "1e-09"),
        (math.inf, "–"),
        (None, "–"),
    ],
)
def test_numbers_keep_four_significant_digits(value: float | None, text: str) -> None:
    assert show_number(value) == text


def test_small_percentages_keep_a_decimal() -> None:
    assert [show_percent(part) for part in (1.0, 0.953, 0.004, 0.0, None)] == ["100%", "95%", "0.4%", "0%", "–"]
