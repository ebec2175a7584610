"""A job with tensor subclasses in its state: interrupted, it ends as the undisturbed run does.

torchao's optimizers and quantized weights are tried where torchao is installed.
"""

import copy
import functools

import pytest
import torch
from lazy_cases import InPairs
from lazy_watch import _job  # noqa: F401 - a fixture
from state_bits import difference
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import outlast
from outlast.checkpoint.tree import flatten
from outlast.errors import ConfigError


def pairs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8))
    pair = TwoTensor(torch.randn(8, 8), torch.randn(8, 8))
    model.register_parameter("frozen", nn.Parameter(pair, requires_grad=False))
    return model, InPairs(p for p in model.parameters() if p.requires_grad)


def low_bit(name):
    """One of torchao's optimizers; its state is quantized from 4,096 elements on."""
    optim = pytest.importorskip("torchao.optim", exc_type=ImportError)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))
    return model, getattr(optim, name)(model.parameters(), lr=0.01)


def quantized(name):
    """A frozen base model in torchao's weights, and a head that is trained."""
    quantization = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64)).requires_grad_(False)
    quantization.quantize_(base, getattr(quantization, name)())
    model = nn.Sequential(base, nn.Linear(64, 8))
    return model, torch.optim.AdamW(model[1].parameters(), lr=0.01)


# torch and torchao warn of each other.
pytestmark = pytest.mark.filterwarnings("default")
KINDS = {"pairs": pairs}
for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
    KINDS[name] = functools.partial(low_bit, name)
for name in ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig"):
    KINDS[name] = functools.partial(quantized, name)


def train(job, build, until):
    """Train up to a step; the state there, and whether it went on from a checkpoint."""
    model, optimizer = build()
    with outlast.session(dir=job, every="1 steps", model=model, optimizer=optimizer) as session:
        for number in session.steps(range(100), until=until):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            model(x).sub(x).square().mean().backward()
            optimizer.step()
    return {"model": plain(model), "optimizer": plain(optimizer)}, session.resumed


def plain(value):
    """A state as data and plain tensors: not all subclasses can be copied."""
    data, tensors = flatten(value.state_dict(), "")
    return {"data": data, **{name: tensor.detach().clone() for name, tensor in tensors.items()}}


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_run_ends_as_the_undisturbed_one(job, kind):
    expected, _ = train(job / "whole", KINDS[kind], 6)
    train(job / "two", KINDS[kind], 3)
    found, resumed = train(job / "two", KINDS[kind], 6)
    assert resumed
    assert not difference(expected, found)
    assert difference(expected, train(job / "other", KINDS[kind], 5)[0]), "it sees a difference"


class Opaque(torch.Tensor):
    """Nothing that could be saved."""

    @staticmethod
    def __new__(cls, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Opaque(args[0].shape)


def test_what_cannot_be_saved_is_refused_when_the_session_opens(job):
    model = nn.Linear(4, 4)
    model.register_buffer("of_nothing", Opaque((3,)))
    before = copy.deepcopy(model.weight)
    with (
        pytest.raises(ConfigError, match=r"model\.of_nothing is a Opaque, which has no memory"),
        outlast.session(dir=job, model=model),
    ):
        pass
    assert torch.equal(before, model.weight)
    assert not job.exists()
