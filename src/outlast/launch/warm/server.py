"""Import ahead, fork workers, and tell at once when a worker has ended.

**The server.** One thread, no device, no lock held, no child of anybody else's: checked before each
fork, because only then a fork is as good as a fresh start. A worker that has ended stays a zombie
until the agent has heard of it, so that its id cannot be another process's when the agent signals
it. What can go wrong: an import that never ends (the agent stops waiting and starts cold), and
being killed (the workers die with it, and the agent starts another one).

The server imports torch's stack, ours, and of the script's own imports those that are safe.
``EnvReads`` knows which variables the imports have read: a script that sets one of them has to
start cold. ``os.environ["TORCH_LOGS"] = …`` above ``import torch`` works in a fresh interpreter. In
a fork torch has been imported long before. What Python code reads is noticed while it is imported;
what native libraries read when they are loaded is known by the beginnings of the names.

**The fork** (``become``) looks freshly started. Its command line and environment, as ``ps`` and
/proc show them, are at first its parent's. The kernel lets a process say where they lie
(PR_SET_MM_MAP, which takes no privilege where the kernel has it), so a worker points to what a cold
one would show: people and tools recognise workers by it. Where the kernel refuses, the server's
command line is shown.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import mmap
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from outlast.health.processes import AGENT_VARIABLE, die_with
from outlast.ipc import ReceivedFrame, readable
from outlast.launch import worker
from outlast.launch.warm.client import (
    Exited,
    ForkedWorker,
    ForkRefused,
    Message,
    Reaped,
    Script,
    ServerReady,
    Start,
    Started,
    Wire,
)
from outlast.launch.warm.imports import (
    ImportProbe,
    Reading,
    VariableAssignment,
    WantedImport,
    is_at,
    is_loaded,
    load,
    own_modules,
    read,
    script_of,
    unfit,
)

_PR_SET_MM: Final = 35
_PR_SET_MM_MAP: Final = 14
# Positions in /proc/self/stat, counted after the command's name.
_IN_STAT: Final = {
    "start_code": 23,
    "end_code": 24,
    "start_stack": 25,
    "start_data": 42,
    "end_data": 43,
    "start_brk": 44,
}
_shown: list[Any] = []  # the memory that the kernel reads from lives as long as the process


class _Map(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data")),
        *((name, ctypes.c_uint64) for name in ("start_brk", "brk", "start_stack")),
        *((name, ctypes.c_uint64) for name in ("arg_start", "arg_end", "env_start", "env_end")),
        ("auxv", ctypes.c_void_p),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def show(command: Sequence[bytes], environ: Mapping[bytes, bytes]) -> None:
    """Show this command line and environment from now on, if the kernel lets us."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        _show(command, environ)


