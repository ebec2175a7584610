"""A snapshot is the state at the boundary, or void: tensors, writers and moments are drawn.

Each draw makes a few tensors, leaves what it may for later, and writes to them between the boundary
and the optimizer's step in one of the ways that torch, NumPy and people have, before, between and
after the copies. 5,000 draws: ``OUTLAST_TEST_ALL=1 pytest tests/unit -k capture_draws -n 0 -s``.
A failing draw is repeated with ``OUTLAST_TEST_DRAW=its seed``.
"""

import collections
import ctypes
import os
import random
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode
from unit_checkpoints import write
from unit_fakes import bits, stand_in_for_graphs

import thorough
from outlast.checkpoint import capture, plan, writers
from outlast.checkpoint.capture import Capture, Copiers, held_by_others
from outlast.checkpoint.plan import Share, make, structure
from outlast.checkpoint.reader import open_checkpoint
from outlast.checkpoint.tensors import array_of, as_bytes
from outlast.script.objects import Objects
from outlast.storage import Directory

DRAWS = 5000 if thorough.ALL else 300
BLOCK = 4 << 10  # instead of 16 MiB: tensors of a few KiB have several parts
SIZES = (1, 2, 7, 8, 9, 31, 33, 500, 1023, 1024, 1025, 3000, 9001)  # elements: 32 bytes, a block
FLOAT = torch.float32
DTYPES = (FLOAT, torch.bfloat16, torch.float64, torch.int64, torch.uint8)


