"""A checkpoint that was damaged after its commit is never loaded, and the file is named."""

import msgspec
import pytest
import torch
from unit_fakes import WatchedStorage, same, same_tensor
from unit_names import save_name
from unit_saver import small_blocks, written

from outlast.checkpoint.manifest import encode, write_hashed
from outlast.checkpoint.transfer import read_manifest
from outlast.errors import CheckpointInvalid
from outlast.storage import Directory
from whole_reads import load, verify

STEP = save_name(7)
MANIFEST = f"{STEP}/manifest.json"


def state_of(rank, *, seed=0):
    """A tensor that is shared, small ones of each rank."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "large": torch.rand(130, 130, generator=generator),
            "w": torch.rand(4, 3, generator=generator) + rank,
        },
        "outlast": {"random": torch.arange(8, dtype=torch.uint8) + rank, "rank": rank},
    }


def loaded_state(storage, rank=0, step=7, **more):
    found = load(storage, step, rank=rank, **more)
    return {key: found.state(key) for key in found.data}


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of two ranks."""
    written(Directory(tmp_path), [state_of(rank) for rank in range(2)])
    return tmp_path


@pytest.fixture
def alone(tmp_path):
    """A checkpoint of one rank, whose manifest names all of its files itself."""
    written(Directory(tmp_path), [state_of(0)])
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
    (saved / STEP).rename(saved / save_name(8))
    with pytest.raises(CheckpointInvalid, match="that of step 7"):
        load(Directory(saved), 8)


def test_files_of_another_save_are_refused(saved, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    written(Directory(other), [state_of(rank, seed=1) for rank in range(2)])
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
def test_small_state_that_is_not_understood_is_named(alone, small):
    """Somebody wrote another file and a manifest for it: hashes agree, the content does not."""
    storage = Directory(alone)
    manifest = read_manifest(storage, 7)
    entry = write_hashed(storage, f"{STEP}/rank-00000.json", [small])
    files = manifest.files | {"rank-00000.json": entry}
    storage.put(MANIFEST, encode(msgspec.structs.replace(manifest, files=files)))
    with pytest.raises(CheckpointInvalid, match=r"rank-00000\.json is not understood"):
        load(storage, 7)


def test_a_manifest_without_the_ranks_state_is_refused(alone):
    storage = Directory(alone)
    manifest = read_manifest(storage, 7)
    files = {name: e for name, e in manifest.files.items() if name != "rank-00000.json"}
    storage.put(MANIFEST, encode(msgspec.structs.replace(manifest, files=files)))
    with pytest.raises(CheckpointInvalid, match=r"does not name rank-00000\.json"):
        load(storage, 7)


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
    verify(Directory(saved), 7, lambda done, total: told.append((done, total)))
    total = sum(file.stat().st_size for file in (saved / STEP).glob("rank-*"))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (total, total)
    assert len(told) == 6  # each rank has three files


def test_damage_beyond_the_first_block_is_found(tmp_path, monkeypatch):
    small_blocks(monkeypatch, 1024)
    storage = Directory(tmp_path)
    written(storage, [{"m": torch.arange(2000.0)}])
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