def _show(command: Sequence[bytes], environ: Mapping[bytes, bytes]) -> None:
    arguments = b"\0".join(command) + b"\0"
    surroundings = b"".join(name + b"=" + value + b"\0" for name, value in environ.items())
    memory = mmap.mmap(-1, len(arguments) + len(surroundings), flags=mmap.MAP_PRIVATE)
    memory.write(arguments + surroundings)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    middle = start + len(arguments)
    wanted = _Map(
        **{name: int(stat[position]) for name, position in _IN_STAT.items()},
        brk=libc.sbrk(0),
        arg_start=start,
        arg_end=middle,
        env_start=middle,
        env_end=middle + len(surroundings),
        auxv=None,
        auxv_size=0,
        exe_fd=0xFFFFFFFF,
    )
    size = ctypes.sizeof(wanted)
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(wanted), size, 0) == 0:
        _shown.append(memory)


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a forked worker is to be.

    Attributes:
        worker: as the agent described it.
        fds: for its standard output and error, where they are redirected.
        server: process id of the one that it is forked from, which it must not outlive. Taken
            before the fork: in here it may be somebody else's by now.
        say: to be told of a session of its own, by one byte.
        environ_made: what imports have set in, or (None) taken out of the environment.
    """

    worker: ForkedWorker
    fds: list[int]
    server: int
    say: int
    environ_made: dict[bytes, bytes | None]


def become(job: ForkRequest, held: Sequence[int]) -> NoReturn:
    """Run the worker's script; whatever happens, nothing of the server runs on in here.

    Args:
        job: what this fork is to be.
        held: signals that are blocked in the server alone.
    """
    try:
        _become(job)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
        worker.main()
    except BaseException:  # noqa: BLE001 - main() leaves by itself: this is ours
        traceback.print_exc()
    finally:
        os._exit(1)


def _become(job: ForkRequest) -> None:
    os.setsid()
    os.write(job.say, b"x")
    os.close(job.say)
    for number, fd in zip(job.worker.redirected, job.fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    _set_environment(job)
    sys.orig_argv = [os.fsdecode(one) for one in job.worker.command]
    sys.argv = [str(worker.__file__), *(os.fsdecode(one) for one in job.worker.arguments)]
    show(job.worker.command, os.environb)
    _draw_anew()
    importlib.invalidate_caches()  # the server has seen directories as they were


def _set_environment(job: ForkRequest) -> None:
    environ = dict(job.worker.environ)
    for name, value in job.environ_made.items():
        if value is not None:
            environ[name] = value
        else:
            environ.pop(name, None)
    # The one that it must not outlive is the server, which does not outlive the agent.
    environ[AGENT_VARIABLE.encode()] = str(job.server).encode()
    for name in set(os.environb).difference(environ):
        del os.environb[name]
    for name, value in environ.items():
        if os.environb.get(name) != value:
            os.environb[name] = value


def _draw_anew() -> None:
    """Seeds as in a fresh interpreter: another one in each. Python's own module sees to itself.

    Not torch.manual_seed or torch.seed: they would seed the devices' generators too, which begin
    with the same number in each fresh process.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.default_generator.seed()


# Read by the loader, the allocator, OpenMP, BLAS and torch's own libraries.
_NATIVE: Final = (
    *("LD_", "MALLOC_", "GLIBC_", "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_"),
    *("DNNL_", "ONEDNN_", "ATEN_", "C10_", "TORCH_", "PYTORCH_"),
)
# Of these, what is read when a process group or a device begins.
_LATE: Final = ("TORCH_NCCL_", "TORCH_GLOO_", "TORCH_FR_")


class EnvReads:
    """What has been read so far: by torch itself, and by what is imported after it."""

    def __init__(self) -> None:
        self.by_torch: set[str] = set()
        self.after_torch: set[str] = set()

    @contextlib.contextmanager
    def noting(self, *, after_torch: bool) -> Iterator[None]:
        """Notes what Python code asks the environment for."""
        environ = type(os.environ)
        before = environ.__getitem__
        noted = self.after_torch if after_torch else self.by_torch

        def read(self: Any, key: Any) -> Any:
            noted.add(os.fsdecode(key))
            return before(self, key)

        environ.__getitem__ = read  # type: ignore[method-assign]
        try:
            yield
        finally:
            environ.__getitem__ = before  # type: ignore[method-assign]

    def objection(self, reading: Reading) -> str:
        """Why a script has to start cold; empty if it need not."""
        for one in reading.settings:
            if self._matters(one):
                name = one.name or "variables"
                return f"{one.place} sets {name}, which imports that are done already have read"
        return ""

    def _matters(self, one: VariableAssignment) -> bool:
        if one.is_after_torch:
            return one.name in self.after_torch
        return one.name is None or self._is_read(one.name)

    def _is_read(self, name: str) -> bool:
        if name in self.by_torch or name in self.after_torch:
            return True
        return name.startswith(_NATIVE) and not name.startswith(_LATE)


