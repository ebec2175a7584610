"""Who has the same part of a state that is divided, and a part that is sent to another one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from outlast.inprocess.divided import WHOLE, dims_of, division_of, joined, local
from outlast.script.objects import Objects

RANK, WORLD = 3, 6


@pytest.fixture(name="group", autouse=True)
def _group():
    dist.init_process_group("fake", rank=RANK, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


def model_on(*sizes):
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 4))
    names = ("replicate", "shard")[-len(sizes) :]
    fully_shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    return Objects({"model": model})


def test_ranks_at_one_place_of_their_groups_are_twins():
    for sizes, twins in (((2, 3), {0, 3}), ((3, 2), {1, 3, 5})):
        division = division_of(model_on(*sizes))
        assert (division.part, division.twins) == (min(twins), twins)
        assert dist.get_process_group_ranks(division.group) == sorted(twins)
        assert not division.why_not


@pytest.mark.parametrize("sizes", [(6,), (1, 6)])
def test_a_part_that_one_worker_has_alone(sizes):
    assert "no other worker has the part" in division_of(model_on(*sizes)).why_not


def test_parts_of_several_kinds():
    mesh = init_device_mesh("cpu", (2, 3))
    model = nn.Linear(6, 6)
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 6), mesh, [Replicate(), Shard(0)]))
    model.bias = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Shard(0), Replicate()]))
    assert division_of(Objects({"model": model})).why_not


def test_a_whole_state_is_everybodys():
    assert division_of(Objects({"model": nn.Linear(2, 2)})) is WHOLE


def test_a_part_that_was_sent_is_what_it_was():
    division = division_of(model_on(2, 3))
    for whole in (torch.randn(7, 4), torch.randn(1, 4), torch.randn(5)):
        for placements in ([Replicate(), Shard(0)], [Replicate(), Replicate()]):
            mesh = division.like.device_mesh
            sent = DTensor.from_local(whole, mesh, placements, run_check=False)
            come = joined(local(sent).clone(), dims_of(sent), division)
            assert (come.shape, come.stride()) == (sent.shape, sent.stride())
            assert come.placements == sent.placements
            assert torch.equal(local(come), local(sent))
    assert joined(whole, dims_of(whole), division) is whole
