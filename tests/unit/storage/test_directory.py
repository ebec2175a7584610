"""A directory as a storage: names stay inside, files appear whole, and in the right order."""

import errno
import importlib.util
import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from unit_fakes import listing

from outlast.storage import Directory, directory
from thorough import examples


@pytest.fixture
def storage(tmp_path):
    return Directory(tmp_path / "root")


# --- names ---------------------------------------------------------------------------------------

LEADS_OUT = [
    "..",
    "../x",
    "a/../b",
    "a/..",
    "/etc/passwd",
    "a//b",
    "a/",
    "/a",
    "./a",
    ".",
    ".hidden",
    "a/.hidden",
    "a\n",
    "a\x00b",
    "a b",
    "a\\b",
    "~",
    "ä",
    "-rf",
    "a/-b",
]
OPERATIONS = {
    "children": lambda storage, name: storage.children(name),
    "exists": lambda storage, name: storage.exists(name),
    "size": lambda storage, name: storage.size(name),
    "read": lambda storage, name: storage.read(name),
    "read_into": lambda storage, name: storage.read_into(name, memoryview(bytearray(1))),
    "put": lambda storage, name: storage.put(name, b"x"),
    "put_new": lambda storage, name: storage.put_new(name, b"x"),
    "create": lambda storage, name: storage.create(name),
    "create of a size": lambda storage, name: storage.create(name, 1),
    "open": lambda storage, name: storage.open(name),
    "remove": lambda storage, name: storage.remove(name),
    "remove_tree": lambda storage, name: storage.remove_tree(name),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", LEADS_OUT)
def test_a_name_that_is_not_plain_is_refused(storage, operation, name):
    with pytest.raises(ValueError, match="is not a name of this storage"):
        OPERATIONS[operation](storage, name)
    assert not storage.root.exists()


@given(st.text(alphabet="a./\\\n~0-_", min_size=1, max_size=12))
@examples(300)
def test_no_name_leads_out(name):
    root = Path("/somewhere/root")
    try:
        path = Directory(root)._path(name)
    except ValueError:
        return
    assert os.path.normpath(path) == str(path) == f"{root}/{name}"
    assert not any(part.startswith(".") for part in name.split("/"))


def test_the_root_is_not_removed(storage):
    storage.put("a", b"1")
    with pytest.raises(ValueError, match="root"):
        storage.remove_tree("")
    assert storage.read("a") == b"1"


# --- reading and writing -------------------------------------------------------------------------


def test_what_is_put_is_read(storage):
    assert storage.children() == []
    assert storage.children("a") == []
    storage.put("a/b/c.json", b"123")
    storage.put("a/b/empty", b"")
    assert storage.read("a/b/c.json") == b"123"
    assert storage.read("a/b/empty") == b""
    assert (storage.size("a/b/c.json"), storage.exists("a/b/c.json")) == (3, True)
    assert (storage.exists("a/b"), storage.exists("a/b/other")) == (False, False)
    assert storage.children() == ["a"]
    assert storage.children("a/b") == ["c.json", "empty"]
    assert storage.describe("a/b") == str(storage.root / "a/b")
    storage.put("a/b/c.json", b"new")
    assert storage.read("a/b/c.json") == b"new"
    with pytest.raises(FileNotFoundError):
        storage.read("a/other")


def test_reading_into_memory(storage):
    storage.put("f", bytes(range(100)))
    buffer = memoryview(bytearray(10))
    assert storage.read_into("f", buffer, 95) == 5
    assert bytes(buffer[:5]) == bytes(range(95, 100))
    assert storage.read_into("f", buffer) == 10
    assert storage.read_into("f", buffer, 100) == 0


def test_a_blob_is_seen_only_when_it_is_finished(storage):
    blob = storage.create("step/f")
    blob.write(b"12")
    blob.write(memoryview(b"34"))
    assert storage.children("step") == []
    assert not storage.exists("step/f")
    blob.finish()
    assert storage.read("step/f") == b"1234"
    assert [path.name for path in (storage.root / "step").iterdir()] == ["f"]


def test_an_abandoned_blob_leaves_nothing_and_the_old_file_stands(storage):
    storage.put("f", b"old")
    blob = storage.create("f")
    blob.write(b"new")
    blob.abandon()
    assert storage.read("f") == b"old"
    assert [path.name for path in storage.root.iterdir()] == ["f"]


def test_two_writers_of_one_file_do_not_mix(storage):
    one, other = storage.create("f"), storage.create("f")
    one.write(b"one")
    other.write(b"other")
    one.finish()
    assert storage.read("f") == b"one"
    other.finish()
    assert storage.read("f") == b"other"


def test_a_write_that_takes_only_part_goes_on(storage, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data[:3])))
    storage.put("f", b"0123456789")
    assert storage.read("f") == b"0123456789"


def test_the_part_of_a_dead_process_with_our_number_is_not_in_the_way(tmp_path):
    """In a container every start has the same process id, and counts from the start."""

    def fresh_process():
        spec = importlib.util.spec_from_file_location("fresh", directory.__file__)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.Directory(tmp_path)

    fresh_process().create("f").write(b"killed here")
    again = fresh_process()
    again.put("f", b"1")
    assert again.read("f") == b"1"
    assert again.children() == ["f"]


# --- removing ------------------------------------------------------------------------------------


def test_removing(storage):
    storage.remove("nothing")
    storage.put("a/b", b"1")
    storage.put("a/c", b"1")
    storage.remove("a/b")
    assert storage.children("a") == ["c"]
    storage.remove("a/b")
    storage.create("a/part").write(b"left behind")
    storage.remove_tree("a")
    assert storage.children() == []
    assert list(storage.root.iterdir()) == []


