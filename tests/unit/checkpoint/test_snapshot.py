"""The copy is the state of one moment, in memory that is used again."""

import torch
from unit_checkpoints import read_flat
from unit_fakes import bits
from unit_names import save_name
from unit_saver import Attempt, captured, share_everything, snapshot

from outlast.checkpoint.capture import digest_of
from outlast.storage import Directory


def bytes_of(taken, data):
    """Name → a tensor's bytes in its rank's file."""
    return {write.piece.name: data[write.start : write.end] for write in taken.plan.writes}


def test_bytes_are_those_of_each_tensor():
    tensors = {
        "b": torch.rand(3, 2, dtype=torch.float64).t(),
        "a": torch.tensor(True),
        "c": torch.empty(0, 4),
        "d": torch.ones(2, dtype=torch.bfloat16),
    }
    taken, data = snapshot(tensors)
    assert bytes_of(taken, data) == {name: bits(tensor) for name, tensor in tensors.items()}
    assert len(data) == len(taken.plan.head) + 6 * 8 + 1 + 2 * 2
    assert data.startswith(taken.plan.head)
    assert taken.plan.writes[0].piece.name == "b"  # widest elements first


def test_the_copy_does_not_follow_the_tensor(tmp_path):
    weight = torch.ones(4)
    given = captured({"m": {"w": weight}})
    with Attempt(Directory(tmp_path), 1) as attempt:
        attempt.agree([given])
        (saver,) = attempt.savers
        saver.copy(given)
        weight.fill_(2)
        saver.complete()
        saver.wait()
        memory = attempt.keepers[0].memory()
        data = memory.read(f"{save_name(7)}/rank-00000.safetensors")
    assert data[-16:] == bits(torch.ones(4))


def test_memory_is_used_again_and_grows_when_it_must(tmp_path):
    with Attempt(Directory(tmp_path), 1) as attempt:
        arenas = attempt.keepers[0].books.arenas
        sizes = {"large": 100_000, "small": 10, "larger": 1_000_000}
        for step, (name, size) in enumerate(sizes.items(), 1):
            state = {"m": {name: torch.full((size,), float(step))}}
            assert [one.error for one in attempt.save([state], step)] == [""]
            assert len(arenas) == (2 if name == "larger" else 1)
            memory = attempt.keepers[0].memory()
            data = memory.read(f"{save_name(step, serial=step)}/rank-00000.safetensors")
            assert data[-4 * size :] == bits(state["m"][name])


def test_nothing_to_copy():
    taken, data = snapshot({})
    assert (data, taken.plan.size, taken.plan.writes) == (b"", 0, ())


def test_digests_tell_values_apart_that_compare_equal():
    base = torch.tensor([1.0, 0.0, 0.0, 0.0])
    values = [base, torch.tensor([1.0, 0.0, 0.0, -0.0]), base[:3], base[:0]]
    assert digest_of(base) == digest_of(base.clone())
    assert len({digest_of(value) for value in values}) == len(values)


def test_digests_are_of_what_a_view_shows():
    turned = torch.rand(3, 4).t()
    assert digest_of(turned) == digest_of(turned.contiguous())
    flipped = torch.tensor([1 + 2j, -3j]).conj()
    assert digest_of(flipped) == digest_of(flipped.resolve_conj())
    assert digest_of(flipped) != digest_of(flipped.conj())


def test_tensors_are_only_compared_with_those_of_their_shape_and_dtype(tmp_path, monkeypatch):
    """A digest is of bytes alone: equal bytes of other shapes or dtypes are no replicas."""
    share_everything(monkeypatch)
    base = torch.tensor([1.0, 0.0, 0.0, 0.0])
    for number, other in enumerate((base.view(2, 2), base.view(torch.int32)), 1):
        with Attempt(Directory(tmp_path), 2, attempt=number) as attempt:
            attempt.save([{"m": {"w": base}}, {"m": {"w": other}}])
        found = read_flat(Directory(tmp_path), 7)
        assert (found.attempt, set(found.tensors)) == (number, {"m.w", "m.w@rank-00001"})
