"""Saving across ranks in threads, and reading back: what is committed is whole, or is not there."""

import builtins
import json
import pickle

import msgspec
import pytest
import torch
from unit_fakes import Hub, WatchedStorage, on_ranks, same, same_tensor

from outlast.checkpoint import blocks as blocks_room
from outlast.checkpoint import load as load_room
from outlast.checkpoint import manifest as manifest_room
from outlast.checkpoint.load import load, read_manifest, verify
from outlast.checkpoint.manifest import decode, encode
from outlast.checkpoint.save import Captured, Saver
from outlast.checkpoint.snapshot import Arena
from outlast.checkpoint.tree import flatten
from outlast.errors import CheckpointInvalid, StorageError
from outlast.storage import Directory

STEP = "step-000000000007"
MANIFEST = f"{STEP}/manifest.json"


def captured(state, step=7):
    data, tensors = {}, {}
    for key, value in state.items():
        data[key], found = flatten(value, key)
        tensors |= found
    return Captured(step=step, data=data, snapshot=Arena().take(tensors))


def saver(storage, link, timeout_s=20.0, attempt=1):
    return Saver(storage, link, job="job", attempt=attempt, timeout_s=timeout_s)


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


def save_all(storage, world_size, *, states=None, hub=None, only=None, step=7, timeout_s=20.0):
    states = states or [state_of(rank) for rank in range(world_size)]
    return on_ranks(
        world_size,
        lambda link: saver(storage, link, timeout_s).save(captured(states[link.rank], step)),
        hub=hub,
        only=only,
    )


def loaded_state(storage, rank=0, step=7, **more):
    found = load(storage, step, rank=rank, **more)
    return {key: found.state(key) for key in found.data}


# --- what comes back -----------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_rank_gets_back_what_it_saved(tmp_path, world_size):
    storage = Directory(tmp_path)
    results = save_all(storage, world_size)
    assert [result.step for result in results] == [7] * world_size
    for rank in range(world_size):
        assert same(state_of(rank), loaded_state(storage, rank))
        assert same(state_of(rank), loaded_state(storage, rank, everything=False))
    found = verify(storage, 7)
    assert (found.world_size, found.layout) == (world_size, {"data_parallel": world_size})
    assert (found.job, found.attempt, found.step) == ("job", 1, 7)


def test_what_is_replicated_is_written_once_and_what_differs_is_a_ranks_own(tmp_path):
    save_all(Directory(tmp_path), 3)
    manifest = read_manifest(Directory(tmp_path), 7)
    names = set(manifest.tensors)
    assert {"model.w", "model.running", "optimizer.state.w.step"} <= names
    own = {name for name in names if "@" in name}
    assert own == {
        "model.running@rank-00001",
        "outlast.random@rank-00000",
        "outlast.random@rank-00001",
        "outlast.random@rank-00002",
    }
    files = {name: {c.file for c in entry.chunks} for name, entry in manifest.tensors.items()}
    assert files["model.w"] == {"rank-00000.safetensors"}
    assert files["model.running@rank-00001"] == {"rank-00001.safetensors"}
    assert (tmp_path / STEP / "rank-00002.safetensors").stat().st_size == 4096 + 8


def test_random_states_are_each_ranks_own_even_if_they_agree(tmp_path):
    """Ranks that were seeded alike; the next save may find them apart."""
    state = {"model": {"w": torch.ones(2)}, "outlast": {"random": torch.arange(8)}}
    save_all(Directory(tmp_path), 2, states=[state, state])
    names = set(read_manifest(Directory(tmp_path), 7).tensors)
    assert names == {"model.w", "outlast.random@rank-00000", "outlast.random@rank-00001"}
    for rank in range(2):
        assert same(state, loaded_state(Directory(tmp_path), rank))


def test_a_tensor_differs_by_one_bit_of_zero(tmp_path):
    states = [{"m": {"w": torch.tensor([0.0])}}, {"m": {"w": torch.tensor([-0.0])}}]
    save_all(Directory(tmp_path), 2, states=states)
    for rank in range(2):
        assert same(states[rank], loaded_state(Directory(tmp_path), rank))


def test_ranks_with_other_names_keep_them(tmp_path):
    states = [
        {"m": {"a": torch.ones(2), "shape": torch.zeros(4)}},
        {"m": {"b": torch.ones(3), "shape": torch.zeros(2, 2)}},
    ]
    save_all(Directory(tmp_path), 2, states=states)
    for rank in range(2):
        assert same(states[rank], loaded_state(Directory(tmp_path), rank))


def test_a_rank_that_has_nothing_of_its_own_writes_no_tensors(tmp_path):
    states = [{"m": {"w": torch.ones(2)}, "n": rank} for rank in range(2)]
    save_all(Directory(tmp_path), 2, states=states)
    assert sorted(path.name for path in (tmp_path / STEP).iterdir()) == [
        "manifest.json",
        "rank-00000.json",
        "rank-00000.safetensors",
        "rank-00001.json",
    ]
    assert same(states[1], loaded_state(Directory(tmp_path), 1))


