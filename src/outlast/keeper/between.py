"""This machine's keeper and those of the others: how saves end, and what comes to slower tiers.

Where rank 0 is, and by which key whoever speaks is recognised, is handed over by the workers of an
attempt when their sessions begin; from then on none of them is needed. An attempt's conversation
goes on for as long as one of its saves is in flight, beside that of the next attempt.

Guarantees: the key of a session is known to those alone who could read the attempt's store. Where
an agent has given the keepers the job's key, both are needed.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from outlast.checkpoint.names import SaveName
from outlast.keeper import parley, wire
from outlast.keeper.arrivals import Arrived, Said
from outlast.keeper.flight import Side
from outlast.keeper.follower import Follower
from outlast.keeper.leader import Leader
from outlast.keeper.saves import Saves
from outlast.peer import Tls


class Between:
    """Conversations about saves.

    Args:
        saves: those in flight.
        job_key: the job's key, b"" where nobody has given one.
        record: puts an event into the ledger.
    """

    def __init__(
        self,
        saves: Saves,
        *,
        job_key: Callable[[], bytes],
        record: Callable[..., None],
    ) -> None:
        self._saves = saves
        self._job_key = job_key
        self._record = record
        self._sides: set[Leader | Follower] = set()
        self._said = Said()
        self._lock = threading.Lock()

    def lead(self, hello: wire.Hello, message: wire.Lead, key: bytes, fd: int) -> None:
        """Rank 0 is on this machine: listen for the others."""
        side = Leader(
            socket.socket(fileno=fd),
            lambda: self._of_both(key),
            _tls(message.tls),
            self._saves,
            hello=hello,
            local=set(self._saves.local(hello.attempt, hello.world_size)),
            record=self._record,
        )
        self._meet(hello.attempt, side)

    def follow(self, hello: wire.Hello, message: wire.Follow, key: bytes) -> None:
        """Rank 0 is elsewhere: go there."""
        if 0 in self._saves.local(hello.attempt, hello.world_size):
            return  # two agents on one machine that share its keeper
        side = Follower(
            (message.host, message.port),
            lambda: self._of_both(key),
            _tls(message.tls),
            self._saves,
            hello=hello,
            said=self._said,
        )
        self._meet(hello.attempt, side)

    def bring(self, save: SaveName, word: parley.Brought) -> None:
        """Say what becomes of this machine's files in a slower tier."""
        self._said.note(save.attempt, word)
        for side in self._of(save.attempt):
            if isinstance(side, Follower):
                side.bring(word)

    def arrived(self, save: SaveName, tier: str) -> Arrived | None:
        """What is known of other machines' files in a slower tier; None: they cannot be asked."""
        for side in self._of(save.attempt):
            if isinstance(side, Leader):
                return side.arrived(tier, save.serial)
        return None

    def _of(self, attempt: int) -> list[Leader | Follower]:
        with self._lock:
            return [side for side in self._sides if side.attempt == attempt]

    def tidy(self) -> None:
        """End the conversations that nobody needs any more."""
        for side in self._saves.part():
            self._end(side)

    @property
    def idle(self) -> bool:
        """Whether the others have been told everything, and have taken it in."""
        with self._lock:
            return all(side.idle for side in self._sides)

    def stop(self) -> None:
        """End all of them."""
        with self._lock:
            sides = list(self._sides)
        for side in sides:
            self._end(side)

    def _meet(self, attempt: int, side: Leader | Follower) -> None:
        with self._lock:
            self._sides.add(side)
        before = self._saves.meet(attempt, side)
        if before is not None:
            self._end(before)

    def _end(self, side: Side) -> None:
        with self._lock:
            self._sides = {one for one in self._sides if one is not side}
        side.close()

    def _of_both(self, key: bytes) -> bytes:
        job_key = self._job_key()
        return hashlib.blake2b(key, key=job_key, digest_size=32).digest() if job_key else key


def _tls(files: tuple[str, str, str] | None) -> Tls | None:
    if files is None:
        return None
    cert, key, ca = map(Path, files)
    return Tls(cert=cert, key=key, ca=ca)