# --- the order of system calls -------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """What reaches the disk, by path; ``fail`` maps a call to the error that it gives."""
    log, paths, fail = [], {}, {}

    def note(call, path):
        log.append((call, Path(path).name))
        if call in fail:
            raise fail[call]

    real = {name: getattr(os, name) for name in ("open", "fsync", "close", "rename", "write")}

    def opening(path, *rest, **more):
        fd = real["open"](path, *rest, **more)
        paths[fd] = path
        return fd

    def fsync(fd):
        note("fsync", paths[fd])
        real["fsync"](fd)

    def close(fd):
        real["close"](fd)
        if fd in paths:
            note("close", paths.pop(fd))

    def rename(old, new):
        note("rename", new)
        real["rename"](old, new)

    def write(fd, data):
        note("write", paths[fd])
        return real["write"](fd, data)

    mkdir, unlink = Path.mkdir, Path.unlink

    def making(path, *rest, **more):
        note("mkdir", path)
        mkdir(path, *rest, **more)

    def unlinking(path, *rest, **more):
        note("unlink", path)
        unlink(path, *rest, **more)

    for name, fake in {
        "open": opening,
        "fsync": fsync,
        "close": close,
        "rename": rename,
        "write": write,
    }.items():
        monkeypatch.setattr(os, name, fake)
    monkeypatch.setattr(Path, "mkdir", making)
    monkeypatch.setattr(Path, "unlink", unlinking)
    return type("Calls", (), {"log": log, "fail": fail, "open": paths})()


def names(log):
    """Parts have random names."""
    return [
        (call, "part of f" if name.startswith(".f.") else name)
        for call, name in log
        if call != "close"
    ]


def test_data_then_name_then_directory(storage, calls):
    storage.put("a/b/f", b"1")
    assert names(calls.log) == [
        ("fsync", storage.root.parent.parent.name),  # who made what is there may have been killed
        ("mkdir", "root"),
        ("fsync", storage.root.parent.name),
        ("mkdir", "a"),
        ("fsync", "root"),
        ("mkdir", "b"),
        ("fsync", "a"),
        ("write", "part of f"),
        ("fsync", "part of f"),
        ("rename", "f"),
        ("fsync", "b"),
    ]
    assert calls.open == {}
    calls.log.clear()
    storage.put("a/b/f", b"2")
    assert names(calls.log) == [
        ("write", "part of f"),
        ("fsync", "part of f"),
        ("rename", "f"),
        ("fsync", "b"),
    ]


def test_a_directory_that_another_process_made_is_durable_before_what_is_in_it(storage, calls):
    (storage.root / "a").mkdir(parents=True)
    calls.log.clear()
    assert storage.put_new("a/f", b"1")
    assert names(calls.log)[0] == ("fsync", "root")
    calls.log.clear()
    storage.put("a/g", b"1")
    assert ("fsync", "root") not in names(calls.log)
    storage.remove_tree("a")
    storage.put("a/g", b"1")
    assert ("fsync", "root") in names(calls.log)


def test_removing_is_durable(storage, calls):
    storage.put("a/f", b"1")
    calls.log.clear()
    storage.remove("a/f")
    assert names(calls.log) == [("unlink", "f"), ("fsync", "a")]
    assert calls.open == {}
    calls.log.clear()
    storage.remove_tree("a")
    assert names(calls.log) == [("fsync", "root")]
    assert calls.open == {}


def test_a_new_name_is_durable(storage, calls):
    storage.put("a/g", b"1")
    calls.log.clear()
    assert storage.put_new("a/f", b"1")
    assert names(calls.log) == [
        ("write", "part of f"),
        ("fsync", "part of f"),
        ("unlink", "part of f"),
        ("fsync", "a"),
    ]
    assert calls.open == {}


@pytest.mark.parametrize("call", ["write", "fsync", "close", "rename"])
def test_a_put_that_fails_leaves_the_old_file_and_no_part(storage, calls, call):
    storage.put("f", b"old")
    calls.fail[call] = OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output error") as caught:
        storage.put("f", b"new")
    assert caught.value is calls.fail[call]
    calls.fail.clear()
    assert storage.read("f") == b"old"
    assert listing(storage.root) == ["f"]
    assert calls.open == {}


def test_a_descriptor_is_closed_once_even_if_closing_fails(storage, calls):
    """After a failed close the number is free, and may be somebody else's by now."""
    storage.put("f", b"old")
    calls.log.clear()
    calls.fail["close"] = OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output error"):
        storage.put("f", b"1")
    closed = [name for call, name in calls.log if call == "close" and name.startswith(".f.")]
    assert len(closed) == 1


def test_a_part_that_cannot_be_removed_does_not_hide_the_failure(storage, calls):
    storage.put("f", b"old")
    calls.fail["write"] = OSError(errno.ENOSPC, "No space left on device")
    calls.fail["unlink"] = OSError(errno.EROFS, "Read-only file system")
    with pytest.raises(OSError, match="No space left"):
        storage.put("f", b"new")
    calls.fail.clear()
    assert storage.children() == ["f"]
    assert storage.read("f") == b"old"


def test_an_exception_of_any_kind_abandons(storage, monkeypatch):
    def interrupted(fd, data):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        storage.put("f", b"1")
    assert listing(storage.root) == []


def test_removing_what_is_already_gone_makes_that_durable(tmp_path, monkeypatch):
    """Another process has removed it, and may not have come to make it durable."""
    storage = Directory(tmp_path)
    storage.put("step/manifest.json", b"{}")
    (tmp_path / "step" / "manifest.json").unlink()
    synced = []
    monkeypatch.setattr("outlast.storage.directory.sync_directory", synced.append)
    storage.remove("step/manifest.json")
    assert synced == [tmp_path / "step"]
    storage.remove("nowhere/manifest.json")
