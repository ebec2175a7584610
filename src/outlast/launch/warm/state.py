"""Whether this process may be forked from, and what an import has changed in it.

A fork copies one thread: locks that others held stay locked for ever. A device driver that was
started does not work in a fork. So both are looked for each time, by what the kernel shows and not
by what a library says of itself.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
from pathlib import Path
from typing import Any, Final

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
