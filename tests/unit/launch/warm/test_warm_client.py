"""The agent's end of the server, against one that the test plays."""

import os
import signal
import socket
import subprocess
import threading

import pytest

from outlast.launch.warm import client
from outlast.launch.warm.client import Server, ServerLost, StartRefused
from outlast.launch.warm.wire import Exited, Ready, Reaped, Refused, Start, Started, Wire


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
    found = Server({"A": "1"})
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
        message, _ = Played.newest.wire.receive(10.0)
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
    assert Played.newest.wire.receive(10.0) == (Reaped(pids=[pid]), [])


def test_started_and_ended_in_one_breath(server, pid):
    wire = Played.newest.wire
    wire.send(Ready())
    wire.send(Started(pids=[pid]))
    wire.send(Exited(pid=pid, code=7))
    server.wait_until_ready()  # hears all of it
    (worker,) = server._started
    assert (worker.returncode, worker.poll()) == (7, 7)


def test_a_refusal(server):
    thread = answer(Refused(reason="it snows"))
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


def test_a_wait_ends(server, pid):
    Played.newest.wire.send(Started(pids=[pid]))
    server.hear(10.0)
    with pytest.raises(subprocess.TimeoutExpired):
        server._started[0].wait(0.0)
