"""Keep newest snapshots in other machines' memory: theirs here, and this machine's there, paced.

The replica store has other machines' newest snapshots. Guarantees: a copy is there in full, every
block of it compared with the manifest, or not at all; the one before it stays until the next one
comes in, where there is memory for both: machines do not send at one pace, and of the newest step
one part may be here and another not yet anywhere. Where each step is kept, it is the newest that
was copied from every machine that stays besides, however many come after it. All of it is in the
books, so that a keeper that is started again still has it.

The server takes the copies that come in and answers questions about what is in memory. What it
refuses is said once in the log and in the ledger.

The replicator brings this machine's newest snapshot to the machines that keep a copy of it. It is
one thread; the newest snapshot always takes the place of the one that waits, or is under way to a
machine that fails. It reads the arena itself, block by block, sealed and paced; when the snapshot
is copied over meanwhile, the rest is withdrawn (the receiver compares each block with the manifest,
so a torn one is never kept). What can go wrong: a machine does not answer, or has no memory. That
is said once for each snapshot and tried again with growing pauses; the checkpoint itself is
committed already.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import xxhash

from outlast.checkpoint.manifest import (
    BLOCK_BYTES,
    FULL,
    MANIFEST,
    PART_NAME,
    FileEntry,
    Manifest,
    SaveName,
    decode,
    hashed,
    named,
    parse,
)
from outlast.checkpoint.transfer import Inventory
from outlast.errors import CheckpointInvalid, OutlastError
from outlast.keeper import protocol
from outlast.keeper.background import (
    RATE_MAX_BYTES,
    Cores,
    TrafficPace,
    rate_of,
    yield_to_training,
)
from outlast.keeper.memory import COPIES, Holdings, KeptSnapshot, MemoryTier, Replica
from outlast.keeper.protocol import Door, ReplicaOffer
from outlast.keeper.wire import PeerMachine
from outlast.peer import Channel, Tls

logger = logging.getLogger(__name__)

PAUSE_S: Final = 1.0
PAUSE_MAX_S: Final = 30.0


class Gone(Exception):
    """A snapshot that was to be copied is not there any more."""


class Declined(OutlastError, OSError):
    """The other machine does not take it."""


class Replicator:
    """Brings copies to other machines, in a thread of its own.

    Args:
        node: this machine.
        newest: (save, snapshot) of the newest one that can be resumed from, if there is one.
        view: a file's bytes in memory, or None if they are gone.
        open_channel: to another machine's keeper.
        rate_bytes: how fast, per second; None: after the cores, and slower while none is spare.
        record: puts an event into the ledger.
        on_copied: told after each round: the save, how many machines have it, or 0 and why not.
        held: attempt → the number of its newest save that was copied from every machine.
        each_step: training waits for it.
    """

    def __init__(
        self,
        node: str,
        *,
        newest: Callable[[], tuple[SaveName, KeptSnapshot] | None],
        view: Callable[[str, KeptSnapshot, str], memoryview | None],
        open_channel: Callable[[PeerMachine], Channel],
        rate_bytes: float | None,
        record: Callable[..., None],
        on_copied: Callable[[SaveName, int, str], None] = lambda *_: None,
        held: Callable[[int], int] = lambda _: 0,
        each_step: bool = False,
    ) -> None:
        self._node, self._held = node, held
        self._newest = newest
        self._view = view
        self._open_channel = open_channel
        self._record = record
        self._stop = threading.Event()
        self._on_copied, self._each_step = on_copied, each_step
        cores = None if each_step or rate_bytes is not None else Cores()
        most = RATE_MAX_BYTES if each_step and rate_bytes is None else rate_of(rate_bytes)
        self._pace = TrafficPace(most, self._stop, cores)
        self._changed = threading.Condition()
        self._holders: tuple[PeerMachine, ...] = ()
        self._news = 0  # counts what has changed
        self._channels: dict[PeerMachine, Channel] = {}
        self._have: dict[PeerMachine, bytes] = {}  # the manifest of what a machine keeps for us
        self._tried: dict[PeerMachine, tuple[SaveName, str]] = {}  # the last one, and what failed
        self._failed: set[tuple[PeerMachine, SaveName]] = set()
        self._thread = threading.Thread(target=self._run, name="outlast-replicate", daemon=True)
        self._thread.start()

    def to(self, holders: Sequence[PeerMachine]) -> None:
        """Who keeps the copies from here on."""
        with self._changed:
            self._holders = tuple(holders)
            self._news += 1
            self._changed.notify_all()

    def committed(self) -> None:
        """There is a newer snapshot."""
        with self._changed:
            self._news += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Give up what is under way."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()

    def _run(self) -> None:
        if not self._each_step:
            yield_to_training()
        seen, pause_s = -1, PAUSE_S
        while not self._stop.is_set():
            with self._changed:
                while seen == self._news and not self._stop.is_set():
                    self._changed.wait()
                if self._stop.is_set():
                    break
                seen, holders = self._news, self._holders
            self._leave_others(holders)
            failed = [holder for holder in holders if not self._bring(holder)]
            self._tell(holders)
            if not failed:
                pause_s = PAUSE_S
                continue
            with self._changed:
                if seen == self._news:
                    self._changed.wait(pause_s)
                    pause_s = min(pause_s * 2, PAUSE_MAX_S) if seen == self._news else PAUSE_S
                    self._news += seen == self._news
        self._leave_others(())

    def _tell(self, holders: Sequence[PeerMachine]) -> None:
        tried = [self._tried[one] for one in holders if one in self._tried]
        if holders and len(tried) == len(holders) and not self._stop.is_set():
            why = next((why for _, why in tried if why), "")
            oldest = min((save for save, _ in tried), key=when)
            self._on_copied(oldest, 0 if why else len(holders), why)

    def _leave_others(self, holders: Sequence[PeerMachine]) -> None:
        for member in [one for one in self._channels if one not in holders]:
            self._hang_up(member)
        self._have = {one: have for one, have in self._have.items() if one in holders}
        self._tried = {one: tried for one, tried in self._tried.items() if one in holders}

    def _bring(self, holder: PeerMachine) -> bool:
        """Have one machine keep the newest snapshot; whether there is nothing left to do for it."""
        newest = self._newest()
        if newest is None or self._have.get(holder) == newest[1].manifest:
            return True
        save, kept = newest
        start_s = time.monotonic()
        try:
            num_bytes = self._send(holder, save, kept)
        except Gone:
            return True  # a newer one is on its way, which will say so
        except Exception as error:  # noqa: BLE001 - said and tried again: this thread goes on
            if not isinstance(error, Declined):
                self._hang_up(holder)
            if not self._stop.is_set():
                self._say_failed(holder, save, error)
            return False
        self._have[holder] = kept.manifest
        self._tried[holder] = save, ""
        self._failed = {one for one in self._failed if one[0] != holder}
        if num_bytes and not self._each_step:  # else there would be one in each step
            self._record(
                "replicated",
                durable=False,
                attempt=save.attempt,
                step=save.step,
                machine=holder.node,
                bytes=num_bytes,
                seconds=round(time.monotonic() - start_s, 6),
            )
        return True

    def _say_failed(self, holder: PeerMachine, save: SaveName, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or str(error)
        logger.warning("step %d has no copy on %s yet: %s", save.step, holder.node, reason)
        self._tried[holder] = save, f"{holder.node}: {reason}"
        of = SaveName(0) if self._each_step else save  # of several steps in a row one is enough
        if (holder, of) not in self._failed:
            self._failed = {(holder, of)} | {one for one in self._failed if one[1] == of}
            self._record(
                "replica_failed",
                durable=False,
                attempt=save.attempt,
                step=save.step,
                machine=holder.node,
                reason=reason,
            )

    def _send(self, holder: PeerMachine, save: SaveName, kept: KeptSnapshot) -> int:
        """Bytes sent, 0 if the other machine had it already."""
        channel = self._channel(holder)
        sizes = {name: size for name, (_, size) in kept.files.items()}
        offer = protocol.ReplicaOffer(
            node=self._node,
            save=str(save),
            files=sizes,
            small={name: len(data) for name, data in kept.small.items()},
            held=self._held(save.attempt),
        )
        protocol.say(channel, offer, kept.small.values(), self._pace)
        if self._verdict(channel) == "have":
            return 0
        for name, size in sizes.items():
            self._send_file(channel, str(save), kept, name, size)
        protocol.say(channel, protocol.ReplicaWhole())
        self._verdict(channel)
        return sum(sizes.values()) + sum(map(len, kept.small.values()))

    def _send_file(
        self, channel: Channel, save: str, kept: KeptSnapshot, name: str, size: int
    ) -> None:
        for index, start in enumerate(range(0, size, BLOCK_BYTES)):
            view = self._view(save, kept, name)
            if view is None:
                protocol.say(channel, protocol.Withdrawn())
                raise Gone
            block = view[start : min(start + BLOCK_BYTES, size)]
            protocol.say(
                channel, protocol.ReplicaBlock(file=name, index=index), [block], self._pace
            )
        if self._view(save, kept, name) is None:
            protocol.say(channel, protocol.Withdrawn())
            raise Gone

    def _verdict(self, channel: Channel) -> str:
        answer = protocol.hear(channel, protocol.ANSWER_S)
        if not isinstance(answer, protocol.ReplicaVerdict):
            raise ConnectionResetError(f"{channel.peer} left without an answer")
        if answer.verdict == "refused":
            raise Declined(answer.reason)
        return answer.verdict

    def _channel(self, holder: PeerMachine) -> Channel:
        channel = self._channels.get(holder)
        if channel is None:
            channel = self._open_channel(holder)
            with self._changed:
                self._channels[holder] = channel
        return channel

    def _hang_up(self, member: PeerMachine) -> None:
        with self._changed:
            channel = self._channels.pop(member, None)
        self._have.pop(member, None)
        if channel is not None:
            channel.close()


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
    """All copies of other machines' snapshots that are kept here.

    Args:
        job: id of the job.
        holdings: this machine's memory.
        lock: guards it.
        each_step: two copies of a machine stay while the next comes; the only one always does.

    Attributes:
        wards: machines whose copies are to be here.
    """

    def __init__(
        self, job: str, holdings: Holdings, lock: threading.RLock, *, each_step: bool = False
    ) -> None:
        self._job, self._each_step = job, each_step
        self._holdings, self._lock = holdings, lock
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
            books = self._holdings.books
            old = books.copies.get(offer.node)
            if old is not None and (offer.node not in books.before or _is_held(old, offer)):
                books.before[offer.node] = old  # else what is there is the newest that all hold
            books.copies[offer.node] = Replica(save=offer.save, kept=kept)
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
                    books.before.pop(node, None)
            if not books.copies and not self._coming:
                self._holdings.drop(self._spare())
            self._holdings.note()

    def _find_room(self, offer: ReplicaOffer) -> list[int]:
        """Arenas for its files; if memory is short, older copies and the one before it make way.

        Where each step is kept, older copies alone do, and what the other machines will send soon
        has its memory already.
        """
        sizes, books = list(offer.files.values()), self._holdings.books
        makes_way: list[Callable[[], object]] = [books.before.clear]
        num_left = 0
        if self._each_step:
            num_left = len(sizes) * max(len(self.wards) - 1, 0)
        else:
            books.before.pop(offer.node, None)  # what is newer lies beside it
            makes_way.append(lambda: books.copies.pop(offer.node, None))
        for make_way in makes_way:
            with contextlib.suppress(OSError):
                return self._holdings.room(sizes, self._spare(), num_left)
            make_way()
            num_left = 0
        try:
            return self._holdings.room(sizes, self._spare())
        except OSError as error:
            raise ReplicaRefused(error.strerror or str(error)) from None

    def _spare(self) -> set[int]:
        """Arenas of copies that are no copy's."""
        books = self._holdings.books
        copies = [*books.copies.values(), *books.before.values()]
        used = {arena for copy in copies for arena, _ in copy.kept.files.values()}
        used.update(*(incoming.arenas.values() for incoming in self._coming.values()))
        return set(books.of_rank(COPIES)) - used


def _is_held(copy: Replica, offer: ReplicaOffer) -> bool:
    """Whether all machines' parts of this copy's save, or of a later one, have a copy."""
    save, new = named(copy.save), named(offer.save)
    return save.attempt == new.attempt and save.serial <= offer.held


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
    """The listening side: takes copies, and answers what is in memory.

    Args:
        listener: a listening socket; it is closed by ``close``.
        key: the job's.
        tls: files for TLS, or None.
        store: what is in memory here.
        wait_for_earlier: waits until nothing of attempts before one is in flight.
        gives_way: takes copies more slowly while no core is spare.
        each_step: takes them at once.
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
        each_step: bool = False,
    ) -> None:
        self._store, self._each_step = store, each_step
        self._wait_for_earlier = wait_for_earlier
        self._gives_way = gives_way and not each_step
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
            if not self._each_step:
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
