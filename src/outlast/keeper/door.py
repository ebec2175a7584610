"""A listening socket behind which other machines' keepers talk, each in a thread of its own.

Guarantees: their number is bounded; a stranger gets no further than the handshake, and is said once
in the log and in the ledger.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from outlast.errors import CutShort, SealError
from outlast.keeper import parley
from outlast.peer import Channel, Tls, accept

logger = logging.getLogger(__name__)

HANDSHAKE_S: Final = 10.0
TELL_EVERY_S: Final = 60.0  # the same refusal of the same host again
MAX_TOLD: Final = 256


class Door:
    """The listening side.

    Args:
        listener: a listening socket; it is closed by ``close``.
        key: says, at each connection, what the other side must have.
        tls: files for TLS, or None.
        purpose: what the channels are for.
        talk: serves a channel, in a thread of its own; the channel is closed when it returns.
        record: puts an event into the ledger.
        places: how many connections there may be at once.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: Callable[[], bytes],
        tls: Tls | None,
        *,
        purpose: str,
        talk: Callable[[Channel], None],
        record: Callable[..., None],
        places: int,
    ) -> None:
        self._listener = listener
        self._key = key
        self._tls = tls
        self._purpose = purpose
        self._talk = talk
        self._record = record
        self._places = threading.BoundedSemaphore(places)
        self._told: dict[tuple[str, str], float] = {}
        self._open: set[Channel] = set()
        self._lock = threading.Lock()
        self.closing = threading.Event()
        self._wake = socket.socketpair()
        listener.setblocking(False)
        threading.Thread(target=self._accept, name="outlast-peers", daemon=True).start()

    def close(self) -> None:
        """Listen no longer, and end all connections."""
        with self._lock:
            if self.closing.is_set():
                return
            self.closing.set()
            channels = list(self._open)
        self._wake[1].close()
        for channel in channels:
            channel.close()

    def refused(self, host: str, peer: str, reason: str) -> None:
        """Into the ledger, but not for ever: whoever hammers must not fill the disk."""
        now = time.monotonic()
        kind = (host, reason.replace(peer, ""))
        with self._lock:
            self._told = {k: at for k, at in self._told.items() if now - at < TELL_EVERY_S}
            if kind in self._told or len(self._told) >= MAX_TOLD:
                return
            self._told[kind] = now
        self._record("replica_refused", peer=peer, reason=reason)

    def _accept(self) -> None:
        # Not ended by a shutdown of the listener: that is its owner's too, for a successor.
        poll = select.poll()
        with self._listener, self._wake[0]:
            poll.register(self._listener, select.POLLIN)
            poll.register(self._wake[0], select.POLLIN)
            while True:
                poll.poll()
                if self.closing.is_set():
                    return
                try:
                    sock, address = self._listener.accept()
                except BlockingIOError:
                    continue
                except OSError as error:
                    logger.warning("a peer could not be let in: %s", error)
                    time.sleep(0.1)  # too many open files, for instance
                    continue
                if not self._places.acquire(blocking=False):
                    sock.close()  # it tries again, or asks another
                    continue
                threading.Thread(
                    target=self._serve, args=(sock, address), name="outlast-peer", daemon=True
                ).start()

    def _serve(self, sock: socket.socket, address: Any) -> None:
        channel: Channel | None = None
        try:
            channel = accept(
                sock,
                self._key(),
                self._purpose,
                HANDSHAKE_S,
                silence_s=parley.SILENCE_S,
                tls=self._tls,
            )
            with self._lock:
                if self.closing.is_set():
                    return
                self._open.add(channel)
            self._talk(channel)
        except CutShort:
            pass  # it died, or looked only whether somebody listens
        except SealError as error:
            self.refused(str(address[0]), f"{address[0]}:{address[1]}", error.reason)
        except (OSError, ValueError) as error:
            logger.info("%s: %s", address[0], error)
        except Exception:
            logger.exception("a peer's connection is given up")
        finally:
            if channel is not None:
                with self._lock:
                    self._open.discard(channel)
                channel.close()
            self._places.release()
