"""Copies into the arena: every kind of tensor, at once or later, whole or through a ring."""

import gc
import threading
import weakref

import pytest
import torch
from unit_fakes import bits

from outlast.checkpoint import capture as room
from outlast.checkpoint.capture import Capture, Copiers, digest_of
from outlast.checkpoint.devices import in_words, sums_of
from outlast.checkpoint.manifest import BLOCK_BYTES
from outlast.checkpoint.plan import Share, make, structure
from outlast.checkpoint.tensors import NAMES
from outlast.errors import ConfigError

BIG = BLOCK_BYTES // 4 + 1001  # fp32 elements: one block and a bit


def plan_of(tensors, *, narrow=(), order=None, share=None):
    return make(structure(tensors, narrow), 0, share or Share(), order or {})


class Ring:
    """A reader that takes each block out of a ring as soon as it is full."""

    def __init__(self, buffer, size, ring_bytes):
        self.buffer, self.size, self.ring_bytes = buffer, size, ring_bytes
        self.file = bytearray(size)
        self.blocks = []

    def full(self, blocks):
        for block in blocks:
            start = block * BLOCK_BYTES
            count = min(BLOCK_BYTES, self.size - start)
            place = start % self.ring_bytes if self.ring_bytes else start
            self.file[start : start + count] = self.buffer[place : place + count].numpy().tobytes()
            self.blocks.append(block)


def capture(tensors, lazy=(), *, narrow=(), ring_bytes=0, share=None, plan=None):
    """A capture that has not copied anything, and what reads its blocks."""
    plan = plan or plan_of(tensors, narrow=narrow, share=share)
    buffer = torch.full((ring_bytes or plan.size,), 0xAB, dtype=torch.uint8)
    ring = Ring(buffer, plan.size, ring_bytes)
    made = Capture(plan, tensors, lazy, buffer, ring_bytes=ring_bytes, on_blocks=ring.full)
    return made, ring


def stored(made, ring):
    """Name → bytes in the file."""
    return {w.piece.name: bytes(ring.file[w.start : w.end]) for w in made.plan.writes}


