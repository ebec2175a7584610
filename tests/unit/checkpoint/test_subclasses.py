"""Tensor subclasses are taken apart into tensors and data, and come back as what they were."""

import dataclasses
import enum
import json
from typing import NamedTuple

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from unit_checkpoints import write
from unit_fakes import bits

from outlast.checkpoint import tensors
from outlast.checkpoint.load import open_checkpoint
from outlast.checkpoint.plan import structure
from outlast.checkpoint.tensors import put_together, take_apart
from outlast.checkpoint.tree import flatten, names_in_parts, tensor_names, unflatten
from outlast.errors import ConfigError, StateMismatch
from outlast.storage import Directory
from outlast.training.objects import Objects


class Grain(enum.Enum):
    ROW = "row"
    BLOCK = "block"


@dataclasses.dataclass(frozen=True)
class Layout:
    block: tuple[int, ...]
    grain: Grain


class Limits(NamedTuple):
    low: int
    high: int


class Quantized(torch.Tensor):
    """As torchao's: codes and a scale, and settings of several kinds; no memory of its own."""

    @staticmethod
    def __new__(cls, codes, scale, settings):
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scale.dtype, device=codes.device
        )

    def __init__(self, codes, scale, settings):
        self.codes, self.scale, self.settings = codes, scale, settings

    def __tensor_flatten__(self):
        return ["codes", "scale"], self.settings

    @classmethod
    def __tensor_unflatten__(cls, inner, settings, shape, strides):
        return cls(inner["codes"], inner["scale"], settings)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            one = args[0]
            return cls(one.codes.detach(), one.scale.detach(), one.settings)
        raise NotImplementedError(str(func))


class Bare(torch.Tensor):
    """Without memory, and without a word on what it is made of."""

    @staticmethod
    def __new__(cls, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(str(func))


SETTINGS = [Layout((1, 8), Grain.ROW), Limits(-8, 7), torch.float32, None, {"signed": True}]


def two(seed=0):
    torch.manual_seed(seed)
    return TwoTensor(torch.randn(4, 6), torch.randn(4, 6))


def quantized(seed=0, settings=None):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 255, (4, 8), dtype=torch.uint8, generator=generator)
    return Quantized(codes, torch.rand(4, generator=generator), settings or SETTINGS)


KINDS = {
    "two": two,
    "quantized": quantized,
    "quantized by others": lambda seed=0: quantized(seed, [True, torch.Size([4, 8])]),
    "one in another": lambda seed=0: TwoTensor(two(seed), two(seed + 1)),
    "a parameter": lambda seed=0: torch.nn.Parameter(two(seed)),
    "without elements": lambda _=0: TwoTensor(torch.empty(0, 3), torch.empty(0, 3)),
}


def plain(tensor):
    """Everything that makes a tensor what it is, as plain values."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return type(tensor), tensor.dtype, tuple(tensor.shape), bits(tensor)
    names, settings = tensor.__tensor_flatten__()
    inner = {name: plain(getattr(tensor, name)) for name in names}
    return type(tensor), tensor.dtype, tuple(tensor.shape), settings, inner


@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_back_as_what_it_was(kind):
    tensor = KINDS[kind]()
    data, tensors = flatten({"state": [tensor, 3]}, "o")
    assert {type(one) for one in tensors.values()} <= {torch.Tensor, torch.nn.Parameter}
    assert set(tensor_names(data)) == set(names_in_parts(data)) == set(tensors)
    structure(tensors)
    found = unflatten(json.loads(json.dumps(data)), tensors)
    assert found["state"][1] == 3
    assert plain(found["state"][0]) == plain(tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_filled_where_it_lies(tmp_path, kind):
    def model(seed):
        made = torch.nn.Module()
        made.weight = torch.nn.Parameter(KINDS[kind](seed), requires_grad=False)
        made.bias = torch.nn.Parameter(torch.full((3,), float(seed)))
        return made

    saved, live = model(1), model(2)
    write(Directory(tmp_path), [Objects({"m": saved}).capture() | {"outlast": {"step": 7}}])
    weight, memory = live.weight, [one.data_ptr() for one in tensors.memories(live.weight)]
    Objects({"m": live}).apply(open_checkpoint(Directory(tmp_path), 7))
    assert live.weight is weight
    assert [one.data_ptr() for one in tensors.memories(weight)] == memory
    assert plain(weight) == plain(saved.weight)
    assert torch.equal(live.bias, saved.bias)


class Eight(torch.optim.SGD):
    """An optimizer with a state of a subclass."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                self.state[parameter].setdefault("codes", quantized(number))


