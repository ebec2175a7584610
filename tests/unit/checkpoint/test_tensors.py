"""Tensors as bytes, as memory, spread over workers (in one process), and of subclasses.

What is written opens in safetensors' own readers. DTensors have a group whose collectives do
nothing, and one rank's view at a time.
"""

import contextlib
import dataclasses
import enum
import gc
import io
import itertools
import json
import struct
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
import xxhash
from hypothesis import given
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
from unit_checkpoints import write
from unit_fakes import WatchedStorage, bits, same_tensor
from unit_saver import snapshot

from outlast.checkpoint import manifest, tensors
from outlast.checkpoint.manifest import ITEM_BYTES, FileEntry
from outlast.checkpoint.plan import structure
from outlast.checkpoint.reader import open_checkpoint
from outlast.checkpoint.tensors import (
    fresh,
    holds,
    is_spread,
    lay,
    local_chunks,
    overlaps,
    put_together,
    take_apart,
)
from outlast.checkpoint.tree import flatten, names_in_parts, tensor_names, unflatten
from outlast.data.trail import fingerprint
from outlast.drill.digests import digest_of
from outlast.errors import ConfigError, StateMismatch
from outlast.script.objects import Objects
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


def write_shard(path, tensors):
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


def _apart(value):
    return tensors.bytes_of(value).tobytes()


@pytest.mark.parametrize("read", [_apart, digest_of, fingerprint])
def test_what_was_read_can_still_be_resized(read):
    """FSDP2 gives a parameter's memory back so; tensor.numpy() would forbid it for good."""
    value = torch.arange(6.0)
    read(value)
    value.untyped_storage().resize_(0)
    assert value.untyped_storage().nbytes() == 0


@pytest.mark.parametrize(
    "value", [torch.arange(6)[::2], torch.empty(0, 3), torch.tensor(2.5j).conj()]
)
def test_bytes_keep_what_they_were_read_from(value):
    found = tensors.bytes_of(value)
    gc.collect()
    assert found.tobytes() == value.resolve_conj().contiguous().numpy().tobytes()
    assert found.nbytes == value.numel() * value.element_size()


@pytest.mark.parametrize(("name", "dtype"), ALL_DTYPES)
def test_each_dtype_opens_elsewhere(tmp_path, name, dtype):
    tensors = {
        "some": values_of(dtype),
        "none": torch.empty(0, 3, dtype=dtype),
        "zero_dim": values_of(dtype).reshape(-1)[0],
        "odd": torch.tensor([True]),
    }
    write_shard(tmp_path, tensors)
    found = opened(tmp_path)
    assert found.keys() == tensors.keys()
    assert all(same_tensor(tensors[key], found[key]) for key in tensors)
    assert_aligned(tmp_path)
    assert ITEM_BYTES[name] == dtype.itemsize


def test_all_dtypes_in_one_file(tmp_path):
    tensors = {f"t.{name}": values_of(dtype) for name, dtype in ALL_DTYPES}
    assert len(tensors) >= 16
    write_shard(tmp_path, tensors)
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
    write_shard(tmp_path, tensors)
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
    assert {one.piece.name for one in writes} == names == taken.plan.tensors.keys()
    assert {check.piece.name for check in taken.plan.checks} == tensors.keys() - names
    widths = [ITEM_BYTES[one.piece.dtype] for one in writes]
    assert widths == sorted(widths, reverse=True)
    position = len(taken.plan.head)
    for one in writes:
        assert one.start == position
        assert one.start % ITEM_BYTES[one.piece.dtype] == 0
        assert data[one.start : one.end] == bits(tensors[one.piece.name])
        position = one.end
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


# --- elements that share memory -------------------------------------------------------------------


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


# --- spread over workers --------------------------------------------------------------------------


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


# --- subclasses -----------------------------------------------------------------------------------


class Grain(enum.Enum):
    ROW = "row"
    BLOCK = "block"


