"""Where the socket lies: nobody else's, whatever the path; and what is taken away when."""

import contextlib
import os
import threading
from pathlib import Path

import pytest

from outlast.errors import ConfigError, StorageError
from outlast.keeper import process, wire
from outlast.keeper.process import (
    RUNTIME_VARIABLE,
    KeeperListener,
    Setup,
    TierSetup,
    connect,
    decode_setup,
    encode_setup,
    is_foreign,
    only_one,
    sweep,
)

NAME = "0123456789abcdef0123"


@pytest.fixture(name="runtime")
def _runtime(tmp_path, monkeypatch):
    path = tmp_path / "run"
    monkeypatch.setenv(RUNTIME_VARIABLE, str(path))
    return path


def names(path):
    return sorted(found.name for found in path.iterdir())


def test_the_directory_is_ours_alone(runtime):
    assert process.runtime_directory() == runtime
    assert runtime.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("how", ["open", "link", "file"])
def test_a_directory_that_others_could_enter_is_refused(runtime, tmp_path, how):
    if how == "open":
        runtime.mkdir(mode=0o755)
    elif how == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        runtime.symlink_to(tmp_path / "real")
    else:
        runtime.touch()
    with pytest.raises((ConfigError, FileExistsError)):
        process.runtime_directory()


def test_another_users_directory_is_refused(runtime):
    if os.getuid():
        pytest.skip("only root can give a directory away")
    runtime.mkdir(mode=0o700)
    os.chown(runtime, 12345, -1)
    with pytest.raises(ConfigError, match="must be a directory of yours"):
        process.runtime_directory()


def test_any_path_of_a_job_has_a_socket_of_its_own(runtime, tmp_path):
    odd = [tmp_path / "a b", tmp_path / "ü\n'\"", tmp_path / os.fsdecode(b"\xff\xfe")]
    sockets = {process.socket_path("job", path) for path in odd}
    assert len(sockets) == len(odd)
    assert process.socket_path("job", odd[0]) != process.socket_path("other", odd[0])


def test_the_name_says_which_version_is_spoken(runtime, tmp_path, monkeypatch):
    mine = process.socket_path("job", tmp_path)
    assert mine == process.socket_path("job", tmp_path)
    assert mine.stem.endswith(f"-{wire.version()}")
    assert not is_foreign(mine)
    old = mine.with_name(f"{mine.stem.partition('-')[0]}.sock")  # before names said so
    assert is_foreign(old)
    assert not is_foreign(tmp_path / "k.sock")  # somebody has chosen it
    monkeypatch.setattr(wire, "version", lambda: "00000000")
    assert process.socket_path("job", tmp_path) != mine
    assert is_foreign(mine)


def test_a_directory_that_cannot_be_made_is_the_storages_fault(monkeypatch):
    monkeypatch.setenv(RUNTIME_VARIABLE, "/proc/nothing/here")
    words = f"/proc/nothing/here, .* cannot be made: .*set {RUNTIME_VARIABLE} to a directory"
    with pytest.raises(StorageError, match=words):
        process.runtime_directory()


def test_a_setup_keeps_any_path():
    path = os.fsdecode(b"/tmp/\xff\xfe \xe2\x82\xac")
    tier = TierSetup(name="local", url=path, keep=3)
    setup = Setup(job="j", directory=path, socket="/s", tiers=(tier,), inherited={0: 3, 7: 9})
    assert decode_setup(encode_setup(setup)) == setup


def test_a_path_too_long_for_a_socket_works_all_the_same(tmp_path):
    path = tmp_path / ("d" * 120) / f"{NAME}.sock"
    path.parent.mkdir()
    listener = KeeperListener(path)
    sock = connect(path)
    listener.settimeout(10)
    listener.accept().close()
    sock.close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert listener.close()
    assert names(path.parent) == []


def test_a_keeper_does_not_leave_while_somebody_connects(tmp_path):
    path = tmp_path / f"{NAME}.sock"
    listener = KeeperListener(path)
    with only_one(path):
        assert not listener.close()  # somebody looks for it
    sock = connect(path)
    assert not listener.close()  # somebody waits to be let in
    listener.settimeout(10)
    listener.accept().close()
    sock.close()
    assert listener.close()


def test_a_keeper_does_not_take_its_successors_socket_away(tmp_path):
    path = tmp_path / f"{NAME}.sock"
    old, new = KeeperListener(path), KeeperListener(path)
    assert old.close()
    connect(path).close()
    new._server.close()


def test_whoever_waits_for_the_lock_gets_one_that_counts(tmp_path):
    path = tmp_path / f"{NAME}.sock"
    order = []

    def second():
        with only_one(path):
            order.append("second")

    thread = threading.Thread(target=second)
    with contextlib.ExitStack() as inner:
        with only_one(path):
            thread.start()
            while not waits_for_a_lock():
                pass
            process.remove(path)  # as a keeper does that leaves
            assert inner.enter_context(only_one(path, wait=False))
        thread.join(0.2)  # what it waited for is free now, and counts for nothing
        order.append("first")
    thread.join(20)
    assert order == ["first", "second"]


def waits_for_a_lock():
    """Whether a thread of ours waits for a lock that another descriptor of ours holds."""
    waiting = [line for line in Path("/proc/locks").read_text().splitlines() if "->" in line]
    return any(f" {os.getpid()} " in line for line in waiting)


def test_what_dead_keepers_left_is_swept_and_nothing_else(tmp_path):
    dead, alive, ours = (tmp_path / f"{digit * 20}.sock" for digit in "abc")
    newer = tmp_path / f"a{NAME[1:]}-01234567.sock"
    KeeperListener(newer)._server.close()
    KeeperListener(dead)._server.close()
    listener = KeeperListener(alive)
    for path in (dead, alive):
        path.with_suffix(".lock").touch()
        path.with_suffix(".log").touch()
    starting = tmp_path / f"{'d' * 20}.sock"
    said = tmp_path / f"{'e' * 20}.log"
    said.write_text("why it died")
    (tmp_path / "notes.log").touch()
    with only_one(starting):
        sweep(ours)
        assert starting.with_suffix(".lock").exists()
    left = names(tmp_path)
    assert not [name for name in left if name.startswith("a")]
    assert [name for name in left if name.startswith("b")] == [
        f"{'b' * 20}.{kind}" for kind in ("lock", "log", "sock")
    ]
    assert {said.name, "notes.log"} <= set(left)
    os.utime(said, (0, 0))
    sweep(ours)
    assert not said.exists()
    listener._server.close()
