"""What the floor's warm processes start: forks with torch loaded, not fresh interpreters.

The server of a warm agent's workers would import torch's stack, seconds of a core for each agent
of each test; a keeper and a watcher need a sixth of a second for their imports, half of what a
short job needs in all. Here the first one of each begins as a fork of what the floor forks
everything warm from, and does all else as it always does; one that follows it starts afresh. How
they begin for people is seen where a test starts a job cold, in ``warm/`` (the server) and in
``keeper/test_supervisor.py`` (the keeper).
"""

import contextlib
import fcntl
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

POLL_S = 0.002
FDS_MAX = 64
STANDARD = (0, 1, 2)


def have_ready(is_agent):
    """Have a keeper started when this process starts one; an agent's server and watcher too."""
    from outlast.keeper import process

    starters = [(process, "outlast.keeper")]
    if is_agent:
        from outlast.launch import health
        from outlast.launch.warm import client

        starters += [(client, "outlast.launch.warm"), (health, "outlast.health.watcher")]
    for starter, module in starters:
        starter.subprocess = SimpleNamespace(
            Popen=_Spare(module).popen,
            PIPE=subprocess.PIPE,
            DEVNULL=subprocess.DEVNULL,
            TimeoutExpired=subprocess.TimeoutExpired,
        )


class _Spare:
    """A process that waits to become ``python -m MODULE``, once."""

    def __init__(self, module):
        self._module = module
        self._ask, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._ask.close()
            _become(theirs)
        theirs.close()

    def popen(self, command, **options):
        """What is called in place of ``subprocess.Popen``."""
        pid, self._pid = self._pid, None
        if pid is None:
            return subprocess.Popen(command, **options)
        assert self._module in command, command
        with contextlib.ExitStack() as stack:
            return self._tell(pid, command, stack, **options)

    def _tell(
        self, pid, command, stack, *, env=None, cwd=None, pass_fds=(), start_new_session, **standard
    ):
        assert start_new_session
        stdin, fds = None, list(pass_fds)
        for name in ("stdin", "stdout", "stderr"):
            given = standard.pop(name, None)
            if given == subprocess.PIPE:
                theirs, ours = os.pipe()
                stack.callback(os.close, theirs)
                stdin = os.fdopen(ours, "wb")
                fds.append(theirs)
            elif given == subprocess.DEVNULL:
                fds.append(os.open(os.devnull, os.O_RDWR))
                stack.callback(os.close, fds[-1])
            else:
                fds.append(STANDARD[len(fds) - len(pass_fds)] if given is None else given.fileno())
        assert not standard, standard
        told = {
            "command": command,
            "module": self._module,
            "env": dict(os.environ if env is None else env),
            "cwd": cwd,
            "numbers": [*pass_fds, *STANDARD],
            "blocked": [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        }
        data = json.dumps(told).encode()
        socket.send_fds(self._ask, [len(data).to_bytes(8, "big")], fds)
        self._ask.sendall(data)
        self._ask.close()
        return _Forked(pid, stdin)


class _Forked:
    """As much of a ``Popen`` as those who start it use."""

    def __init__(self, pid, stdin):
        self.pid = pid
        self.stdin = stdin
        self.returncode = None

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=None):
        until_s = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif until_s is not None and time.monotonic() >= until_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            else:
                time.sleep(POLL_S)
        return self.returncode


def _become(asked):
    """Wait until it is wanted, and never come back."""
    code = 1
    try:
        head, fds, _, _ = socket.recv_fds(asked, 8, FDS_MAX)
        if not head:
            os._exit(0)  # who may have wanted it has ended
        with asked, asked.makefile("rb") as stream:
            told = json.loads(stream.read(int.from_bytes(head, "big")))
        _look_fresh(told, fds)
        runpy.run_module(told["module"], run_name="__main__")
        threading._shutdown()  # as an interpreter that ends: its threads are waited for
        code = 0
    except SystemExit as error:
        code = error.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _look_fresh(told, fds):
    from outlast.launch.warm.server import show

    command = told["command"]
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, told["blocked"])
    numbers = told["numbers"]
    beyond = max(numbers) + 1
    held = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, beyond) for fd in fds]
    for fd, number in zip(held, numbers, strict=True):
        os.dup2(fd, number)
    before = 3
    for number in sorted({*numbers, 4096}.difference(STANDARD)):
        os.closerange(before, number)
        before = number + 1
    os.environ.clear()
    os.environ.update(told["env"])
    if told["cwd"] is not None:
        os.chdir(told["cwd"])
    show([os.fsencode(word) for word in command], os.environb)
    sys.stdin = os.fdopen(0, closefd=False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    tests = str(Path(__file__).parent)
    here = [] if "-P" in command else [str(Path.cwd())]
    sys.path[:] = [*here, *(path for path in sys.path if not path.startswith(tests))]
    sys.argv = command[command.index("-m") + 1 :]
