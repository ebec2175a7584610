"""Reading a checkpoint back: what verifies comes back to the bit, what does not is named."""

import msgspec
import pytest
import torch
from unit_checkpoints import grid, write
from unit_fakes import WatchedStorage, same, same_tensor

from outlast.checkpoint import blocks as blocks_room
from outlast.checkpoint import copies as copies_room
from outlast.checkpoint import manifest as manifest_room
from outlast.checkpoint.load import load, open_checkpoint, read_manifest, verify
from outlast.checkpoint.manifest import encode
from outlast.errors import CheckpointInvalid
from outlast.storage import Directory

STEP = "step-000000000007"
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
    entry = read_manifest(Directory(tmp_path), 7).tensors["m.w"]
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


# --- damage --------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of two ranks."""
    save_all(Directory(tmp_path), 2)
    return tmp_path


FILES = [
    "rank-00000.json",
    "rank-00000.safetensors",
    "rank-00001.json",
    "rank-00001.safetensors",
    "manifest.json",
]
READERS = {
    "load": lambda path: load(Directory(path), 7),
    "load_rank_1": lambda path: load(Directory(path), 7, rank=1),
    "verify": lambda path: verify(Directory(path), 7),
}


def reasons(path):
    found = []
    for read in READERS.values():
        with pytest.raises(CheckpointInvalid) as caught:
            read(path)
        assert caught.value.step == 7
        found.append(caught.value.reason)
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_anywhere_is_found_and_the_file_named(saved, name):
    path = saved / STEP / name
    whole = path.read_bytes()
    for place in {0, 7, len(whole) // 3, len(whole) // 2, len(whole) - 2, len(whole) - 1}:
        altered = bytearray(whole)
        altered[place] ^= 0x01
        path.write_bytes(altered)
        for reason in reasons(saved):
            assert name in reason or "format" in reason
    path.write_bytes(whole)
    verify(Directory(saved), 7)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_found_and_named(saved, name):
    path = saved / STEP / name
    whole = path.read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert all(name in reason for reason in reasons(saved))
    if name != "manifest.json":
        path.write_bytes(whole + b"x")
        size = len(whole)
        assert f"{name} has {size + 1} bytes and should have {size}" in reasons(saved)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found_and_named(saved, name):
    path = saved / STEP / name
    path.unlink()
    assert set(reasons(saved)) == {f"{name} is missing"}
    path.mkdir()
    assert all(name in reason for reason in reasons(saved))


def test_no_directory_at_all(tmp_path):
    with pytest.raises(CheckpointInvalid, match=r"step 7 is not valid: manifest\.json is missing"):
        load(Directory(tmp_path), 7)


def test_the_manifest_of_another_step_is_refused(saved):
    (saved / STEP).rename(saved / "step-000000000008")
    with pytest.raises(CheckpointInvalid, match="that of step 7"):
        load(Directory(saved), 8)


def test_files_of_another_save_are_refused(saved, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    save_all(Directory(other), 2, states=[state_of(rank, seed=1) for rank in range(2)])
    path = f"{STEP}/rank-00000.safetensors"
    (saved / path).write_bytes((other / path).read_bytes())
    assert all("does not match its checksum" in reason for reason in reasons(saved))


def test_a_rank_alone_need_not_read_the_others(saved):
    (saved / STEP / "rank-00000.json").unlink()
    assert same(state_of(1), loaded_state(Directory(saved), 1, everything=False))
    (saved / STEP / "rank-00001.safetensors").unlink()
    with pytest.raises(CheckpointInvalid, match=r"rank-00001\.safetensors is missing"):
        load(Directory(saved), 7, rank=1, everything=False)


@pytest.mark.parametrize(
    "small",
    [
        b"",
        b"[]",
        b"{}",
        b"nonsense",
        b'{"state": {}, "own": 3}',
        b'{"state": {"a": {"$": "tensor", "name": "unknown"}}, "own": []}',
        b'{"state": {"a": {"$": "tensor"}}, "own": []}',
        b"\xff\xfe",
    ],
)
def test_small_state_that_is_not_understood_is_named(saved, small):
    """Somebody wrote another file and a manifest for it: hashes agree, the content does not."""
    storage = Directory(saved)
    manifest = read_manifest(storage, 7)
    entry = blocks_room.write_hashed(storage, f"{STEP}/rank-00000.json", [small])
    files = manifest.files | {"rank-00000.json": entry}
    storage.put(MANIFEST, encode(msgspec.structs.replace(manifest, files=files)))
    with pytest.raises(CheckpointInvalid, match=r"rank-00000\.json is not understood"):
        load(storage, 7)


def test_a_manifest_without_the_ranks_state_is_refused(saved):
    storage = Directory(saved)
    manifest = read_manifest(storage, 7)
    files = {name: e for name, e in manifest.files.items() if name != "rank-00001.json"}
    storage.put(MANIFEST, encode(msgspec.structs.replace(manifest, files=files)))
    with pytest.raises(CheckpointInvalid, match=r"does not name rank-00001\.json"):
        load(storage, 7, rank=1)


def test_a_storage_that_fails_is_not_a_checkpoint_that_is_invalid(saved):
    error = OSError(5, "Input/output error")
    for operation in ("read", "open"):
        storage = WatchedStorage(
            Directory(saved), lambda did, _, failing=operation: error if did == failing else None
        )
        with pytest.raises(OSError, match="Input/output") as caught:
            load(storage, 7)
        assert caught.value is error


def test_verifying_tells_its_progress_and_ends_at_all(saved):
    told = []
    manifest = verify(Directory(saved), 7, lambda done, total: told.append((done, total)))
    total = sum(entry.size for entry in manifest.files.values())
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (total, total)
    assert len(told) == 4


def test_damage_beyond_the_first_block_is_found(tmp_path, monkeypatch):
    for room in (copies_room, manifest_room, blocks_room):
        monkeypatch.setattr(room, "BLOCK_BYTES", 1024)
    storage = Directory(tmp_path)
    save_all(storage, 1, states=[{"m": torch.arange(2000.0)}])
    path = tmp_path / STEP / "rank-00000.safetensors"
    whole = path.read_bytes()
    blocks = len(whole) // 1024 + 1
    assert len(read_manifest(storage, 7).files["rank-00000.safetensors"].xxh3_128) == blocks
    assert same_tensor(torch.arange(2000.0), load(storage, 7).state("m"))
    for block in range(blocks):
        altered = bytearray(whole)
        altered[block * 1024] ^= 0x80
        path.write_bytes(altered)
        for read in (lambda: load(storage, 7), lambda: verify(storage, 7)):
            with pytest.raises(CheckpointInvalid, match=rf"block {block} of {blocks}"):
                read()
