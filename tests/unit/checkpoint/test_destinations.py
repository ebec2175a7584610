"""Whatever way a tensor was cut when it was saved, and is cut now: the same bits arrive."""

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
import xxhash
from hypothesis import given
from unit_checkpoints import grid, region
from unit_fakes import bits
from unit_names import save_name

from outlast.checkpoint import reader, transfer
from outlast.checkpoint.manifest import Chunk, FileEntry, Place, TensorEntry
from outlast.checkpoint.reader import pieces
from outlast.checkpoint.spreads import cut
from outlast.checkpoint.tensors import NAMES, fresh, local_chunks
from outlast.checkpoint.transfer import FileCopies, by_file, job_for, read
from thorough import examples

STEP = save_name(1)


class Seen:
    """A storage of bytes in memory."""

    def __init__(self, files):
        self.files = files

    def view(self, name):
        return memoryview(self.files[name])


def fill(entry, files, target):
    """Read ``target`` as a checkpoint would."""
    place = Place("memory", Seen({f"{STEP}/{name}": data for name, data in files.items()}))
    jobs = []
    for name, parts in by_file(pieces(entry, target)).items():
        size = transfer.BLOCK_BYTES
        starts = range(0, len(files[name]), size)
        hashes = tuple(xxhash.xxh3_128_hexdigest(bytes(files[name][s : s + size])) for s in starts)
        whole = FileEntry(size=len(files[name]), xxh3_128=hashes)
        copies = FileCopies([place], f"{STEP}/{name}", whole)
        jobs.append(job_for(copies, parts, everything=False))
    read(jobs)


def stored(tensor, chunks, num_files):
    """An entry of these chunks, spread over some files, with bytes of others between them."""
    files = {f"rank-{number:05d}.safetensors": bytearray(b"#" * 3) for number in range(num_files)}
    entry = []
    for (offsets, shape), name in zip(chunks, itertools.cycle(files)):
        start = len(files[name])
        files[name] += bits(region(tensor, offsets, shape))
        place = {"file": name, "start": start, "end": len(files[name])}
        entry.append(Chunk(offsets=offsets, shape=shape, **place))
        files[name] += b"#"
    shape = tuple(tensor.shape)
    return TensorEntry(dtype=NAMES[tensor.dtype], shape=shape, chunks=tuple(entry)), files


@st.composite
def cuts(draw, shape):
    axes = []
    for size in shape:
        inner = draw(st.sets(st.integers(1, max(size - 1, 1)), max_size=3))
        axes.append((0, *sorted(x for x in inner if x < size), size))
    return draw(st.permutations(grid(*axes)))


@st.composite
def layouts(draw):
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    return shape, draw(cuts(shape)), draw(cuts(shape))


@examples(150)
@given(
    layout=layouts(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    num_files=st.integers(1, 3),
    block=st.sampled_from([16, 64, 4096]),
    short=st.sampled_from([0, 8, 1 << 20]),
    stage=st.sampled_from([8, 48, 1 << 20]),
    kind=st.sampled_from(["contiguous", "transposed", "every other", "other dtype"]),
)
def test_any_cut_becomes_any_other(layout, dtype, num_files, block, short, stage, kind):
    shape, saved, wanted = layout
    generator = torch.Generator().manual_seed(math.prod(shape) + len(saved))
    tensor = torch.randint(0, 2**7, shape, generator=generator).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "BLOCK_BYTES", block)
        patch.setattr(reader, "SHORT_BYTES", short)
        patch.setattr(reader, "STAGE_BYTES", stage)
        entry, files = stored(tensor, saved, num_files)
        held = [(offsets, part, memory(part, dtype, kind)) for offsets, part in wanted]
        patch.setattr(reader, "local_chunks", lambda _: held)
        fill(entry, files, tensor)
    for offsets, part, view in held:
        found = view.to(dtype)
        assert bits(found) == bits(region(tensor, offsets, part)), (offsets, part)


