"""What training changes and nothing saves is named once; constants and results are not."""

import pytest
import torch
from torch import nn

from outlast.script import unnamed
from outlast.script.objects import Objects
from outlast.script.unnamed import LOOKS, Transient


@pytest.fixture
def lines(monkeypatch):
    said = []
    monkeypatch.setattr(unnamed, "say", said.append)
    return said


class Net(nn.Module):
    """Does something with a tensor at each step.

    Args:
        tensor: what it has at first.
        change: called with the module at each step.
        kind: how it holds it.
    """

    def __init__(self, tensor, change, kind="buffer"):
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.steps = 0
        if kind == "attribute":
            self.cache = tensor
        else:
            self.register_buffer("cache", tensor, persistent=kind == "saved")
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.change = change

    def forward(self, x):
        self.change(self)
        self.steps += 1
        return self.line(x)


def run(model, lines, steps=12, **named):
    watch = Transient(Objects({"model": model, **named}))
    watch.open()
    for _ in range(steps):
        model(torch.ones(1, 2))
        watch.completed()
    return lines


def in_place(model):
    model.cache.mul_(0.9)


def rebound(model):
    model.cache = model.cache * 0.9


def one_element(model):
    model.cache.view(-1)[0] += 1


@pytest.mark.parametrize("change", [in_place, rebound, one_element])
@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_what_each_step_changes_is_named_once(lines, change, kind):
    (line,) = run(nn.Sequential(Net(torch.ones(2, 3), change, kind)), lines)
    assert line.startswith("model.0.cache is changed by training and in no checkpoint")
    remedy = {
        "buffer": "register it with persistent=True",
        "attribute": 'make it a buffer: self.register_buffer("cache", ...)',
    }
    assert line.endswith(remedy[kind])


def test_a_large_one_is_named_and_so_is_what_changes_seldom(lines):
    def now_and_then(model):
        if model.steps % 9 == 4:
            model.cache += 1

    (line,) = run(Net(torch.ones(1000, 200), in_place), lines)
    assert "model.cache" in line
    (_, line) = run(Net(torch.ones(3), now_and_then), lines, steps=LOOKS[5])
    assert "model.cache" in line


def test_several_are_one_line(lines):
    (line,) = run(nn.Sequential(*[Net(torch.ones(2), in_place) for _ in range(5)]), lines)
    assert line.startswith("model.0.cache, model.1.cache, model.2.cache and 2 more are changed")


def nothing(model):
    pass


def same_again(model):
    """As DDP's broadcast, and as a table that is made anew each time."""
    model.cache.copy_(model.cache.clone())
    model.table = torch.arange(4.0)


def filled_once(model):
    if not model.steps:
        model.cache.fill_(7)


def longer(model):
    model.cache = torch.arange(float(len(model.cache) + 1))


def made_late(model):
    model.late = torch.full((3,), float(model.steps))


def result(model):
    model.cache = model.line(torch.full((1, 2), float(model.steps)))


@pytest.mark.parametrize("change", [nothing, same_again, filled_once, longer, made_late, result])
@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_constants_tables_and_results_are_not_spoken_of(lines, change, kind):
    assert run(Net(torch.ones(3), change, kind), lines, steps=40) == []


def test_one_that_was_made_late_and_is_changed_where_it_lies_is_named(lines):
    def change(model):
        if not model.steps:
            model.late = torch.zeros(3)
        model.late += 1

    (line,) = run(Net(torch.ones(3), change), lines)
    assert line.startswith("model.late is changed by training")


class Keeper:
    """An object of the script's that saves the cache, as it is or as a copy."""

    def __init__(self, model, *, copies):
        self.model, self.copies = model, copies

    def state_dict(self):
        return {"cache": self.model.cache.clone() if self.copies else self.model.cache}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("copies", [True, False])
def test_what_is_saved_otherwise_is_not_spoken_of(lines, copies):
    model = Net(torch.ones(3), in_place)
    assert run(model, lines, keeper=Keeper(model, copies=copies)) == []
    assert run(Net(torch.ones(3), in_place, "saved"), lines) == []
    tied = Net(torch.ones(3), in_place, "saved")
    tied.same = tied.cache
    assert run(tied, lines) == []


def test_a_number_that_happens_to_be_saved_elsewhere_is_named_all_the_same(lines):
    def count(model):
        model.cache += 1
        model.other += 1

    model = Net(torch.tensor(0), count)
    model.register_buffer("other", torch.tensor(0))
    assert len(run(model, lines)) == 1


def test_a_module_that_gives_state_in_a_way_of_its_own_is_not_spoken_of(lines):
    class Own(Net):
        def get_extra_state(self):
            return self.cache.tolist()

        def set_extra_state(self, state):
            self.cache = torch.tensor(state)

    assert run(Own(torch.ones(3), in_place), lines) == []


def test_other_ranks_do_not_look(lines, monkeypatch):
    monkeypatch.setattr(Transient, "_look", lambda self: pytest.fail("it looked"))
    watch = Transient(Objects({"model": Net(torch.ones(3), in_place)}))
    for _ in range(5):
        watch.completed()


def test_trouble_is_nobodys_but_ours(lines, monkeypatch, caplog):
    monkeypatch.setattr(unnamed, "_digest", lambda tensor: 1 / 0)
    assert run(Net(torch.ones(3), in_place), lines) == []
    assert "were not looked at: division by zero" in caplog.text
