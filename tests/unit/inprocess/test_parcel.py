"""Small state as bytes for another process."""

import pytest
import torch

from outlast.data import random_state
from outlast.errors import ConfigError
from outlast.inprocess.living import Packer, unpack


def pack(value, name):
    return Packer(name).pack(value)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6).reshape(2, 3),
        torch.tensor(1.5),
        torch.zeros(0, 4),
        torch.randn(3, 3).t(),
        torch.tensor([True, False]),
        torch.randn(4).bfloat16(),
        torch._neg_view(torch.randn(4)),
        torch.randn(4, dtype=torch.complex64).conj(),
    ],
    ids=["matrix", "scalar", "empty", "transposed", "bool", "bfloat16", "negated", "conjugated"],
)
def test_tensors_come_back_to_the_bit(value):
    found = unpack(pack({"one": value}, "x"))["one"]
    assert found.dtype == value.dtype
    assert torch.equal(found, value)


def test_data_comes_back():
    value = {"a": {"b": (1, 2.5, None), 3: [b"bytes", {"x"}]}, "inf": float("inf")}
    assert unpack(pack(value, "x")) == value


def test_random_numbers_go_on_where_they_were():
    parcel = pack(random_state.capture(), "x")
    expected = torch.rand(3)
    random_state.restore(unpack(parcel))
    assert torch.equal(torch.rand(3), expected)


def test_what_is_known_is_looked_through_once():
    packer = Packer("x", plain=["step"])
    same = {"words": torch.arange(3)}
    first = packer.pack({"step": 1, "random": same, "held": [torch.zeros(2)]})
    assert packer.pack({"step": 1, "random": same, "held": [torch.zeros(2)]}) == first
    for state in (
        {"step": 2, "random": same, "held": [torch.zeros(2)]},
        {"step": 2, "random": {"words": torch.arange(4)}, "held": [torch.ones(2)]},
        {"step": 2, "random": same},
    ):
        packed = packer.pack(state)
        assert packed == pack(state, "x")
        assert packer.pack(dict(state)) is packed


def test_what_is_no_data_is_refused():
    with pytest.raises(ConfigError, match=r"x\.a"):
        pack({"a": object()}, "x")
