"""Whether an import may be done ahead: tried in a fork, which is then thrown away.

An import is declined when it leaves something behind that a fork would not have right: threads, a
device driver, processes, open descriptors, handlers, other random numbers; and when it looks at
what is different in each worker: its rank, its process id, the environment as a whole, fresh
randomness. What C code reads by itself is not seen.

Whether this process may be forked from, and what an import has changed in it.

A fork copies one thread: locks that others held stay locked for ever. A device driver that was
started does not work in a fork. So both are looked for each time, by what the kernel shows and not
by what a library says of itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from outlast.health.processes import die_with
from outlast.launch.warm.imports import WantedImport, is_per_worker

_TASKS: Final = Path("/proc/self/task")
_DESCRIPTORS: Final = Path("/proc/self/fd")
_DEVICES: Final = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/infiniband")


def unfit() -> str:
    """Why this process cannot be forked from; empty if it can."""
    if _num_threads() > 1:
        # OpenBLAS's pool, which numpy brings, puts its threads away at each fork.
        _fork_nothing()
    if (num_threads := _num_threads()) > 1:
        return f"an import has started {num_threads - 1} thread{'s'[: num_threads > 2]}"
    if device := _device():
        return f"an import has opened {device}"
    return ""


def has_children() -> bool:
    """Whether an import has started processes."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def visible() -> dict[str, Any]:
    """What an import is not expected to change, by name: what a script draws, or the kernel's."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return {
        "Python's random numbers": random.getstate(),
        "NumPy's random numbers": repr(numpy.random.get_state()) if numpy else None,
        "torch's random numbers": bytes(torch.get_rng_state().tolist()) if torch else None,
        "torch's number of threads": torch.get_num_threads() if torch else None,
        "torch's default type": str(torch.get_default_dtype()) if torch else None,
        "the working directory": os.getcwd(),  # noqa: PTH109 - no more than a comparison
        "a signal's handler": [signal.getsignal(one) for one in signal.valid_signals()],
        "the mask of signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "a limit": [resource.getrlimit(one) for one in _LIMITS],
        "the processors to run on": os.sched_getaffinity(0),
        "the umask": _umask(),
        "an open descriptor": _open(),
    }


_LIMITS: Final = tuple(
    getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")
)


def _num_threads() -> int:
    return len(os.listdir(_TASKS))  # noqa: PTH208 - asked before each fork


def _fork_nothing() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _device() -> str:
    for _, target in _open():
        if target.startswith(_DEVICES):
            return target
    return ""


def _open() -> list[tuple[int, str]]:
    found = []
    for entry in _DESCRIPTORS.iterdir():
        try:
            found.append((int(entry.name), str(entry.readlink())))
        except OSError:  # the listing's own
            continue
    return sorted(found)


def _umask() -> int:
    now = os.umask(0o77)
    os.umask(now)
    return now


PROBE_TIMEOUT_S: Final = 60.0  # of all imports of a script
_NICENESS: Final = 10  # training goes on meanwhile


class ImportVerdict(msgspec.Struct, frozen=True):
    """One import's: ``problem`` is empty if it is safe."""

    wanted: WantedImport
    problem: str


def load(wanted: WantedImport) -> None:
    """Do what the import statement would do."""
    if wanted.names:
        __import__(wanted.module, fromlist=wanted.names)
    else:
        importlib.import_module(wanted.module)


def is_loaded(wanted: WantedImport) -> bool:
    """Whether there is nothing left to import; without looking, where looking imports."""
    module = sys.modules.get(wanted.module)
    return module is not None and all(name in vars(module) for name in wanted.names)


