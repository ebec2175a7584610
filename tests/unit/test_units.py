"""Numbers with units: what is read, and words at the edges where rounding moves them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast import units


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0 s"),
        (0.0004, "0 s"),
        (0.35, "350 ms"),
        (0.9996, "1.0 s"),
        (2.1, "2.1 s"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (59.97, "1 min 00 s"),
        (250, "4 min 10 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (3720, "1 h 02 min"),
        (86_369, "23 h 59 min"),
        (86_371, "1 d 00 h"),
        (2 * 86_400 + 3 * 3600, "2 d 03 h"),
        (-2.1, "-2.1 s"),
    ],
)
def test_seconds(value, words):
    assert units.seconds(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_940, "999.9 kB"),
        (999_960, "1.0 MB"),
        (1_300_000_000, "1.3 GB"),
        (2.5e21, "2,500.0 EB"),
    ],
)
def test_size(value, words):
    assert units.size(value) == words


def test_count():
    assert units.count(0, "step") == "no steps"
    assert units.count(1, "step") == "1 step"
    assert units.count(12_000, "step") == "12,000 steps"
    assert units.count(2, "loss", "losses") == "2 losses"


def test_clock():
    assert units.clock(3 * 3600 + 12 * 60 + 44.9) == "03:12:44 UTC"
    assert units.clock(1e12) == "--:--:-- UTC"


def test_percents_add_up_as_shown():
    assert units.percents([1, 1, 1]) == [33.4, 33.3, 33.3]
    assert units.percents([2, 0, 1]) == [66.7, 0.0, 33.3]
    assert units.percents([0, 0]) == [0.0, 0.0]
    assert units.percents([]) == []


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=7))
def test_percents_always_add_up(values):
    shown = units.percents(values)
    assert round(sum(shown), 6) == (100.0 if sum(values) else 0.0)
    if sum(values):
        exact = [value / sum(values) * 100 for value in values]
        assert all(abs(a - b) <= 0.1 + 1e-9 for a, b in zip(shown, exact, strict=True))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.5 min", 90.0),
        (" .5min ", 30.0),
        ("2", None),
        ("2 h", None),
        ("-2 min", None),
        ("1e3 min", None),
        ("1,5 min", None),
        ("min", None),
        ("1 min 2", None),
    ],
)
def test_a_plain_number_with_a_unit_that_is_known(text, value):
    assert units.measure(text, {"min": 60.0}) == value


def test_a_number_alone_is_read_where_no_unit_is_one():
    assert units.measure("2.5", {"": 1.0}) == 2.5


@pytest.mark.parametrize(
    ("value", "least", "number"),
    [("2.5", 1, 2.5), (1, 1, 1.0), (0.9, 1, None), ("inf", 0, None), ("nan", 0, None)]
    + [(value, 0, None) for value in (True, None, "x", [])],
)
def test_a_number_from_a_least_one_on(value, least, number):
    assert units.read_number(value, least=least) == number


@pytest.mark.parametrize(
    ("value", "words", "with_a_digit"),
    [(0.123, "0.12 s", "0.1 s"), (9.94, "9.9 s", "9.9 s"), (10, "10 s", "10 s")],
)
def test_short_spans(value, words, with_a_digit):
    assert units.short_seconds(value) == words
    assert units.short_seconds(value, ".1f") == with_a_digit


@pytest.mark.parametrize(
    ("value", "words"),
    [(512, "0.512 kB"), (12e6, "12 MB"), (1.5e9, "1.5 GB"), (6.4e11, "640 GB"), (2e12, "2 TB")],
)
def test_short_sizes(value, words):
    assert units.gigabytes(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3600.0, "1 h"),
        (5400.0, "90 min"),
        (90.0, "90 s"),
        (60.0, "1 min"),
        (1.5, "1.5 s"),
        (0.2, "200 ms"),
        (0.0015, "0.0015 s"),
    ],
)
def test_a_time_as_it_is_set(value, words):
    assert units.set_seconds(value) == words


@given(st.integers(1, 10**7), st.sampled_from(["ms", "s", "min", "h"]))
def test_a_time_as_it_is_set_is_read_back(number, unit):
    value = units.read_seconds(f"{number} {unit}", least_s=0.0, most_s=1e12)
    assert units.read_seconds(units.set_seconds(value), least_s=0.0, most_s=1e12) == value
