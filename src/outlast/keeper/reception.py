"""Other machines' keepers come in here: copies to be kept, and questions about what is in memory.

What is refused is said once in the log and in the ledger.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
from collections.abc import Callable
from typing import Final

import msgspec
import xxhash

from outlast.checkpoint.manifest import BLOCK_BYTES
from outlast.checkpoint.names import SaveName, named
from outlast.keeper import parley
from outlast.keeper.door import Door
from outlast.keeper.guests import Guest, Guests, Refused
from outlast.keeper.memory import Kept
from outlast.keeper.pace import Cores, Pace, yield_to_training
from outlast.peer import Channel, Tls

logger = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 256


class Reception:
    """The listening side.

    Args:
        listener: a listening socket; it is closed by ``close``.
        key: the job's.
        tls: files for TLS, or None.
        guests: copies that are kept here.
        wait_for_earlier: waits until nothing of attempts before one is in flight.
        inventory: what is in memory, by the names of saves.
        view: a file's bytes in memory.
        on_copy: told the save of each copy that has come in.
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
        inventory: Callable[[], dict[str, Kept]],
        view: Callable[[str, str, str], memoryview | None],
        on_copy: Callable[[SaveName], None],
        gives_way: bool,
        record: Callable[..., None],
    ) -> None:
        self._guests = guests
        self._wait_for_earlier = wait_for_earlier
        self._inventory = inventory
        self._view = view
        self._on_copy = on_copy
        self._gives_way = gives_way
        self._door = Door(
            listener,
            lambda: key,
            tls,
            purpose=parley.PURPOSE,
            talk=self._talk,
            record=record,
            places=MAX_CONNECTIONS,
        )

    def close(self) -> None:
        """Listen no longer, and end all connections."""
        self._door.close()

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
                    raise parley.out_of_turn(channel, message)

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
            logger.warning("a copy of %s: %s is not taken: %s", offer.node, offer.save, refused)
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
            self._on_copy(named(offer.save))

    def _fill(self, channel: Channel, guest: Guest) -> bool:
        """Take the blocks as they come; whether the copy is whole."""
        pace = Pace(math.inf, self._door.closing, Cores()) if self._gives_way else None
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
                    self._door.refused(host, channel.peer, guest.problem)
                    logger.warning("refused a copy from %s: %s", channel.peer, guest.problem)
                    verdict = parley.Verdict(verdict="refused", reason=guest.problem)
                    parley.say(channel, verdict)
                    return False
                case parley.Withdrawn() | None:
                    return False
                case _:
                    raise parley.out_of_turn(channel, message)

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
        found = {save: listed(kept) for save, kept in self._inventory().items()}
        parley.say(channel, parley.Listing(), [msgspec.msgpack.encode(found)])

    def _read(self, channel: Channel, message: parley.Read) -> None:
        view = self._view(message.save, message.manifest, message.file)
        if view is None or not 0 <= message.size <= BLOCK_BYTES or message.start < 0:
            why = f"{message.file} of {message.save} is not here"
            parley.say(channel, parley.Data(error=why))
            return
        part = view[message.start : message.start + message.size]
        parley.say(channel, parley.Data(), [part])


def listed(kept: Kept) -> parley.Listed:
    """What is said of a snapshot to those who ask."""
    sizes = {name: size for name, (_, size) in kept.files.items()}
    sizes |= {name: len(data) for name, data in kept.small.items()}
    return parley.Listed(manifest=fingerprint(kept), files=sizes)


def fingerprint(kept: Kept) -> str:
    """One word for a save: the hash of its manifest."""
    return xxhash.xxh3_128_hexdigest(kept.manifest)
