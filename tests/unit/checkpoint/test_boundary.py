"""Pieces that are used again are those of the tensors as they are now."""

import pytest
import torch

from outlast.checkpoint.capture import Capture, Remembered
from outlast.checkpoint.plan import Share, make, structure


class Saves:
    """One capture after the other into the same memory."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.plan = make(structure(tensors), 0, Share(), {})
        self.buffer = torch.zeros(self.plan.size, dtype=torch.uint8)
        self.remembered = Remembered()

    def begin(self, lazy=None):
        lazy = frozenset(self.tensors) if lazy is None else lazy
        made = Capture(
            self.plan,
            self.tensors,
            lazy,
            self.buffer,
            on_blocks=lambda _: None,
            remembered=self.remembered,
            again=self.remembered.again(self.plan, lazy, self.tensors),
        )
        made.take_now()
        return made

    def end(self, made):
        made.wait()
        made.let_go()
        return made.void

    def copied(self):
        found = {}
        for write in self.plan.writes:
            raw = self.buffer[write.start : write.end].clone()
            found[write.piece.name] = raw.view(write.dtype).view(write.piece.shape)
        return found

    def is_right(self):
        copied = self.copied()
        return all(torch.equal(copied[name], tensor) for name, tensor in self.tensors.items())


@pytest.fixture
def saves():
    torch.manual_seed(0)
    tensors = {f"t{number}": torch.randn(7, 7) for number in range(5)}
    return Saves(tensors | {"n": torch.arange(3)})


def used_again(saves):
    return saves.remembered.again(saves.plan, frozenset(saves.tensors), saves.tensors)


def test_again_and_again(saves):
    for turn in range(3):
        assert used_again(saves) == bool(turn)
        assert saves.end(saves.begin()) == []
        assert saves.is_right()
        for tensor in saves.tensors.values():
            tensor.add_(1)


def test_no_tensor_is_held_on_to(saves):
    saves.end(saves.begin())
    for source in saves.remembered.sources:
        assert source.tensor.numel() == 0


@pytest.mark.parametrize("past_the_counter", [False, True])
def test_a_change_under_the_second_copy_is_seen(saves, past_the_counter):
    saves.end(saves.begin())
    made = saves.begin()
    tensor = saves.tensors["t3"]
    (tensor.data if past_the_counter else tensor).add_(1)
    assert set(saves.end(made)) == {"t3"}


def test_a_change_between_two_captures_is_none(saves):
    saves.end(saves.begin())
    saves.tensors["t3"].data.add_(1)
    assert saves.end(saves.begin()) == []
    assert saves.is_right()


MOVES = {
    "another tensor": lambda tensor: tensor.clone(),
    "transposed where it lies": lambda tensor: tensor.t(),
    "a sparse one": lambda tensor: tensor.to_sparse(),
    "one without memory": lambda tensor: tensor.to("meta"),
    "shorter where it lies": lambda tensor: tensor[:3],
}
KINDS = {
    "of another dtype": lambda tensor: tensor.view(torch.int32),
    "of another shape": lambda tensor: tensor.view(49),
    "negated": torch._neg_view,
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_tensor_that_lies_otherwise_is_not_taken_for_what_it_was(saves, move):
    saves.end(saves.begin())
    saves.tensors["t2"] = move(saves.tensors["t2"])
    assert not used_again(saves)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_tensor_that_became_something_else_where_it_lies_is_found(saves, kind):
    saves.end(saves.begin())
    saves.buffer.zero_()
    saves.tensors["t2"] = kind(saves.tensors["t2"]).detach()  # that alone: no view of another
    made = saves.begin()
    saves.end(made)
    assert made.moved == ["t2"]
    assert not saves.copied()["t0"].any()  # nothing is copied of what is not to be believed
    assert not used_again(saves)


@pytest.mark.parametrize("move", [torch.clone, torch.t], ids=["clone", "transposed"])
def test_what_lies_otherwise_is_copied_all_the_same(saves, move):
    saves.end(saves.begin())
    saves.tensors["t2"] = move(saves.tensors["t2"])
    for _ in range(2):
        assert saves.end(saves.begin()) == []
        assert saves.is_right()


def test_with_other_names_nothing_is_used_again(saves):
    saves.end(saves.begin())
    assert used_again(saves)
    assert not saves.remembered.again(
        saves.plan, frozenset(saves.tensors), saves.tensors | {"more": torch.zeros(2)}
    )


def test_what_is_copied_at_once_must_be_what_it_was(saves):
    late = frozenset({"t0", "t1"})
    saves.end(saves.begin(late))
    assert saves.remembered.again(saves.plan, late, saves.tensors)
    changed = saves.tensors | {"n": saves.tensors["n"].int()}
    assert not saves.remembered.again(saves.plan, late, changed)


def test_what_is_copied_at_once_is_not_forgotten(saves):
    late = frozenset({"t0", "t1", "t2"})
    for _ in range(3):
        made = saves.begin(late)
        assert made.copied_at_once_bytes == 2 * 7 * 7 * 4 + 3 * 8
        assert saves.end(made) == []
        assert saves.is_right()
        for tensor in saves.tensors.values():
            tensor.add_(1)


def test_other_names_to_be_copied_later(saves):
    saves.end(saves.begin())
    for late in (frozenset({"t0", "t1"}), frozenset(), frozenset(saves.tensors)):
        assert saves.end(saves.begin(late)) == []
        assert saves.is_right()
        for tensor in saves.tensors.values():
            tensor.add_(1)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_is_copied_later_is_the_memory_of_the_boundary(saves, requires_grad):
    """Whoever moves state about assigns to ``data``; what lay there before is what is saved."""
    for tensor in list(saves.tensors.values())[:-1]:
        tensor.requires_grad_(requires_grad)
    for _ in range(3):
        before = {name: tensor.detach().clone() for name, tensor in saves.tensors.items()}
        made = saves.begin()
        for tensor in saves.tensors.values():
            tensor.data = torch.zeros_like(tensor)
        assert saves.end(made) == []
        copied = saves.copied()
        assert all(torch.equal(copied[name], tensor) for name, tensor in before.items())
        for name, tensor in saves.tensors.items():
            tensor.data = before[name] + 1


@pytest.mark.parametrize("shape", [(2,), (1 << 20,)])
def test_memory_of_the_boundary_is_not_given_back_while_it_is_copied(shape):
    tensors = {f"t{number}": torch.full((1 << 20,), float(number)) for number in range(3)}
    saves = Saves(tensors)
    for _ in range(3):
        made = saves.begin()
        for tensor in tensors.values():  # of 4 MB: what is given back is not there any more
            tensor.data = torch.ones(shape)
        assert saves.end(made) == []
        assert made.moved or all((saves.copied()[n] == float(n[1:])).all() for n in tensors)
        assert not made.moved or shape == (2,)
        for number, tensor in enumerate(tensors.values()):
            tensor.data = torch.full((1 << 20,), float(number))
