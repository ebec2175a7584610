"""Breaking what an attempt's process groups wait for, and taking them down, in a living process.

A collective on gloo that waits for a rank that is gone ends in ``abort`` as little as in anything
else that torch has for it: only at its time-out. What ends it within a millisecond is shutting down
the connections that it waits on. Those are the connections that were opened while torch made the
groups, and those to the attempt's own store; each is known by its inode, so that nothing else that
has got its number since is touched. NCCL's communicators are aborted.

At first only their reading ends: gloo's own thread then closes them. Where a write fails before
that thread has noticed, gloo (of torch 2.13) loses the operation that was about to be posted, and
who waits for it waits for the whole time-out. A peer's death can lead to that too, but seldom.

What can go wrong: another thread of the script that connects somewhere in the milliseconds in which
a group is made has that connection taken for the group's. A group that still waits for others to
connect cannot be broken; the agent then ends the process after a while.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from outlast.attempt.link import STORE_VARIABLE
from outlast.checkpoint import devices

logger = logging.getLogger(__name__)

_DESCRIPTORS: Final = Path("/proc/self/fd")
_HELPER: Final = "_new_process_group_helper"  # what makes each group, in torch's c10d
FREE_S: Final = 1.0
_held: list[Any] = []  # groups that something of the script still holds on to


def is_possible() -> bool:
    """Whether this torch has what is needed."""
    return dist.is_available() and hasattr(dist.distributed_c10d, _HELPER)


class Groups:
    """The connections of this process' groups."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: dict[int, int] = {}  # descriptor → inode
        self._before: dict[int, int] | None = None  # while a group is being made
        self._stores: set[tuple[str, int]] = set()
        self._aborted = False
        self._made: list[Any] = []  # also those that the script has destroyed itself

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within, the connections of groups that are made are noted."""
        c10d: Any = dist.distributed_c10d
        make = getattr(c10d, _HELPER)
        self._opened, self._aborted = {}, False
        self._stores = _stores()

        def making(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._before = _sockets()
            try:
                made = make(*args, **kwargs)
                self._made.append(made)
                return made
            finally:
                with self._lock:
                    self._opened |= self._new()
                    self._before = None

        setattr(c10d, _HELPER, making)
        try:
            yield
        finally:
            setattr(c10d, _HELPER, make)

    def break_all(self, *, again: bool) -> None:
        """Let go whatever waits for another rank.

        Args:
            again: it was not enough. What was opened since goes too, and what waits for the
                attempt's store: whoever can leaves it in peace, and torch prints a stack for each
                connection that ends otherwise.
        """
        with self._lock:
            opened = self._opened | self._new()
        for fd, inode in _sockets().items():
            with contextlib.suppress(OSError):
                self._shut_down(fd, inode, is_groups=opened.get(fd) == inode, again=again)
        if not self._aborted:
            self._aborted = True
            _abort_nccl()

    def take_down(self) -> None:
        """Forget the process groups of an attempt that is over.

        A gloo group that is freed while a DDP object holds it too waits for a thread that waits for
        the interpreter's lock: DDP has to go first, and no group before, whoever has destroyed it.
        Where the script still holds a DDP object, the groups are kept, with their threads and
        descriptors. One whose thread is in an operation that does not end is freed once it has.

        Raises:
            RuntimeError: torch could not.
        """
        gc.collect()
        made, self._made = self._made, []
        if dist.is_initialized():
            dist.destroy_process_group()
        if _ddp_is_held():
            _held.append(made)
            logger.warning("a DDP object of the attempt before is still held; so are its groups")
            return
        freeing = devices.Thread(target=made.clear, name="outlast-free", daemon=True)
        del made
        freeing.start()
        freeing.join(FREE_S)
        gc.collect()

    def hold(self) -> None:
        """The worker is about to end: the groups are left to that."""
        _held.append(self._made)

    def _new(self) -> dict[int, int]:
        """What was opened since a group began to be made; the lock is held."""
        if self._before is None:
            return {}
        before = set(self._before.items())
        return dict(one for one in _sockets().items() if one not in before)

    def _shut_down(self, fd: int, inode: int, *, is_groups: bool, again: bool) -> None:
        with socket.socket(fileno=os.dup(fd)) as sock:
            if os.fstat(sock.fileno()).st_ino != inode:
                return  # the number is another one's by now
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                return
            host, port, *_ = sock.getpeername()  # an OSError where it only listens
            is_store = (host.removeprefix("::ffff:"), port) in self._stores
            if again if is_store else is_groups:
                sock.shutdown(socket.SHUT_RDWR if again else socket.SHUT_RD)


def _sockets() -> dict[int, int]:
    found = {}
    for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208 - quick
        with contextlib.suppress(OSError, ValueError):
            target = os.readlink(_DESCRIPTORS / name)  # noqa: PTH115
            if target.startswith("socket:["):
                found[int(name)] = int(target[8:-1])
    return found


def _stores() -> set[tuple[str, int]]:
    """Addresses of the attempt's store: no other attempt, and nothing else, is served there."""
    given = os.environ.get(STORE_VARIABLE, "")
    host, _, port = given.rpartition(":")
    if not port.isdigit():
        return set()
    with contextlib.suppress(OSError):
        kind = socket.SOCK_STREAM
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=kind)
        return {(str(address[0]), int(port)) for *_, address in found}
    return set()


def _abort_nccl() -> None:
    """As torch's own ``_abort_process_group``, without forgetting the groups meanwhile."""
    c10d: Any = dist.distributed_c10d
    if not dist.is_nccl_available():
        return
    backends = []
    for group in sorted(c10d._world.pg_names, key=c10d._world.pg_names.get, reverse=True):
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(torch.device("cuda"))
            if isinstance(backend, c10d.ProcessGroupNCCL):
                backends.append(backend)
    if backends:
        # In one piece, or the communicators' aborts may wait for each other (pytorch#119797).
        backends[0]._group_start()
        for backend in backends:
            backend.abort()
        backends[0]._group_end()


def _ddp_is_held() -> bool:
    parallel: Any = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is None:
        return False
    kind = parallel.DistributedDataParallel
    return any(issubclass(type(one), kind) for one in gc.get_objects())