@dataclasses.dataclass(frozen=True)
class Layout:
    block: tuple[int, ...]
    grain: Grain


class Limits(NamedTuple):
    low: int
    high: int


class Quantized(torch.Tensor):
    """As torchao's: codes and a scale, and settings of several kinds; no memory of its own."""

    @staticmethod
    def __new__(cls, codes, scale, settings):
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scale.dtype, device=codes.device
        )

    def __init__(self, codes, scale, settings):
        self.codes, self.scale, self.settings = codes, scale, settings

    def __tensor_flatten__(self):
        return ["codes", "scale"], self.settings

    @classmethod
    def __tensor_unflatten__(cls, inner, settings, shape, strides):
        return cls(inner["codes"], inner["scale"], settings)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            one = args[0]
            return cls(one.codes.detach(), one.scale.detach(), one.settings)
        raise NotImplementedError(str(func))


class Bare(torch.Tensor):
    """Without memory, and without a word on what it is made of."""

    @staticmethod
    def __new__(cls, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(str(func))


SETTINGS = [Layout((1, 8), Grain.ROW), Limits(-8, 7), torch.float32, None, {"signed": True}]


def two(seed=0):
    torch.manual_seed(seed)
    return TwoTensor(torch.randn(4, 6), torch.randn(4, 6))


def quantized(seed=0, settings=None):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 255, (4, 8), dtype=torch.uint8, generator=generator)
    return Quantized(codes, torch.rand(4, generator=generator), settings or SETTINGS)


KINDS = {
    "two": two,
    "quantized": quantized,
    "quantized by others": lambda seed=0: quantized(seed, [True, torch.Size([4, 8])]),
    "one in another": lambda seed=0: TwoTensor(two(seed), two(seed + 1)),
    "a parameter": lambda seed=0: torch.nn.Parameter(two(seed)),
    "without elements": lambda _=0: TwoTensor(torch.empty(0, 3), torch.empty(0, 3)),
}


def plain(tensor):
    """Everything that makes a tensor what it is, as plain values."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return type(tensor), tensor.dtype, tuple(tensor.shape), bits(tensor)
    names, settings = tensor.__tensor_flatten__()
    inner = {name: plain(getattr(tensor, name)) for name in names}
    return type(tensor), tensor.dtype, tuple(tensor.shape), settings, inner


@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_back_as_what_it_was(kind):
    tensor = KINDS[kind]()
    data, tensors = flatten({"state": [tensor, 3]}, "o")
    assert {type(one) for one in tensors.values()} <= {torch.Tensor, torch.nn.Parameter}
    assert set(tensor_names(data)) == set(names_in_parts(data)) == set(tensors)
    structure(tensors)
    found = unflatten(json.loads(json.dumps(data)), tensors)
    assert found["state"][1] == 3
    assert plain(found["state"][0]) == plain(tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_filled_where_it_lies(tmp_path, kind):
    def model(seed):
        made = torch.nn.Module()
        made.weight = torch.nn.Parameter(KINDS[kind](seed), requires_grad=False)
        made.bias = torch.nn.Parameter(torch.full((3,), float(seed)))
        return made

    saved, live = model(1), model(2)
    write(Directory(tmp_path), [Objects({"m": saved}).capture() | {"outlast": {"step": 7}}])
    weight, memory = live.weight, [one.data_ptr() for one in tensors.memories(live.weight)]
    Objects({"m": live}).apply(open_checkpoint(Directory(tmp_path), 7))
    assert live.weight is weight
    assert [one.data_ptr() for one in tensors.memories(weight)] == memory
    assert plain(weight) == plain(saved.weight)
    assert torch.equal(live.bias, saved.bias)


class Eight(torch.optim.SGD):
    """An optimizer with a state of a subclass."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                self.state[parameter].setdefault("codes", quantized(number))


