"""Counters around a loop over steps that begin anew: which are found, and which are not meant."""

import itertools
import sys

import pytest

from outlast.script.callsite import recount


class Loop:
    """Stands in for a loop over steps that goes on behind ``num_had`` batches."""

    def __init__(self, num_had=5):
        self.num_had, self.found = num_had, []

    def steps(self):
        for number in range(3):
            self.found.append(recount(sys._getframe(), self.num_had))
            self.num_had = 0  # asked once
            yield number, [0, 1]


def bar(iterable):
    for one in iterable:  # noqa: UP028 - as progress bars do
        yield one


class Bar:
    def __init__(self, iterable):
        self.iterable = iterable

    def __iter__(self):
        for one in self.iterable:  # noqa: UP028
            yield one


def enumerated(loop):
    for i, batch in enumerate(loop.steps()):
        if i > 3:
            return batch
    return None


def from_one(loop):
    for i, (_, (_, _)) in enumerate(loop.steps(), 1):
        if i > 3:
            return


def behind_a_bar(loop):
    for i, (_, _) in Bar(enumerate(loop.steps())):
        str(i)


def around_a_bar(loop):
    for i, (_, _) in enumerate(Bar(bar(loop.steps()))):
        str(i)


def zipped(loop):
    for i, _ in zip(range(9), loop.steps(), strict=False):
        str(i)


def zipped_behind(loop):
    for _, i in zip(loop.steps(), itertools.count()):
        str(i)


def zipped_with_values(loop):
    for i, _ in zip([0.1, 0.2, 0.3], loop.steps(), strict=True):
        str(i)


def read_behind_the_loop(loop):
    for i, _ in enumerate(loop.steps()):  # noqa: B007
        pass
    return i


def all_zipped_of(loop):
    for _, i, _ in zip(loop.steps(), (i for i in range(3)), "abc", strict=True):
        str(i)


FOUND = [
    *(enumerated, from_one, behind_a_bar, around_a_bar, zipped, zipped_behind),
    *(zipped_with_values, read_behind_the_loop, all_zipped_of),
]


@pytest.mark.parametrize("script", FOUND)
@pytest.mark.parametrize("num_had", [1, 2, 5])
def test_a_counter_that_begins_anew_is_found(script, num_had):
    script(loop := Loop(num_had))
    assert (loop.found[0].name, loop.found[0].wrapper) == (
        "i",
        "zip" if "zip" in script.__name__ else "enumerate",
    )
    assert f"in {script.__name__}" in loop.found[0].line
    assert not any(loop.found[1:])
    words = loop.found[0].doubt(num_had, may_wrap=True)
    assert words.startswith("`i` of ")
    assert f"this loop has had {num_had} batch" in words
    assert "Write session.steps(" in words
    assert "Write" not in loop.found[0].doubt(num_had, may_wrap=False)


def asked_with_next(loop):
    number, _ = next(enumerate(loop.steps()))
    return number


def not_unpacked(loop):
    for item in enumerate(loop.steps()):
        str(item)


@pytest.mark.parametrize("script", [asked_with_next, not_unpacked])
def test_one_whose_variable_is_not_known_is_found(script):
    script(loop := Loop())
    assert loop.found[0].name == ""
    assert loop.found[0].doubt(5, may_wrap=True).startswith("a variable of enumerate(")


def bare(loop):
    for number, _ in loop.steps():
        str(number)


def with_a_bar(loop):
    for number, _ in Bar(loop.steps()):
        str(number)


def unread(loop):
    for _number, batch in enumerate(loop.steps()):
        str(batch)


def given_its_start(loop):
    for i, _ in enumerate(loop.steps(), start=loop.num_had):
        str(i)


def given_its_range(loop):
    for i, _ in zip(range(loop.num_had, 99), loop.steps(), strict=False):
        str(i)


def counting_from_there(loop):
    for _, i in zip(loop.steps(), itertools.count(loop.num_had)):
        str(i)


def around_and_inside(loop):
    for fold, _ in enumerate("a"):
        for number, _ in loop.steps():
            for i, _ in enumerate(range(2)):
                str((fold, number, i))


@pytest.mark.parametrize(
    "script",
    [
        *(bare, with_a_bar, unread, given_its_start, given_its_range, counting_from_there),
        around_and_inside,
    ],
)
def test_what_is_not_counted_anew_is_not_said(script):
    script(loop := Loop())
    assert loop.found == [None] * 3


@pytest.mark.parametrize("script", FOUND)
def test_a_loop_that_begins_with_its_first_batch_has_none(script):
    script(loop := Loop(0))
    assert not any(loop.found)
