"""DTensors in one process: a group whose collectives do nothing, one rank's view at a time."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from unit_fakes import same_tensor

from outlast.checkpoint.load import fresh
from outlast.checkpoint.tensors import is_spread, local_chunks
from outlast.checkpoint.tree import flatten
from outlast.errors import ConfigError


@contextlib.contextmanager
def as_rank(rank, *mesh):
    """This process as one rank of a mesh."""
    size = 1
    for extent in mesh:
        size *= extent
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", mesh)
    finally:
        dist.destroy_process_group()


def held(tensor, mesh, placements):
    """The DTensor that a rank holds of a tensor, cut by torch."""
    local = tensor
    for axis in [*range(mesh.ndim)]:
        placement = placements[axis]
        if not placement.is_replicate():
            parts, _ = placement._split_tensor(local, mesh.size(axis), with_padding=False)
            local = parts[mesh.get_coordinate()[axis]]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((3,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((7,), [Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 3), [Shard(0), Shard(0)]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        ((3,), [_StridedShard(0, split_factor=2)]),
        ((2, 2), [_StridedShard(1, split_factor=3), Shard(0)]),
    ],
    ids=str,
)
def test_the_pieces_of_all_ranks_are_the_tensor(mesh, placements):
    """Uneven, empty, strided: each piece is where it says, and nothing is missing."""
    tensor = torch.arange(30.0).view(5, 6)
    seen = torch.zeros(5, 6)
    for rank in range(torch.Size(mesh).numel()):
        with as_rank(rank, *mesh) as whole:
            spread = held(tensor, whole, placements)
            chunks = local_chunks(spread)
            assert sum(view.numel() for *_, view in chunks) == spread.to_local().numel()
            for offsets, shape, view in chunks:
                where = tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))
                assert torch.equal(view, tensor[where])
                assert shape == tuple(view.shape)
                assert view.numel()
                seen[where] += 1
    copies = 2 if any(one.is_replicate() for one in placements) else 1
    assert torch.equal(seen, torch.full((5, 6), float(copies)))


def test_pieces_are_views_of_the_live_memory():
    with as_rank(1, 2) as mesh:
        spread = held(torch.zeros(5, 6), mesh, [Shard(0)])
        ((_, _, view),) = local_chunks(spread)
        view.fill_(7)
        assert bool((spread.to_local() == 7).all())


def test_a_tensor_without_elements_is_one_empty_piece():
    with as_rank(1, 2) as mesh:
        ((offsets, shape, view),) = local_chunks(held(torch.zeros(0, 6), mesh, [Shard(0)]))
        assert (offsets, shape, view.shape) == ((0, 0), (0, 6), (0, 6))


@pytest.mark.parametrize("column", [0, 1])
def test_a_piece_that_is_not_what_its_placements_say_is_refused(column):
    """Seven rows cut for two by tensor parallelism, then each for three by FSDP2.

    The last row of that mesh holds nothing and one row; torch says one row and nothing.
    """
    with as_rank(4 + column, 3, 2) as mesh:
        local = torch.tensor([6.0] * column)
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        spread = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=(7,), stride=(1,)
        )
        with pytest.raises(ConfigError, match=r"of shape \(7,\) is spread as .* divisible"):
            local_chunks(spread)


def test_terms_of_a_sum_are_refused_by_their_path():
    with as_rank(0, 2) as mesh:
        spread = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(ConfigError, match=r"model\.w is spread .* terms of a sum"):
            flatten({"w": spread}, "model")
        with pytest.raises(ConfigError, match="terms of a sum"):
            local_chunks(spread)


def test_a_spread_tensor_stays_one_in_a_state_tree():
    with as_rank(0, 2) as mesh:
        spread = held(torch.arange(6.0), mesh, [Shard(0)])
        data, tensors = flatten({"w": torch.nn.Parameter(spread)}, "model")
        assert data == {"w": {"$": "tensor", "name": "model.w"}}
        assert is_spread(tensors["model.w"])
        assert tuple(tensors["model.w"].shape) == (6,)


def test_new_memory_is_spread_as_what_it_is_like():
    with as_rank(1, 2) as mesh:
        like = held(torch.arange(10.0).view(5, 2), mesh, [Shard(0)])
        made = fresh((5, 2), torch.float64, like)
        assert made.placements == like.placements
        assert (made.shape, made.stride(), made.dtype) == ((5, 2), (2, 1), torch.float64)
        assert same_tensor(torch.zeros(2, 2).double(), made.to_local().zero_())
