"""Which checkpoint a job goes on from: all ranks agree, and nothing is passed over in silence."""

import pytest
import torch
from unit_fakes import Hub, WatchedStorage, on_ranks, same

from outlast.attempt.link import LocalLink
from outlast.checkpoint.manifest import step_name
from outlast.checkpoint.save import Captured, Saver
from outlast.checkpoint.snapshot import Arena
from outlast.checkpoint.tree import flatten
from outlast.errors import ResumeRefused, StateMismatch, StorageError
from outlast.storage import Directory
from outlast.training import resume


def fine(loaded):
    """Every checkpoint fits."""


def save(path, step, world_size=2):
    def act(link):
        state = {"model": {"w": torch.full((3,), float(step))}, "outlast": {"rank": link.rank}}
        data, tensors = {}, {}
        for key, value in state.items():
            data[key], found = flatten(value, key)
            tensors |= found
        saver = Saver(Directory(path), link, job="j", attempt=1, timeout_s=5.0)
        saver.save(Captured(step=step, data=data, snapshot=Arena().take(tensors)))

    assert on_ranks(world_size, act) == [None] * world_size


def find(path, world_size=2, *, promised=(), check=fine, storages=None, only=None):
    storages = storages or [Directory(path)] * world_size

    def act(link):
        mine = check[link.rank] if isinstance(check, list) else check
        given = promised if link.rank == 0 else ()
        return resume.find(storages[link.rank], link, given, mine)

    return on_ranks(world_size, act, hub=Hub(world_size), only=only)


def damage(path, step, name):
    file = path / step_name(step) / name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def cannot_read(path, step):
    """A machine's view of the storage in which the files of ``step`` are unreadable."""

    def fail(did, name):
        hit = did == "size" and step_name(step) in name
        return OSError(5, "Input/output error") if hit else None

    return WatchedStorage(Directory(path), fail)


def refuse(step, error):
    """A check that refuses ``step`` alone."""

    def check(loaded):
        if loaded.manifest.step == step:
            raise error

    return check


def test_a_first_start(tmp_path):
    for outcome in find(tmp_path / "none"):
        assert (outcome.step, outcome.loaded, outcome.skipped) == (0, None, [])
        assert outcome.read_s >= 0