# What a training script imports sooner or later: any optimizer imports torch._dynamo.
STACK: Final = (
    "encodings.idna",  # a name's look-up
    "numpy",
    "numpy.ma",  # numpy.unique
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "torch.utils.serialization.config",  # torch.save and torch.load
    "outlast.training.session",
)


def import_stack(env_reads: EnvReads) -> None:
    """Import what every worker needs; what this installation does not have is left out."""
    for name in STACK:
        with contextlib.suppress(ImportError), env_reads.noting(after_torch="torch" in sys.modules):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        importlib.import_module("outlast.keeper.wire").version()  # which each worker asks for


SESSION_TIMEOUT_S: Final = 5.0


def serve(fd: int, agent: int, baseline: frozenset[str]) -> ForkRequest:
    """Serve until the agent has gone; returns in a worker only, with what it is to be.

    Args:
        fd: of the socket.
        agent: process id of the agent, with which this process dies.
        baseline: modules that a cold worker has loaded when its script begins.
    """
    die_with(agent)
    here = sys.path.pop(0)  # what lies in the working directory is not what is to be imported
    server = _ForkServer(Wire(socket.socket(fileno=fd)), baseline)
    import_stack(server.env_reads)
    gc.collect()
    gc.freeze()  # a worker's collections then touch, and so copy, none of what it shares
    job = server.run()
    sys.path.insert(0, here)
    return job


