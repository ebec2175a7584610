"""The agent's end of the server, against one that the test plays."""

import os
import signal
import socket
import subprocess
import threading
import types

import pytest

from outlast.launch.warm import client
from outlast.launch.warm.client import (
    Exited,
    ForkRefused,
    NotWaitedFor,
    Reaped,
    ServerLost,
    ServerReady,
    Start,
    Started,
    StartRefused,
    WarmServer,
    Wire,
)


class Played:
    """The other end, and the process that it seems to be."""

    def __init__(self, command, *, pass_fds, **_):
        self.wire = Wire(socket.socket(fileno=os.dup(pass_fds[0])))
        self.pid, self.returncode = 999_999, None
        Played.newest = self

    def wait(self, timeout=None):
        if self.returncode is None:
            raise subprocess.TimeoutExpired("server", timeout)
        return self.returncode

    def kill(self):
        if self.returncode is None:
            self.returncode = -signal.SIGKILL


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(client.subprocess, "Popen", Played)
    found = WarmServer({"A": "1"})
    yield found
    found.close()
    Played.newest.wire.close()


@pytest.fixture
def pid():
    """A process that is there until the test is over."""
    return os.getpid()


def answer(*messages):
    """Play the server's part of one start."""

    def play():
        message, _, _ = Played.newest.wire.receive(10.0)
        assert isinstance(message, Start)
        for one in messages:
            Played.newest.wire.send(one)

    thread = threading.Thread(target=play)
    thread.start()
    return thread


def test_a_worker_that_has_ended_before_its_start_was_heard_of(server, pid):
    thread = answer(Started(pids=[pid]), Exited(pid=pid, code=-11))
    thread.join(0)
    (worker,) = server.start([], [])
    thread.join()
    assert worker.wait(10.0) == -11
    assert Played.newest.wire.receive(10.0) == (Reaped(pids=[pid]), b"", [])


def test_started_and_ended_in_one_breath(server, pid):
    wire = Played.newest.wire
    wire.send(ServerReady())
    wire.send(Started(pids=[pid]))
    wire.send(Exited(pid=pid, code=7))
    server.wait_until_ready()  # hears all of it
    (worker,) = server._started
    assert (worker.returncode, worker.poll()) == (7, 7)


def test_a_refusal(server):
    thread = answer(ForkRefused(reason="it snows"))
    with pytest.raises(StartRefused, match="it snows"):
        server.start([], [])
    thread.join()


def test_a_server_that_ends(server, pid, monkeypatch):
    Played.newest.wire.send(Started(pids=[pid]))
    server.hear(10.0)
    (worker,) = server._started
    assert worker.poll() is None
    Played.newest.returncode = -signal.SIGSEGV
    Played.newest.wire.close()
    with pytest.raises(ServerLost, match="their server was ended by SIGSEGV"):
        server.start([], [])
    assert server.is_lost
    assert worker.poll() is None  # it has not gone yet
    monkeypatch.setattr(client, "readable", lambda fds, timeout_s: set(fds))
    assert worker.poll() == -signal.SIGKILL


def test_one_that_does_not_answer(server, monkeypatch):
    monkeypatch.setattr(client, "READY_TIMEOUT_S", 0.0)
    with pytest.raises(ServerLost, match="their server does not answer"):
        server.wait_until_ready()
    assert Played.newest.returncode == -signal.SIGKILL


def test_whoever_is_to_leave_does_not_wait_for_imports(server):
    answers = iter([False, True])
    with pytest.raises(NotWaitedFor):
        server.wait_until_ready(lambda: next(answers))
    assert not server.is_lost


def test_a_wait_ends(server, pid):
    Played.newest.wire.send(Started(pids=[pid]))
    server.hear(10.0)
    with pytest.raises(subprocess.TimeoutExpired):
        server._started[0].wait(0.0)


def ended(server, pid, monkeypatch, code):
    """A worker of which the kernel says that it has ended, and the server nothing."""
    Played.newest.wire.send(Started(pids=[pid]))
    server.hear(10.0)
    (worker,) = server._started
    monkeypatch.setattr(client, "readable", lambda fds, timeout_s: set(fds))
    monkeypatch.setattr(client, "code_of", lambda _: code)
    return worker


def test_a_server_that_does_not_move_holds_up_neither_the_news_nor_the_next_start(
    server, pid, monkeypatch
):
    worker = ended(server, pid, monkeypatch, -signal.SIGKILL)
    assert (worker.wait(10.0), worker.poll()) == (-signal.SIGKILL, -signal.SIGKILL)
    assert not server.is_lost  # it may only be slow, and others live by it
    monkeypatch.setattr(client, "OWED_S", 0.0)
    with pytest.raises(ServerLost, match="their server does not answer"):
        server.start([], [])


def test_a_server_that_was_only_slow_stays(server, pid, monkeypatch):
    worker = ended(server, pid, monkeypatch, 3)
    assert worker.poll() == 3
    Played.newest.wire.send(Exited(pid=pid, code=3))
    thread = answer_after_the_reaping(pid)
    assert server.start([], []) == []
    thread.join()
    assert not server.is_lost


def answer_after_the_reaping(pid):
    def play():
        wire = Played.newest.wire
        assert wire.receive(10.0)[0] == Reaped(pids=[pid])
        assert isinstance(wire.receive(10.0)[0], Start)
        wire.send(Started(pids=[]))

    thread = threading.Thread(target=play)
    thread.start()
    return thread


@pytest.mark.parametrize("code", [0, None])
def test_a_good_end_is_not_believed_without_the_servers_word(server, pid, monkeypatch, code):
    now = types.SimpleNamespace(s=100.0)
    worker = ended(server, pid, monkeypatch, code)
    monkeypatch.setattr(client.time, "monotonic", lambda: now.s)
    assert worker.poll() is None
    now.s += client.SILENT_S
    assert worker.poll() is None
    assert not server.is_lost
    now.s += 1.0
    assert worker.poll() is None
    assert server.is_lost
    assert worker.poll() == -signal.SIGKILL
