"""What stands on a chart's axis: round numbers that do not run into each other."""

import itertools

import pytest

from outlast.report.chart import WIDTH, Chart, Curve, decades


def chart(low, high, rounds=decades, words="{:g}/h".format):
    return Chart(
        title="t",
        x_label="x",
        y_label="y",
        x_words=words,
        x_rounds=rounds,
        curves=[Curve("one", [(low, 1.0), (high, 2.0)], "solid")],
        marks=[],
        y_low=0.0,
        y_high=3.0,
    )


def test_decades_are_round_and_within():
    assert decades(0.15, 30) == pytest.approx([0.2, 0.5, 1, 2, 5, 10, 20])
    assert decades(0, 1) == decades(2, 1) == []


def test_round_numbers_stand_on_the_axis():
    assert [tick.words for tick in chart(0.2, 50).x_ticks()] == [
        *("0.2/h", "0.5/h", "1/h", "2/h", "5/h", "10/h", "20/h", "50/h")
    ]


@pytest.mark.parametrize("high", [3.0, 1e3, 1e12])
def test_words_neither_meet_nor_leave_the_picture(high):
    ticks = chart(1.0, high, words=lambda value: f"{value:012.2f}").x_ticks()
    assert len(ticks) >= 3
    half = 7 * 12 / 2
    assert all(b.at - a.at >= 2 * half for a, b in itertools.pairwise(ticks))
    assert all(tick.at + half <= WIDTH for tick in ticks)


def test_a_range_without_round_numbers_has_equal_parts():
    assert len(chart(1.01, 1.9, rounds=decades).x_ticks()) >= 3