def zoo():
    """A tensor of each dtype, and of each way to lie in memory."""
    torch.manual_seed(0)
    base = torch.randn(12, 10)
    raw = torch.randint(0, 256, (16,), dtype=torch.uint8)
    tensors = {f"dtype.{NAMES[d]}": raw.clone().view(d) for d in NAMES if d != torch.bool}
    tensors |= {
        "bool": raw > 127,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "offset": base[3:5],
        "expanded": torch.randn(1, 4).expand(5, 4),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugated": torch.randn(5, dtype=torch.complex64).conj(),
        "negated": torch.randn(5, dtype=torch.complex64).conj().imag,
        "flipped": base.T[1:, 2:].transpose(0, 1),
        "big": torch.randn(BIG),
        "big.transposed": torch.randn(BIG // 7, 7).T,
    }
    with torch.inference_mode():
        tensors["inference"] = torch.randn(3)
    return tensors


@pytest.mark.parametrize("ring_bytes", [0, 2 * BLOCK_BYTES])
@pytest.mark.parametrize("is_lazy", [False, True])
def test_every_kind_of_tensor_is_copied_bit_for_bit(ring_bytes, is_lazy):
    tensors = zoo()
    made, ring = capture(tensors, tensors if is_lazy else (), ring_bytes=ring_bytes)
    made.take_now()
    made.wait()
    assert made.void == []
    assert made.error is None
    assert sorted(ring.blocks) == list(range(len(ring.blocks)))
    found = stored(made, ring)
    assert {name: found[name] == bits(tensor) for name, tensor in tensors.items()} == dict.fromkeys(
        tensors, True
    )
    assert bytes(ring.file[: len(made.plan.head)]) == made.plan.head
    # The negated one is a view of a view that lives as well.
    late = {"negated"} if is_lazy and not ring_bytes else set(found)
    assert made.copied_at_once_bytes == sum(len(found[name]) for name in late)


@pytest.mark.parametrize("ring_bytes", [0, 2 * BLOCK_BYTES])
def test_what_is_stored_in_fewer_bits_is_rounded_as_torch_rounds(ring_bytes):
    tensors = {"m": torch.randn(BIG), "w": torch.randn(7)}
    made, ring = capture(tensors, tensors, narrow={"m"}, ring_bytes=ring_bytes)
    made.take_now()
    made.wait()
    found = stored(made, ring)
    assert found["m"] == bits(tensors["m"].to(torch.bfloat16))
    assert found["w"] == bits(tensors["w"])


KINDS = {
    "plain": lambda: torch.randn(600, 40),
    "strided": lambda: torch.randn(40, 600).T,
    "narrow": lambda: torch.randn(600, 40),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["before its copy", "after its copy"])
@pytest.mark.parametrize("how", ["counted", "counted, in the middle", "first", "last"])
def test_a_tensor_that_changes_before_the_hook_is_void(kind, when, how):
    tensor, other = KINDS[kind](), torch.randn(9)
    narrow = {"w"} if kind == "narrow" else ()
    made, _ = capture({"w": tensor, "other": other}, {"w", "other"}, narrow=narrow)
    made.take_now()
    if when == "after its copy":
        made.help()
    if how == "counted":
        tensor.mul_(2)
    elif how == "counted, in the middle":
        tensor[300].mul_(2)
    else:
        index = 0 if how == "first" else -1
        tensor.data[index, index] += 1  # no counter tells
    made.wait()
    assert set(made.void) == {"w"}


def test_what_changes_after_the_hook_is_nobodys_business():
    tensor = torch.randn(50)
    made, ring = capture({"w": tensor}, {"w"})
    made.take_now()
    before = bits(tensor)
    made.wait()
    tensor.mul_(2)
    made.settle()
    made.wait()
    assert made.void == []
    assert stored(made, ring)["w"] == before


def test_what_changes_in_the_middle_of_an_operation_is_found_when_the_copier_settles(monkeypatch):
    """A counter moves after the bytes: the copier looks again when the operation has ended."""
    monkeypatch.setattr(room, "SETTLE_S", 0.0)
    tensor = torch.randn(50)
    made, _ = capture({"w": tensor}, {"w"})
    made.take_now()
    made.help()
    assert made.void == []
    with torch.no_grad():
        tensor[25].mul_(2)
    made.settle()
    assert made.void == ["w"]


def test_what_is_not_lazy_is_hashed_at_once():
    """A replica that another rank writes, and that forward changes."""
    tensor = torch.randn(70, 300)
    plan = plan_of({"w": tensor}, share=Share(writers={"w[0,0]": 1}))
    made, _ = capture({"w": tensor}, (), plan=plan)
    made.take_now()
    assert made.digests == {"w[0,0]": digest_of(tensor)}
    tensor.mul_(2)
    made.wait()
    assert made.void == []


@pytest.mark.parametrize("kind", [*KINDS, "longer than a ring"])
@pytest.mark.parametrize("ring_bytes", [0, 2 * BLOCK_BYTES])
@pytest.mark.parametrize("is_lazy", [False, True])
def test_who_writes_and_who_checks_come_to_the_same_digest(kind, ring_bytes, is_lazy):
    tensor = KINDS.get(kind, lambda: torch.randn(3 * BIG // 64, 64))()
    narrow = {"w"} if kind == "narrow" else ()
    found = []
    for writer in (0, 1):
        plan = plan_of({"w": tensor}, narrow=narrow, share=Share(writers={"w[0,0]": writer}))
        made, _ = capture({"w": tensor}, {"w"} if is_lazy else (), plan=plan, ring_bytes=ring_bytes)
        made.take_now()
        made.wait()
        found.append(made.digests)
    assert found[0] == found[1] != {}


def test_a_device_digest_sees_each_flipped_bit():
    for dtype in NAMES:
        one = torch.randint(0, 256, (48,), dtype=torch.uint8).view(torch.uint8)
        other = one.clone()
        other[5] ^= 16
        if dtype == torch.bool:
            one, other = one > 127, one > 128
            other[3] = ~one[3]
        assert in_words(sums_of(one.view(dtype))) != in_words(sums_of(other.view(dtype)))
        assert in_words(sums_of(one.view(dtype))) == in_words(sums_of(one.clone().view(dtype)))
    assert in_words(sums_of(torch.randn(3, 4).T)) != ""
    assert in_words(sums_of(torch.randn(3, dtype=torch.complex64).conj().imag)) != ""


def test_a_tensor_that_is_not_what_was_planned_is_refused():
    plan = plan_of({"w": torch.randn(4, 4)})
    with pytest.raises(ConfigError, match=r"w has shape \(4, 3\), planned as \(4, 4\)"):
        capture({"w": torch.randn(4, 3)}, plan=plan)


def test_a_failing_copy_is_the_saves_and_never_trainings(monkeypatch):
    tensors = {"a": torch.randn(4, 4), "b": torch.randn(5)}
    made, _ = capture(tensors, tensors)
    made.take_now()
    monkeypatch.setattr(made, "_on_blocks", lambda _: 1 / 0)
    made.wait()
    assert isinstance(made.error, ZeroDivisionError)


def test_memory_that_training_replaces_stays_until_it_is_copied():
    tensor = torch.nn.Parameter(torch.randn(1000))
    before = bits(tensor)
    made, ring = capture({"w": tensor}, {"w"})
    made.take_now()
    tensor.data = torch.zeros(1000)
    made.wait()
    assert stored(made, ring)["w"] == before
    assert made.void == []


# --- copiers -------------------------------------------------------------------------------------


@pytest.fixture
def copiers():
    copied, started = threading.Semaphore(0), []

    def on_copied(_):
        copied.release()

    made = Copiers(on_copied)
    made.copied, made.captures = copied, started
    yield made
    made.stop()
    assert not any(thread.is_alive() for thread in made._threads)


def test_copiers_copy_one_capture_after_the_other(copiers):
    for number in range(20):
        tensors = {"w": torch.full((1000,), float(number)), "big": torch.randn(BIG)}
        made, ring = capture(tensors, tensors)
        made.take_now()
        copiers.submit(made)
        if number % 2:
            made.wait()
        assert copiers.copied.acquire(timeout=30)
        assert made.void == []
        assert stored(made, ring) == {name: bits(tensor) for name, tensor in tensors.items()}
        assert copiers.current is None


def test_copiers_keep_nothing_alive(copiers):
    tensor = torch.randn(1000)
    gone = weakref.ref(tensor)
    made, _ = capture({"w": tensor}, {"w"})
    dead = weakref.ref(made)
    made.take_now()
    copiers.submit(made)
    assert copiers.copied.acquire(timeout=30)
    del made, tensor
    for _ in range(100):
        gc.collect()
        if dead() is None:
            break
        threading.Event().wait(0.01)
    assert dead() is None
    assert gone() is None


# --- tensors that are spread ---------------------------------------------------------------------


@pytest.fixture
def mesh():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["the whole", "its part", "past the counter"])
def test_a_spread_tensor_that_changes_under_the_copy_is_void(mesh, how):
    from torch.distributed.tensor import Shard, distribute_tensor

    tensor = distribute_tensor(torch.randn(40, 30), mesh, [Shard(0)])
    other = distribute_tensor(torch.randn(9), mesh, [Shard(0)])
    tensors = {"w": tensor, "other": other}
    made, ring = capture(tensors, tensors)
    made.take_now()
    made.help()
    assert stored(made, ring) == {n: bits(t.to_local()) for n, t in tensors.items()}
    with torch.no_grad():
        if how == "the whole":
            tensor.mul_(2)
        elif how == "its part":
            tensor.to_local()[20].mul_(2)
        else:
            tensor.to_local().data[0, 0] += 1
    made.wait()
    assert made.void == ["w"]
