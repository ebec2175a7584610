"""Where the keepers of several machines find each other: handed over when a session begins.

Rank 0 opens a socket for its machine's keeper and tells the others, through the attempt's store,
where it is and by which key whoever speaks is recognised: 32 random bytes of this session. After
that a save needs no worker once its copies are whole. With one machine nothing of this happens.

The socket is this worker's, so that a keeper that takes the place of one that has died is found at
the same address.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from outlast.attempt.link import Link
from outlast.config import Settings
from outlast.errors import ConfigError
from outlast.keeper import wire
from outlast.peer import Tls, listen
from outlast.training.line import Line

logger = logging.getLogger(__name__)

KEY_BYTES: Final = 32
WHERE: Final = "keepers"  # the key in the attempt's store
_SLICE_S: Final = 1.0
_ANYBODY: Final = "192.0.2.1"  # a documentation address; nothing is sent there


class _Where(msgspec.Struct, frozen=True):
    host: str
    port: int
    key: bytes


def local_ranks(link: Link) -> range:
    """The ranks of this process's machine, as its launcher says."""
    count = int(os.environ.get("LOCAL_WORLD_SIZE", str(link.world_size)))
    if count >= link.world_size:
        return range(link.world_size)
    first = link.rank - int(os.environ.get("LOCAL_RANK", "0"))
    return range(first, first + count)


class Meeting:
    """One worker's part in it.

    Attributes:
        is_needed: whether there are several machines.

    Args:
        settings: the job's.
        link: the other ranks.
        local: the ranks of this machine.
        line: to this machine's keeper.
        say: tells people what they must know.
    """

    def __init__(
        self,
        settings: Settings,
        link: Link,
        local: range,
        line: Line,
        say: Callable[[str], None],
    ) -> None:
        self.is_needed = len(local) < link.world_size
        self._link = link
        self._local = local
        self._line = line
        self._say = say
        self._listener: socket.socket | None = None
        self._closing = threading.Event()
        self._tls: tuple[str, str, str] | None = None
        if not self.is_needed:
            return
        tls = Tls.of(settings)
        if tls is not None:
            self._tls = tls.files
        act = None
        if link.rank == 0:
            act = self._lead
        elif link.rank == local.start:
            act = self._follow
        if act is not None:
            threading.Thread(target=act, name="outlast-meeting", daemon=True).start()

    def stop(self) -> None:
        """The session is over: the keepers go on without it, and none comes in their place."""
        self._closing.set()
        if self._listener is not None:
            self._listener.close()

    def _lead(self) -> None:
        try:
            host = reached_at(self._link.host)
            listener = self._listener = listen(host)
            key = os.urandom(KEY_BYTES)
            self._line.tell_all(wire.Lead(tls=self._tls), key, (listener.fileno(),))
            where = _Where(host, int(listener.getsockname()[1]), key)
            self._link.publish(WHERE, msgspec.msgpack.encode(where))
        except (OSError, RuntimeError, ConfigError) as error:
            self._say(
                f"the keepers of other machines cannot reach that of rank 0: {error}; nothing is "
                "saved. See that this machine's name means an address that the others can reach"
            )

    def _follow(self) -> None:
        while not self._closing.is_set():
            try:
                data = self._link.fetch(WHERE, _SLICE_S)
            except TimeoutError:
                continue
            except (OSError, RuntimeError):  # the store is gone: the attempt is over
                return
            where = msgspec.msgpack.decode(data, type=_Where)
            follow = wire.Follow(host=where.host, port=where.port, tls=self._tls)
            self._line.tell_all(follow, where.key)
            return


def reached_at(host: str) -> str:
    """The address of this machine, as a number, on the way between it and ``host``.

    ``host`` is where the attempt's store is: on this machine, its address as the others know it. A
    name of this machine that means loopback here, as some systems have it, stands for the address
    of its default route.

    Raises:
        OSError: there is no way there.
    """
    found = _towards(host)
    is_name = host != "localhost" and not _is_number(host)
    if is_name and ipaddress.ip_address(found).is_loopback:
        try:
            return _towards(_ANYBODY)
        except OSError:
            return found
    return found


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _towards(host: str) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
