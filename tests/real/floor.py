"""Real processes for the tests: how they are started, watched and ended.

A process is started *cold* (a fresh interpreter, as people start it; importing torch costs it
seconds) or *warm* (forked from a server that has torch imported already; 50 ms). Both get a clean
environment, a session of their own, and files for their output. Nothing is mocked in either. What a
warm one starts is a fork too: an agent's server and watcher, and the keeper (see ``floor_server``).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import floor_server
import psutil
from saved import is_committed, saved, saves_in

from outlast.attempt import early
from outlast.launch import first_look
from outlast.ledger.file import read_events
from outlast.storage import Directory

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = SCRIPTS / "train.py"
LIMIT_S = 120.0
POLL_S = 0.003
COSTS, SELDOM_S = 3, 0.2  # a look that takes long is paid for with so many times of waiting
TAG = "REAL_TEST_TAG"  # marks whatever our processes start: found by it, and ended
STAMP = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (?=outlast: )", re.MULTILINE)
_DROPPED = ("OUTLAST_", "PET_", "TORCHELASTIC_", "TORCH_NCCL", "GROUP_")
_DROPPED_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PYTHON_EXEC", "LOGLEVEL"),
    "PYTHONUNBUFFERED",  # streams have buffers where people start us
    first_look.LEVEL_VARIABLE,
}

_warm = multiprocessing.get_context("forkserver")
# What all warm processes are forked from imports torch before our agent could tell it to be quiet.
os.environ[first_look.LEVEL_VARIABLE] = "ERROR"
# The main module of a test run is pytest: a child that imports it finds it imported.
_warm.set_forkserver_preload(
    [
        *("pytest", "torch", "torch._dynamo", "torch.utils.data"),
        *("torchdata.stateful_dataloader", "outlast.training.session", "outlast.launch.run"),
    ]
)


def alone(monkeypatch):
    """This process is no worker of a launcher's, whatever a test before it has left set."""
    for name in ("RANK", "WORLD_SIZE", "OUTLAST_STORE", "OUTLAST_DIR"):
        monkeypatch.delenv(name, raising=False)


def until(condition, what, *, running=None, limit_s=LIMIT_S, every_s=POLL_S):
    """Wait for ``condition`` and return what it gave; fails after a deadline, never before.

    It is asked every ``every_s``, or less often where to ask takes long.
    """
    deadline = time.monotonic() + limit_s
    while True:
        began_s = time.monotonic()
        if found := condition():
            return found
        if running is not None and running.poll() is not None and not condition():
            raise AssertionError(f"ended with {running.poll()} before: {what}\n{running.text}")
        assert time.monotonic() < deadline, (
            f"not within {limit_s:.0f} s: {what}\n{running.text if running else ''}"
        )
        # What is waited for needs the cores too.
        time.sleep(max(every_s, min(COSTS * (time.monotonic() - began_s), SELDOM_S)))


class Started:
    """A process that a test started."""

    def __init__(self, process, out, err):
        self._process = process
        self._out, self._err = out, err
        self.pid = process.pid

    def poll(self):
        """The exit code (negative: the signal), or None."""
        if isinstance(self._process, subprocess.Popen):
            return self._process.poll()
        return self._process.exitcode

    def wait(self, limit_s=LIMIT_S):
        """The exit code, waited for."""
        if isinstance(self._process, subprocess.Popen):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(limit_s)
        else:
            self._process.join(limit_s)
        code = self.poll()
        assert code is not None, f"still running after {limit_s:.0f} s\n{self.text}"
        return code

    def signal(self, number):
        os.kill(self.pid, number)

    def signal_group(self, number):
        os.killpg(self.pid, number)

    def kill(self):
        """SIGKILL; nothing happens when it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.wait()

    @property
    def out(self):
        return self._out.read_text(errors="replace")

    @property
    def err(self):
        """Standard error; lines of ours without their time."""
        return STAMP.sub("", self.dated_err)

    @property
    def dated_err(self):
        return self._err.read_text(errors="replace")

    @property
    def text(self):
        """All that it printed, for a failing test's message."""
        return f"--- stdout\n{self.out[-4000:]}\n--- stderr\n{self.err[-6000:]}"


