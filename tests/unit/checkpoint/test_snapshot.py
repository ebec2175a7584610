"""The copy is the state of one moment, in memory that is used again."""

import torch
import xxhash
from unit_fakes import bits

from outlast.checkpoint.snapshot import Arena


def test_bytes_are_those_of_each_tensor():
    tensors = {
        "b": torch.rand(3, 2, dtype=torch.float64).t(),
        "a": torch.tensor(True),
        "c": torch.empty(0, 4),
        "d": torch.ones(2, dtype=torch.bfloat16),
    }
    snapshot = Arena().take(tensors)
    assert {name: bytes(snapshot.bytes_of(name)) for name in tensors} == {
        name: bits(tensor) for name, tensor in tensors.items()
    }
    assert snapshot.num_bytes == 6 * 8 + 1 + 2 * 2
    assert next(iter(snapshot.placed)) == "b"  # widest elements first


def test_the_copy_does_not_follow_the_tensor():
    weight = torch.ones(4)
    snapshot = Arena().take({"w": weight})
    weight.fill_(2)
    assert bytes(snapshot.bytes_of("w")) == bits(torch.ones(4))


def test_memory_is_used_again_and_grows_when_it_must():
    arena = Arena()
    large = arena.take({"w": torch.ones(100)})
    place = torch.frombuffer(large.data, dtype=torch.uint8).data_ptr()
    small = arena.take({"w": torch.zeros(10), "v": torch.zeros(5)})
    assert torch.frombuffer(small.data, dtype=torch.uint8).data_ptr() == place
    assert small.num_bytes == 60
    assert bytes(small.bytes_of("w")) == bytes(40)
    larger = arena.take({"w": torch.full((1000,), 3.0)})
    assert bytes(larger.bytes_of("w")) == bits(torch.full((1000,), 3.0))


def test_nothing_to_copy():
    snapshot = Arena().take({})
    assert snapshot.num_bytes == 0
    assert snapshot.placed == {}


def test_digests_tell_value_shape_and_dtype_apart():
    base = torch.tensor([1.0, 0.0, 0.0, 0.0])
    tensors = {
        "same": base,
        "again": base.clone(),
        "value": torch.tensor([1.0, 0.0, 0.0, -0.0]),
        "shape": base.view(2, 2),
        "dtype": base.view(torch.int32),
        "empty": base[:0],
    }
    snapshot = Arena().take(tensors)
    digests = {name: snapshot.digest(name) for name in tensors}
    assert digests["same"] == digests["again"]
    assert len(set(digests.values())) == len(tensors) - 1
    assert digests["same"] != xxhash.xxh3_128_hexdigest(b"")
