"""Other machines' keepers come in here: copies to be kept, and questions about what is in memory.

One thread accepts, one thread a connection; their number is bounded, and a stranger gets no further
than the handshake. What is refused is said once in the log and in the ledger.
"""

from __future__ import annotations

import logging
import math
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import xxhash

from outlast.checkpoint.manifest import BLOCK_BYTES
from outlast.errors import CutShort, SealError
from outlast.keeper import parley
from outlast.keeper.guests import Guest, Guests, Refused
from outlast.keeper.memory import Kept
from outlast.keeper.pace import Cores, Pace, yield_to_training
from outlast.peer import Channel, Tls, accept

logger = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 256
HANDSHAKE_S: Final = 10.0
TELL_EVERY_S: Final = 60.0  # the same refusal of the same host again
MAX_TOLD: Final = 256


class Reception:
    """The listening side.

    Args:
        listener: a listening socket; it is closed by ``close``.
        key: the job's.
        tls: files for TLS, or None.
        guests: copies that are kept here.
        wait_for_earlier: waits until nothing of attempts before one is in flight.
        inventory: what is in memory, by step.
        view: a file's bytes in memory.
        on_copy: told of each copy that has come in: (attempt, step).
        gives_way: takes copies more slowly while no core is spare.
        record: puts an event into the ledger.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        tls: Tls | None,
        *,
        guests: Guests,
        wait_for_earlier: Callable[[int], None],
        inventory: Callable[[], dict[int, Kept]],
        view: Callable[[int, str, str], memoryview | None],
        on_copy: Callable[[tuple[int, int]], None],
        gives_way: bool,
        record: Callable[..., None],
    ) -> None:
        self._listener = listener
        self._key = key
        self._tls = tls
        self._guests = guests
        self._wait_for_earlier = wait_for_earlier
        self._inventory = inventory
        self._view = view
        self._on_copy = on_copy
        self._gives_way = gives_way
        self._record = record
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._told: dict[tuple[str, str], float] = {}
        self._open: set[Channel] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._wake = socket.socketpair()
        listener.setblocking(False)
        threading.Thread(target=self._accept, name="outlast-peers", daemon=True).start()

    def close(self) -> None:
        """Listen no longer, and end all connections."""
        with self._lock:
            self._closing.set()
            channels = list(self._open)
        self._wake[1].close()
        for channel in channels:
            channel.close()

    def _accept(self) -> None:
        # Not ended by a shutdown of the listener: that is the supervisor's too, for a successor.
        poll = select.poll()
        with self._listener, self._wake[0]:
            poll.register(self._listener, select.POLLIN)
            poll.register(self._wake[0], select.POLLIN)
            while True:
                poll.poll()
                if self._closing.is_set():
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
                self._key,
                parley.PURPOSE,
                HANDSHAKE_S,
                silence_s=parley.SILENCE_S,
                tls=self._tls,
            )
            with self._lock:
                if self._closing.is_set():
                    return
                self._open.add(channel)
            self._talk(channel)
        except CutShort:
            pass  # it died, or looked only whether somebody listens
        except SealError as error:
            self._refused(str(address[0]), f"{address[0]}:{address[1]}", error.reason)
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

    def _refused(self, host: str, peer: str, reason: str) -> None:
        """Into the ledger, but not for ever: whoever hammers must not fill the disk."""
        now = time.monotonic()
        kind = (host, reason.replace(peer, ""))
        with self._lock:
            self._told = {k: at for k, at in self._told.items() if now - at < TELL_EVERY_S}
            if kind in self._told or len(self._told) >= MAX_TOLD:
                return
            self._told[kind] = now
        self._record("replica_refused", peer=peer, reason=reason)

    def _talk(self, channel: Channel) -> None:
        while (message := parley.hear(channel)) is not None:
            match message:
                case parley.Offer():
                    self._take(channel, message)
                case parley.List():
                    self._list(channel, message)
                case parley.Read():
                    self._read(channel, message)
                case _:
                    raise ValueError(f"{channel.peer} says {type(message).__name__} out of turn")

    # --- copies ---------------------------------------------------------------------------------

    def _take(self, channel: Channel, offer: parley.Offer) -> None:
        blob = memoryview(parley.take_bulk(channel, parley.SMALL_BYTES_MAX))
        small, start = {}, 0
        for name, size in offer.small.items():
            small[name] = bytes(blob[start : start + size])
            start += size
        try:
            guest = self._guests.receive(offer, small)
        except Refused as refused:
            logger.warning(
                "a copy of %s: step %d is not taken: %s", offer.node, offer.step, refused
            )
            parley.say(channel, parley.Verdict(verdict="refused", reason=str(refused)))
            return
        if guest is None:
            parley.say(channel, parley.Verdict(verdict="have"))
            return
        is_whole = False
        try:
            parley.say(channel, parley.Verdict(verdict="send"))
            yield_to_training()
            is_whole = self._fill(channel, guest)
        finally:
            if not is_whole:
                self._guests.give_up(guest)
        if is_whole:
            self._guests.adopt(guest)
            parley.say(channel, parley.Verdict(verdict="have"))
            self._on_copy((offer.attempt, offer.step))

    def _fill(self, channel: Channel, guest: Guest) -> bool:
        """Take the blocks as they come; whether the copy is whole."""
        pace = Pace(math.inf, self._closing, Cores()) if self._gives_way else None
        while True:
            message = parley.hear(channel, parley.ANSWER_S)
            match message:
                case parley.Block(file=file, index=index):
                    room = guest.room_for(file, index, channel.bulk_bytes)
                    channel.receive_into(room, pace=pace)
                    guest.arrived(file, index)
                case parley.Whole() if guest.is_whole():
                    return True
                case parley.Whole():
                    host = channel.peer.rpartition(":")[0]
                    self._refused(host, channel.peer, guest.problem)
                    logger.warning("refused a copy from %s: %s", channel.peer, guest.problem)
                    verdict = parley.Verdict(verdict="refused", reason=guest.problem)
                    parley.say(channel, verdict)
                    return False
                case parley.Withdrawn() | None:
                    return False
                case _:
                    raise ValueError(f"{channel.peer} says {type(message).__name__} out of turn")

    # --- questions ------------------------------------------------------------------------------

    def _list(self, channel: Channel, message: parley.List) -> None:
        is_settled = threading.Event()

        def settle() -> None:
            try:
                self._wait_for_earlier(message.attempt)
            finally:
                is_settled.set()

        # Whoever asks must see that this keeper lives, however long the wait takes.
        threading.Thread(target=settle, name="outlast-settling", daemon=True).start()
        while not is_settled.wait(parley.LATER_S):
            parley.say(channel, parley.Later())
        found = {step: listed(kept) for step, kept in self._inventory().items()}
        parley.say(channel, parley.Listing(), [msgspec.msgpack.encode(found)])

    def _read(self, channel: Channel, message: parley.Read) -> None:
        view = self._view(message.step, message.manifest, message.file)
        if view is None or not 0 <= message.size <= BLOCK_BYTES or message.start < 0:
            why = f"{message.file} of step {message.step} is not here"
            parley.say(channel, parley.Data(error=why))
            return
        part = view[message.start : message.start + message.size]
        parley.say(channel, parley.Data(), [part])


def listed(kept: Kept) -> parley.Listed:
    """What is said of a snapshot to those who ask."""
    sizes = {name: size for name, (_, size) in kept.files.items()}
    sizes |= {name: len(data) for name, data in kept.small.items()}
    return parley.Listed(attempt=kept.attempt, manifest=fingerprint(kept), files=sizes)


def fingerprint(kept: Kept) -> str:
    """One word for a save: the hash of its manifest."""
    return xxhash.xxh3_128_hexdigest(kept.manifest)
