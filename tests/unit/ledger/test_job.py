"""``job.json`` is written once, whoever comes first; and one launcher at a time."""

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest
from unit_fakes import at_once, listing, num_descriptors

from outlast import config
from outlast.checkpoint.catalog import open_job
from outlast.errors import ConfigError, StorageError
from outlast.ledger import job as job_room
from outlast.ledger.file import Ledger
from outlast.ledger.job import JobLock, process_age_s, read_job

IMPORTED_S = time.monotonic()


@pytest.fixture
def settings(tmp_path):
    return config.load({"dir": tmp_path / "job"}, environ={})


def test_a_job_is_made_and_found_again(settings):
    job = open_job(settings.dir, settings)
    assert len(job.id) == 12
    int(job.id, 16)
    assert job.settings["dir"] == str(settings.dir)
    assert set(job.versions) == {"outlast", "torch", "python"}
    other = config.load({"dir": settings.dir, "checkpoint.keep": 9}, environ={})
    assert open_job(settings.dir, other) == job == read_job(settings.dir)
    assert listing(settings.dir) == ["job.json"]


@pytest.mark.parametrize("same_number", [True, False])
def test_many_that_start_at_once_find_the_same_id(settings, monkeypatch, same_number):
    """On two machines two containers' processes have the same number."""
    gate = threading.Barrier(8)
    real = os.link

    def linked(*paths):
        gate.wait(10)
        real(*paths)

    monkeypatch.setattr(os, "link", linked)
    if not same_number:
        monkeypatch.setattr(os, "getpid", threading.get_ident)
    jobs = at_once(8, lambda _: open_job(settings.dir, settings).id)
    assert len(set(jobs)) == 1, jobs
    assert read_job(settings.dir).id == jobs[0]
    assert listing(settings.dir) == ["job.json"]


def test_one_that_comes_later_does_not_touch_the_record(settings, monkeypatch):
    """Between looking and linking, another machine was quicker, and its record stays whole."""
    real = os.link
    first = []

    def beaten(part, path):
        monkeypatch.setattr(os, "link", real)
        first.append(open_job(settings.dir, settings))
        real(part, path)

    monkeypatch.setattr(os, "link", beaten)
    second = open_job(settings.dir, settings)
    assert first == [second]
    assert listing(settings.dir) == ["job.json"]


def test_a_directory_that_is_no_jobs(tmp_path):
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"is not a job's directory: it has no job\.json"):
            read_job(place)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a job's directory"):
        read_job(tmp_path / "file")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"nonsense",
        b'{"id": 3}',
        b"\xff",
        b'{"id": "\xff',
        b'{"settings": {"\xff": ""}}',
        b"\x00" * 100,
    ],
)
def test_a_record_that_is_none(settings, content):
    open_job(settings.dir, settings)
    path = settings.dir / "job.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"job\.json is not a job's record: it is (empty|damag)"):
        read_job(settings.dir)
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [None, b"", b'{"id": "a'])
def test_a_lost_record_is_read_from_the_ledger(settings, content):
    job = open_job(settings.dir, settings)
    ledger = Ledger(settings.dir, job=job.id)
    first = ledger.append("job_started")
    ledger.append("attempt_formed")
    path = settings.dir / "job.json"
    path.unlink() if content is None else path.write_bytes(content)
    found = read_job(settings.dir)
    assert (found.id, found.created_t) == (job.id, pytest.approx(first.t))
    assert not path.exists() if content is None else path.read_bytes() == content  # only read
    Ledger(settings.dir, job="another").append("job_started")
    with pytest.raises(ConfigError, match=r"job\.json is not a job's record: it is"):
        read_job(settings.dir)


def test_a_field_of_a_later_version_does_not_matter(settings):
    job = open_job(settings.dir, settings)
    path = settings.dir / "job.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"of_the_future": 1}))
    assert read_job(settings.dir) == job


def test_the_names_of_a_jobs_directory_and_of_those_above_it_are_durable(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("outlast.durable.sync_directory", synced.append)
    settings = config.load({"dir": tmp_path / "above" / "job"}, environ={})
    open_job(settings.dir, settings)
    assert synced == [tmp_path.parent, tmp_path, tmp_path / "above"]
    synced.clear()
    open_job(settings.dir, settings)  # whoever made it may have been killed just then
    assert synced == [tmp_path / "above"]


def test_a_place_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        settings = config.load({"dir": place}, environ={})
        with pytest.raises(ConfigError, match=r"cannot be made: .*; give another with --dir"):
            open_job(place, settings)


@pytest.mark.parametrize("call", ["link", "fsync"])
@pytest.mark.parametrize(
    ("number", "order"),
    [
        (errno.ENOSPC, "free space there"),
        (errno.EDQUOT, "free space there, or have the quota raised"),
        (errno.EROFS, "make it writable again"),
        (errno.EACCES, "give this user the right to write there"),
        (errno.EIO, "see the kernel's log, and whether the storage answers"),
    ],
)
def test_a_place_that_cannot_be_written(settings, monkeypatch, call, number, order):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError) as caught:
        open_job(settings.dir, settings)
    words = str(caught.value)
    assert words.startswith(f"{settings.dir} cannot be written: {os.strerror(number)}; {order}")
    assert words.endswith(", or give another directory with --dir")
    assert caught.value.exit_code == 77
    assert listing(settings.dir) == []


