"""Replica store and replica server: other machines' newest snapshots, kept in memory for them.

Guarantees: a copy is there in full, every block of it compared with the manifest, or not at all;
the one before it stays until then, where there is memory for both. Only the newest of each machine
stays. All of it is in the books, so that a keeper that is started again still has it.

The server takes the copies that come in and answers questions about what is in memory. What it
refuses is said once in the log and in the ledger.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import xxhash

from outlast.checkpoint.inventory import Inventory
from outlast.checkpoint.manifest import (
    BLOCK_BYTES,
    FULL,
    MANIFEST,
    PART_NAME,
    FileEntry,
    Manifest,
    decode,
    hashed,
)
from outlast.checkpoint.names import SaveName, named, parse
from outlast.errors import CheckpointInvalid
from outlast.keeper import protocol
from outlast.keeper.memory import COPIES, Holdings, KeptSnapshot, MemoryTier, Replica
from outlast.keeper.protocol import Door, ReplicaOffer
from outlast.keeper.replicate import Cores, TrafficPace, yield_to_training
from outlast.peer import Channel, Tls

logger = logging.getLogger(__name__)

FILES_MAX: Final = 4096
MAX_CONNECTIONS: Final = 256


class ReplicaRefused(Exception):
    """A copy that is not taken, in words."""


class IncomingReplica:
    """A copy that is coming in.

    Attributes:
        problem: what was wrong with it, "" so far.
    """

    def __init__(
        self,
        offer: ReplicaOffer,
        manifest: Manifest,
        entries: Mapping[str, FileEntry],
        small: dict[str, bytes],
    ) -> None:
        self.offer = offer
        self.manifest = manifest
        self.entries = entries
        self.small = small
        self.arenas: dict[str, int] = {}
        self.views: dict[str, memoryview] = {}
        self.problem = ""
        self._missing = {
            (name, index) for name in offer.files for index in range(len(entries[name].xxh3_128))
        }

    def room_for(self, file: str, index: int, num_bytes: int) -> memoryview:
        """Where a block goes.

        Raises:
            ValueError: there is no such block.
        """
        if file not in self.views or not 0 <= index < len(self.entries[file].xxh3_128):
            raise ValueError(f"there is no block {index} of {file}")
        view = self._block(file, index)
        if len(view) != num_bytes:
            raise ValueError(f"block {index} of {file} has {len(view)} bytes, not {num_bytes}")
        return view

    def arrived(self, file: str, index: int) -> None:
        """A block lies in its place: compare it with the manifest."""
        view = self._block(file, index)
        if xxhash.xxh3_128_hexdigest(view) == self.entries[file].xxh3_128[index]:
            self._missing.discard((file, index))
        else:
            self.problem = f"block {index} of {file} does not match its checksum"

    def _block(self, file: str, index: int) -> memoryview:
        start = index * BLOCK_BYTES
        return self.views[file][start : start + BLOCK_BYTES]

    def is_whole(self) -> bool:
        """Whether every block came and was right."""
        if self._missing and not self.problem:
            file, index = min(self._missing)
            self.problem = f"block {index} of {file} did not come"
        return not self.problem


class ReplicaStore:
    """All of them.

    Args:
        job: id of the job.
        holdings: this machine's memory.
        lock: guards it.

    Attributes:
        wards: machines whose copies are to be here.
    """

    def __init__(self, job: str, holdings: Holdings, lock: threading.RLock) -> None:
        self._job = job
        self._holdings = holdings
        self._lock = lock
        self.wards: frozenset[str] = frozenset()
        self._coming: dict[str, IncomingReplica] = {}
        self._arrivals = (SaveName(0), SaveName(0))  # the last two that came or were made

    def receive(self, offer: ReplicaOffer, small: Mapping[str, bytes]) -> IncomingReplica | None:
        """Make room for a copy; None if it is here already.

        Raises:
            Refused: it makes no sense, is older than what is here, or there is no memory.
        """
        incoming = IncomingReplica(offer, *_checked(offer, small, self._job), dict(small))
        books = self._holdings.books
        with self._lock:
            here = books.copies.get(offer.node)
            if here is not None:
                if here.kept.manifest == small[MANIFEST]:
                    return None
                if when(named(here.save)) > when(incoming.manifest.save):
                    raise ReplicaRefused(f"{here.save} is here")
            if offer.node in self._coming:
                raise ReplicaRefused("another copy of this machine is coming in")
            numbers = self._find_room(offer)
            incoming.arenas = dict(zip(offer.files, numbers, strict=True))
            incoming.views = {
                name: books.arenas[incoming.arenas[name]].view[:size]
                for name, size in offer.files.items()
            }
            self._coming[offer.node] = incoming
        return incoming

    def adopt(self, incoming: IncomingReplica) -> None:
        """It is whole: it takes the place of the one before."""
        offer = incoming.offer
        with self._lock:
            self._coming.pop(offer.node, None)
            files = {name: (incoming.arenas[name], size) for name, size in offer.files.items()}
            kept = KeptSnapshot(
                files=files, small=incoming.small, attempt=incoming.manifest.attempt
            )
            self._holdings.books.copies[offer.node] = Replica(save=offer.save, kept=kept)
            self._holdings.note()

    def give_up(self, incoming: IncomingReplica) -> None:
        """It does not come in full; its memory is used for the next."""
        with self._lock:
            self._coming.pop(incoming.offer.node, None)

    def inventory(self) -> dict[str, KeptSnapshot]:
        """By the names of saves: all that is in memory here, this machine's own and copies."""
        with self._lock:
            return self._holdings.books.everything()

    def view(self, save: str, manifest: str, file: str) -> memoryview | None:
        """A file of a save, as it lies here."""
        with self._lock:
            books = self._holdings.books
            kept = books.everything().get(save)
            if kept is None or fingerprint(kept) != manifest:
                return None
            return MemoryTier(books.arenas, {save: kept}).view(f"{save}/{file}")

    def came(self, newest: SaveName) -> None:
        """A copy has come in; or, where none does, a snapshot of this machine was committed.

        What others left here goes when two newer ones are there: until then it may be a part of the
        newest step of which everything is somewhere.
        """
        with self._lock:
            if when(newest) > when(self._arrivals[1]):
                self._arrivals = (self._arrivals[1], newest)
        self.see_off(self._arrivals[0])

    def see_off(self, newest: SaveName) -> None:
        """Drop what is older than ``newest`` and of machines that leave no copies here any more."""
        books, staying = self._holdings.books, self.wards
        with self._lock:
            for node, copy in list(books.copies.items()):
                if node not in staying and when(named(copy.save)) < when(newest):
                    del books.copies[node]
            if not books.copies and not self._coming:
                self._holdings.drop(self._spare())
            self._holdings.note()

    def _find_room(self, offer: ReplicaOffer) -> list[int]:
        """Arenas for its files; if memory is short, the copy before it makes way."""
        sizes, books = list(offer.files.values()), self._holdings.books
        try:
            return self._holdings.room(sizes, self._spare())
        except OSError as error:
            if books.copies.pop(offer.node, None) is None:
                raise ReplicaRefused(error.strerror or str(error)) from None
        try:
            return self._holdings.room(sizes, self._spare())
        except OSError as error:
            raise ReplicaRefused(error.strerror or str(error)) from None

    def _spare(self) -> set[int]:
        """Arenas of copies that are no copy's."""
        books = self._holdings.books
        used = {arena for copy in books.copies.values() for arena, _ in copy.kept.files.values()}
        used.update(*(incoming.arenas.values() for incoming in self._coming.values()))
        return set(books.of_rank(COPIES)) - used


