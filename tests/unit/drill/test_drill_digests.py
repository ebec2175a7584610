"""Digests go by content, and odd objects hide a difference rather than invent one."""

import random

import numpy as np
import pytest
import torch

from outlast.drill.digests import UNREADABLE, digest_of, number_of, unseen


class Plain:
    def __init__(self, **values):
        self.__dict__.update(values)


class Odd:
    @property
    def __dict__(self):
        raise RuntimeError("ask me not")


ALIKE = [
    (torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 9.0], [2.0, 9.0]])[:, 0]),  # laid otherwise
    ({"a", "b", "c"}, {"c", "b", "a"}),
    (Plain(x=1), Plain(x=1)),
    (lambda: 1, lambda: 2),  # code is no state
    (random.Random(1), random.Random(1)),
    (torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)),
]
DIFFERENT = [
    (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
    (torch.zeros(2, 1), torch.zeros(1, 2)),
    (torch.tensor([0.0]), torch.tensor([-0.0])),
    (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
    (torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse()),
    (np.array([1, 2]), np.array([2, 1])),
    ([1, [2]], [1, [3]]),
    ({"a": 1}, {"a": 2}),
    (1, True),
    ("1", 1),
    (0.1, 0.1 + 2**-56),
    (Plain(x=1), Plain(x=2)),
    (random.Random(1), random.Random(2)),
    (np.random.default_rng(1), np.random.default_rng(2)),
    (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_what_has_the_same_content_has_the_same_digest(one, other):
    assert digest_of(one) == digest_of(other) != UNREADABLE


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_has_another_content_has_another_digest(one, other):
    assert digest_of(one) != digest_of(other)
    assert UNREADABLE not in (digest_of(one), digest_of(other))


def test_what_cannot_be_read_is_the_same_each_time():
    assert digest_of([Odd()]) == digest_of([Odd()]) == UNREADABLE
    endless = []
    endless.append(endless)
    assert digest_of(endless) == digest_of(endless)


def test_a_loss_is_its_bits():
    loss = torch.tensor(0.1, requires_grad=True)
    assert number_of(loss) == float(loss.detach()).hex()
    assert number_of(torch.tensor([1.0, 2.0])) == digest_of(torch.tensor([1.0, 2.0]))


def test_nothing_is_seen_of_it_and_nothing_drawn():
    weight = torch.nn.Parameter(torch.ones(3))
    before, version = torch.get_rng_state(), weight._version
    with unseen():
        digest_of([weight, weight * 2])
    assert torch.equal(torch.get_rng_state(), before)
    assert (weight._version, weight.grad) == (version, None)
