"""A model's state the second time is what torch's own walk gives."""

import collections
import gc
import weakref

import pytest
import torch
from torch import nn

from outlast.script.objects import ModelState


class Odd(nn.Module):
    """Everything that a stock module may hold."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.again = self.first  # one module under two names
        self.bare = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.tied = nn.Linear(2, 3)
        self.tied.weight = self.first.weight
        self.nothing = None
        self.register_module("absent", None)
        self.register_parameter("none", None)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("skipped", torch.ones(2), persistent=False)
        self.register_buffer("unset", None)


def same(found, model):
    expected = model.state_dict(keep_vars=True)
    assert type(found) is type(expected) is collections.OrderedDict
    assert list(found) == list(expected)
    assert all(found[name] is expected[name] for name in expected)


def equal(found, expected):
    """As ``same``, where hooks may make new tensors each time."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        is_tensor = isinstance(value, torch.Tensor)
        assert torch.equal(found[name], value) if is_tensor else found[name] == value


def walks(state):
    return state._walk is not None and state._walk.again() is not None


MODELS = {
    "odd": Odd,
    "nested": lambda: nn.Sequential(Odd(), nn.ModuleList([Odd(), nn.Linear(1, 1)])),
    "list": lambda: nn.ModuleDict({"ab": nn.Linear(1, 1), "p": nn.ParameterList([])}),
    "empty": nn.Identity,
    "parameters": lambda: nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(1)}),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_again_and_again(make):
    model = make()
    state = ModelState(model)
    for _ in range(3):
        same(state(), model)
        assert walks(state)


def put(**more):
    def change(model):
        for name, value in more.items():
            setattr(model, name, value)

    return change


def replace_table(model):
    """As unpickling does."""
    model.first.__dict__["_parameters"] = {"weight": nn.Parameter(torch.ones(1))}


def rename(table, old, new):
    """The same value in the same place, under another name."""
    items = [(new if name == old else name, value) for name, value in table.items()]
    table.clear()
    table.update(items)


CHANGES = {
    "a module under another name": lambda model: rename(model._modules, "bare", "naked"),
    "a parameter under another name": lambda model: rename(model.bare._parameters, "weight", "w"),
    "another module": put(first=nn.Linear(5, 5)),
    "a module more": put(more=nn.Linear(1, 1)),
    "a module where there was none": put(absent=nn.Linear(1, 1)),
    "a module less": lambda model: delattr(model, "bare"),
    "modules in another order": lambda model: model._modules.update(
        first=model._modules.pop("first")
    ),
    "deep inside": lambda model: setattr(model.norm, "inner", nn.Linear(1, 1)),
    "another parameter": lambda model: setattr(model.bare, "weight", nn.Parameter(torch.ones(1))),
    "a bias where there was none": lambda model: setattr(
        model.bare, "bias", nn.Parameter(torch.ones(1))
    ),
    "a bias less": lambda model: setattr(model.first, "bias", None),
    "a parameter more": lambda model: model.register_parameter("more", nn.Parameter(torch.ones(1))),
    "a buffer more": lambda model: model.register_buffer("more", torch.ones(1)),
    "a buffer that is set": put(unset=torch.ones(1)),
    "a buffer that is not kept any more": lambda m: m.register_buffer(
        "kept", torch.ones(2), persistent=False
    ),
    "another table": replace_table,
    "frozen": lambda model: model.requires_grad_(False),
    "moved": lambda model: model.double(),
    "a hook": lambda model: model.norm.register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update({f"{prefix}extra": torch.ones(1)})
    ),
    "a hook ahead": lambda model: model.norm.register_state_dict_pre_hook(
        lambda module, *_: setattr(module, "running_mean", torch.full((3,), 7.0))
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_that_changes(change):
    model = nn.Sequential(Odd(), nn.Linear(1, 1))
    state = ModelState(model)
    same(state(), model)
    change(model[0])
    for _ in range(2):
        equal(state(), model.state_dict(keep_vars=True))


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


class Own(nn.Linear):
    def state_dict(self, *args, prefix="", **kwargs):
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        state[f"{prefix}own"] = torch.ones(1)
        return state


class Saved(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}packed"] = self.weight


class Fickle(nn.Linear):
    """Stock, as it seems, until it is not."""

    asked = 0

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.asked += 1
        if self.asked > 2:
            destination[f"{prefix}more"] = torch.ones(1)


def instance():
    """As ``Fickle``, but one module alone."""
    model, stock = nn.Linear(1, 1), nn.Linear._save_to_state_dict
    asked = []

    def save(destination, prefix, keep_vars):
        stock(model, destination, prefix, keep_vars)
        asked.append(1)
        if len(asked) > 2:
            destination[f"{prefix}more"] = torch.ones(1)

    model._save_to_state_dict = save
    return model


@pytest.mark.parametrize("make", [lambda: Fickle(1, 1), instance], ids=["class", "instance"])
def test_what_is_not_stock_is_asked_each_time(make):
    state = ModelState(nn.Sequential(make()))
    sizes = [len(state()) for _ in range(4)]
    assert sizes == [2, 2, 3, 3]


def with_hook():
    model = Odd()
    model.norm.register_state_dict_pre_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("make", [lambda: Extra(1, 1), lambda: Saved(1, 1), with_hook])
def test_what_is_not_stock_goes_its_own_way(make):
    model = nn.Sequential(make(), nn.Linear(1, 1))
    state = ModelState(model)
    for _ in range(2):
        equal(state(), model.state_dict(keep_vars=True))
        assert not walks(state)


@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential])
def test_a_state_dict_of_its_own_is_asked(wrap):
    model = wrap(Own(1, 1))
    state = ModelState(model)
    for _ in range(2):
        assert any(name.endswith("own") for name in state())
        assert not walks(state)


