"""The ranks agree on who writes what, without a barrier and off the training thread.

Each rank names the digest of its structure; rank 0 publishes which rank has which; a structure that
not all ranks have is published once, by the first that has it. From that each rank works out its
own share (see ``checkpoint.plan``): no message grows with ranks times tensors. A new round begins
at the same points on all ranks: after the first step, and after a save that was void.

Where the keepers of several machines find each other: handed over when a session begins.

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
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec

from outlast.attempt.link import Link
from outlast.checkpoint.plan import Held, Share, Structure, World, describe, share
from outlast.config import Settings
from outlast.errors import ConfigError
from outlast.keeper import wire
from outlast.keeper.client import KeeperLine
from outlast.peer import Tls, listen

logger = logging.getLogger(__name__)

KEY_BYTES: Final = 32
WHERE: Final = "keepers"  # the key in the attempt's store
_SLICE_S: Final = 1.0
_ANYBODY: Final = "192.0.2.1"  # a documentation address; nothing is sent there


class _KeeperPlace(msgspec.Struct, frozen=True):
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


class KeeperMeeting:
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
        line: KeeperLine,
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
            where = _KeeperPlace(host, int(listener.getsockname()[1]), key)
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
            where = msgspec.msgpack.decode(data, type=_KeeperPlace)
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


class _Table(msgspec.Struct, frozen=True, array_like=True):
    words: tuple[str, ...]  # digests of the structures
    runs: tuple[tuple[int, int], ...]  # (number of the structure, how many ranks have it)


class Sharing:
    """One rank's side of it.

    Args:
        link: the other ranks.
        on_settled: told that a round has come to its end.
    """

    def __init__(self, link: Link, on_settled: Callable[[], None]) -> None:
        self._link = link
        self._on_settled = on_settled
        self._changed = threading.Condition()
        self._round = 0
        self._offered: Sequence[Held] = ()
        self._share: Share | None = None
        self._is_over = False

    def stop(self) -> None:
        """No round comes to its end any more: whoever waits is let go."""
        with self._changed:
            self._is_over = True
            self._round += 1  # ends the thread of the one under way
            self._changed.notify_all()

    def offer(self, structure: Sequence[Held], own: Collection[str]) -> None:
        """Begin a round; all ranks do. ``own`` are names known to differ, the same on all ranks."""
        with self._changed:
            self._round += 1
            self._share = None
            self._offered = structure
            number = self._round
        mine = describe(structure, self._link.rank)
        if self._link.world_size == 1:
            self._settle(number, share(World([0], [mine]), 0, own))
            return
        threading.Thread(
            target=self._agree,
            args=(number, mine, sorted(own)),
            name="outlast-sharing",
            daemon=True,
        ).start()

    @property
    def is_settled(self) -> bool:
        """Whether this round's share is known."""
        return self._share is not None

    @property
    def has_begun(self) -> bool:
        """Whether there was an offer."""
        return self._round > 0

    def of(self, structure: Sequence[Held], timeout_s: float) -> Share | None:
        """This rank's share, waited for; None if ``structure`` is another than was offered."""
        if structure is not self._offered and structure != self._offered:
            return None
        with self._changed:
            self._changed.wait_for(lambda: self._share is not None or self._is_over, timeout_s)
            return self._share

    def _agree(self, number: int, mine: Structure, own: list[str]) -> None:
        link = self._link
        try:
            link.publish(f"sharing/{number}/{link.rank}", mine.digest().encode())
            if link.rank == 0:
                self.publish_table(number)
            world = self._world(number, mine)
            self._settle(number, share(world, link.rank, own))
        except (
            OSError,
            RuntimeError,
            msgspec.MsgspecError,
        ) as error:  # the attempt is over, or another round has begun
            logger.info("the ranks did not agree on who writes what: %s", error)

    def publish_table(self, number: int) -> None:
        """Say which rank has which structure: runs of ranks that have the same one."""
        words: dict[str, int] = {}
        runs: list[tuple[int, int]] = []
        for rank in range(self._link.world_size):
            word = self._fetch(number, f"sharing/{number}/{rank}").decode()
            which = words.setdefault(word, len(words))
            if runs and runs[-1][0] == which:
                runs[-1] = (which, runs[-1][1] + 1)
            else:
                runs.append((which, 1))
        table = _Table(tuple(words), tuple(runs))
        self._link.publish(f"sharing/{number}/table", msgspec.msgpack.encode(table))

    def _world(self, number: int, mine: Structure) -> World:
        raw = self._fetch(number, f"sharing/{number}/table")
        found = msgspec.msgpack.decode(raw, type=_Table)
        table = [which for which, length in found.runs for _ in range(length)]
        ours = table[self._link.rank]
        if len(found.words) > 1 and table.index(ours) == self._link.rank:
            self._link.publish(f"structure/{found.words[ours]}", mine.encode())
        structures = [
            mine if which == ours else Structure.decode(self._fetch(number, f"structure/{word}"))
            for which, word in enumerate(found.words)
        ]
        return World(table, structures)

    def _fetch(self, number: int, key: str) -> bytes:
        """Wait in slices, since a link serves one waiting thread at a time; a rank may be late."""
        while number == self._round:
            try:
                return self._link.fetch(key, _SLICE_S)
            except TimeoutError:
                continue
        raise ConnectionAbortedError("another round has begun")

    def _settle(self, number: int, share: Share) -> None:
        with self._changed:
            if number == self._round:
                self._share = share
                self._changed.notify_all()
        self._on_settled()
