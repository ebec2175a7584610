"""What is done with the parts of thousands of ranks, and what is said of full disks and errors."""

import errno
import os
import re
import sys
from types import SimpleNamespace

import pytest
from keeper_fakes import FakeKeeper, hello
from unit_fakes import listing

from outlast import storage
from outlast.keeper import protocol
from outlast.keeper.flight import MAX_ASKED, GatheredParts, RankOutcome
from outlast.storage import Directory


def calls_of(act):
    """How many Python functions ``act`` calls: work that no clock and no other process changes."""
    count = [0]

    def see(_, event, __):
        count[0] += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count[0]


def test_the_work_for_a_save_is_linear_in_the_ranks(monkeypatch, tmp_path):
    part = RankOutcome(replicas={"all": "1"})

    def calls(num_ranks):
        keeper = FakeKeeper(monkeypatch, {"local": Directory(tmp_path / str(num_ranks))})
        keeper.meet([0])
        keeper.worker(world_size=num_ranks).begin(5, 1)
        reports = [protocol.PartReport(step=5, serial=1, rank=rank) for rank in range(1, num_ranks)]
        who = hello(1, num_ranks)

        def report_all():
            for report in reports:
                keeper.saves.reported(who, report, part, None)

        return calls_of(report_all) / num_ranks

    assert calls(4000) < 1.1 * calls(500)


def test_replicas_are_compared_within_their_group_and_one_of_each_version_is_asked():
    found = GatheredParts(1000)
    for rank in range(1000):
        version = "odd" if rank == 7 else "even"
        found.add(rank, RankOutcome(replicas={"all": version, f"pair-{rank // 2}": str(rank // 2)}))
    assert found.is_whole
    assert found.differs
    assert found.ask() == {0: ("all",), 7: ("all",)}
    assert found.ask() == {}
    assert list(found.missing()) == [0, 7]
    assert not found.answer(5, {"w[0]": "1"})  # nobody asked it
    assert not found.answer(0, {"w[0]": "1", "v[0]": "1"})
    assert found.answer(7, {"w[0]": "2", "v[0]": "1"})
    assert found.differing() == ("w[0]",)


def test_of_ranks_that_are_all_different_some_are_asked():
    found = GatheredParts(100)
    for rank in range(100):
        found.add(rank, RankOutcome(replicas={"all": str(rank)}))
    assert len(found.ask()) == MAX_ASKED


def test_a_part_counts_once_and_ranks_that_are_not_there_do_not():
    found = GatheredParts(2)
    assert found.add(1, RankOutcome(error="lost", void=("a",)))
    assert not found.add(1, RankOutcome())
    assert not found.add(2, RankOutcome(error="who?"))
    assert (found.failed, found.void, found.is_whole) == ([1], {"a"}, False)


# --- what is said of a full disk, and of other errors: where, how much, and what to do ------------

MIB = 2**20


def full(number=errno.ENOSPC):
    return OSError(number, os.strerror(number))


@pytest.fixture(name="room")
def _room(monkeypatch):
    """What the file system says it has."""
    found = SimpleNamespace(f_bavail=0, f_frsize=4096, f_files=100, f_favail=50)
    monkeypatch.setattr(os, "statvfs", lambda _: found)
    return found


@pytest.mark.parametrize("where", ["create", "write_at", "finish", "put", "put_new"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_whatever_does_not_fit_the_line_says_all_of_it(
    monkeypatch, tmp_path, room, where, world_size
):
    """A shard, the small files, a rank's part, the note, the manifest."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    room.f_bavail = 0 if where == "put_new" else 100  # all but the manifest was written
    disk = Fails(tmp_path / "tier", where)
    keeper = FakeKeeper(monkeypatch, {"local": disk})
    workers = [keeper.worker(rank, world_size, size=8 * MIB) for rank in range(world_size)]
    for worker in workers:
        worker.save(5, 1)
    keeper.run()
    ((event, fields),) = keeper.events
    assert event == "storage_error"
    words = fields["error"].removeprefix("rank 0: ")
    start = f"No space left on device: step 5 needs {8 * world_size}(\\.[0-9]+)? MiB in "
    assert re.match(f"{start}{tmp_path}/tier, and ", words)
    assert words.endswith(f" are free; {storage.KEEP_FEWER}")
    free = room.f_bavail * 4096 + sum(
        path.stat().st_blocks * 512 for path in (tmp_path / "tier").rglob("*") if path.is_file()
    )
    assert f", and {storage.size_of(free)} are free; " in words
    (ended,) = workers[0].ended
    assert (ended.error, ended.by_storage) == (fields["error"], True)


class Fails(Directory):
    """A disk that is full at one kind of call."""

    def __init__(self, root, where):
        super().__init__(root)
        self.where = where

    def _fail(self, where, name=""):
        if where == self.where:
            raise full()

    def create(self, name, size=None):
        self._fail("create", name)
        blob = super().create(name, size)
        if size is not None:
            for call in ("write_at", "finish"):
                if call == self.where:
                    setattr(blob, call, lambda *_: self._fail(self.where))
        return blob

    def put(self, name, data):
        self._fail("put", name)
        super().put(name, data)

    def put_new(self, name, data, **options):
        self._fail("put_new", name)
        return super().put_new(name, data, **options)


def of(error, tmp_path, sizes=(10 * MIB,)):
    return storage.unwritten(error, Directory(tmp_path), "step-x", list(sizes), "step 7")


def test_what_the_save_has_written_is_room_for_it(tmp_path, room):
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-x" / "shard").write_bytes(b"x" * 3 * MIB)
    (tmp_path / "other").write_bytes(b"x" * 3 * MIB)
    assert "needs 10 MiB" in of(full(), tmp_path)
    assert "and 3 MiB are free; " in of(full(), tmp_path)


def test_so_little_is_missing_that_it_is_said_to_the_byte(tmp_path, room):
    room.f_bavail = 10 * MIB // 4096
    assert "and 12288 bytes less are free; " in of(full(), tmp_path)


def test_what_is_free_by_the_time_it_is_said(tmp_path, room):
    room.f_bavail = 20 * MIB // 4096
    assert "and 20 MiB are free by now; " in of(full(), tmp_path)


def test_a_quota_and_too_many_files_are_called_so(tmp_path, room):
    room.f_bavail = 10**6
    words = of(full(errno.EDQUOT), tmp_path)
    assert words.startswith("Disk quota exceeded: step 7 needs 10 MiB in ")
    assert "of which your quota there leaves less; free space there" in words
    room.f_favail = 0
    assert "(no inodes are free); free space there" in of(full(), tmp_path)
    room.f_files = 0  # a file system that does not count them
    assert "inodes" not in of(full(), tmp_path)


def test_a_file_system_that_does_not_say_is_none_the_less_full(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "statvfs", fail)
    assert f"needs 10 MiB in {tmp_path}; {storage.KEEP_FEWER}" in of(full(), tmp_path)


def test_other_errors_name_the_place_and_what_to_do(tmp_path):
    words = of(OSError(errno.EIO, "Input/output error"), tmp_path)
    place = f"OSError: [Errno 5] Input/output error in {tmp_path}; see the kernel's log"
    assert words.startswith(place)
    words = of(OSError(errno.EROFS, "Read-only file system", "/x/f"), tmp_path)
    assert words.startswith("OSError: [Errno 30] Read-only file system: '/x/f'; make it writable")
    assert storage.in_words(ValueError("odd")) == "ValueError: odd"
    assert listing(tmp_path) == []
