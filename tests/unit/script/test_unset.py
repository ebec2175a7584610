"""Behind a loop without a step: what fails for want of it, and what fails for another reason."""

import statistics
from pathlib import Path

import pytest
import torch

from outlast.script.excepthook import left_unset


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


def nested():
    history = {"loss": []}
    for one in ():
        history["loss"].append(one)
    return history["loss"][-1]


def on_several_lines():
    losses = []
    for one in ():
        losses.append(one)  # noqa: PERF402
    return torch.stack(
        losses,
    )


class Meter:
    def __init__(self):
        self.name, self.sum, self.count = "loss", 0.0, 0

    def update(self, value):
        self.sum, self.count = self.sum + value, self.count + 1

    def average(self):
        return self.sum / self.count


def metered():
    meter = Meter()
    for one in ():
        meter.update(one)
    return meter.average()


class Trainer:
    def __init__(self):
        self.losses, self.best = [], None

    def attribute(self):
        for one in ():
            self.losses.append(one)
        return self.losses[-1]

    def none_in_attribute(self):
        for one in ():
            self.best = one
        return self.best.item()


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


def a_key_of_what_is_read(model):
    for _ in ():
        model.zero_grad()
    return model.state_dict()["wieght"]


def a_key_of_what_was_there():
    config = {"name": "small"}
    for one in ():
        config["seen"] = one
    return config["nmae"]


def a_default_that_is_no_default():
    best = float("inf")
    for one in ():
        best = min(best, one)
    return print({}["acc"], best)


def beside_what_is_empty():
    losses = []
    for one in ():
        losses.append(one)  # noqa: PERF402
    return print({}["acc"], losses)


def of_a_loop_elsewhere():
    def inner():
        for loss in ():  # noqa: B007
            pass

    inner()
    return loss  # noqa: F821


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
        (nested, "history"),
        (on_several_lines, "losses"),
        (metered, "meter"),
        (Trainer().attribute, "self.losses"),
        (Trainer().none_in_attribute, "self.best"),
    ],
)
def test_for_want_of_the_loop(function, what):
    assert left_unset(raised(function)).startswith(f"{what} at test_unset.py:")


@pytest.mark.parametrize(
    "function",
    [
        *(misspelt, of_no_loop, a_file, a_value, an_index_elsewhere),
        *(a_key_of_what_was_there, a_default_that_is_no_default, beside_what_is_empty),
        *(of_a_loop_elsewhere, lambda: a_key_of_what_is_read(torch.nn.Linear(1, 1))),
    ],
)
def test_for_another_reason(function):
    assert left_unset(raised(function)) == ""


def test_a_script_that_was_changed_since_the_job_finished_excuses_nothing():
    changed_t = Path(__file__).stat().st_mtime
    assert left_unset(raised(name), finished_t=changed_t + 1.0)
    assert left_unset(raised(name), finished_t=changed_t - 1.0) == ""


def test_no_error():
    assert left_unset(None) == ""
    assert left_unset(SystemExit(1)) == ""
