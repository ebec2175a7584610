"""State that survivors hold, given to the objects of the next attempt."""

import pytest
import torch
from torch import nn

from outlast.checkpoint.tree import flatten, unflatten
from outlast.errors import StateMismatch
from outlast.script.objects import Objects


class Counter:
    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def objects(seed, width=3):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    counter = Counter()
    for _ in range(seed):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
        counter.value += 1
    return Objects(
        {"model": model, "optimizer": optimizer, "scheduler": scheduler, "counter": counter}
    )


def state_of(one):
    """As it comes over the wire: through data and tensors."""
    found = {}
    for key, value in one.capture().items():
        data, tensors = flatten(value, key)
        found[key] = unflatten(data, {name: t.detach().clone() for name, t in tensors.items()})
    return found


def bits(one):
    found = {}
    for key, value in one.capture().items():
        data, tensors = flatten(value, key)
        found[key] = data, {name: tensor.tolist() for name, tensor in tensors.items()}
    return found


def test_all_of_it_is_that_of_the_survivor():
    survivor, fresh = objects(4), objects(0)
    fresh.put(state_of(survivor))
    assert bits(fresh) == bits(survivor)


def test_an_optimizer_that_has_stepped_takes_it_too():
    survivor, behind = objects(4), objects(3)
    behind.put(state_of(survivor))
    assert bits(behind) == bits(survivor)


def test_what_does_not_fit_is_said_in_words():
    with pytest.raises(StateMismatch, match="model does not take its state"):
        objects(0, width=4).put(state_of(objects(1)))


def test_what_was_not_kept_is_left_alone():
    one = objects(2)
    before = bits(one)
    one.put({})
    assert bits(one) == before
