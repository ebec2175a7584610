"""What is written opens in safetensors' own readers; blocks are hashed as they say."""

import io
import json
import struct

import hypothesis.strategies as st
import pytest
import safetensors
import safetensors.torch
import torch
import xxhash
from hypothesis import given
from unit_fakes import WatchedStorage, bits, same_tensor
from unit_saver import snapshot

from outlast.checkpoint import manifest, tensors
from outlast.checkpoint.manifest import ITEM_BYTES, FileEntry
from outlast.checkpoint.plan import structure
from outlast.errors import ConfigError
from outlast.storage import Directory
from thorough import examples

ALL_DTYPES = sorted(tensors.DTYPES.items())


def values_of(dtype):
    """Every bit pattern counts: random bytes, except where only 0 and 1 are values."""
    generator = torch.Generator().manual_seed(1)
    if dtype == torch.bool:
        return torch.tensor([True, False, True])
    raw = torch.randint(0, 256, (6 * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(2, 3)


def write(path, tensors):
    """As a save does: planned, copied into memory, written from there."""
    _, data = snapshot(tensors)
    return manifest.write_hashed(Directory(path), "file.safetensors", [data])


def opened(path):
    with safetensors.safe_open(path / "file.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        one_by_one = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    at_once = safetensors.torch.load_file(path / "file.safetensors")
    assert one_by_one.keys() == at_once.keys()
    assert all(same_tensor(one_by_one[name], at_once[name]) for name in at_once)
    return at_once


def assert_aligned(path):
    data = (path / "file.safetensors").read_bytes()
    (header_bytes,) = struct.unpack("<Q", data[:8])
    assert (8 + header_bytes) % 4096 == 0
    entries = json.loads(data[8 : 8 + header_bytes])
    for name, entry in entries.items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % ITEM_BYTES[entry["dtype"]] == 0


@pytest.mark.parametrize(("name", "dtype"), ALL_DTYPES)
def test_each_dtype_opens_elsewhere(tmp_path, name, dtype):
    tensors = {
        "some": values_of(dtype),
        "none": torch.empty(0, 3, dtype=dtype),
        "zero_dim": values_of(dtype).reshape(-1)[0],
        "odd": torch.tensor([True]),
    }
    write(tmp_path, tensors)
    found = opened(tmp_path)
    assert found.keys() == tensors.keys()
    assert all(same_tensor(tensors[key], found[key]) for key in tensors)
    assert_aligned(tmp_path)
    assert ITEM_BYTES[name] == dtype.itemsize


def test_all_dtypes_in_one_file(tmp_path):
    tensors = {f"t.{name}": values_of(dtype) for name, dtype in ALL_DTYPES}
    assert len(tensors) >= 16
    write(tmp_path, tensors)
    found = opened(tmp_path)
    assert all(same_tensor(tensors[key], found[key]) for key in tensors)
    assert_aligned(tmp_path)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("lay_out", [structure, tensors.place])
def test_a_dtype_without_a_name_is_refused(dtype, lay_out):
    with pytest.raises(ConfigError, match=f"model.weight has dtype {dtype}"):
        lay_out({"model.weight": torch.zeros(2, dtype=dtype)})


def test_views_are_written_as_what_they_show(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
        "conj": torch.tensor([1 + 2j, -3j]).conj(),
        "neg": torch.tensor([1 + 2j]).conj().imag,
        "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "grad": torch.nn.Parameter(torch.ones(2)).detach(),
    }
    write(tmp_path, tensors)
    found = opened(tmp_path)
    assert all(same_tensor(tensors[key], found[key]) for key in tensors)


def test_a_header_just_at_the_alignment_and_just_beyond(tmp_path):
    sizes = set()
    for length in range(3900, 4100):
        placed = tensors.place({"x" * length: torch.ones(1)})
        first = tensors.header(placed)
        (header_bytes,) = struct.unpack("<Q", first[:8])
        assert header_bytes + 8 == len(first)
        assert len(first) % 4096 == 0
        assert len(first) - len(first.rstrip()) < 4096  # no page more than needed
        sizes.add(len(first))
    assert sizes == {4096, 8192}


def test_no_tensors_at_all(tmp_path):
    manifest.write_hashed(Directory(tmp_path), "file.safetensors", [tensors.header({})])
    assert opened(tmp_path) == {}


# --- a file with some of the tensors -------------------------------------------------------------


@given(st.sets(st.sampled_from([name for name, _ in ALL_DTYPES])))
@examples(30)
def test_what_others_write_leaves_no_holes(names):
    tensors = {name: values_of(dtype) for name, dtype in ALL_DTYPES}
    taken, data = snapshot(tensors, elsewhere=tensors.keys() - names)
    writes = taken.plan.writes
    assert {write.piece.name for write in writes} == names == taken.plan.tensors.keys()
    assert {check.piece.name for check in taken.plan.checks} == tensors.keys() - names
    widths = [ITEM_BYTES[write.piece.dtype] for write in writes]
    assert widths == sorted(widths, reverse=True)
    position = len(taken.plan.head)
    for write in writes:
        assert write.start == position
        assert write.start % ITEM_BYTES[write.piece.dtype] == 0
        assert data[write.start : write.end] == bits(tensors[write.piece.name])
        position = write.end
    assert position == taken.plan.size == len(data)
    assert (not names) == (not data)


# --- hashes --------------------------------------------------------------------------------------

BLOCK = 64


@pytest.fixture
def _small_blocks(monkeypatch):
    monkeypatch.setattr(manifest, "BLOCK_BYTES", BLOCK)


def hashes(data):
    manifest = [data[start : start + BLOCK] for start in range(0, len(data), BLOCK)]
    return tuple(xxhash.xxh3_128_hexdigest(block) for block in manifest)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize(
    "size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 5 * BLOCK]
)
@pytest.mark.parametrize("piece", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK])
def test_each_block_has_its_hash_however_it_is_cut(tmp_path, size, piece):
    data = bytes(index * 37 % 251 for index in range(size))
    pieces = [data[start : start + piece] for start in range(0, size, piece)]
    entry = manifest.write_hashed(Directory(tmp_path), "f", pieces)
    assert (tmp_path / "f").read_bytes() == data
    assert entry == FileEntry(size=size, xxh3_128=hashes(data))


def test_the_real_block_is_16_mib(tmp_path):
    assert manifest.BLOCK_BYTES == 16 << 20
    data = bytes(16 << 20) + b"1"
    entry = manifest.write_hashed(Directory(tmp_path), "f", [data])
    halves = (data[: 16 << 20], data[16 << 20 :])
    assert entry.xxh3_128 == tuple(xxhash.xxh3_128_hexdigest(half) for half in halves)


@pytest.mark.parametrize("operation", ["write", "finish"])
def test_a_write_that_fails_leaves_nothing(tmp_path, operation):
    error = OSError(28, "No space left on device")
    storage = WatchedStorage(
        Directory(tmp_path), lambda did, _: error if did == operation else None
    )
    with pytest.raises(OSError, match="No space"):
        manifest.write_hashed(storage, "step/f", [b"abc"])
    assert list((tmp_path / "step").iterdir()) == []
    assert storage.log[-1] == ("abandon", "step/f")


def test_a_source_that_fails_leaves_nothing(tmp_path):
    def pieces():
        yield b"abc"
        raise RuntimeError("the memory went")

    with pytest.raises(RuntimeError, match="the memory went"):
        manifest.write_hashed(Directory(tmp_path), "f", pieces())
    assert list(tmp_path.iterdir()) == []


def test_reading_goes_through_any_buffer(tmp_path):
    (tmp_path / "f").write_bytes(b"abcdef")
    buffer = bytearray(10)
    assert Directory(tmp_path).read_into("f", memoryview(buffer), 2) == 4
    assert io.BytesIO(buffer).read(4) == b"cdef"
