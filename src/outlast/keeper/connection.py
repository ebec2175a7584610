"""One worker or supervisor, as the keeper sees it: a thread that reads, and one that writes.

Whoever does not read loses the connection, and with it what was in flight: the keeper never waits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from typing import Protocol

from outlast.keeper import wire

logger = logging.getLogger(__name__)


class Owner(Protocol):
    """Who acts on what is said."""

    def handle(self, peer: Connection, message: wire.Message, blob: bytes, fds: list[int]) -> None:
        """Act on one message; what it raises ends the connection."""

    def gone(self, peer: Connection) -> None:
        """The connection has ended."""


class Connection:
    """One worker or supervisor.

    Attributes:
        hello: who it is, once it has said so.
        layouts: number → how a rank's file is made up.
        ring_bytes: size of the ring that its snapshots go through, or 0.
        since_s: monotonic time of its beginning.
        has_left: it said goodbye.
        is_over: a supervisor has said that the job is over.
        is_gone: nothing that is sent arrives any more.
    """

    def __init__(self, owner: Owner, sock: socket.socket) -> None:
        self.wire = wire.Wire(sock)
        self.rank: int | None = None
        self.hello: wire.Hello | None = None
        self.layouts: dict[int, wire.Layout] = {}
        self.ring_bytes = 0
        self.since_s = time.monotonic()
        self.has_left = self.is_over = self.is_gone = False
        self._owner = owner
        self._lock = threading.Lock()
        self._out: queue.SimpleQueue[tuple[wire.Message, bytes, tuple[int, ...]] | None]
        self._out = queue.SimpleQueue()
        for name, act in (("in", self._read), ("out", self._write)):
            threading.Thread(target=act, name=f"outlast-{name}", daemon=True).start()

    @property
    def supervises(self) -> bool:
        """Whether this is one that holds the memory."""
        return self.hello is not None and self.rank is None

    def send(self, message: wire.Message, blob: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Queue a message; never waits."""
        with self._lock:
            if not self.is_gone:
                # A descriptor may be closed before its turn comes: send a copy.
                self._out.put((message, blob, tuple(os.dup(fd) for fd in fds)))

    def _write(self) -> None:
        while (item := self._out.get()) is not None:
            message, blob, fds = item
            try:
                if not self.is_gone:
                    self.wire.send(message, blob, fds)
            except OSError:  # also half a message: nothing that follows would be understood
                self._give_up()
            finally:
                for fd in fds:
                    os.close(fd)

    def _read(self) -> None:
        try:
            while (frame := self.wire.receive()) is not None:
                self._owner.handle(self, *frame)
        except Exception:
            logger.exception("a connection is given up")
        finally:
            self._give_up()
            self._out.put(None)
            self.wire.close()
            self.wire.drop_descriptors()
            self._owner.gone(self)

    def _give_up(self) -> None:
        """The thread that reads ends, and sees to the rest."""
        with self._lock:
            self.is_gone = True
        with contextlib.suppress(OSError):
            self.wire.sock.shutdown(socket.SHUT_RDWR)