def when(save: SaveName) -> tuple[int, int, int]:
    """What is newer among a machine's snapshots: of a later attempt, of a later step, later."""
    return save.attempt, save.step, save.serial


def _checked(
    offer: ReplicaOffer, small: Mapping[str, bytes], job: str
) -> tuple[Manifest, dict[str, FileEntry]]:
    """The manifest of what is offered and the entries of its files, which fit all of it.

    Raises:
        Refused: it does not.
    """
    save = parse(offer.save)
    if save is None:
        raise ReplicaRefused(f"{offer.save!r} is not the name of a save")
    try:
        manifest = decode(small.get(MANIFEST, b""), save)
    except CheckpointInvalid as error:
        raise ReplicaRefused(error.reason) from None
    if manifest.job != job:
        raise ReplicaRefused(f"it is of job {manifest.job}")
    if manifest.kind != FULL:
        raise ReplicaRefused("it cannot be resumed from")
    if len(offer.files) > FILES_MAX:
        raise ReplicaRefused(f"{len(offer.files)} files")
    inventory = Inventory(manifest, lambda name, _: small.get(name, b""))
    try:
        content = {name: data for name, data in small.items() if name != MANIFEST}
        # Parts first: what they say of other files is believed once they are what was committed.
        for name in sorted(content, key=lambda name: PART_NAME.match(name) is None):
            if inventory.file(name) != hashed(content[name]):
                raise ReplicaRefused(f"{name} does not match its checksum")
        entries = {name: inventory.file(name) for name in offer.files}
    except CheckpointInvalid as error:
        raise ReplicaRefused(error.reason) from None
    for name, size in offer.files.items():
        if entries[name].size != size or not size:
            raise ReplicaRefused(f"{name} is not what the manifest says")
    return manifest, entries