class ImportProbe:
    """A fork that tries imports, one after the other.

    Attributes:
        fd: readable when there is a verdict, or when the fork has ended.
        safe: what has been found safe.
        declined: module → why not.
        is_over: whether all is known.
    """

    def __init__(self, wanted: list[WantedImport]) -> None:
        self.safe: list[WantedImport] = []
        self.declined: dict[str, str] = {}
        self.is_over = not wanted
        self.fd = -1
        self._left = list(wanted)
        self._pid = 0
        self._text = b""
        self._said_problem = False
        self._until_s = time.monotonic() + PROBE_TIMEOUT_S
        if wanted:
            self._fork()

    @property
    def left_s(self) -> float:
        """Seconds until it is given up."""
        return max(self._until_s - time.monotonic(), 0.0)

    def look(self) -> None:
        """Take in what the fork has said; to be called when ``fd`` is readable or time is over."""
        if not self.left_s:
            self._ended(f"it takes longer than {PROBE_TIMEOUT_S:.0f} s")
            self._finish()
            return
        data = os.read(self.fd, 1 << 16)
        self._text += data
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            self._take(msgspec.json.decode(line, type=ImportVerdict))
        if not data:
            self._ended("it ends the process")
        if not self._left:
            self._finish()
        elif self.fd < 0:
            self._fork()  # for those after the one that failed

    def _take(self, verdict: ImportVerdict) -> None:
        self._left.remove(verdict.wanted)
        if verdict.problem:
            self.declined[verdict.wanted.module] = verdict.problem
            self._said_problem = True
        else:
            self.safe.append(verdict.wanted)

    def _ended(self, otherwise: str) -> None:
        """The fork is done, because of its last verdict or without one."""
        assert self._pid > 0  # noqa: S101 - 0 would be our own group
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # with what it has started
        os.waitpid(self._pid, 0)
        os.close(self.fd)
        self.fd, self._pid = -1, 0
        if self._left and not self._said_problem:
            self.declined[self._left.pop(0).module] = otherwise
        self._said_problem = False

    def _finish(self) -> None:
        if self.fd >= 0:
            self._ended("")
        self.is_over = True

    def _fork(self) -> None:
        ours, theirs = os.pipe()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                die_with(server)
                _let_go_of_all_but(theirs)
                _try(self._left, theirs)
            finally:
                os._exit(0)
        os.close(theirs)
        with contextlib.suppress(OSError):  # it has ended already
            os.setpgid(pid, pid)
        self.fd, self._pid = ours, pid


def _let_go_of_all_but(said: int) -> None:
    """What an import starts here must not hold the server's connection."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) not in (0, 1, 2, said):
            with contextlib.suppress(OSError):
                os.close(int(name))


def _try(wanted: list[WantedImport], said: int) -> None:
    """In the fork: import, compare, tell; ends with the first problem."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)
    for one in wanted:
        problem = _problem(one)
        os.write(said, msgspec.json.encode(ImportVerdict(one, problem)) + b"\n")
        if problem:
            return


def _problem(one: WantedImport) -> str:
    before = visible()
    with _taps() as looked_at:
        try:
            load(one)
        except BaseException as error:  # noqa: BLE001 - sys.exit at import, too
            return f"it fails: {type(error).__name__}"
    after = visible()
    if looked_at:
        return f"it looks at {looked_at[0]}"
    changed = [name for name in before if before[name] not in (None, after[name])]
    if changed:
        return f"it changes {changed[0]}"
    if has_children():
        return "it starts processes"
    return unfit()


@contextlib.contextmanager
def _taps() -> Iterator[list[str]]:
    """Notes what an import looks at that is another thing in each worker."""
    looked_at: list[str] = []
    environ = type(os.environ)
    numpy = sys.modules.get("numpy")

    def read(self: Any, key: Any) -> Any:
        if is_per_worker(os.fsdecode(key)):
            looked_at.append(os.fsdecode(key))
        return read_before(self, key)

    def tap(call: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            looked_at.append(what)
            return call(*args, **kwargs)

        return tapped

    read_before = environ.__getitem__
    places = [
        (environ, "__iter__", "the whole environment"),
        (os, "getpid", "the process id"),
        (os, "urandom", "fresh randomness"),
        (random.Random, "seed", "fresh randomness"),
        *([(numpy.random, "default_rng", "fresh randomness")] if numpy else []),
    ]
    originals = [(place, name, getattr(place, name)) for place, name, _ in places]
    for place, name, what in places:
        setattr(place, name, tap(getattr(place, name), what))
    environ.__getitem__ = read  # type: ignore[method-assign]
    try:
        yield looked_at
    finally:
        environ.__getitem__ = read_before  # type: ignore[method-assign]
        for place, name, original in originals:
            setattr(place, name, original)