TWICE = {
    "by another kind": lambda model: (
        setattr(model, "bare", nn.Identity()),
        setattr(model, "bare", nn.Linear(3, 3, bias=False)),
    ),
    "twice": lambda model: [setattr(model, "bare", nn.Linear(3, 3, bias=False)) for _ in range(2)],
    "deleted": lambda model: (
        delattr(model, "bare"),
        setattr(model, "bare", nn.Linear(3, 3, bias=False)),
    ),
}


@pytest.mark.parametrize("swap", TWICE.values(), ids=TWICE)
def test_a_module_that_takes_the_place_of_one_that_is_gone_is_another_one(swap, request):
    """In memory too: its id may be that of the one before it."""
    gc.collect()
    gc.freeze()  # what is collected below is this test's own alone
    request.addfinalizer(gc.unfreeze)
    for _ in range(30):
        model = nn.Sequential(Odd())
        state = ModelState(model)
        state()
        gc.collect()
        swap(model[0])
        same(state(), model)


def test_tables_of_another_order_than_their_values():
    model = nn.Sequential(nn.Linear(1, 1))
    table = collections.OrderedDict(model[0]._parameters)
    table.move_to_end("weight")
    model[0].__dict__["_parameters"] = table
    state = ModelState(model)
    for _ in range(2):
        same(state(), model)


@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential], ids=["whole", "part"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
def test_scripted_modules(wrap):
    model = wrap(torch.jit.script(nn.Linear(2, 1)))
    state = ModelState(model)
    for _ in range(2):
        equal(state(), model.state_dict(keep_vars=True))
        assert not walks(state)


class Listed(nn.Linear):
    def state_dict(self, *args, **kwargs):
        return [("weight", self.weight)]


def test_a_state_of_another_kind_is_left_as_it_is():
    model = Listed(1, 1)
    assert ModelState(model)() == [("weight", model.weight)]


def test_an_instance_with_a_way_of_its_own():
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].state_dict = lambda *args, **kwargs: {}
    state = ModelState(model)
    state()
    assert not walks(state)


def test_a_model_that_is_gone_is_not_held_on_to():
    model = nn.Sequential(Odd())
    state = ModelState(model)
    state()
    weight = weakref.ref(model[0].bare.weight)
    model[0].bare = nn.Linear(3, 3)
    state()
    gc.collect()
    assert weight() is None