class Floor:
    """Starts processes for one test, and sees that none is left.

    Args:
        directory: the test's own.
        starts_afresh: have what a warm process starts import all by itself, as a cold one's does.
    """

    def __init__(self, directory, *, starts_afresh=False):
        self.directory = directory
        self._starts_afresh = starts_afresh
        self.tag = uuid.uuid4().hex
        self.environ = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(_DROPPED) and name not in _DROPPED_NAMES
            },
            "OUTLAST_NOTICE_PLATFORM": "none",  # no packet leaves this machine
            "OMP_NUM_THREADS": "1",
            "OUTLAST_RESUME": "1",  # tests begin a job with other arguments than they end it with
            "OUTLAST_HEALTH_HANG": "60 s",  # tests stop what they like; those of hangs say "auto"
            TAG: self.tag,
        }
        self._started = []
        self._serial = itertools.count()

    # --- starting ----------------------------------------------------------------------------

    def cold(self, *arguments, env=None, cwd=None, program=sys.executable):
        """``python ARGUMENTS`` in a fresh interpreter."""
        out, err = self._files()
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [program, *map(str, arguments)],
                env=self._environ(env),
                cwd=cwd or self.directory,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        return self._keep(process, out, err)

    def warm(self, *arguments, env=None, cwd=None, enter=None, ahead=()):
        """``python SCRIPT ARGUMENTS`` (or ``-m MODULE ARGUMENTS``), forked with torch loaded.

        ``enter`` is called first, in the new process: to move it to another machine, say. The
        modules ``ahead`` are imported in it, so that what it forks has them too.
        """
        out, err = self._files()
        process = _warm.Process(
            target=_run_warm,
            args=(
                [str(argument) for argument in arguments],
                self._environ(env),
                *(str(cwd or self.directory), str(out), str(err)),
                *(enter, ahead, self._starts_afresh),
            ),
        )
        process.start()
        return self._keep(process, out, err)

    def outlast(self, *arguments, cold=False, **options):
        """``python -m outlast ARGUMENTS``; its workers are always fresh interpreters."""
        return (self.cold if cold else self.warm)("-m", "outlast", *arguments, **options)

    def torchrun(self, *arguments, cold=False, **options):
        """Stock ``torchrun ARGUMENTS``; its workers are always fresh interpreters."""
        start = self.cold if cold else self.warm
        return start("-m", "torch.distributed.run", *arguments, **options)

    def ranks(self, count, *arguments, env=None, **options):
        """``count`` warm processes with the environment that torchrun gives its workers."""
        shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        return [
            self.warm(
                *arguments,
                env={**shared, "RANK": rank, "LOCAL_RANK": rank, **(env or {})},
                **options,
            )
            for rank in range(count)
        ]

    # --- looking and ending ------------------------------------------------------------------

    def offspring(self):
        """Processes that ours started and that still run."""
        found, mark = [], f"{TAG}={self.tag}".encode()
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, psutil.Error):
                if mark in (place / "environ").read_bytes().split(b"\0"):
                    process = psutil.Process(int(place.name))
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
        return found

    def trainers(self):
        """Processes of ours that run a script for an agent, whether it is there or not."""
        found = []
        for process in self.offspring():
            with contextlib.suppress(psutil.Error):
                if "outlast.launch.worker" in process.cmdline():
                    found.append(process)
        return found

    def workers(self):
        """Ids of the worker processes of ``outlast run``, by rank."""
        by_rank = {}
        for process in self.trainers():
            with contextlib.suppress(psutil.Error):
                environ = process.environ()
                # A data loader's process has its parent's command line and environment.
                if str(process.ppid()) == environ.get("OUTLAST_AGENT_PID"):
                    by_rank[int(environ["RANK"])] = process.pid
        return [by_rank[rank] for rank in sorted(by_rank)]

    def close(self):
        """End what is left; fails when something outlived the processes that the test ended."""
        for started in self._started:
            started.kill()
        was_killed = any(started.poll() == -signal.SIGKILL for started in self._started)
        deadline = time.monotonic() + 90  # a busy machine takes a while
        while (left := self.offspring()) and time.monotonic() < deadline:
            time.sleep(0.05)
            if was_killed and all(map(_is_keeper, left)):
                # They would stay 20 s for an agent to come back; test_keeper_kills.py sees them go.
                for keeper in left:
                    with contextlib.suppress(psutil.Error):
                        keeper.kill()
        names = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                names.append(f"{process.pid} {process.status()}: {' '.join(process.cmdline())}")
                process.kill()
        assert not left, f"left running: {names}"

    def _environ(self, extra):
        return {**self.environ, **{name: str(value) for name, value in (extra or {}).items()}}

    def _files(self):
        number = next(self._serial)
        paths = [self.directory / f"process-{number}.{kind}" for kind in ("out", "err")]
        for path in paths:
            path.touch()
        return paths

    def _keep(self, process, out, err):
        started = Started(process, out, err)
        self._started.append(started)
        return started


