"""Do what ``outlast run`` must do before torch is imported.

**Keep out of the log what torch logs and people cannot use.** torch's agent logs every failure that
the narrator tells in fewer words. torch's C++ warns, in the agent and in the workers: of each
connection to a store where addresses have no names ("The hostname of the client socket cannot be
retrieved", up to ten lines an attempt), and of each store whose server has ended before its
clients, with thirty frames of a C++ stack. Both happen at every loss. Errors of C++ stay. So do the
warnings that torch raises for the code that calls it (TORCH_WARN, in the backward pass too): Python
shows them, and this level does not concern them. What the owner has chosen stands. Rejected:
reading the workers' output line by line (it is theirs, and not always a pipe).

**Set the number of threads** that a worker computes with, unless the environment has it.

**Know where machines meet**, and what address they are reached at.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Final

from outlast.attempt.early import QUIET_VARIABLE
from outlast.errors import ConfigError

LEVEL_VARIABLE: Final = "TORCH_CPP_LOG_LEVEL"
_CHOSEN: Final = (LEVEL_VARIABLE, "TORCH_DISTRIBUTED_DEBUG")
_PYTHON: Final = "LOGLEVEL"


def level_to_set(environ: Mapping[str, str]) -> dict[str, str]:
    """What has to be in the environment before torch is imported; workers inherit it.

    Args:
        environ: the environment; what is set there stands.
    """
    if any(name in environ for name in _CHOSEN):
        return {}
    counts = "torch" not in sys.modules  # which reads it once
    return {LEVEL_VARIABLE: "ERROR"} | ({QUIET_VARIABLE: "1"} if counts else {})


def quieten_loggers(environ: Mapping[str, str]) -> None:
    """Keep what torch's agent logs about failures to itself; torch is imported already."""
    if _PYTHON in environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


THREADS_VARIABLE: Final = "OMP_NUM_THREADS"


def threads_to_set(environ: Mapping[str, str], num_workers: str) -> dict[str, str]:
    """What torchrun sets, without its banner: several workers get one thread each.

    Args:
        environ: the environment; what is set there stands.
        num_workers: the value of --nproc-per-node.
    """
    return {} if THREADS_VARIABLE in environ or num_workers == "1" else {THREADS_VARIABLE: "1"}


BACKEND: Final = "outlast"
_ADDRESS: Final = re.compile(r"[^/]*:\d+")


def place_of(endpoint: str) -> str:
    """The directory or bucket that an endpoint names.

    Raises:
        ConfigError: it is a machine's address, as other rendezvous want one.
    """
    if "://" in endpoint:
        return endpoint
    if _ADDRESS.fullmatch(endpoint):
        raise ConfigError(
            f"--rdzv-endpoint {endpoint} is an address; for --rdzv-backend {BACKEND} name a "
            "directory or bucket that all machines share"
        )
    return os.path.abspath(endpoint)  # noqa: PTH100 - as given, for every machine


def reached_at(local_addr: str | None, tell: Callable[[str], None]) -> str:
    """The address that other machines reach this one at, as a number: ``local_addr``, or a guess.

    A name is looked up once, here: whoever is told the number needs no name server, which may not
    answer just when machines are lost.

    Args:
        local_addr: an address or a name of this machine; None or "" for that of its default route.
        tell: told in words when others cannot reach it there, and nobody has asked for just that.

    Raises:
        ConfigError: the name is nobody's.
    """
    try:
        host = _looked_up(local_addr) if local_addr else own_address()
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"no other machine can reach this one at {local_addr}: {why}; name an address of this "
            "machine with --local-addr"
        ) from None
    if host != local_addr and ipaddress.ip_address(host).is_loopback:
        found = (
            f"{local_addr} is {host}" if local_addr else f"it has no route, and listens on {host}"
        )
        tell(
            f"other machines cannot reach this one ({found}); name an address of this machine with "
            "--local-addr"
        )
    return host


def _looked_up(host: str) -> str:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda one: one[0] != socket.AF_INET)  # else in the order of the answer
    numbers = [str(one[4][0]) for one in found]
    others = [one for one in numbers if not ipaddress.ip_address(one).is_loopback]
    return (others or numbers)[0]


# Documentation addresses; nothing is sent to them.
_ANYBODY: Final = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def own_address() -> str:
    """An address of this machine that others may reach: that of its default route, or loopback."""
    for family, anybody in _ANYBODY:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((anybody, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"
