"""Connections of torch's stores, without the question what name their addresses have.

For a message that next to nobody reads, torch asks for the name of each address that one of its
stores connects to, and of each that connects to it. That is a question to the name servers: no file
of hosts has the addresses as torch writes them (``::ffff:127.0.0.1``). Where an answer is lost,
five seconds pass in which an attempt stands still; several are asked for in each attempt, by each
worker. All our stores are at numbers.

Within ``nameless`` the C library knows of no name server, in this thread alone, and answers from
its files. It counts its servers in a structure of each thread's, which it leaves as it is where
somebody has changed it. Only under our agent, and where it was in time to tell torch that it need
not log the name that it did not get. torch asks for none in this process after that, in no thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

VARIABLE: Final = "OUTLAST_TORCH_IS_QUIET"  # set by the agent, before torch is here
_READY: Final = 1  # RES_INIT
_RENDEZVOUS: Final = "torch.distributed.rendezvous"
_MAKES: Final = "_create_c10d_store"


class _ResolverState(ctypes.Structure):
    """The beginning of glibc's ``struct __res_state``, which is part of its ABI."""

    _fields_ = (
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("nscount", ctypes.c_int),
    )


@contextlib.contextmanager
def nameless(host: str) -> Iterator[None]:
    """Within, this thread asks no name server; nothing changes where ``host`` is a name."""
    state = _state() if VARIABLE in os.environ and _is_number(host) else None
    if state is None:
        yield
        return
    before, state.nscount = state.nscount, 0
    try:
        yield
    finally:
        state.nscount = before


def spare_torch() -> None:
    """The same for the stores that torch makes for a script, if it is here already."""

    def spared(make: Any) -> Any:
        if hasattr(make, "__wrapped__"):
            return make

        def made(hostname: str, *args: Any, **options: Any) -> Any:
            with nameless(hostname):
                return make(hostname, *args, **options)

        return made

    around_stores(spared)


def around_stores(around: Callable[[Any], Any]) -> None:
    """Have torch make stores for scripts by ``around`` of its own function, if it is here."""
    module: Any = sys.modules.get(_RENDEZVOUS)
    make = getattr(module, _MAKES, None)
    if make is not None and (made := around(make)) is not make:
        setattr(module, _MAKES, functools.wraps(make)(made))


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _state() -> _ResolverState | None:
    """This thread's, ready for use; None where the C library is another one."""
    try:
        library = ctypes.CDLL(None)
        find, begin = library.__res_state, library.__res_ninit
    except (OSError, AttributeError):
        return None
    find.restype = ctypes.POINTER(_ResolverState)
    begin.argtypes = [ctypes.POINTER(_ResolverState)]
    found = find()
    is_ready = found.contents.options & _READY or not begin(found)
    return found.contents if is_ready else None