def memory(shape, dtype, kind):
    if kind == "transposed":
        return torch.zeros(shape[::-1], dtype=dtype).permute(list(reversed(range(len(shape)))))
    if kind == "every other":
        wide = torch.zeros([2 * size for size in shape], dtype=dtype)
        return wide[tuple(slice(None, None, 2) for _ in shape)]
    return torch.zeros(shape, dtype=torch.float64 if kind == "other dtype" else dtype)


def test_neighbours_of_what_is_wanted_are_not_touched():
    tensor = torch.arange(24.0).view(4, 6)
    entry, files = stored(tensor, grid((0, 4), (0, 2, 6)), 1)
    around = torch.full((8, 10), -1.0)
    view = around[2:6, 3:9]
    fill(entry, files, view)
    assert torch.equal(view, tensor)
    assert int((around == -1).sum()) == 80 - 24


def test_wanted_ranges_may_lie_in_each_other(monkeypatch):
    monkeypatch.setattr(transfer, "BLOCK_BYTES", 16)
    tensor = torch.arange(40.0)
    entry, files = stored(tensor, grid((0, 40)), 1)
    whole, part = torch.zeros(40), torch.zeros(3)
    inner = [((0,), (40,), whole), ((5,), (3,), part), ((1,), (3,), torch.zeros(3))]
    monkeypatch.setattr(reader, "local_chunks", lambda _: inner)
    fill(entry, files, tensor)
    assert torch.equal(whole, tensor)
    assert torch.equal(part, tensor[5:8])


def test_a_whole_tensor_is_one_piece():
    tensor = torch.rand(50, 4)
    entry, _ = stored(tensor, grid((0, 50), (0, 4)), 1)
    assert len(list(pieces(entry, torch.empty(50, 4)))) == 1


def test_rows_that_follow_each_other_are_one_piece_a_chunk():
    tensor = torch.rand(50, 4)
    entry, _ = stored(tensor, grid((0, 20, 50), (0, 4)), 2)
    found = [piece for _, piece in pieces(entry, torch.empty(50, 4))]
    assert [piece.end - piece.start for piece in found] == [20 * 16, 30 * 16]
    assert all(piece.stage is None for piece in found)


def test_many_short_runs_go_through_one_stage(monkeypatch):
    tensor = torch.rand(50, 4)
    entry, _ = stored(tensor, grid((0, 50), (0, 2, 4)), 1)
    found = [piece for _, piece in pieces(entry, torch.empty(50, 4))]
    assert len(found) == 2
    assert all(piece.stage is not None for piece in found)
    monkeypatch.setattr(reader, "SHORT_BYTES", 8)
    assert len(list(pieces(entry, torch.empty(50, 4)))) == 100


def test_new_memory_is_aligned_as_torch_aligns():
    for shape in ((3,), (1 << 21,)):
        tensor = fresh(shape, torch.float32)
        assert tensor.data_ptr() % 64 == 0
        assert tensor.storage_offset() == 0
        tensor.fill_(1.0)


# --- who holds what ------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 4))
def test_rows_are_cut_as_torch_cuts_them(size, parts, factor):
    """torch.chunk, and _StridedShard's own splitting with a factor."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    rows = torch.arange(size)
    kind = Shard(0) if factor == 1 else _StridedShard(0, split_factor=factor)
    if size == 0 and factor > 1:
        return  # torch cannot
    expected, _ = kind._split_tensor(rows, parts, with_padding=False)
    for index in range(parts):
        runs = cut([(0, size)], parts, index, factor)
        found = [row for start, length in runs for row in range(start, start + length)]
        assert found == expected[index].tolist()
        assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(runs)), (
            "touching runs are one"
        )


def test_a_plain_tensor_is_one_piece_of_its_own_memory():
    tensor = torch.nn.Parameter(torch.rand(3, 2))
    ((offsets, shape, view),) = local_chunks(tensor)
    assert (offsets, shape) == ((0, 0), (3, 2))
    assert view.data_ptr() == tensor.data_ptr()
    assert not view.requires_grad
    assert local_chunks(torch.tensor(1.0))[0][:2] == ((), ())
    assert local_chunks(torch.empty(0, 3))[0][:2] == ((0, 0), (0, 3))
