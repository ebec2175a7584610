"""What stands behind a loop and reads what the loop sets: seen in the source."""

import sys

import pytest

from outlast.script.loop_names import Need, need_behind

NEEDED, LASTING, NOT = Need(True, False), Need(True, True), Need(False, True)


class Looks:
    """In place of a loop's batches: what is found of the loop that asks for them."""

    def __iter__(self):
        return self

    def __next__(self):
        self.need = need_behind(sys._getframe(1))
        raise StopIteration


LOOKS = Looks()


def plain():
    for _epoch in range(2):
        for x, _y in LOOKS:
            loss = x
        if LOOKS is None:
            print(loss)


def reset():
    for _epoch in range(2):
        loss = None
        for x in LOOKS:
            loss = x
        if LOOKS is None:
            print(loss)


def added():
    total = 0
    for x in LOOKS:
        total += x
    return total


def filled():
    losses = []
    for x in LOOKS:
        losses.append(x)  # noqa: PERF402 - as people write it
    return losses


def by_key():
    metrics = {}
    for x in LOOKS:
        metrics["loss"] = x
    return metrics


def by_while():
    batches = iter(LOOKS)
    x = 0
    while x is not None:
        x = next(batches, None)
    return x


def in_a_function_of_its_own():
    for x in LOOKS:
        loss = x

    def report():
        print(loss)

    return report


def nothing():
    for x, _y in LOOKS:
        loss = x
        print(loss)


def of_another_function():
    for x in LOOKS:
        loss = x
        print(loss)

    def criterion(x):
        loss = x * x
        print(loss)

    return criterion


class Trainer:
    def __init__(self):
        self.loss = None

    def fit(self):
        for x in LOOKS:
            self.loss = x

    def report(self):
        return self.loss


def no_loop():
    return list(LOOKS)


@pytest.mark.parametrize(
    ("script", "need"),
    [
        *((plain, LASTING), (reset, NEEDED), (added, NEEDED), (filled, NEEDED), (by_key, NEEDED)),
        *((by_while, NEEDED), (in_a_function_of_its_own, LASTING), (nothing, NOT)),
        *((of_another_function, NOT), (Trainer().fit, LASTING), (no_loop, NEEDED)),
    ],
)
def test_what_is_read_behind_a_loop(script, need):
    LOOKS.need = None
    script()
    assert LOOKS.need == need


def test_without_a_source_it_is_needed():
    LOOKS.need = None
    exec(compile("for x in looks:\n    loss = x\n", "<nowhere>", "exec"), {"looks": LOOKS})
    assert LOOKS.need == NEEDED