def test_state_without_tensors(tmp_path):
    result = save_all(Directory(tmp_path), 1, states=[{"counter": {"n": (1, 2)}}])[0]
    assert result.num_files == 2
    assert loaded_state(Directory(tmp_path)) == {"counter": {"n": (1, 2)}}


@pytest.mark.parametrize("saved_by", [1, 2, 3])
@pytest.mark.parametrize("read_by", [1, 2, 5])
def test_another_number_of_ranks_reads_in_turn(tmp_path, saved_by, read_by):
    storage = Directory(tmp_path)
    save_all(storage, saved_by)
    for rank in range(read_by):
        found = load(storage, 7, rank=rank)
        assert found.source_rank == rank % saved_by
        assert same(state_of(rank % saved_by)["model"], found.state("model"))


def test_numbers_of_a_commit(tmp_path):
    result = save_all(Directory(tmp_path), 2)[0]
    files = [path for path in (tmp_path / STEP).iterdir() if path.name != "manifest.json"]
    assert result.num_files == len(files) + 1
    assert result.num_bytes == sum(path.stat().st_size for path in files)


def test_a_sharded_tensor_is_put_together(tmp_path):
    """This version writes one chunk a tensor; the format has room for more, and is read."""
    storage = Directory(tmp_path)
    save_all(storage, 1, states=[{"m": {"w": torch.arange(12.0).view(4, 3)}}])
    manifest = read_manifest(storage, 7)
    entry = manifest.tensors["m.w"]
    (whole,) = entry.chunks
    halves = [
        msgspec.structs.replace(
            whole,
            offsets=(row, 0),
            shape=(2, 3),
            start=whole.start + row * 12,
            end=whole.start + row * 12 + 24,
        )
        for row in (2, 0)
    ]
    entry = msgspec.structs.replace(entry, chunks=tuple(halves))
    storage.put(MANIFEST, encode(msgspec.structs.replace(manifest, tensors={"m.w": entry})))
    assert same_tensor(torch.arange(12.0).view(4, 3), load(storage, 7).tensor("m.w"))


def test_a_key_that_was_not_saved(tmp_path):
    save_all(Directory(tmp_path), 1)
    with pytest.raises(KeyError):
        load(Directory(tmp_path), 7).state("scheduler")


# --- the order of operations ---------------------------------------------------------------------


def test_a_rejected_manifest_goes_first_and_the_new_one_comes_last(tmp_path):
    save_all(Directory(tmp_path), 1)
    storage = WatchedStorage(Directory(tmp_path))
    save_all(storage, 1)
    acts = [entry for entry in storage.log if entry[0] != "write"]
    tensors, small = f"{STEP}/rank-00000.safetensors", f"{STEP}/rank-00000.json"
    assert acts == [
        ("remove", MANIFEST),
        ("create", tensors),
        ("finish", tensors),
        ("create", small),
        ("finish", small),
        ("put", MANIFEST),
    ]


def test_the_manifest_comes_after_every_ranks_files_and_goes_before_any(tmp_path):
    save_all(Directory(tmp_path), 3)
    storage = WatchedStorage(Directory(tmp_path))
    save_all(storage, 3)
    order = [entry for entry in storage.log if entry[0] in ("create", "finish", "put", "remove")]
    assert order[0] == ("remove", MANIFEST)
    assert order[-1] == ("put", MANIFEST)
    assert [entry[0] for entry in order].count("finish") == 6
    assert [entry[0] for entry in order].count("put") == 1


def test_a_manifest_that_cannot_be_removed_stops_the_save_before_it_writes(tmp_path):
    save_all(Directory(tmp_path), 2)
    before = (tmp_path / MANIFEST).read_bytes()
    error = OSError(5, "Input/output error")
    storage = WatchedStorage(Directory(tmp_path), lambda did, _: error if did == "remove" else None)
    results = save_all(storage, 2)
    assert results[0] is error
    assert isinstance(results[1], StorageError)
    assert "create" not in [did for did, name in storage.log if "rank-00000" in name]
    assert (tmp_path / MANIFEST).read_bytes() == before


# --- failures ------------------------------------------------------------------------------------