@pytest.fixture(scope="module", autouse=True)
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(plan, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(capture, "BLOCK_BYTES", BLOCK)


@pytest.fixture(autouse=True)
def _graphs(monkeypatch):
    """A CUDA graph, as far as a machine without a GPU has one: replayed, it writes by address."""
    stand_in_for_graphs(monkeypatch, lambda write: write())
    for known in (writers._originals, writers._patched):
        known.cache_clear()
    yield
    for known in (writers._originals, writers._patched):
        known.cache_clear()


@torch.library.custom_op("outlast_draws::bump", mutates_args={"x"})
def bump(x: torch.Tensor, row: int) -> None:
    x.view(-1)[row] += 1


def filled(rng, *shape, dtype):
    return torch.randint(0, 100, shape, generator=rng.torch).to(dtype)


# --- tensors -------------------------------------------------------------------------------------


def plain(rng, size, dtype, _):
    return filled(rng, size, dtype=dtype)


def parameter(rng, size, dtype, _):
    return torch.nn.Parameter(filled(rng, size, dtype=dtype), requires_grad=False)


def transposed(rng, size, dtype, _):
    return filled(rng, 3, size, dtype=dtype).T


def channels_last(rng, size, dtype, _):
    made = filled(rng, 2, 3, 4, max(size // 24, 1), dtype=dtype)
    return made.to(memory_format=torch.channels_last)


def expanded(rng, size, dtype, _):
    return filled(rng, 1, size, dtype=dtype).expand(3, size)


def view(rng, size, dtype, _):
    return filled(rng, size + 5, dtype=dtype)[2 : 2 + size]


def strided(rng, size, dtype, _):
    return filled(rng, 2 * size, dtype=dtype)[::2]


def spread(rng, size, dtype, mesh):
    placement = rng.choice([Shard(0), Replicate()])
    return distribute_tensor(filled(rng, size, dtype=dtype), mesh, [placement])


def of_numpy(rng, size, dtype, _):
    array = np.full(size, 3, dtype=np.float32)
    rng.arrays.append(array)
    return torch.from_numpy(array)


def negated(rng, size, dtype, _):
    """Its bytes are not its values."""
    return torch._neg_view(filled(rng, size, dtype=dtype if dtype.is_floating_point else FLOAT))


def conjugated(rng, size, dtype, _):
    parts = (filled(rng, size, dtype=FLOAT) for _ in range(2))
    return torch.complex(*parts).conj()


def imaginary(rng, size, dtype, mesh):
    """Negated, and strided."""
    return conjugated(rng, size, dtype, mesh).imag


KINDS = (
    *(plain, parameter, transposed, channels_last, expanded, view, strided, spread, of_numpy),
    *(negated, conjugated, imaginary),
)


# --- writers: each changes something somewhere in the middle -------------------------------------


def local(tensor):
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def memory(tensor):
    """The elements where they lie and as they lie there, once each."""
    one = local(tensor)
    one = one.conj() if one.is_conj() else one
    one = torch._neg_view(one) if one.is_neg() else one
    return one[:1] if one.dim() and one.stride(0) == 0 else one


def like(tensor, value):
    """A tensor spread as ``tensor`` is, of zeros but for some element in its middle."""
    one = torch.zeros(tensor.shape, dtype=tensor.dtype)
    one.view(-1)[one.numel() // 2] = value
    if isinstance(tensor, torch.distributed.tensor.DTensor):
        return distribute_tensor(one, tensor.device_mesh, tensor.placements)
    return one


def middle(flat):
    return tuple(n // 2 for n in flat.shape)


def in_place(rng, tensor):
    one = memory(tensor)
    one[middle(one)] += 1


def whole(rng, tensor):
    memory(tensor).mul_(3).add_(1)


def through_spread(rng, tensor):
    if tensor.stride(0):
        tensor.add_(like(tensor, 1))


def copy(rng, tensor):
    one = memory(tensor)
    one.copy_(one + like(one, 1))


def data(rng, tensor):
    one = memory(tensor.data)
    one[middle(one)] += 1


def foreach(rng, tensor):
    is_deferred = tensor.is_neg() or tensor.is_conj()  # of which torch's kernels know nothing
    if tensor.stride(0):
        one = memory(tensor) if is_deferred else tensor
        torch._foreach_add_([one], [like(one, 1)])


def foreach_data(rng, tensor):
    one = memory(tensor).data
    torch._foreach_add_([one[n : n + 1] for n in range(len(one) // 2, len(one))], 1)


def numpy(rng, tensor):
    one = memory(tensor).detach()
    if one.dtype != torch.bfloat16:
        array = one.numpy()
        array[middle(one)] += 1


def array_interface(rng, tensor):
    one = memory(tensor).detach()
    if one.dtype != torch.bfloat16:
        array = np.asarray(one)
        array[middle(one)] += 1


def dlpack(rng, tensor):
    one = torch.from_dlpack(memory(tensor).detach())
    one[middle(one)] += 1


def storage(rng, tensor):
    held = memory(tensor).untyped_storage()
    held[len(held) // 2] = 77


def set_(rng, tensor):
    one = memory(tensor)
    other = torch.empty(0, dtype=one.dtype).set_(one.detach())
    other[middle(other)] += 1


def set_away(rng, tensor):
    """The tensor lies elsewhere from here on."""
    one = local(tensor)
    if type(tensor) is torch.Tensor and not one._is_view():
        tensor.set_(torch.zeros_like(one))


def data_away(rng, tensor):
    if type(tensor) is torch.nn.Parameter:
        tensor.data = torch.zeros_like(tensor)


def resize(rng, tensor):
    is_own = type(tensor) is torch.Tensor and not tensor._is_view() and tensor.dim() == 1
    if is_own and tensor.untyped_storage().resizable():
        tensor.resize_(4 * tensor.numel() + 100_000).fill_(1)


def free(rng, tensor):
    """As FSDP frees what it has gathered."""
    held = local(tensor).untyped_storage()
    if held.resizable():
        size = held.nbytes()
        held.resize_(0)
        held.resize_(size)
        held.fill_(5)


def fused(rng, tensor):
    one = memory(tensor)
    if one.dtype == torch.float32 and one.is_contiguous():
        zeros = [torch.zeros_like(one) for _ in range(3)]
        zeros[0].view(-1)[one.numel() // 2] = 1
        torch._fused_adamw_(
            [one], *([zero] for zero in zeros), [], [torch.tensor(1.0)],
            lr=1.0, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip


def custom(rng, tensor):
    one = memory(tensor)
    if one.is_contiguous():
        bump(one, one.numel() // 2)


def compiled(rng, tensor):
    one = memory(tensor)
    if one.dtype == torch.float32 and one.dim() == 1 and type(one) is torch.Tensor:
        add_compiled(one, like(one, 1))


@torch.compile(backend="aot_eager", dynamic=True)
def add_compiled(one, other):
    one.add_(other)  # through .data, compiled code restores the counter: docs/guarantees.md


def graph(rng, tensor):
    one = memory(tensor)
    at = rng.addresses[id(tensor)] + one.element_size() * (one.numel() // 2)
    torch.cuda.CUDAGraph.replay(lambda: ctypes.memset(at, 0xEE, one.element_size()))


def alias(rng, tensor):
    """One that was made before the boundary."""
    for one in rng.aliases.get(id(tensor), ()):
        one[tuple(n // 2 for n in one.shape)] += 1
    for array in rng.arrays:
        array[len(array) // 2] += 1


def optimizer(rng, tensor):
    """Its hook waits for the copy: what it does then is nobody's business."""
    rng.capture.wait()
    one = memory(tensor)
    ctypes.memset(one.data_ptr(), 0xEE, one.element_size())


WRITERS = (
    *(in_place, whole, through_spread, copy, data, foreach, foreach_data, numpy, array_interface),
    *(
        dlpack,
        storage,
        set_,
        set_away,
        data_away,
        resize,
        free,
        fused,
        custom,
        compiled,
        graph,
        alias,
    ),
    optimizer,
)
ALIASES = {
    "data": lambda one: one.data,
    "detached": lambda one: one.detach(),
    "numpy": lambda one: one.detach().numpy(),
    "dlpack": lambda one: torch.from_dlpack(one.detach()),
    "of a view": lambda one: one.data.view_as(one),
}


# --- a draw --------------------------------------------------------------------------------------


class Rng(random.Random):
    def __init__(self, seed):
        super().__init__(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.arrays, self.aliases, self.addresses = [], {}, {}
        self.capture = None


def tensors_of(rng, mesh):
    found = {}
    for number in range(rng.randint(1, 4)):
        made = rng.choice(KINDS)(rng, rng.choice(SIZES), rng.choice(DTYPES), mesh)
        found[f"t{number}"] = made
        rng.addresses[id(made)] = memory(made).data_ptr()
        if rng.random() < 0.2:
            found[f"tied{number}"] = made
        kind = rng.choice([*ALIASES, *[None] * 10])
        # An alias of a spread tensor cannot be told from those that FSDP2 itself keeps.
        if kind and not isinstance(made, torch.distributed.tensor.DTensor):
            kind = "data" if made.dtype == torch.bfloat16 else kind  # of which NumPy knows nothing
            rng.aliases[id(made)] = [ALIASES[kind](memory(made))]
    return found


def draw(seed, mesh, copiers=None):
    """Whether it was void, whether anything changed before its copy; fails if it was wrong."""
    rng = Rng(seed)
    tensors = tensors_of(rng, mesh)
    wanted = {name: bits(local(tensor)) for name, tensor in tensors.items()}
    made = make(structure(tensors), 0, Share(), {})
    buffer = torch.zeros(made.size, dtype=torch.uint8)
    # What it lies in must live on for a graph that writes by address.
    kept = [memory(tensor).untyped_storage() for tensor in tensors.values()] * (rng.random() < 0.1)
    one = rng.capture = Capture(made, tensors, frozenset(tensors), buffer, on_blocks=lambda _: None)
    one.take_now()
    left = len(one._items)
    if copiers is None:
        one.hold_back()
    else:
        copiers.submit(one)
    writers = []
    for _ in range(rng.randint(0, 3)):
        for _ in range(rng.choice([0, 0, 1, 2, 100]) if copiers is None else 0):
            one._step()
        name = rng.choice(list(tensors))
        writer = rng.choice(WRITERS)
        if writer is graph and any(w in (set_away, resize, free, data_away) for w in writers):
            continue  # its address is another's now
        writers.append(writer)
        with torch.no_grad():
            writer(rng, tensors[name])
    one.wait()
    del kept
    assert one.error is None, (seed, one.error)
    stored = {w.piece.name: bytes(buffer[w.start : w.end].numpy()) for w in made.writes}
    wrong = [name for name, data in stored.items() if data != wanted[name]]
    said = [writer.__name__ for writer in writers]
    assert one.void or not wrong, f"OUTLAST_TEST_DRAW={seed}: {wrong} of {tensors.keys()}: {said}"
    return "void" if one.void else "equal", "later" if left else "at once", said


def seeds(num):
    if "OUTLAST_TEST_DRAW" in os.environ:
        return [int(os.environ["OUTLAST_TEST_DRAW"])]
    first = thorough.seed()
    return range(first, first + num)


def test_each_snapshot_is_the_state_at_the_boundary_or_void(mesh):
    ends = collections.Counter()
    for seed in seeds(DRAWS):
        end, when, said = draw(seed, mesh)
        ends[end] += 1
        ends[when] += 1
        ends.update(f"{name}: {end}" for name in said)
    print(dict(sorted(ends.items())))
    assert torch.Tensor.__dict__.get("data") is None, "torch's functions are its own again"
    if len(ends) > 5:  # not one draw alone
        assert min(ends["void"], ends["equal"], ends["later"]) > DRAWS // 20


def test_the_same_with_threads_that_copy(mesh):
    copied = threading.Semaphore(0)
    copiers = Copiers(lambda _: copied.release())
    try:
        for seed in seeds(DRAWS // 5):
            draw(seed, mesh, copiers)
            assert copied.acquire(timeout=30)
    finally:
        copiers.stop()


def _held_back(tensor):
    """A capture of one tensor that has copied nothing yet, and its buffer."""
    made = make(structure({"t": tensor}), 0, Share(), {})
    buffer = torch.zeros(made.size, dtype=torch.uint8)
    one = Capture(made, {"t": tensor}, {"t"}, buffer, on_blocks=lambda _: None)
    one.take_now()
    one.hold_back()
    return one, buffer


def _what_is_copied_ahead(tensor, ask):
    """The bytes of a snapshot whose copy ``ask`` made, and which was not void."""
    one, buffer = _held_back(tensor)
    ask()
    assert not one._items
    one.wait()
    assert not one.void
    assert one.error is None
    (write,) = one.plan.writes
    return bytes(buffer[write.start : write.end].numpy())


@pytest.mark.parametrize("kind", [strided, negated, view])
def test_who_asks_under_one_of_torch_s_modes_has_the_real_bytes_copied(kind):
    """While torch compiles, a copy copies nothing; under ``torch.func`` it is an error."""
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False)):
        tensor = kind(Rng(1), 3000, FLOAT, None)
        wanted = bits(tensor)

        def ask(tensor=tensor, mode=mode):
            with mode:
                tensor.data  # noqa: B018

        assert _what_is_copied_ahead(tensor, ask) == wanted
    tensor = kind(Rng(1), 3000, FLOAT, None)

    def loss(x, tensor=tensor):
        return (x * tensor.data).sum()

    wanted = bits(tensor)
    assert _what_is_copied_ahead(tensor, lambda: torch.func.grad(loss)(torch.ones(3000))) == wanted


def test_without_a_thread_for_it_the_save_is_lost_and_training_goes_on(monkeypatch):
    tensor = torch.zeros(5000)
    one, _ = _held_back(tensor)
    monkeypatch.setattr(threading.Thread, "start", _no_more_threads)
    tensor.data[7] = 1
    assert str(one.error) == "can't start new thread"


def _no_more_threads(_):
    raise RuntimeError("can't start new thread")


def test_a_forked_process_waits_for_nobody(mesh):
    """It has the functions, and not the threads that copy: a loader's worker, say."""
    tensor = torch.zeros(5000)
    one, _ = _held_back(tensor)
    with one._lock:  # as some thread may have it at that moment
        child = os.fork()
        if not child:
            tensor.data[7] = 1
            tensor.numpy()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    one.wait()
    assert not one.void


def test_what_was_loaded_or_hashed_is_nobody_elses(tmp_path):
    """Else all of it would be copied at once from then on."""
    saved, model = (
        torch.nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last) for _ in range(2)
    )
    write(Directory(tmp_path), [Objects({"m": saved}).capture() | {"outlast": {"step": 7}}])
    Objects({"m": model}).apply(open_checkpoint(Directory(tmp_path), 7))
    tensors = dict(model.named_parameters())
    for tensor in tensors.values():
        raw = as_bytes(tensor)
        assert array_of(raw).tobytes() == bits(tensor.clone())
        assert (array_of(tensor.detach().view(torch.int32)) == 0).sum() == 0
        del raw
    assert held_by_others(tensors, tensors) == set()
    tensors["weight"].detach().numpy()
    assert held_by_others(tensors, tensors) == {"weight"}
