"""A state flattened again is what it would be flattened for the first time."""

import collections

import pytest
import torch

from outlast.checkpoint.plan import structure
from outlast.checkpoint.tree import Flattener, flatten
from outlast.errors import ConfigError


def model_state(**more):
    return collections.OrderedDict({"a.weight": torch.randn(2, 3), "a.bias": torch.randn(2)} | more)


def optimizer_state(**more):
    state = {name: {"step": torch.tensor(1.0), "exp_avg": torch.randn(2)} for name in ("p", "q")}
    return {"state": state | more, "param_groups": [{"lr": 0.1, "params": ["p", "q"]}]}


def same(found, state, name="m"):
    data, tensors = found
    expected_data, expected = flatten(state, name)
    assert data == expected_data
    assert list(tensors) == list(expected)
    for one, other in zip(tensors.values(), expected.values(), strict=True):
        assert one is other


@pytest.mark.parametrize("make", [model_state, optimizer_state])
def test_again_with_other_tensors(make):
    flattener = Flattener()
    for _ in range(3):
        state = make()
        same(flattener(state, "m"), state)


def test_small_state_is_always_that_of_now():
    flattener = Flattener()
    for step in range(3):
        state = optimizer_state()
        state["param_groups"][0]["lr"] = step
        same(flattener(state, "m"), state)


OTHER = {
    "another key": lambda: model_state(more=torch.zeros(1)),
    "fewer keys": lambda: collections.OrderedDict([("a.weight", torch.zeros(2, 3))]),
    "another order": lambda: collections.OrderedDict(reversed(model_state().items())),
    "another kind of dict": lambda: dict(model_state()),
    "a number in place of a tensor": lambda: model_state(**{"a.bias": 3}),
    "an optimizer's": optimizer_state,
    "a row more": lambda: optimizer_state(r={"step": torch.zeros(())}),
    "a slot more": lambda: optimizer_state(q={"step": torch.zeros(()), "x": torch.zeros(1)}),
    "an empty row": lambda: optimizer_state(q={}),
    "a number in a row": lambda: optimizer_state(q={"step": 1, "exp_avg": torch.zeros(2)}),
    "a parameter": lambda: model_state(**{"a.bias": torch.nn.Parameter(torch.zeros(2))}),
    "nothing": dict,
}


@pytest.mark.parametrize("before", [model_state, optimizer_state])
@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_a_structure_that_changes(before, other):
    flattener = Flattener()
    flattener(before(), "m")
    for state in (other(), other(), before()):
        same(flattener(state, "m"), state)


def test_what_cannot_be_saved_is_refused_the_second_time_too():
    flattener = Flattener()
    flattener(model_state(), "m")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"m\.a\.bias is a torch.sparse_coo"):
            structure(flattener(model_state(**{"a.bias": torch.eye(2).to_sparse()}), "m")[1])


def test_names_that_collide_stay_apart():
    flattener = Flattener()
    for _ in range(2):
        state = {"a": {"b": torch.zeros(1)}, "a.b": {"c": torch.ones(1)}, "x": 1}
        state["a"]["b.c"] = torch.full((1,), 2.0)
        state = {"a": {"b.c": torch.zeros(1)}, "a.b": {"c": torch.ones(1)}}
        same(flattener(state, "m"), state)
