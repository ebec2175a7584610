"""Reading a checkpoint back: what verifies comes back to the bit, what does not is named."""

import pytest
import torch
from unit_checkpoints import grid, read_flat, write
from unit_fakes import WatchedStorage, same, same_tensor
from unit_names import save_name

from outlast.checkpoint.reader import open_checkpoint
from outlast.storage import Directory
from whole_reads import load

STEP = save_name(7)
MANIFEST = f"{STEP}/manifest.json"


def state_of(rank, *, seed=0):
    """Replicated weights; batch-norm counters of its own on rank 1; random states of each rank."""
    generator = torch.Generator().manual_seed(seed)
    counters = torch.full((3,), 1.0 if rank != 1 else 5.0)
    return {
        "model": {
            "w": torch.rand(4, 3, generator=generator),
            "half": torch.ones(3, dtype=torch.bfloat16),
            "running": counters,
            "empty": torch.zeros(0, 2),
            "scalar": torch.tensor(1.5),
        },
        "optimizer": {"state": {"w": {"step": torch.tensor(7.0)}}, "lr": 0.1},
        "outlast": {"step": 7, "random": torch.arange(8, dtype=torch.uint8) + rank, "rank": rank},
    }


def save_all(storage, world_size, *, states=None, step=7):
    return write(storage, states or [state_of(rank) for rank in range(world_size)], step)


def loaded_state(storage, rank=0, step=7, **more):
    found = load(storage, step, rank=rank, **more)
    return {key: found.state(key) for key in found.data}


# --- what comes back -----------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_rank_gets_back_what_it_saved(tmp_path, world_size):
    save_all(Directory(tmp_path), world_size)
    for rank in range(world_size):
        assert same(state_of(rank), loaded_state(Directory(tmp_path), rank))
        assert same(state_of(rank), loaded_state(Directory(tmp_path), rank, everything=False))


@pytest.mark.parametrize("saved_by", [1, 2, 3])
@pytest.mark.parametrize("read_by", [1, 2, 5])
def test_another_number_of_ranks_reads_in_turn(tmp_path, saved_by, read_by):
    storage = Directory(tmp_path)
    save_all(storage, saved_by)
    for rank in range(read_by):
        found = load(storage, 7, rank=rank)
        assert found.source_rank == rank % saved_by
        assert same(state_of(rank % saved_by)["model"], found.state("model"))


def test_a_tensor_in_many_chunks_of_many_files_is_put_together(tmp_path):
    whole = torch.arange(60.0).view(6, 10)
    states = [{"m": {"w": whole}}] * 3
    write(Directory(tmp_path), states, cut=lambda name, tensor: grid((0, 1, 4, 6), (0, 3, 10)))
    entry = read_flat(Directory(tmp_path), 7).tensors["m.w"]
    assert len({chunk.file for chunk in entry.chunks}) == 3
    for rank in range(3):
        assert same_tensor(whole, load(Directory(tmp_path), 7, rank=rank).tensor("m.w"))


def test_a_key_that_was_not_saved(tmp_path):
    save_all(Directory(tmp_path), 1)
    with pytest.raises(KeyError):
        load(Directory(tmp_path), 7).state("scheduler")


def test_what_was_read_is_not_read_again(tmp_path):
    save_all(Directory(tmp_path), 1)
    storage = WatchedStorage(Directory(tmp_path))
    checkpoint = load(storage, 7)
    storage.log.clear()
    first = checkpoint.state("model")["w"]
    assert checkpoint.state("model")["w"] is first is checkpoint.tensor("model.w")
    assert storage.log == []


def test_opening_reads_no_tensor(tmp_path):
    save_all(Directory(tmp_path), 1)
    storage = WatchedStorage(Directory(tmp_path))
    checkpoint = open_checkpoint(storage, 7)
    assert checkpoint.outline("model")["w"].shape == (4, 3)
    assert [name for did, name in storage.log if did == "open"] == [f"{STEP}/rank-00000.json"]
