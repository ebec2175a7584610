"""Behind a loop without a step: what fails for want of it, and what fails for another reason."""

import statistics

import pytest
import torch

from outlast.training.unset import left_unset


def name():
    for loss in ():  # noqa: B007
        pass
    return loss


def added():
    total = n = 0
    for one in ():
        total += one
        n += 1
    return total / n


def last():
    losses = []
    for one in ():
        losses.append(one)  # noqa: PERF402 - as people write it
    return losses[-1]


def stacked():
    losses = []
    for one in ():
        losses.append(one)  # noqa: PERF402
    return torch.stack(losses)


def mean():
    losses = []
    for one in ():
        losses.append(one)  # noqa: PERF402
    return statistics.mean(losses)


def best():
    losses = []
    for one in ():
        losses.append(one)  # noqa: PERF402
    return min(losses)


def none():
    loss = None
    for loss in ():  # noqa: B007
        pass
    return loss.item()


def key():
    metrics = {}
    for one in ():
        metrics["loss"] = one
    return metrics["loss"]


def in_a_while():
    step = 1
    while step < 1:
        found = step
        step += 1
    return found


def in_another_function():
    losses = []
    for one in ():
        losses.append(one)  # noqa: PERF402

    def report(values):
        return values[0]

    return report(losses)


def misspelt():
    for loss in ():  # noqa: B007
        pass
    return losss  # noqa: F821


def of_no_loop():
    if torch is None:
        found = 1
    return found


def a_file():
    for loss in ():  # noqa: B007
        pass
    return open("/nowhere")


def a_value():
    losses = []
    for one in ():
        losses.append(one)  # noqa: PERF402
    return int("three" + str(losses))


def an_index_elsewhere():
    losses = []
    for one in ():
        losses.append(one)  # noqa: PERF402
    empty = ()
    return empty[0]


def raised(function):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function()
    return caught.value


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (name, "loss"),
        (added, "n, total"),
        (last, "losses"),
        (stacked, "losses"),
        (mean, "losses"),
        (best, "losses"),
        (none, "loss"),
        (key, "metrics"),
        (in_a_while, "found"),
        (in_another_function, "losses"),
    ],
)
def test_for_want_of_the_loop(function, what):
    assert left_unset(raised(function)).startswith(f"{what} at test_unset.py:")


@pytest.mark.parametrize("function", [misspelt, of_no_loop, a_file, a_value, an_index_elsewhere])
def test_for_another_reason(function):
    assert left_unset(raised(function)) == ""


def test_no_error():
    assert left_unset(None) == ""
    assert left_unset(SystemExit(1)) == ""
