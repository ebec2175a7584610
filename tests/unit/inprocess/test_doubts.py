"""What a script's step has in it that costs steps at a loss is said once."""

import types

import pytest
import torch

from outlast.inprocess.interrupted import BODIES, LATE, NOTHING, WRITES, Doubts

SENT = types.SimpleNamespace(num_sent=0)  # the script's own collectives


def body(doubts, optimizer, *, behind=lambda weight: None, steps=True, sends=()):
    """One step of a script: what is said of it."""
    weight = optimizer.param_groups[0]["params"][0]
    doubts.begins()
    SENT.num_sent += "before" in sends
    weight.square().sum().backward()
    if steps:
        optimizer.step()
        doubts.stepped()
    optimizer.zero_grad()
    with torch.no_grad():
        behind(weight)
    SENT.num_sent += "behind" in sends
    return doubts.found() or doubts.kept(is_there=True)


@pytest.fixture(name="optimizer")
def _optimizer():
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])


@pytest.fixture(name="doubts")
def _doubts(optimizer):
    return Doubts(lambda: [optimizer], SENT)


def test_nothing_is_said_of_a_plain_step(doubts, optimizer):
    for number in range(2 * BODIES):
        assert not body(doubts, optimizer, steps=number % 2, sends=("before",))


@pytest.mark.parametrize("behind", [lambda w: w.mul_(0.9), lambda w: w.clamp_(-1, 1)])
def test_weights_that_the_script_changes_itself(doubts, optimizer, behind):
    assert body(doubts, optimizer, behind=behind) == WRITES
    assert not body(doubts, optimizer, behind=behind)


def test_an_optimizer_of_nobodys_kind(doubts, optimizer):
    assert body(doubts, optimizer, behind=lambda w: w.sub_(0.1), steps=False) == WRITES


def test_a_collective_behind_the_step(doubts, optimizer):
    assert body(doubts, optimizer, sends=("before", "behind")) == LATE
    assert not body(doubts, optimizer, sends=("behind",))


def test_steps_without_an_end_that_can_be_gone_on_from(doubts, optimizer):
    said = []
    for _ in range(BODIES):
        doubts.begins()
        said.append(doubts.found() or doubts.kept(is_there=False))
    assert [one for one in said if one] == [NOTHING]


def test_later_steps_cost_nothing(doubts, optimizer):
    for _ in range(BODIES):
        body(doubts, optimizer)
    assert not body(doubts, optimizer, behind=lambda w: w.mul_(0.9))
