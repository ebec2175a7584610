"""What stands on a chart: round numbers on its axis, and words at its marks, that do not meet."""

import itertools

import msgspec
import pytest

from outlast.report.chart import WIDTH, Chart, Curve, Mark, _box, decades, svg


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


@pytest.mark.parametrize("at", [1.0, 1.5, 2.0, 3.0, 4.0])
def test_words_at_a_mark_hide_no_curve_and_no_other_words(at):
    points = [(x / 50, 1 + abs(x / 50 - 2) ** 2 / 4) for x in range(5, 300)]
    drawn = Chart(
        title="t",
        x_label="x",
        y_label="y",
        x_words="{:g}/h".format,
        x_rounds=decades,
        curves=[Curve("one", points, "solid")],
        marks=[
            Mark(2.0, 1.0, "the best: 2 min 00 s", True),
            Mark(at, 1 + (at - 2) ** 2 / 4, "another one: 3 min 25 s", False),
        ],
        y_low=0.0,
        y_high=3.0,
    )
    boxes = [_box(spot) for spot in drawn.spots()]
    for left, top, right, bottom in boxes:
        for x, y in points:
            assert not (left < drawn.x(x) < right and top < drawn.y(y) < bottom)
    (left, top, right, bottom), (left_2, top_2, right_2, bottom_2) = boxes
    beside = right < left_2 or right_2 < left
    assert beside or abs(bottom - bottom_2) >= 14, (top, top_2)


def test_one_curve_is_named_by_the_title_alone():
    named = msgspec.structs.replace(chart(1, 2), title="how much memory there is")
    alone = msgspec.structs.replace(
        named, curves=[Curve(named.title, [(1.0, 1.0), (2.0, 2.0)], "solid")]
    )
    assert svg([alone], title="p").count(named.title) == 1
    assert ">one</text>" in svg([named], title="p")