def test_unfinished_steps_are_no_promise(tmp_path):
    (tmp_path / step_name(5)).mkdir()
    assert [outcome.step for outcome in find(tmp_path)] == [0, 0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_newest_valid_one_is_chosen_by_all(tmp_path, world_size):
    for step in (100, 300, 200):
        save(tmp_path, step)
    for rank, outcome in enumerate(find(tmp_path, world_size, promised=[100, 200, 300])):
        assert (outcome.step, outcome.skipped) == (300, [])
        assert same(outcome.loaded.state("model"), {"w": torch.full((3,), 300.0)})
        assert outcome.loaded.state("outlast") == {"rank": rank % 2}


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.json", "manifest.json"])
def test_a_damaged_one_is_passed_over_by_all_and_said(tmp_path, name):
    for step in (100, 200, 300):
        save(tmp_path, step)
    damage(tmp_path, 300, name)
    for outcome in find(tmp_path):
        assert outcome.step == outcome.loaded.manifest.step == 200
        ((step, reason),) = [(one.step, one.reason) for one in outcome.skipped]
        assert step == 300
        assert name in reason


def test_several_are_passed_over_newest_first(tmp_path):
    for step in (100, 200, 300, 400):
        save(tmp_path, step)
    damage(tmp_path, 300, "rank-00000.json")
    (tmp_path / step_name(400) / "rank-00001.safetensors").unlink(missing_ok=True)
    (tmp_path / step_name(400) / "rank-00001.json").unlink()
    for outcome in find(tmp_path, promised=[400, 500]):
        assert outcome.step == 200
        assert [(one.step, one.reason) for one in outcome.skipped] == [
            (500, "its manifest is missing, though the ledger has its commit"),
            (400, "rank-00001.json is missing"),
            (300, "rank-00000.json does not match its checksum (block 0 of 1)"),
        ]


def test_one_ranks_refusal_is_everybodys(tmp_path):
    """Rank 1's machine cannot read what rank 0's can."""
    for step in (100, 200):
        save(tmp_path, step)
    blind = cannot_read(tmp_path, 200)
    for outcome in find(tmp_path, storages=[Directory(tmp_path), blind]):
        assert outcome.step == 100
        assert [(one.step, one.reason) for one in outcome.skipped] == [
            (200, "EIO: Input/output error")
        ]


@pytest.mark.parametrize("error", [KeyError("x"), TypeError("x"), ValueError("x")])
def test_small_state_that_nobody_understands_is_passed_over(tmp_path, error):
    for step in (100, 200):
        save(tmp_path, step)
    for outcome in find(tmp_path, check=[fine, refuse(200, error)]):
        assert outcome.step == 100
        assert "its small state is not understood" in outcome.skipped[0].reason


def test_not_enough_memory_is_not_the_checkpoints_fault(tmp_path):
    save(tmp_path, 100)
    results = find(tmp_path, check=[fine, refuse(100, MemoryError())])
    assert all(isinstance(result, StorageError) for result in results)
    assert "not enough memory to read it" in str(results[0])


@pytest.mark.parametrize("unhappy", [0, 1])
def test_a_mismatch_on_one_rank_is_raised_on_all(tmp_path, unhappy):
    """Older ones are not tried: the newest is whole, the session is another."""
    for step in (100, 200):
        save(tmp_path, step)
    tried = []
    checks = [lambda loaded: tried.append(loaded.manifest.step)] * 2
    checks[unhappy] = refuse(200, StateMismatch("model.w has shape (3,) in step 200"))
    results = find(tmp_path, check=checks)
    assert [type(result) for result in results] == [StateMismatch, StateMismatch]
    assert {str(result) for result in results} == {"model.w has shape (3,) in step 200"}
    assert tried == [200]


@pytest.mark.parametrize("unhappy", [0, 1])
def test_what_one_rank_cannot_read_is_not_compared_by_the_other(tmp_path, unhappy):
    """A session that is another is told of by the older one, which both ranks can read."""
    for step in (100, 200):
        save(tmp_path, step)
    blind = cannot_read(tmp_path, 200)
    storages = [Directory(tmp_path), Directory(tmp_path)]
    storages[1 - unhappy] = blind
    checks = [fine, fine]
    checks[unhappy] = refuse(200, StateMismatch("model.w has shape (3,) in step 200"))
    for outcome in find(tmp_path, storages=storages, check=checks):
        assert (outcome.step, outcome.skipped[0].step) == (100, 200)


def test_none_is_valid(tmp_path):
    for step in (100, 200):
        save(tmp_path, step)
    damage(tmp_path, 100, "manifest.json")
    damage(tmp_path, 200, "rank-00000.json")
    results = find(tmp_path, promised=[100, 200])
    assert [type(result) for result in results] == [ResumeRefused, ResumeRefused]
    assert str(results[0]) == str(results[1])
    says = str(results[0])
    assert says.startswith(
        f"checkpoints were committed to {tmp_path} and none is valid (step 200: "
    )
    assert "rank-00000.json does not match its checksum" in says
    assert "; step 100: manifest.json" in says
    assert says.endswith("bring one back from a copy, or start anew with another --dir")


def test_a_manifest_alone_is_a_promise(tmp_path):
    """The ledger may be lost too."""
    save(tmp_path, 100)
    damage(tmp_path, 100, "manifest.json")
    assert all(isinstance(result, ResumeRefused) for result in find(tmp_path))


def test_the_ledger_alone_is_a_promise(tmp_path):
    results = find(tmp_path, promised={100, 50})
    assert all(isinstance(result, ResumeRefused) for result in results)
    assert "step 100: its manifest is missing, though the ledger has its commit" in str(results[1])


@pytest.mark.parametrize("promised", [(), (100,)])
def test_a_storage_that_cannot_be_listed(tmp_path, promised):
    save(tmp_path, 100)
    error = OSError(13, "Permission denied")
    blind = WatchedStorage(Directory(tmp_path), lambda did, _: error if did == "children" else None)
    results = find(tmp_path, promised=promised, storages=[blind, Directory(tmp_path)])
    assert [type(result) for result in results] == [StorageError, StorageError]
    assert str(results[1]) == f"{tmp_path} cannot be listed: Permission denied"


def test_a_storage_that_cannot_be_read_is_not_a_loss(tmp_path):
    """Not 'none is valid': the checkpoints may be as good as ever."""
    save(tmp_path, 100)
    error = OSError(5, "Input/output error")
    blind = WatchedStorage(Directory(tmp_path), lambda did, _: error if did == "read" else None)
    results = find(tmp_path, promised=[100], storages=[blind, Directory(tmp_path)])
    assert all(isinstance(result, StorageError) for result in results)
    assert str(results[0]) == f"{tmp_path} cannot be read: EIO: Input/output error"


def test_only_rank_0_verifies_what_it_does_not_need(tmp_path):
    save(tmp_path, 100, world_size=3)
    storages = [WatchedStorage(Directory(tmp_path)) for _ in range(3)]
    find(tmp_path, 3, storages=storages)
    read = [
        {name.rpartition("/")[2] for did, name in storage.log if did == "read_into"}
        for storage in storages
    ]
    assert {f"rank-0000{rank}.json" for rank in range(3)} <= read[0]
    for rank in (1, 2):
        assert read[rank] == {
            "rank-00000.safetensors",
            f"rank-0000{rank}.json",
        }


def test_a_rank_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "READ_TIMEOUT_S", 0.05)
    save(tmp_path, 100)
    results = find(tmp_path, only=[0])
    assert isinstance(results[0], TimeoutError)
    results = find(tmp_path, only=[1])
    assert isinstance(results[1], TimeoutError)


def test_alone(tmp_path):
    save(tmp_path, 100, world_size=1)
    assert resume.find(Directory(tmp_path), LocalLink(), (), fine).step == 100