def failing(path, where, operation="finish", error=None):
    error = error or OSError(28, "No space left on device")
    return WatchedStorage(
        Directory(path), lambda did, name: error if did == operation and where in name else None
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("operation", ["create", "write", "finish"])
@pytest.mark.parametrize("kind", ["safetensors", "json"])
def test_a_rank_that_cannot_write_leaves_no_manifest(tmp_path, world_size, operation, kind):
    for failed in range(world_size):
        path = tmp_path / str(failed)
        storage = failing(path, f"rank-{failed:05d}.{kind}", operation)
        results = save_all(storage, world_size)
        assert all(isinstance(result, OSError) for result in results), results
        assert results[failed].errno == 28
        for rank in set(range(world_size)) - {failed}:
            assert isinstance(results[rank], StorageError)
            assert "No space left on device" in str(results[rank])
            if failed:
                assert f"rank {failed} could not write its part" in str(results[rank])
        assert not (path / MANIFEST).exists()
        with pytest.raises(CheckpointInvalid, match=r"manifest\.json is missing"):
            load(Directory(path), 7)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_manifest_that_cannot_be_put_fails_every_rank(tmp_path, world_size):
    results = save_all(failing(tmp_path, "manifest", "put"), world_size)
    assert all(isinstance(result, OSError) for result in results)
    assert all("No space left" in str(result) for result in results)
    assert not (tmp_path / MANIFEST).exists()


@pytest.mark.parametrize("failed", [0, 1, 2])
@pytest.mark.parametrize("error", [MemoryError("no"), ValueError("no"), RuntimeError("no")])
def test_whatever_a_rank_fails_with_nobody_waits_for_it(tmp_path, failed, error):
    storage = failing(tmp_path, f"rank-{failed:05d}.json", "create", error)
    results = save_all(storage, 3)
    assert results[failed] is error
    others = [result for rank, result in enumerate(results) if rank != failed]
    assert all(isinstance(result, StorageError) for result in others), results
    assert not (tmp_path / MANIFEST).exists()


@pytest.mark.parametrize("where", ["rank-00000.json", "rank-00001.json"])
def test_an_error_whose_path_is_not_utf8_is_told_too(tmp_path, where):
    error = FileNotFoundError(2, "No such file or directory", "/data/\udcff")
    results = save_all(failing(tmp_path, where, "create", error), 2)
    (other,) = [result for result in results if result is not error]
    assert "No such file or directory: '/data/\\udcff'" in str(other)


def test_a_commit_that_fails_in_an_unexpected_way_is_nobodys_commit(tmp_path):
    storage = failing(tmp_path, "manifest", "put", MemoryError())
    results = save_all(storage, 2)
    assert isinstance(results[0], MemoryError)
    assert isinstance(results[1], StorageError)


def test_a_rank_that_never_reports_is_named(tmp_path):
    storage = Directory(tmp_path)
    results = save_all(storage, 3, only=[0, 1], timeout_s=0.3)
    assert isinstance(results[0], StorageError)
    assert "missing the part of rank 2 of 3" in str(results[0])
    assert isinstance(results[1], OSError)
    assert not (tmp_path / MANIFEST).exists()


def test_rank_0_never_reports(tmp_path):
    results = save_all(Directory(tmp_path), 2, only=[1], timeout_s=0.1)
    assert isinstance(results[1], TimeoutError)
    assert not (tmp_path / MANIFEST).exists()


def test_the_same_step_again_after_a_failure(tmp_path):
    troubles = {"rank-00001.safetensors"}

    def fail(did, name):
        if did == "finish" and name.rpartition("/")[2] in troubles:
            return OSError(5, "Input/output error")
        return None

    storage = WatchedStorage(Directory(tmp_path), fail)
    hub = Hub(2)
    savers = [saver(storage, hub.link(rank)) for rank in range(2)]

    def save(link):
        return savers[link.rank].save(captured(state_of(link.rank)))

    first = on_ranks(2, save, hub=hub)
    assert all(isinstance(result, OSError) for result in first)
    troubles.clear()
    second = on_ranks(2, save, hub=hub)
    assert [result.step for result in second] == [7, 7]
    for rank in range(2):
        assert same(state_of(rank), loaded_state(Directory(tmp_path), rank))


def test_the_older_commit_stands_when_the_newer_one_fails(tmp_path):
    save_all(Directory(tmp_path), 2, step=3)
    save_all(failing(tmp_path, "rank-00001.json"), 2, step=7)
    assert same(state_of(1), loaded_state(Directory(tmp_path), 1, step=3))
    verify(Directory(tmp_path), 3)


def test_a_step_that_is_saved_over_a_rejected_one_is_the_new_one(tmp_path):
    save_all(Directory(tmp_path), 2)
    again = [state_of(rank, seed=1) for rank in range(2)]
    save_all(Directory(tmp_path), 2, states=again)
    for rank in range(2):
        assert same(again[rank], loaded_state(Directory(tmp_path), rank))


def test_saving_over_a_step_of_more_ranks_leaves_no_claim_on_their_files(tmp_path):
    save_all(Directory(tmp_path), 3)
    save_all(Directory(tmp_path), 1)
    assert set(verify(Directory(tmp_path), 7).files) == {
        "rank-00000.json",
        "rank-00000.safetensors",
    }


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
    for operation in ("read", "read_into", "size"):
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
    for room in (load_room, manifest_room, blocks_room):
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


# --- no pickle -----------------------------------------------------------------------------------


def test_no_pickle_is_read_or_written(tmp_path, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("pickle was used")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    monkeypatch.setattr(torch, "save", forbidden)
    monkeypatch.setattr(builtins, "eval", forbidden)
    results = save_all(Directory(tmp_path), 2)
    assert [result.step for result in results] == [7, 7]
    assert same(state_of(1), loaded_state(Directory(tmp_path), 1))


def test_everything_on_disk_is_text_or_safetensors(saved):
    for path in sorted((saved / STEP).iterdir()):
        data = path.read_bytes()
        if path.suffix == ".json":
            json.loads(data)
        else:
            assert data[8:9] == b"{"
    assert decode((saved / MANIFEST).read_bytes(), 7).step == 7
