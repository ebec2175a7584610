"""Elements that share memory, or are negated on the way, get the values they are to have."""

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from unit_fakes import bits

from outlast.checkpoint.tensors import holds, lay, overlaps
from thorough import examples

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.complex128)


@st.composite
def layouts(draw):
    axes = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=3))
    return [size for size, _ in axes], [stride for _, stride in axes]


def laid_out(shape, strides, dtype, offset=2):
    size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n)
    memory = (torch.arange(size + offset) % 7).to(dtype)
    return memory.as_strided(shape, strides, offset)


def places(shape, strides):
    return [
        sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    ]


@given(layout=layouts())
@examples(200)
def test_it_is_told_whether_elements_share_memory(layout):
    found = places(*layout)
    if len(set(found)) < len(found):
        assert overlaps(laid_out(*layout, torch.float32))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4),
        torch.zeros(3, 4).T,
        torch.zeros(5, 4)[::2, 1:3],
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(1, 4).expand(1, 4),
        torch.zeros(0).expand(3, 0),
        torch.zeros(()),
    ],
)
def test_ordinary_tensors_do_not(tensor):
    assert not overlaps(tensor)


@given(layout=layouts(), dtype=st.sampled_from(DTYPES), how=st.sampled_from(["", "neg", "conj"]))
@examples(200)
def test_what_was_saved_of_such_a_tensor_is_what_it_holds(layout, dtype, how):
    def made():
        one = laid_out(*layout, dtype)
        if how == "neg" and dtype != torch.bool:
            return torch._neg_view(one)
        return one.conj() if how == "conj" else one

    other, target = made(), made()
    wanted = bits(other)
    with torch.no_grad():
        memory = target.untyped_storage()
        before = bytes(memory)
        for at in range(2 * dtype.itemsize, len(memory)):
            memory[at] = 0
    assert lay(torch.empty(other.shape, dtype=dtype).copy_(other), target)
    assert bits(target) == wanted
    assert bytes(memory)[: 2 * dtype.itemsize] == before[: 2 * dtype.itemsize]  # is not its own


def test_several_values_for_one_place_are_not_held():
    assert not lay(torch.tensor([1.0, 2.0]), torch.zeros(1).expand(2))
    windows = torch.zeros(4).as_strided((2, 3), (1, 1))
    assert not lay(torch.arange(6.0).view(2, 3), windows)
    assert lay(torch.tensor([[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]), windows)


def test_equal_means_to_the_bit():
    nan = torch.tensor([float("nan"), -0.0])
    assert holds(nan, nan.clone())
    assert not holds(nan, torch.tensor([float("nan"), 0.0]))
    assert holds(
        torch.complex(nan, nan).to(torch.complex128), torch.complex(nan, nan).to(torch.complex128)
    )
