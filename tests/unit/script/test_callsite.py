"""Which loop a call of steps() is, by the line that it comes from and the script's counters."""

import itertools
import sys

import pytest

from outlast.script.callsite import LoopLines, entry_of, site_of


def here():
    return site_of(sys._getframe(1))


def ranged(start, stop):
    for epoch in range(start, stop):
        yield here()
        assert epoch >= 0


def helped(start, stop):
    def train():
        return here()

    for number, _ in enumerate(range(start, stop), start):
        yield train()
        assert number >= 0


def added(start, stop):
    epoch, seen = start, 0
    while epoch < stop:
        yield here()
        seen += 5
        epoch += 1


class Trainer:
    def __init__(self, start):
        self.epoch = start

    def sites(self, stop):
        while self.epoch < stop:
            yield here()
            self.epoch += 1


def of_trainer(start, stop):
    return Trainer(start).sites(stop)


def downwards(start, stop):
    for left in range(stop - start, 0, -1):
        yield here()
        assert left


def repeated(start, stop):
    for _ in itertools.repeat(0, stop - start):
        yield here()


def nested(start, stop):
    for fold, epoch in itertools.product(range(2), range(stop)):
        if fold * stop + epoch >= start:
            yield here()


def ran(script, num, stop):
    """What a run of ``script`` leaves behind in its ``num``-th loop."""
    loops = LoopLines()
    for loop, site in enumerate(itertools.islice(script(0, stop), num), 1):
        loops.begins(site, loop)
    return LoopLines(loops.state())


@pytest.mark.parametrize("num", [1, 2, 3, 5])
@pytest.mark.parametrize("script", [ranged, helped, added, of_trainer, downwards])
def test_a_script_that_starts_where_it_was_is_told_from_one_that_starts_at_0(script, num):
    loops = ran(script, num, 8)
    near = {num, num + 1}
    again = [loops.number_of(site, near) for site in itertools.islice(script(0, 8), num)]
    calls = range(1, num + 1)  # where nothing is told, calls are counted
    assert all(told in (None, call) for told, call in zip(again, calls, strict=True))
    for start in (num - 1, num):
        (site,) = itertools.islice(script(start, 8), 1)
        assert loops.number_of(site, near) == start + 1


@pytest.mark.parametrize("script", [repeated, nested])
def test_where_nothing_counts_the_loops_nothing_is_told(script):
    loops = ran(script, 6, 4)
    for start in (0, 5):
        (site,) = itertools.islice(script(start, 7), 1)
        assert loops.number_of(site, {6, 7}) is None


def alternating(start, stop):
    for epoch in range(start, stop):
        yield here()
        yield here()
        assert epoch >= 0


@pytest.mark.parametrize("num", [3, 4, 5, 6])
def test_lines_that_alternate_are_counted_together(num):
    loops = ran(alternating, num, 8)
    epoch = (num - 1) // 2
    first, second = itertools.islice(alternating(epoch, 8), 2)
    assert loops.number_of(first, {num}) == 2 * epoch + 1
    if num > 3:
        assert loops.number_of(second, {num}) == 2 * epoch + 2


def test_loops_around_the_session_are_not_its_own():
    seen = []
    for fold in range(2):
        entry = entry_of(sys._getframe())
        for epoch in range(2):
            site = site_of(sys._getframe(), entry)
            seen.append((sorted(site.counted.values()), fold, epoch))
    assert [(counted, epoch) for counted, _, epoch in seen] == [([e], e) for e in (0, 1)] * 2
