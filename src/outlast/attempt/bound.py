"""A process that does not outlive the one that it works for."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

AGENT_VARIABLE: Final = "OUTLAST_AGENT_PID"
_PR_SET_PDEATHSIG: Final = 1


def wake_when_alone() -> None:
    """Have the kernel let this process go on, if it is stopped, when its parent has died."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent has died."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def die_with_agent() -> None:
    """Have the kernel kill this process when our agent has died, if it was started by one."""
    agent = int(os.environ.get(AGENT_VARIABLE, "0"))
    if agent:
        die_with(agent)
