"""What a worker does for those who want to see its stack: called once, before its script.

A signal is answered by ``faulthandler``, from C: also while another thread keeps the interpreter.
And where the kernel only lets a process be looked into by those that it has named (Yama), the agent
is named, and with it what the agent starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
from pathlib import Path
from typing import Final

from outlast.attempt.beat import VARIABLE

SIGNAL: Final = signal.SIGRTMAX - 3  # nobody else is known to use it
TRACER_VARIABLE: Final = "OUTLAST_TRACER"  # process id of the agent, set by it
_PR_SET_PTRACER: Final = 0x59616D61


def stacks_path(directory: Path, local_rank: int) -> Path:
    """Where faulthandler answers."""
    return directory / f"stacks-{local_rank}"


def be_ready() -> None:
    """Answer from now on, where an agent listens."""
    directory = os.environ.get(VARIABLE)
    if not directory:
        return
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # it is then not answered
        path = stacks_path(Path(directory), int(os.environ.get("LOCAL_RANK", "0")))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        tracer = int(os.environ.get(TRACER_VARIABLE, "0"))
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(tracer), 0, 0, 0)
