"""Numbers as they stand on the screen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat.backend.stats import percentile
from nanochat.ui import formatting as fmt


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "—"),
        (0.0041, "4.1 ms"),
        (0.0412, "41 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (1.244, "1.24 s"),
        (9.996, "10.0 s"),
        (59.96, "1 min 0 s"),
        (125, "2 min 5 s"),
        (1e300, "over 100 h"),
    ],
)
def test_durations(seconds: float | None, shown: str) -> None:
    assert fmt.duration(seconds) == shown


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(None, "—"), (0, "—"), (8.26, "8.3"), (118.4, "118"), (5120, "5,120"), (1e300, "over 1e+12")],
)
def test_rates(rate: float | None, shown: str) -> None:
    assert fmt.rate(rate) == shown


def test_counts() -> None:
    assert [fmt.count(value) for value in (None, 1183, 10**300)] == ["—", "1,183", "over 1e+12"]


@pytest.mark.parametrize(
    ("size", "shown"), [(12, "12 B"), (98_300, "98.3 kB"), (98_300_000, "98.3 MB"), (2.5e9, "2.50 GB")]
)
def test_sizes(size: float, shown: str) -> None:
    assert fmt.size(size) == shown


def test_percent_of_nothing_is_a_dash() -> None:
    assert fmt.percent(0, 0) == "—"
    assert fmt.percent(612, 1024) == "60 %"


def test_percentiles_are_values_that_occurred() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, fraction) for fraction in (0, 0.5, 0.95, 1)] == [1, 3, 5, 5]
    assert percentile([], 0.5) is None


def test_a_sparkline_shows_the_newest_values_on_the_right() -> None:
    assert fmt.sparkline([0, 7, 14, 0], 2) == "█▁"
    assert fmt.sparkline([5], 4) == "   █"
    assert fmt.sparkline([0, 0], 2) == "▁▁"
    assert fmt.sparkline([1, 2], 0) == ""


@given(st.floats(-1, 2), st.integers(1, 60))
def test_a_bar_has_its_width(fraction: float, width: int) -> None:
    filled, rest = fmt.bar(fraction, width)
    assert len(filled) + len(rest) == width
    assert bool(filled) == (fraction > 0)


def test_plurals() -> None:
    assert [fmt.plural(number, "turn") for number in (1, 2, 1200)] == ["1 turn", "2 turns", "1,200 turns"]