def _run_warm(arguments, environ, cwd, out, err, enter, ahead, starts_afresh):
    """What a warm process does: become one that looks freshly started, and run the script."""
    # A look for garbage, or for what refers to an optimizer, would pass over all of torch's objects
    # and so copy their pages: half of the time that a short job takes.
    gc.freeze()
    os.setsid()
    if enter is not None:
        enter()
    os.environ.clear()
    os.environ.update(environ)
    os.environ.setdefault(early.QUIET_VARIABLE, "1")  # it was told
    early.spare_torch()
    os.chdir(cwd)
    for path, number in ((out, 1), (err, 2)):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(fd, number)
        os.close(fd)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    multiprocessing.set_start_method("fork", force=True)  # Python's own default
    try:
        for module in ahead:
            importlib.import_module(module)
        if arguments[:2] == ["-m", "outlast"]:
            from outlast.cli import main

            if arguments[2:3] == ["run"] and not starts_afresh:
                floor_server.have_ready(is_agent=True)
            sys.argv = ["outlast", *arguments[2:]]
            main(arguments[2:])
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
            return
        if not starts_afresh and "OUTLAST_KEEPER" not in environ:
            floor_server.have_ready(is_agent=False)
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _is_keeper(process):
    with contextlib.suppress(psutil.Error):
        return "outlast.keeper" in process.cmdline()
    return False


def free_port():
    """A port of the loopback that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _record_in(line):
    """What a line records; a kill may have torn it, and the next process have gone on in it."""
    try:
        return json.loads(line)
    except ValueError:
        return json.loads(line[line.rindex('{"') :])


class Steps(NamedTuple):
    committed: list[int]
    unfinished: list[int]


class Job:
    """What a job left behind: its ledger, its checkpoints, and the records of its script."""

    def __init__(self, directory, num_ranks=1):
        self.directory = directory
        self.records = directory.with_name(f"{directory.name}-records")
        self.records.mkdir(exist_ok=True)
        self.num_ranks = num_ranks
        self.checkpoints = directory / "checkpoints"
        self.storage = Directory(self.checkpoints)

    @property
    def env(self):
        return {"OUTLAST_DIR": self.directory}

    def events(self, name):
        return [event for event in read_events(self.directory) if event.event == name]

    def steps(self):
        """(committed, unfinished): steps with and without a manifest, as ``ls`` would show them."""
        found = Steps([], [])
        for save in saves_in(self.checkpoints):
            there = is_committed(self.storage, save)
            kind = found.committed if there else found.unfinished
            if kind[-1:] != [save.step]:
                kind.append(save.step)
        return found

    def newest(self):
        """The newest committed step, 0 without one."""
        return max(self.steps().committed, default=0)

    def unfinished(self):
        """Steps in the making: a directory newer than the newest commit."""
        found = self.steps()
        return {step for step in found.unfinished if step > max(found.committed, default=0)}

    def path(self, step, name=""):
        return saved(self.checkpoints, step) / name

    def audit(self):
        """What the newest checkpoint proves of the samples."""
        with tempfile.TemporaryDirectory() as place:
            floor = Floor(Path(place))
            command = ("checkpoints", "show", "--samples", "--json", self.directory)
            shown = floor.outlast(*command)
            shown.wait()
            floor.close()
            return json.loads(shown.out)

    def lines(self, rank=0):
        """What the script of ``rank`` recorded: {pid, step, ids} for each step begun."""
        try:
            text = (self.records / f"steps-{rank}.jsonl").read_text()
        except FileNotFoundError:
            return []
        return [_record_in(line) for line in text.splitlines() if line.endswith("}")]

    def begun(self, pid=None):
        """The newest step that some rank has begun, in process ``pid`` if given."""
        return max(
            (
                line["step"]
                for rank in range(self.num_ranks)
                for line in self.lines(rank)
                if pid is None or line["pid"] == pid
            ),
            default=0,
        )

    def consumed(self, rank=0):
        """Step → ids of its samples, as they were consumed last."""
        return {line["step"]: line["ids"] for line in self.lines(rank)}

    def final(self, rank=0):
        """What the script said at its end."""
        return json.loads((self.records / f"final-{rank}.json").read_text())

    def finals(self):
        return [self.final(rank) for rank in range(self.num_ranks)]
