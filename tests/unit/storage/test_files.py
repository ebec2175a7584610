"""Positional blobs and readers: what goes past the page cache, and what happens when it cannot."""

import ctypes
import errno
import itertools
import mmap
import os
import random
import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from storage_contract import memory
from unit_fakes import listing, num_descriptors

from outlast import durable
from outlast.storage import Directory, directory
from outlast.storage.directory import ALIGN
from thorough import examples


@pytest.fixture
def storage(tmp_path):
    return Directory(tmp_path / "root")


@pytest.fixture
def direct_storage(storage):
    """Where the file system below has O_DIRECT."""
    storage.put("probe", b"")
    fd = directory.open_direct(storage.root / "probe", os.O_RDONLY)
    if fd is None:
        pytest.skip("no O_DIRECT on the file system of the tests")
    os.close(fd)
    storage.remove("probe")
    return storage


@pytest.fixture
def transfers(monkeypatch):
    """(call, direct?, length, offset) of each transfer."""
    log, fds = [], {}
    opening, pwrite, preadv = os.open, os.pwrite, os.preadv

    def open_(path, flags, *rest, **more):
        fd = opening(path, flags, *rest, **more)
        fds[fd] = bool(flags & os.O_DIRECT)
        return fd

    def write(fd, view, offset):
        log.append(("write", fds[fd], len(view), offset))
        return pwrite(fd, view, offset)

    def read(fd, views, offset):
        log.append(("read", fds[fd], len(views[0]), offset))
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "preadv", read)
    return log


def written(storage, name, data, **more):
    blob = storage.create(name, len(data), **more)
    blob.write_at(data, 0)
    blob.finish()


# --- what is written directly ---------------------------------------------------------------------


def test_aligned_bytes_and_the_end_of_the_file_are_written_directly(direct_storage, transfers):
    data = memory(3 * ALIGN + 10)
    written(direct_storage, "f", data)
    assert transfers == [("write", True, 3 * ALIGN, 0), ("write", True, ALIGN, 3 * ALIGN)]
    assert direct_storage.read("f") == data


def test_memory_or_offsets_that_are_not_aligned_are_written_through_the_cache(
    direct_storage, transfers
):
    data = memory(4 * ALIGN)
    blob = direct_storage.create("f", 3 * ALIGN)
    blob.write_at(data[8 : 8 + ALIGN], 0)
    blob.write_at(data[:100], ALIGN)
    blob.write_at(data[ALIGN : 3 * ALIGN - 100], ALIGN + 100)
    blob.finish()
    assert [is_direct for _, is_direct, *_ in transfers] == [False, False, False]
    wanted = bytes(data[8 : 8 + ALIGN]) + bytes(data[:100]) + bytes(data[ALIGN : 3 * ALIGN - 100])
    assert direct_storage.read("f") == wanted


def test_memory_that_is_read_only_or_not_of_bytes(direct_storage, transfers):
    data = memory(2 * ALIGN)
    blob = direct_storage.create("f", 2 * ALIGN)
    blob.write_at(data[:ALIGN].toreadonly(), 0)
    blob.write_at(data[ALIGN:].cast("I"), ALIGN)
    blob.finish()
    assert transfers == [("write", True, ALIGN, 0), ("write", True, ALIGN, ALIGN)]
    assert direct_storage.read("f") == data


