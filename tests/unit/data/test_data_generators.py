"""Generators of a script's own are found wherever they are held, and come back to the bit."""

import functools
import json
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from outlast.checkpoint.tree import flatten, unflatten
from outlast.data.generators import KEPT_MAX, Held

SHARED = np.random.default_rng(4)

KINDS = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "python": lambda: random.Random(3),
    "legacy": lambda: np.random.RandomState(3),
    **{
        name: lambda name=name: np.random.Generator(getattr(np.random, name)(3))
        for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
    },
}


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.randn(3, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.random(), generator.gauss(0, 1)]
    return [float(generator.standard_normal()) for _ in range(3)] + [generator.bytes(5)]


def through_a_checkpoint(state):
    data, tensors = flatten(state, "held")
    return unflatten(json.loads(json.dumps(data)), tensors)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_draws", [0, 1, 5])
def test_each_kind_comes_back_to_the_bit(kind, num_draws):
    one, other = KINDS[kind](), KINDS[kind]()
    held = Held([("one", one)])
    for _ in range(num_draws):
        draw(one)
    state = through_a_checkpoint(held.state())
    wanted = [draw(one) for _ in range(4)]
    assert Held([("one", other)]).restore(state) == []
    assert [draw(other) for _ in range(4)] == wanted


class Slotted:
    __slots__ = ("rng",)

    def __init__(self, rng):
        self.rng = rng


class Refuses:
    """Raises for whatever it is asked, as stand-ins of libraries do."""

    __slots__ = ("rng",)

    def __init__(self, rng):
        self.rng = rng

    def __getattr__(self, name):
        raise RuntimeError(f"not to be asked for {name}")


class OfItsClass:
    rng = np.random.default_rng(8)


class Dataset:
    def __init__(self, **held):
        self.__dict__.update(held)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index + SHARED.random()


class Quiet:
    """Holds something."""

    def __init__(self, **held):
        self.__dict__.update(held)

    def __getitem__(self, index):
        return index


def closed_over(rng):
    return lambda items: [items, rng.random()]


def generating(rng):
    yield rng.random()
    yield rng.random()


def holders(rng):
    """Each as a script would hold ``rng``."""
    return {
        "attribute": Quiet(rng=rng),
        "dictionary": Quiet(inner={"a": [1, {"rng": rng}]}),
        "slots": Quiet(inner=Slotted(rng)),
        "refuses": Quiet(inner=Refuses(rng)),
        "partial": Quiet(transform=functools.partial(max, rng)),
        "closure": DataLoader([1, 2], collate_fn=closed_over(rng)),
        "bound": Quiet(shuffle=rng.random),
        "default": Quiet(transform=lambda x, rng=rng: rng.random() + x),
        "frame": generating(rng),
        "wrapped": enumerate(map(max, zip(generating(rng), [1], strict=False))),
    }


@pytest.mark.parametrize("holder", holders(random.Random(1)))
def test_it_is_found_wherever_it_is_held(holder):
    rng = np.random.default_rng(1)
    held = Held([("loader", holders(rng)[holder])])
    assert [one is rng.bit_generator for _, one in held.items()] == [True]


def test_those_of_classes_functions_and_samplers_are_found():
    generator = torch.Generator()
    sampler = RandomSampler(range(4), generator=generator)
    loader = DataLoader(Dataset(inner=OfItsClass()), sampler=sampler, generator=generator)
    assert sorted(dict(Held([("loader", loader)]).items())) == [
        "loader.dataset.__getitem__.SHARED",
        "loader.dataset.inner.rng",
        "loader.generator",
    ]


def test_global_streams_are_not_taken_for_the_scripts_own():
    used = [random.random, np.random.rand, torch.default_generator, random.SystemRandom()]
    assert Held([("used", used), ("np", np.random)]).items() == []


def test_one_that_is_gone_is_told_if_it_had_moved():
    moved, still = random.Random(1), random.Random(2)
    held = Held([("moved", moved), ("still", still)])
    moved.random()
    state = through_a_checkpoint(held.state())
    assert Held([("other", random.Random())]).restore(state) == ["moved"]
    for other in (np.random.default_rng(), np.random.RandomState(), torch.Generator()):
        assert Held([("moved", other)]).restore(state) == ["moved"]


class Shadowed:
    rng = np.random.default_rng(8)

    def __init__(self):
        self.rng = np.random.default_rng(1)


def test_an_object_s_own_is_kept_beside_its_class_s_of_the_same_name():
    one = Shadowed()
    held = Held([("one", one)])
    assert [bits for _, bits in held.items()] == [
        one.rng.bit_generator,
        Shadowed.rng.bit_generator,
    ]
    state = through_a_checkpoint(held.state())
    wanted = [one.rng.random(), Shadowed.rng.random()]
    assert held.restore(state) == []
    assert [one.rng.random(), Shadowed.rng.random()] == wanted


def test_looking_has_an_end():
    ring = []
    ring.append(ring)
    wide = [[object() for _ in range(200)] for _ in range(200)]
    many = [random.Random(n) for n in range(100)]
    held = Held([("ring", ring), ("wide", wide), ("many", many)])
    assert len(held.items()) == KEPT_MAX