@pytest.mark.parametrize("has_stepped", [False, True])
def test_an_optimizers_state_comes_back(tmp_path, has_stepped):
    model = torch.nn.Linear(3, 3)
    before = Eight(model.parameters(), lr=1.0)
    before.step()
    for state in before.state.values():
        state["codes"].codes.add_(1)
    saved = Objects({"m": model, "o": before}).capture()
    write(Directory(tmp_path), [saved | {"outlast": {"step": 7}}])
    after = Eight(model.parameters(), lr=1.0)
    if has_stepped:
        after.step()
    Objects({"m": model, "o": after}).apply(open_checkpoint(Directory(tmp_path), 7))
    for parameter in model.parameters():
        assert plain(after.state[parameter]["codes"]) == plain(before.state[parameter]["codes"])


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        (two, lambda: torch.zeros(4, 6), "was a TwoTensor and is a plain tensor now"),
        (lambda: torch.zeros(4, 6), two, "was a plain tensor and is a TwoTensor now"),
        (quantized, two, "two_tensor:TwoTensor now"),
        (quantized, lambda: quantized(0, [True]), "had settings"),
        (two, lambda: TwoTensor(torch.ones(4, 7), torch.ones(4, 7)), "had shape (4, 6)"),
    ],
)
def test_another_kind_in_its_place_is_refused(tmp_path, then, now, words):
    def model(tensor):
        made = torch.nn.Module()
        made.weight = torch.nn.Parameter(tensor, requires_grad=False)
        return made

    saved = Objects({"m": model(then())}).capture()
    write(Directory(tmp_path), [saved | {"outlast": {"step": 7}}])
    with pytest.raises(StateMismatch, match=r"m\.weight .*; build the model as it was") as caught:
        Objects({"m": model(now())}).check(open_checkpoint(Directory(tmp_path), 7))
    assert words in str(caught.value)


def jagged():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Bare((3, 4)), "o.state is a Bare, which has no memory of its own and no __tensor"),
        (lambda: quantized(0, {"of": object()}), "o.state is a Quantized whose settings hold a"),
        (lambda: quantized(0, [torch.ones(2)]), "whose settings hold a torch:Tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "o.state is a "),
        (jagged, "o.state is a NestedTensor of a shape that is no numbers"),
        (lambda: TwoTensor(Bare((3,)), Bare((3,))), "o.state.a is a Bare"),
        (lambda: TwoTensor(*torch.ones(2, 3).to_sparse().unbind()), "o.state.a is a torch.sparse"),
        (lambda: torch.ones(2, dtype=torch.complex128), "o.state has dtype torch.complex128"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused_by_name(make, words):
    with pytest.raises(ConfigError) as caught:
        flatten({"state": make()}, "o")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "os:path"}, "os:path is not loaded"),
        ({"kind": "builtins:dict"}, "builtins:dict is no class of tensors"),
        ({"kind": "torch:Tensor"}, "torch:Tensor cannot be put together"),
        ({"kind": "torch._tensor:Tensor"}, "is not loaded"),
        ({"kind": "torch.nn.parameter:Parameter"}, "cannot be put together"),
        ({"kind": "there.is:none"}, "there.is:none is not loaded; import there.is"),
        (
            {"settings": tensors.Described(("os:stat_result", "record", {}))},
            "not of the package",
        ),
        (
            {"settings": tensors.Described((f"{__name__}:quantized", "record", {}))},
            "is not loaded",
        ),
        (
            {"settings": tensors.Described((f"{__name__}:Quantized", "record", {}))},
            "is no record",
        ),
        ({"settings": tensors.Described((f"{__name__}:Layout", "enum", "x"))}, "is no enum"),
    ],
)
def test_nothing_is_imported_or_called_that_a_file_names(change, words):
    parts = dataclasses.replace(take_apart(quantized()), **change)
    with pytest.raises(ValueError, match=r".") as caught:
        put_together(parts)
    assert words in str(caught.value)
