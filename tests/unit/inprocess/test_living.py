"""The state at a step's end, in the process that has it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from outlast.attempt.beat import Descent
from outlast.checkpoint.plan import OWN
from outlast.checkpoint.tree import flatten
from outlast.inprocess import living
from outlast.inprocess.living import Moment
from outlast.inprocess.looks import of_all
from outlast.script.objects import BoundaryState, Lazy, Objects

LINK = SimpleNamespace(rank=1, world_size=4)


class Setup:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.objects = Objects({"model": self.model, "optimizer": self.optimizer})
        self.train()

    def train(self):
        self.model(torch.randn(5, 3)).sum().backward()
        self.optimizer.step()

    def state(self, step=1):
        data, tensors = {}, {}
        for key, value in {**self.objects.capture(), OWN: {"step": step}}.items():
            data[key], found = flatten(value, key)
            tensors |= found
        lazy = Lazy(self.objects.stateful, tensors)
        return BoundaryState(
            step=step, data=data, tensors=tensors, lazy=lazy.names, order=lazy.order
        )

    def moment(self, step=1):
        return self.settled(Moment(Descent(3, 3, 4), LINK, step, of_all(self.state(step)), b""))

    def settled(self, moment):
        moment.settle(self.state)
        return moment


@pytest.fixture(name="setup")
def _setup():
    yield Setup()
    living.forget()


def test_it_is_whole_until_an_optimizer_steps(setup):
    moment = setup.moment()
    setup.model(torch.randn(5, 3)).sum().backward()  # changes running statistics, and no weights
    assert moment.is_whole
    setup.optimizer.step()
    assert not moment.is_whole


def test_a_weight_that_something_else_writes_to_is_noticed(setup):
    moment = setup.moment()
    with torch.no_grad():
        setup.model[0].bias.clamp_(0)
    assert not moment.is_whole


def test_a_weight_that_was_replaced_is_noticed(setup):
    moment = setup.moment()
    setup.model[0].weight.data = torch.zeros(3, 3)
    assert not moment.is_whole


def test_what_changes_within_a_step_is_that_of_its_end(setup):
    moment = setup.moment()
    before = setup.model[1].running_mean.clone()
    setup.model(torch.randn(5, 3))
    assert torch.equal(moment.tensors["model.1.running_mean"], before)
    assert not torch.equal(setup.model[1].running_mean, before)


def test_weights_are_not_copied(setup):
    weight = setup.model[0].weight
    assert setup.moment().tensors["model.0.weight"].data_ptr() == weight.data_ptr()


def test_equal_states_have_equal_digests_whoever_has_them(setup):
    other = Setup()
    assert setup.moment().digest() == other.moment().digest()
    assert setup.moment(1).rest == other.moment(2).rest  # what is a rank's own is not in it
    other.model(torch.randn(5, 3))
    assert setup.moment().rest != other.moment().rest
    assert setup.moment().digest() != other.moment().digest()


def test_a_torn_state_is_offered_to_nobody(setup):
    living.deposit(setup.moment(7))
    assert living.kept_step() == 7
    setup.train()
    assert living.kept() is None
    assert living.kept_step() is None


def test_what_an_optimizer_has_begun_to_change_is_not_whole_whatever_the_counters_say(setup):
    moment = setup.moment()
    moment.spoil()
    setup.model[0].bias.data.add_(1)  # as many optimizers write
    assert not moment.is_whole
