"""What torch logs that says nothing to a person does not reach the log.

torch's agent logs every failure that the narrator tells in fewer words. torch's C++ warns, in the
agent and in the workers: of each connection to a store where addresses have no names ("The hostname
of the client socket cannot be retrieved", up to ten lines an attempt), and of each store whose
server has ended before its clients, with thirty frames of a C++ stack. Both happen at every loss.

Errors of C++ stay. So do the warnings that torch raises for the code that calls it (TORCH_WARN, in
the backward pass too): Python shows them, and this level does not concern them. What the owner has
chosen stands.

Rejected: reading the workers' output line by line (it is theirs, and not always a pipe).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Final

from outlast.attempt import nameless

VARIABLE: Final = "TORCH_CPP_LOG_LEVEL"
_CHOSEN: Final = (VARIABLE, "TORCH_DISTRIBUTED_DEBUG")
_PYTHON: Final = "LOGLEVEL"


def level_to_set(environ: Mapping[str, str]) -> dict[str, str]:
    """What has to be in the environment before torch is imported; workers inherit it.

    Args:
        environ: the environment; what is set there stands.
    """
    if any(name in environ for name in _CHOSEN):
        return {}
    counts = "torch" not in sys.modules  # which reads it once
    return {VARIABLE: "ERROR"} | ({nameless.VARIABLE: "1"} if counts else {})


def quieten_loggers(environ: Mapping[str, str]) -> None:
    """Keep what torch's agent logs about failures to itself; torch is imported already."""
    if _PYTHON in environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