class ReplicaServer:
    """The listening side.

    Args:
        listener: a listening socket; it is closed by ``close``.
        key: the job's.
        tls: files for TLS, or None.
        store: what is in memory here.
        wait_for_earlier: waits until nothing of attempts before one is in flight.
        gives_way: takes copies more slowly while no core is spare.
        record: puts an event into the ledger.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        tls: Tls | None,
        store: ReplicaStore,
        *,
        wait_for_earlier: Callable[[int], None],
        gives_way: bool,
        record: Callable[..., None],
    ) -> None:
        self._store = store
        self._wait_for_earlier = wait_for_earlier
        self._gives_way = gives_way
        self._door = Door(
            listener,
            lambda: key,
            tls,
            purpose=protocol.PURPOSE,
            talk=self._talk,
            record=record,
            places=MAX_CONNECTIONS,
        )

    def close(self) -> None:
        """Listen no longer, and end all connections."""
        self._door.close()

    def _talk(self, channel: Channel) -> None:
        while (message := protocol.hear(channel)) is not None:
            match message:
                case protocol.ReplicaOffer():
                    self._take(channel, message)
                case protocol.List():
                    self._list(channel, message)
                case protocol.ReplicaRead():
                    self._read(channel, message)
                case _:
                    raise protocol.out_of_turn(channel, message)

    # --- copies ---------------------------------------------------------------------------------

    def _take(self, channel: Channel, offer: protocol.ReplicaOffer) -> None:
        blob = memoryview(protocol.take_bulk(channel, protocol.SMALL_BYTES_MAX))
        small, start = {}, 0
        for name, size in offer.small.items():
            small[name] = bytes(blob[start : start + size])
            start += size
        try:
            incoming = self._store.receive(offer, small)
        except ReplicaRefused as refused:
            logger.warning("a copy of %s: %s is not taken: %s", offer.node, offer.save, refused)
            protocol.say(channel, protocol.ReplicaVerdict(verdict="refused", reason=str(refused)))
            return
        if incoming is None:
            protocol.say(channel, protocol.ReplicaVerdict(verdict="have"))
            return
        is_whole = False
        try:
            protocol.say(channel, protocol.ReplicaVerdict(verdict="send"))
            yield_to_training()
            is_whole = self._fill(channel, incoming)
        finally:
            if not is_whole:
                self._store.give_up(incoming)
        if is_whole:
            self._store.adopt(incoming)
            protocol.say(channel, protocol.ReplicaVerdict(verdict="have"))
            self._store.came(named(offer.save))

    def _fill(self, channel: Channel, incoming: IncomingReplica) -> bool:
        """Take the blocks as they come; whether the copy is whole."""
        pace = TrafficPace(math.inf, self._door.closing, Cores()) if self._gives_way else None
        while True:
            message = protocol.hear(channel, protocol.ANSWER_S)
            match message:
                case protocol.ReplicaBlock(file=file, index=index):
                    room = incoming.room_for(file, index, channel.bulk_bytes)
                    channel.receive_into(room, pace=pace)
                    incoming.arrived(file, index)
                case protocol.ReplicaWhole() if incoming.is_whole():
                    return True
                case protocol.ReplicaWhole():
                    host = channel.peer.rpartition(":")[0]
                    self._door.refused(host, channel.peer, incoming.problem)
                    logger.warning("refused a copy from %s: %s", channel.peer, incoming.problem)
                    verdict = protocol.ReplicaVerdict(verdict="refused", reason=incoming.problem)
                    protocol.say(channel, verdict)
                    return False
                case protocol.Withdrawn() | None:
                    return False
                case _:
                    raise protocol.out_of_turn(channel, message)

    # --- questions ------------------------------------------------------------------------------

    def _list(self, channel: Channel, message: protocol.List) -> None:
        is_settled = threading.Event()

        def settle() -> None:
            try:
                self._wait_for_earlier(message.attempt)
            finally:
                is_settled.set()

        # Whoever asks must see that this keeper lives, however long the wait takes.
        threading.Thread(target=settle, name="outlast-settling", daemon=True).start()
        while not is_settled.wait(protocol.LATER_S):
            protocol.say(channel, protocol.Later())
        found = {save: listed(kept) for save, kept in self._store.inventory().items()}
        protocol.say(channel, protocol.Listing(), [msgspec.msgpack.encode(found)])

    def _read(self, channel: Channel, message: protocol.ReplicaRead) -> None:
        view = self._store.view(message.save, message.manifest, message.file)
        if view is None or not 0 <= message.size <= BLOCK_BYTES or message.start < 0:
            why = f"{message.file} of {message.save} is not here"
            protocol.say(channel, protocol.Data(error=why))
            return
        part = view[message.start : message.start + message.size]
        protocol.say(channel, protocol.Data(), [part])


def listed(kept: KeptSnapshot) -> protocol.Listed:
    """What is said of a snapshot to those who ask."""
    sizes = {name: size for name, (_, size) in kept.files.items()}
    sizes |= {name: len(data) for name, data in kept.small.items()}
    return protocol.Listed(manifest=fingerprint(kept), files=sizes)


def fingerprint(kept: KeptSnapshot) -> str:
    """One word for a save: the hash of its manifest."""
    return xxhash.xxh3_128_hexdigest(kept.manifest)
