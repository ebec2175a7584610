"""A server that is started before the agent itself has imported torch: both import at once.

What the command line means is known only later. A guess that proves wrong costs nothing but the
work: the server is ended, or another one takes its place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from outlast import config
from outlast.errors import OutlastError
from outlast.launch.first_look import threads_to_set
from outlast.launch.warm.client import WarmServer

_NPROC = "--nproc-per-node"


def begin(arguments: Sequence[str]) -> WarmServer | None:
    """A server that has begun to import, or None where it would not be used.

    Args:
        arguments: the command line after ``outlast run``.
    """
    if not is_possible() or "PYTHON_EXEC" in os.environ or not _has_script(arguments):
        return None
    try:
        wanted = config.load().workers_warm
    except OutlastError:
        return None  # it will be said
    if not wanted:
        return None
    return WarmServer(os.environ | threads_to_set(os.environ, _num_workers(arguments, os.environ)))


def is_possible() -> bool:
    """Whether this system has what it takes."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def _has_script(arguments: Sequence[str]) -> bool:
    return bool(arguments) and not {"-h", "--help", "--no-python", "--no_python"} & set(arguments)


def _num_workers(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    found = environ.get("PET_NPROC_PER_NODE", "1")
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.replace("_", "-").partition("=")
        if name == _NPROC:
            return value if equals else following
        if argument.endswith(".py"):
            break
    return found