@given(seed=st.integers(0, 10**6))
@settings(examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_pieces_in_any_order_from_several_threads(storage, seed):
    rng = random.Random(seed)
    size = rng.randrange(1, 40 * ALIGN)
    data, shifted = memory(size, seed), memory(size + 1, 0)[1:]
    shifted[:] = data
    cuts = {0, size, *(rng.randrange(size) for _ in range(rng.randrange(6)))}
    cuts |= {min(rng.randrange(40) * ALIGN, size) for _ in range(rng.randrange(6))}
    cuts = sorted(cuts)
    pieces = list(itertools.pairwise(cuts))
    rng.shuffle(pieces)
    blob, failures = storage.create("f", size), []

    def write(mine):
        try:
            for start, end in mine:
                blob.write_at((data if start % 3 else shifted)[start:end], start)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(pieces[i::3],)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert failures == []
    blob.finish()
    assert storage.read("f") == data


# --- what must not happen -------------------------------------------------------------------------


def test_bytes_outside_of_the_file_are_refused(storage):
    blob = storage.create("f", 10)
    for offset, length in [(-1, 2), (5, 6), (11, 0)]:
        with pytest.raises(ValueError, match="of f"):
            blob.write_at(bytes(length), offset)
    blob.abandon()
    with pytest.raises(ValueError, match="without a size"):
        storage.create("g").write_at(b"1", 0)


def test_a_blob_that_was_not_written_in_full_is_not_finished(storage):
    blob = storage.create("f", 2 * ALIGN)
    blob.write_at(memory(ALIGN), ALIGN)
    with pytest.raises(ValueError, match=f"f: {ALIGN} of {2 * ALIGN} bytes written"):
        blob.finish()
    blob.abandon()
    assert listing(storage.root) == []


@pytest.mark.parametrize("call", ["pwrite", "ftruncate", "fsync", "close", "rename"])
def test_a_failure_comes_out_as_it_is_and_leaves_nothing(storage, monkeypatch, call):
    storage.put("f", b"old")
    before = num_descriptors()
    blob = storage.create("f", ALIGN + 1)
    error, real = OSError(errno.EIO, "Input/output error"), getattr(os, call)

    def failing(*arguments):
        if call == "close":
            real(*arguments)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(OSError, match="Input/output error") as caught:  # noqa: PT012
            blob.write_at(memory(ALIGN + 1), 0)
            blob.finish()
    blob.abandon()
    assert caught.value is error
    assert storage.read("f") == b"old"
    assert listing(storage.root) == ["f"]
    assert num_descriptors() == before


def test_a_file_system_that_takes_nothing_is_not_asked_for_ever(storage, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    monkeypatch.setattr(os, "write", lambda *_: 0)
    for size in (10, None):
        blob = storage.create("f", size)
        with pytest.raises(OSError, match="took no bytes"):
            blob.write(b"0123456789")
        blob.abandon()


def test_a_descriptor_is_not_closed_under_a_thread_that_writes(storage, monkeypatch):
    """Its number could be another file's by the time the system call is made."""
    before = num_descriptors()
    blob = storage.create("f", ALIGN)
    inside, go_on, pwrite, result = threading.Event(), threading.Event(), os.pwrite, []

    def slow(fd, view, offset):
        inside.set()
        go_on.wait(20)
        result.append(pwrite(fd, view, offset))
        return result[-1]

    monkeypatch.setattr(os, "pwrite", slow)
    thread = threading.Thread(target=blob.write_at, args=(memory(ALIGN), 0))
    thread.start()
    inside.wait(20)
    blob.abandon()
    assert num_descriptors() > before
    go_on.set()
    thread.join(20)
    assert result == [ALIGN]
    assert num_descriptors() == before
    with pytest.raises(ValueError, match="closed"):
        blob.write_at(memory(ALIGN), 0)


def test_a_reader_is_not_closed_under_a_thread_that_reads(storage, monkeypatch):
    storage.put("f", b"1234")
    before = num_descriptors()
    reader, into = storage.open("f"), memoryview(bytearray(4))
    preadv = os.preadv

    def closing(fd, views, offset):
        reader.close()
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", closing)
    assert reader.read_into(into, 0) == 4
    assert num_descriptors() == before
    with pytest.raises(ValueError, match="closed"):
        reader.read_into(into, 0)


# --- reading: from the page cache or past it ------------------------------------------------------


def evict(path):
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


SIZE = 64 * ALIGN + 10


def test_a_cached_file_is_read_from_the_cache_and_another_past_it(direct_storage, transfers):
    data = memory(SIZE)
    direct_storage.put("f", bytes(data))
    into = memory(SIZE)
    evict(direct_storage.root / "f")
    reader = direct_storage.open("f")
    assert reader.read_into(into, 0) == SIZE
    reader.close()
    assert into == data
    assert transfers == [("read", True, SIZE - 10, 0), ("read", False, 10, SIZE - 10)]
    transfers.clear()
    direct_storage.read("f")
    reader = direct_storage.open("f")
    assert reader.read_into(into, 0) == SIZE
    reader.close()
    assert transfers == [("read", False, SIZE, 0)]


def test_the_end_of_a_file_is_read_directly_where_there_is_room(direct_storage, transfers):
    data = memory(SIZE)
    written(direct_storage, "f", data)
    evict(direct_storage.root / "f")
    transfers.clear()
    into = memory(SIZE + ALIGN)
    reader = direct_storage.open("f")
    assert reader.read_into(into[: 65 * ALIGN], 0) == SIZE
    reader.close()
    assert into[:SIZE] == data
    assert transfers[0] == ("read", True, 65 * ALIGN, 0)


def test_how_much_is_cached_is_the_same_by_both_calls(direct_storage):
    path = direct_storage.root / "f"
    direct_storage.put("f", bytes(memory(SIZE)))
    with path.open("rb") as file:
        counts = [(directory._cachestat(file.fileno()), directory._mincore(file.fileno(), SIZE))]
        evict(path)
        counts.append(
            (directory._cachestat(file.fileno()), directory._mincore(file.fileno(), SIZE))
        )
    num_pages = -(-SIZE // mmap.PAGESIZE)
    if counts[0][0] is None:
        pytest.skip("this kernel has no cachestat")
    assert counts == [(num_pages, num_pages), (0, 0)]


@pytest.mark.parametrize("known", ["mincore", "nothing"])
def test_a_kernel_without_cachestat(direct_storage, monkeypatch, known):
    monkeypatch.setattr(directory, "_CACHESTAT", 100_000)  # no such call: ENOSYS
    if known == "nothing":
        monkeypatch.setattr(directory, "_mincore", lambda fd, size: None)
    direct_storage.put("f", bytes(memory(SIZE)))
    with (direct_storage.root / "f").open("rb") as file:
        assert directory._cachestat(file.fileno()) is None
        assert directory.mostly_cached(file.fileno(), SIZE)
        evict(direct_storage.root / "f")
        assert directory.mostly_cached(file.fileno(), SIZE) == (known == "nothing")


# --- a name that must be new ----------------------------------------------------------------------


def no_links(*_):
    raise OSError(errno.EPERM, "Operation not permitted")


def test_where_there_are_no_links_a_renaming_that_does_not_replace(storage, monkeypatch):
    monkeypatch.setattr(os, "link", no_links)
    assert storage.put_new("f", b"1") is True
    assert storage.put_new("f", b"2") is False
    assert storage.read("f") == b"1"
    assert listing(storage.root) == ["f"]


def test_where_neither_works_it_is_said(storage, monkeypatch):
    monkeypatch.setattr(os, "link", no_links)

    def einval(*_):
        ctypes.set_errno(errno.EINVAL)
        return -1

    library = type("Libc", (), {"renameat2": staticmethod(einval)})
    monkeypatch.setattr(durable.ctypes, "CDLL", lambda *_, **__: library)
    with pytest.raises(OSError, match="neither hard links nor renaming without replacing"):
        storage.put_new("f", b"1")
    assert listing(storage.root) == []


def test_a_mount_of_a_bucket_has_neither_and_takes_turns(storage, monkeypatch):
    """rclone's says EIO to a link, which is what a failing disk says."""

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "link", fails)
    with pytest.raises(OSError, match="Input/output error"):
        storage.put_new("f", b"1")
    monkeypatch.setattr(durable, "mount_of", lambda _: durable.Mount("fuse.rclone", ()))
    exists, won = durable.Path.exists, []

    def slowly(path):
        found = exists(path)
        threading.Event().wait(0.02)  # in which another one could come
        return found

    monkeypatch.setattr(durable.Path, "exists", slowly)
    threads = [
        threading.Thread(target=lambda n=n: won.append(storage.put_new("f", b"%d" % n)))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]
    assert storage.put_new("f", b"9") is False
    assert listing(storage.root) == ["f"]


def test_a_link_whose_answer_was_lost_was_made_by_us(storage, monkeypatch):
    """An NFS client repeats the call, and the server finds the name that the first one made."""
    link = os.link

    def repeated(part, path):
        link(part, path)
        link(part, path)

    monkeypatch.setattr(os, "link", repeated)
    assert storage.put_new("f", b"1") is True
    monkeypatch.setattr(os, "link", link)
    assert storage.put_new("f", b"2") is False
    assert storage.read("f") == b"1"


@pytest.mark.parametrize("call", ["write", "fsync", "link"])
def test_a_new_file_that_fails_is_not_there(storage, monkeypatch, call):
    error = OSError(errno.EIO, "Input/output error")

    def failing(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(OSError, match="Input/output") as caught:
            storage.put_new("f", b"1")
    assert caught.value is error
    assert listing(storage.root) == []


# --- addresses -----------------------------------------------------------------------------------

WRITABLE = mmap.mmap(-1, 2 * mmap.PAGESIZE)
MEMORY = {
    "bytes": b"some",
    "a part": memoryview(bytearray(8))[3:],
    "mapped": memoryview(WRITABLE)[mmap.PAGESIZE :],
    "mapped to be read": mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ),
}


@pytest.mark.parametrize("name", MEMORY)
def test_an_address_is_where_numpy_finds_it(name):
    view = memoryview(MEMORY[name])
    assert directory.address_of(view) == np.frombuffer(view, np.uint8).ctypes.data


def test_what_was_looked_at_may_be_resized():
    memory = bytearray(4)
    with memoryview(memory) as view:
        directory.address_of(view)
    memory.append(1)


@pytest.mark.parametrize("times", [1, 3])
def test_directories_are_made_though_somebody_removes_those_that_are_empty(
    tmp_path, monkeypatch, times
):
    """As doctors of other machines do with a job's directory that is not there yet."""
    root, left, sync = tmp_path / "job", iter(range(times)), durable.sync_directory

    def removed_at_once(path):
        sync(path)
        if path == tmp_path and root.exists() and next(left, None) is not None:
            root.rmdir()

    monkeypatch.setattr(durable, "sync_directory", removed_at_once)
    durable.make_directories(root / "doctor-1")
    assert (root / "doctor-1").is_dir()
    assert next(left, None) is None