def test_a_job_that_can_be_read_and_not_written(settings, monkeypatch):
    open_job(settings.dir, settings)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StorageError, match="cannot be written: Permission denied; give this user"):
        open_job(settings.dir, settings)
    monkeypatch.undo()
    real = os.open

    def read_only(path, flags, *rest):
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(StorageError, match="cannot be written: Read-only file system; make it"):
        open_job(settings.dir, settings)
    with pytest.raises(StorageError, match=r"job\.json cannot be opened: Read-only file system; "):
        JobLock(settings.dir)


def test_a_name_is_durable_before_anything_follows(settings, monkeypatch):
    """Else a crash leaves a ledger, and no record of whose it is."""
    synced = []
    real = os.fsync

    def fsync(fd):
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    open_job(settings.dir, settings)
    assert synced[-1] == str(settings.dir)


def test_a_record_that_the_disk_does_not_give(settings):
    open_job(settings.dir, settings)
    (settings.dir / "job.json").unlink()
    (settings.dir / "job.json").mkdir()
    with pytest.raises(StorageError, match=r"job\.json cannot be read: Is a directory"):
        read_job(settings.dir)


# --- the lock ------------------------------------------------------------------------------------


def test_one_launcher_at_a_time(settings):
    open_job(settings.dir, settings)
    lock = JobLock(settings.dir)
    before = num_descriptors()
    for _ in range(3):
        with pytest.raises(ConfigError, match=r"is running already; wait for it, or give another"):
            JobLock(settings.dir)
    assert num_descriptors() == before
    lock.release()
    JobLock(settings.dir).release()


def test_the_machines_of_a_job_share_the_lock_and_nobody_runs_it_alone_meanwhile(settings):
    open_job(settings.dir, settings)
    one, other = (JobLock(settings.dir, shared=True) for _ in range(2))
    one.release()
    with pytest.raises(ConfigError, match="is running already; wait for it"):
        JobLock(settings.dir)
    other.release()
    alone = JobLock(settings.dir)
    with pytest.raises(ConfigError, match="is running already, on one machine alone; wait for it"):
        JobLock(settings.dir, shared=True)
    alone.release()


def test_a_file_system_without_locks_is_the_owners_to_mind(settings, monkeypatch):
    open_job(settings.dir, settings)

    def no_locks(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(job_room.fcntl, "flock", no_locks)
    JobLock(settings.dir).release()


def test_a_process_is_as_old_as_the_time_since_its_start(monkeypatch):
    before_s, age_s = time.monotonic() - IMPORTED_S, process_age_s()
    assert before_s <= age_s <= time.clock_gettime(time.CLOCK_BOOTTIME)
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(job_room.time, "clock_gettime", lambda clock: now_s + 100.0)
    assert age_s + 100.0 <= process_age_s() <= age_s + 101.0 + now_s - before_s
    monkeypatch.setattr(job_room.time, "clock_gettime", lambda clock: 0.0)
    assert process_age_s() == 0.0  # never less


@pytest.mark.parametrize("said", ["", "1 (a) S 2", "1 (a) S " + "x " * 40])
def test_where_the_kernel_does_not_say_it_a_process_has_no_age(monkeypatch, said):
    monkeypatch.setattr(Path, "read_text", lambda path: said)
    assert process_age_s() is None


def test_a_process_whose_name_looks_like_more_fields_has_its_own_age(monkeypatch):
    real = Path("/proc/self/stat").read_text()
    head, tail = real.split("(")[0], real.rpartition(")")[2]
    monkeypatch.setattr(Path, "read_text", lambda path: f"{head}(a) S 1 (b c){tail}")
    first_s = process_age_s()
    monkeypatch.undo()
    assert first_s is not None
    assert first_s <= process_age_s() < first_s + 60


def test_where_there_is_no_proc_a_process_has_no_age(monkeypatch):
    def gone(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", gone)
    assert process_age_s() is None