class _ForkServer:
    def __init__(self, wire: Wire, baseline: frozenset[str]) -> None:
        self._wire = wire
        self._baseline = baseline
        self._before = dict(os.environb)  # as it was started: imports may add to it
        self._children: dict[int, int] = {}  # pidfd → pid
        self.env_reads = EnvReads()
        self._reading: Reading | None = None
        self._probe = ImportProbe([])
        self._wanted: list[WantedImport] = []  # still to be imported

    def run(self) -> ForkRequest:
        """Serve; returns in a worker only."""
        self._tell(ServerReady())
        while True:
            ready = self._wait()
            self._report_ended()
            if self._wire.sock.fileno() in ready:
                job = self._answer()
                if job is not None:
                    return job
            elif self._is_probing and (self._probe.fd in ready or not self._probe.left_s):
                self._probed()
            elif self._wanted and not ready:
                self._import_one()

    def _wait(self) -> set[int]:
        fds, timeout_s = [self._wire.sock.fileno(), *self._children], None
        if self._wanted:
            timeout_s = 0.0
        elif self._is_probing:
            fds.append(self._probe.fd)
            timeout_s = self._probe.left_s
        return readable(fds, timeout_s)

    @property
    def _is_probing(self) -> bool:
        return not self._probe.is_over

    def _answer(self) -> ForkRequest | None:
        """Do what the agent asks for; a job in a worker."""
        while (found := self._hear()) is not None:
            message, _, fds = found
            if isinstance(message, Start):
                job = self._start(message, fds)
                if job is not None:
                    return job
            elif isinstance(message, Script):
                self._look_ahead(message)
            elif isinstance(message, Reaped):
                for pid in message.pids:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, 0)
        return None

    def _tell(self, message: Message) -> None:
        try:
            self._wire.send(message)
        except OSError:
            os._exit(0)

    def _hear(self) -> ReceivedFrame | None:
        try:
            found = self._wire.receive(0.0)
        except TimeoutError:
            return None
        except ValueError:
            found = None
        if found is None:
            os._exit(0)  # without the agent there is nothing to serve
        return found

    # --- workers -----------------------------------------------------------------------------

    def _start(self, message: Start, fds: list[int]) -> ForkRequest | None:
        """Fork; a job in a worker, None in the server."""
        reason = unfit() or self._objection(message.workers[0])
        if reason:
            for fd in fds:
                os.close(fd)
            self._tell(ForkRefused(reason=reason))
            return None
        made = self._made_by_imports()
        said, say = os.pipe()
        given, me = list(fds), os.getpid()
        pids = []
        for one in message.workers:
            mine = [given.pop(0) for _ in one.redirected]
            pid = os.fork()
            if pid == 0:
                os.close(said)
                self._wire.drop_descriptors()
                self._wire.sock.close()  # not shut down: it is the server's too
                theirs = set(fds).difference(mine)
                probe = [self._probe.fd] if self._is_probing else []
                for fd in (*theirs, *self._children, *probe):
                    os.close(fd)
                return ForkRequest(worker=one, fds=mine, server=me, say=say, environ_made=made)
            pids.append(pid)
        os.close(say)
        for fd in fds:
            os.close(fd)
        self._wait_for_sessions(said, len(pids))
        for pid in pids:
            self._children[os.pidfd_open(pid)] = pid
        self._tell(Started(pids=pids))
        return None

    @staticmethod
    def _wait_for_sessions(said: int, count: int) -> None:
        """Until each worker leads a group of its own: the agent signals groups."""
        until_s = time.monotonic() + SESSION_TIMEOUT_S
        while count > 0 and readable([said], max(until_s - time.monotonic(), 0.0)):
            heard = len(os.read(said, count))
            if not heard:
                break  # the others have ended already
            count -= heard
        os.close(said)

    def _report_ended(self) -> None:
        for pidfd in readable(self._children, 0.0):
            self._report(pidfd)

    def _report(self, pidfd: int) -> None:
        pid = self._children.pop(pidfd)
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.close(pidfd)
        assert found is not None  # noqa: S101 - only WNOHANG gives nothing
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        self._tell(Exited(pid=pid, code=code))

    def _made_by_imports(self) -> dict[bytes, bytes | None]:
        """What imports have done to the environment: a cold worker's imports would do it too."""
        now = os.environb
        made: dict[bytes, bytes | None] = {
            name: value for name, value in now.items() if self._before.get(name) != value
        }
        return made | {name: None for name in self._before if name not in now}

    def _objection(self, one: ForkedWorker) -> str:
        """What in the script asks for a fresh interpreter; empty if nothing does."""
        arguments = [os.fsdecode(argument) for argument in one.arguments]
        return self._shadowed(arguments) or self.env_reads.objection(self._read(arguments))

    def _read(self, arguments: list[str]) -> Reading:
        if self._reading is None or not self._reading.is_current:
            self._reading = read(arguments)
        return self._reading

    def _shadowed(self, arguments: list[str]) -> str:
        """A module of the script's own that a cold worker would import in place of a loaded one."""
        _, directory = script_of(arguments)
        loaded = {name.partition(".")[0] for name in sys.modules}
        loaded -= {name.partition(".")[0] for name in self._baseline}
        for path in own_modules(directory):
            name = path.name.partition(".")[0]
            if name in loaded and not is_at(name, path):
                return (
                    f"{path.name} beside the script has the name of a module that is loaded already"
                )
        return ""

    # --- the script's imports ----------------------------------------------------------------

    def _look_ahead(self, message: Script) -> None:
        arguments = [os.fsdecode(one) for one in message.arguments]
        sys.argv = arguments[arguments[0] == "-m" :]
        reading = self._read(arguments)
        wanted = [one for one in reading.wanted if not is_loaded(one)]
        # What a script sets, native code of other packages may read when it is loaded.
        if wanted and not reading.settings:
            self._probe = ImportProbe(wanted)

    def _probed(self) -> None:
        self._probe.look()
        if self._probe.is_over:
            self._wanted = list(self._probe.safe)

    def _import_one(self) -> None:
        # It may take seconds, and a worker's end is not to wait for it.
        before = signal.signal(signal.SIGCHLD, lambda *_: self._report_ended())
        try:
            with contextlib.suppress(Exception), self.env_reads.noting(after_torch=True):
                load(self._wanted.pop(0))
        finally:
            signal.signal(signal.SIGCHLD, before)
        if not self._wanted:
            gc.collect()
            gc.freeze()
