"""What is whole in memory, and new enough, is tried before any storage is as much as listed."""

import pytest
import torch
from unit_checkpoints import write
from unit_fakes import Hub, WatchedStorage, on_ranks
from unit_names import names, save_name, save_of

from outlast.checkpoint.manifest import Place
from outlast.errors import StorageError
from outlast.storage import Directory
from outlast.training import resume
from outlast.training.resume import Candidates


def save(path, step, ranks=2):
    states = [{"model": {"w": torch.full((3,), float(step))}, "n": rank} for rank in range(ranks)]
    write(Directory(path), states, step)


def unreachable(path):
    """A storage of which every call fails; what was tried is in its log."""
    return WatchedStorage(Directory(path), lambda *_: OSError(5, "Input/output error"))


@pytest.fixture(name="job")
def _job(tmp_path):
    """Memory, a peer's memory and a disk, as directories; the peer lacks rank 0's files."""
    memory, peer, disk = (tmp_path / name for name in ("memory", "peer", "disk"))
    for step in (10, 20):
        save(memory, step)
        save(peer, step)
    for place, rank in ((memory, 1), (peer, 0)):
        for step in (10, 20):
            (place / save_name(step) / f"rank-{rank:05d}.safetensors").unlink(missing_ok=True)
            (place / save_name(step) / f"rank-{rank:05d}.json").unlink()
    return memory, peer, disk


def places(job, disk):
    memory, peer, _ = job
    return [
        Place("memory", Directory(memory), in_memory=True),
        Place("peer", Directory(peer), in_memory=True),
        Place("local", disk),
    ]


def find(where, promised):
    def act(link):
        return resume.find(where, link, names(*promised), lambda _: None)

    return on_ranks(2, act, hub=Hub(2))


@pytest.mark.parametrize("promised", [(), (10,), (10, 20)])
def test_storage_is_not_touched_when_memory_has_what_is_promised(job, promised):
    disk = unreachable(job[2])
    outcomes = find(places(job, disk), promised)
    assert [outcome.step for outcome in outcomes] == [20, 20]
    assert not disk.log
    for outcome in outcomes:
        assert set(outcome.sources.values()) <= {"memory", "peer"}
        assert not outcome.skipped
        assert not outcome.repaired


def test_what_the_ledger_promises_and_memory_lacks_is_looked_for(job):
    save(job[2], 30)
    outcomes = find(places(job, Directory(job[2])), (10, 20, 30))
    assert [outcome.step for outcome in outcomes] == [30, 30]


def test_what_is_promised_and_can_nowhere_be_read_is_missed_in_words(job):
    disk = unreachable(job[2])
    outcomes = find(places(job, disk), (30,))
    assert [outcome.step for outcome in outcomes] == [20, 20]
    assert ("children", "") in disk.log
    assert [skipped.step for skipped in outcomes[0].skipped] == [30]
    assert "cannot be listed" in outcomes[0].notes[0]


def test_a_step_that_is_not_whole_in_memory_is_completed_from_storage(job):
    _, peer, disk = job
    save(disk, 20)
    (peer / save_name(20) / "rank-00001.json").unlink()
    outcomes = find(places(job, Directory(disk)), (10, 20))
    assert [outcome.step for outcome in outcomes] == [20, 20]
    assert outcomes[1].sources["rank-00001.json"] == "local"


def test_when_memory_proves_damaged_storage_is_asked_after_all(job):
    memory, _, disk = job
    save(disk, 10)
    (memory / save_name(20) / "rank-00000.json").write_text("{}")
    outcomes = find(places(job, Directory(disk)), (10,))
    assert [outcome.step for outcome in outcomes] == [10, 10]
    assert [skipped.step for skipped in outcomes[0].skipped] == [20]


def test_memory_alone_that_is_damaged_and_storage_that_is_gone_is_no_first_start(job):
    for place in job[:2]:
        for step in (10, 20):
            (place / save_name(step) / "manifest.json").write_text("{}")
    assert all(
        isinstance(error, StorageError) for error in find(places(job, unreachable(job[2])), (10,))
    )


def test_without_memory_all_is_as_before(job):
    save(job[2], 30)
    search = Candidates([Place("local", Directory(job[2]))], names(30))
    assert search.propose().save == save_name(30)
    search.reject(save_of(30), "torn", "", "full")
    assert "none is valid" in search.propose().refused


def test_nothing_anywhere_is_a_first_start(tmp_path):
    where = [
        Place("peer", Directory(tmp_path / "peer"), in_memory=True),
        Place("local", Directory(tmp_path / "disk")),
    ]
    assert Candidates(where, ()).propose().save == ""
    assert Candidates(where, ()).propose().refused == ""