@pytest.mark.parametrize("has_stepped", [False, True])
def test_an_optimizers_state_comes_back(tmp_path, has_stepped):
    model = torch.nn.Linear(3, 3)
    before = Eight(model.parameters(), lr=1.0)
    before.step()
    for state in before.state.values():
        state["codes"].codes.add_(1)
    saved = Objects({"m": model, "o": before}).capture()
    write(Directory(tmp_path), [saved | {"outlast": {"step": 7}}])
    after = Eight(model.parameters(), lr=1.0)
    if has_stepped:
        after.step()
    Objects({"m": model, "o": after}).apply(open_checkpoint(Directory(tmp_path), 7))
    for parameter in model.parameters():
        assert plain(after.state[parameter]["codes"]) == plain(before.state[parameter]["codes"])


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        (two, lambda: torch.zeros(4, 6), "was a TwoTensor and is a plain tensor now"),
        (lambda: torch.zeros(4, 6), two, "was a plain tensor and is a TwoTensor now"),
        (quantized, two, "two_tensor:TwoTensor now"),
        (quantized, lambda: quantized(0, [True]), "had settings"),
        (two, lambda: TwoTensor(torch.ones(4, 7), torch.ones(4, 7)), "had shape (4, 6)"),
    ],
)
def test_another_kind_in_its_place_is_refused(tmp_path, then, now, words):
    def model(tensor):
        made = torch.nn.Module()
        made.weight = torch.nn.Parameter(tensor, requires_grad=False)
        return made

    saved = Objects({"m": model(then())}).capture()
    write(Directory(tmp_path), [saved | {"outlast": {"step": 7}}])
    with pytest.raises(StateMismatch, match=r"m\.weight .*; build the model as it was") as caught:
        Objects({"m": model(now())}).check(open_checkpoint(Directory(tmp_path), 7))
    assert words in str(caught.value)


def jagged():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Bare((3, 4)), "o.state is a Bare, which has no memory of its own and no __tensor"),
        (lambda: quantized(0, {"of": object()}), "o.state is a Quantized whose settings hold a"),
        (lambda: quantized(0, [torch.ones(2)]), "whose settings hold a torch:Tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "o.state is a "),
        (jagged, "o.state is a NestedTensor of a shape that is no numbers"),
        (lambda: TwoTensor(Bare((3,)), Bare((3,))), "o.state.a is a Bare"),
        (lambda: TwoTensor(*torch.ones(2, 3).to_sparse().unbind()), "o.state.a is a torch.sparse"),
        (lambda: torch.ones(2, dtype=torch.complex128), "o.state has dtype torch.complex128"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused_by_name(make, words):
    with pytest.raises(ConfigError) as caught:
        flatten({"state": make()}, "o")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "os:path"}, "os:path is not loaded"),
        ({"kind": "builtins:dict"}, "builtins:dict is no class of tensors"),
        ({"kind": "torch:Tensor"}, "torch:Tensor cannot be put together"),
        ({"kind": "torch._tensor:Tensor"}, "is not loaded"),
        ({"kind": "torch.nn.parameter:Parameter"}, "cannot be put together"),
        ({"kind": "there.is:none"}, "there.is:none is not loaded; import there.is"),
        (
            {"settings": tensors.Described(("os:stat_result", "record", {}))},
            "not of the package",
        ),
        (
            {"settings": tensors.Described((f"{__name__}:quantized", "record", {}))},
            "is not loaded",
        ),
        (
            {"settings": tensors.Described((f"{__name__}:Quantized", "record", {}))},
            "is no record",
        ),
        ({"settings": tensors.Described((f"{__name__}:Layout", "enum", "x"))}, "is no enum"),
    ],
)
def test_nothing_is_imported_or_called_that_a_file_names(change, words):
    parts = dataclasses.replace(take_apart(quantized()), **change)
    with pytest.raises(ValueError, match=r".") as caught:
        put_together(parts)
    assert words in str(caught.value)
