"""The server of warm workers as a fork with torch loaded, in place of a fresh interpreter.

Importing torch's stack costs seconds of a core, for each agent of each test. Here the same server
begins as a fork of what the floor forks everything warm from, and does all else as it always does.
How it begins for people is what the tests in ``warm/`` are about: they have it start afresh.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

MODULE = "outlast.launch.warm"
POLL_S = 0.002


def have_ready():
    """A server that the agent in this process finds started when it starts one."""
    from outlast.launch.warm import client

    spare = _Spare()
    client.subprocess = SimpleNamespace(Popen=spare.popen, TimeoutExpired=subprocess.TimeoutExpired)


class _Spare:
    """A process that waits to be the server; the second one that is asked for starts afresh."""

    def __init__(self):
        self._ask, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._ask.close()
            _become_server(theirs)
        theirs.close()

    def popen(self, command, *, env, pass_fds, start_new_session):
        """What the agent calls in place of ``subprocess.Popen``."""
        pid, self._pid = self._pid, None
        if pid is None:
            return subprocess.Popen(
                command, env=env, pass_fds=pass_fds, start_new_session=start_new_session
            )
        assert command[3] == MODULE, command
        assert start_new_session
        data = json.dumps({"command": command, "env": env}).encode()
        socket.send_fds(self._ask, [len(data).to_bytes(8, "big")], pass_fds)
        self._ask.sendall(data)
        self._ask.close()
        return _Forked(pid)


class _Forked:
    """As much of a ``Popen`` as the agent uses."""

    def __init__(self, pid):
        self.pid = pid
        self.returncode = None

    def kill(self):
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout=None):
        until_s = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif until_s is not None and time.monotonic() > until_s:
                raise subprocess.TimeoutExpired(MODULE, timeout)
            else:
                time.sleep(POLL_S)
        return self.returncode


def _become_server(asked):
    """Wait until it is wanted, and never come back."""
    try:
        head, fds, _, _ = socket.recv_fds(asked, 8, 1)
        if not head:
            os._exit(0)  # the agent has ended
        with asked, asked.makefile("rb") as stream:
            told = json.loads(stream.read(int.from_bytes(head, "big")))
        _look_fresh(told, fds[0])
        runpy.run_module(MODULE, run_name="__main__")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _look_fresh(told, fd):
    from outlast.launch.warm.child import show

    python, unbuffered, dash, module, theirs, agent, *held = told["command"]
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, [int(number) for number in held])
    os.dup2(fd, int(theirs))
    if fd != int(theirs):
        os.close(fd)
    os.closerange(3, int(theirs))
    os.closerange(int(theirs) + 1, 4096)
    os.environ.clear()
    os.environ.update(told["env"])
    command = (python, unbuffered, dash, module, theirs, agent, *held)
    show([os.fsencode(word) for word in command], os.environb)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    tests = str(Path(__file__).parent)
    sys.path[:] = [str(Path.cwd()), *(path for path in sys.path if not path.startswith(tests))]
    sys.argv = [MODULE, theirs, agent, *held]
