"""This machine's keeper among those of other machines, and their memory as a tier.

Copies of this machine's newest snapshot go to others (``replicas``), those of others are kept
here too, and at a resume everybody's memory can be read (``PeerTier``). None of it
begins before a supervisor has handed over the job's key and a listening socket.

The tier asks all machines at once what they have when it is listed; one that says nothing for some
seconds (its keeper is stopped, say) has nothing. Bytes are then read from any machine that has
them, and from another when one fails. Nothing is believed here: the reader compares each block with
the manifest, as with any tier, and asks for the next machine's copy where one is wrong.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from outlast.checkpoint.manifest import BLOCK_BYTES, FULL, SaveName, decode, named
from outlast.errors import CheckpointInvalid, OutlastError
from outlast.keeper import protocol, wire
from outlast.keeper.memory import Holdings, KeptSnapshot, MemoryTier
from outlast.keeper.process import Setup
from outlast.keeper.protocol import tls_of
from outlast.keeper.replicas import ReplicaServer, ReplicaStore, Replicator, when
from outlast.keeper.wire import PeerMachine
from outlast.peer import Channel, Tls, connect
from outlast.policy.retention import PlacedMachine, holders, num_replicas
from outlast.tiers import PEER

logger = logging.getLogger(__name__)

ASKED_AT_ONCE: Final = 16
IDLE_CHANNELS: Final = 4  # kept open to each machine
LOOK_AGAIN_S: Final = 1.0  # for a file that nobody had
MUTE_S: Final = 30.0  # for which one that did not answer is not asked again


class PeerTier:
    """The memory of the other machines of an attempt, as a tier.

    Args:
        attempt: which one.
        members: the other machines.
        open_channel: to one of them.
    """

    def __init__(
        self,
        attempt: int,
        members: Sequence[PeerMachine],
        open_channel: Callable[[PeerMachine], Channel],
    ) -> None:
        self.members = tuple(members)
        self._attempt = attempt
        self._open_channel = open_channel
        self._lock = threading.Lock()
        self._idle: dict[PeerMachine, list[Channel]] = {member: [] for member in members}
        self._found: dict[str, _PeerSave] | None = None
        self._mute: dict[PeerMachine, float] = {}  # who did not answer in time, and when
        self._looked_s = 0.0
        self._closed = False

    def close(self) -> None:
        """They are not asked any more."""
        with self._lock:
            self._closed = True
            channels = [channel for idle in self._idle.values() for channel in idle]
        for channel in channels:
            channel.close()

    # --- as a tier ------------------------------------------------------------------------------

    def children(self, name: str = "") -> list[str]:
        """Saves, asked for anew; or the files of a save."""
        if not name:
            self._look_round()
            return sorted(self._saves())
        save = self._saves().get(name)
        return sorted(save.where) if save else []

    def exists(self, name: str) -> bool:
        """Whether some machine has the file."""
        return self._place(name) is not None

    def size(self, name: str) -> int:
        """Size of the file in bytes; FileNotFoundError if nobody has it."""
        return self._placed(name).size

    def read(self, name: str) -> bytes:
        """The whole file, which is small."""
        buffer = bytearray(self.size(name))
        for start in range(0, len(buffer), BLOCK_BYTES):
            self.read_into(name, memoryview(buffer)[start : start + BLOCK_BYTES], start)
        return bytes(buffer)

    def read_into(self, name: str, buffer: memoryview, offset: int = 0, *, copy: int = 0) -> int:
        """Fill ``buffer`` from byte ``offset``, from the first machine that can.

        Args:
            name: of the file.
            buffer: is filled.
            offset: in the file.
            copy: which machine's is asked for first, of those that have the file.

        Raises:
            FileNotFoundError: there are not so many.
            OSError: none of them gave it.
        """
        place = self._placed(name)
        if copy >= len(place.members):
            raise FileNotFoundError(errno.ENOENT, "no other machine has it in memory", name)
        view = buffer[: max(place.size - offset, 0)]
        failure: Exception | None = None
        for member in (*place.members[copy:], *place.members[:copy]):
            try:
                for start in range(0, len(view), BLOCK_BYTES):
                    self._read(member, name, view[start : start + BLOCK_BYTES], offset + start)
            except (OSError, OutlastError, ValueError) as error:
                logger.warning("%s was not read from %s: %s", name, member.node, error)
                failure = error
            else:
                return len(view)
        raise OSError(errno.EIO, f"no machine that has {name} could give it: {failure}")

    # --- inside ---------------------------------------------------------------------------------

    def _saves(self) -> Mapping[str, _PeerSave]:
        if self._found is None:
            self._look_round()
        return self._found or {}

    def _look_round(self) -> None:
        """Ask all what they have; who does not answer has nothing."""
        if not self.members:
            self._found = {}
            return
        with ThreadPoolExecutor(ASKED_AT_ONCE, "outlast-ask") as pool:
            answers = list(pool.map(self._list, self.members))
        found: dict[str, _PeerSave] = {}
        for member, listing in zip(self.members, answers, strict=True):
            for name, listed in listing.items():
                save = found.setdefault(name, _PeerSave(listed.manifest))
                if save.manifest == listed.manifest:
                    save.add(member, listed.files)
        self._found, self._looked_s = found, time.monotonic()

    def _list(self, member: PeerMachine) -> dict[str, protocol.Listed]:
        if time.monotonic() - self._mute.get(member, float("-inf")) < MUTE_S:
            return {}
        try:
            with self._talking(member) as channel:
                ask = protocol.List(attempt=self._attempt)
                protocol.ask(channel, ask, protocol.Listing, timeout_s=protocol.QUIET_S)
                return protocol.decode_listing(
                    protocol.take_bulk(channel, protocol.SMALL_BYTES_MAX)
                )
        except (OSError, OutlastError, ValueError) as error:
            logger.warning("%s does not say what it has: %s", member.node, error)
            if isinstance(error, TimeoutError):
                self._mute[member] = time.monotonic()
            return {}

    def _read(self, member: PeerMachine, name: str, view: memoryview, start: int) -> None:
        directory, _, file = name.partition("/")
        save = self._saves().get(directory)
        if save is None:
            raise FileNotFoundError(errno.ENOENT, "no machine has it", name)
        ask = protocol.ReplicaRead(
            save=directory,
            manifest=save.manifest,
            file=file,
            start=start,
            size=len(view),
        )
        with self._talking(member) as channel:
            answer = protocol.ask(channel, ask, protocol.Data)
            if answer.error:
                raise FileNotFoundError(errno.ENOENT, answer.error, name)
            channel.receive_into(view)

    @contextlib.contextmanager
    def _talking(self, member: PeerMachine) -> Iterator[Channel]:
        """A channel in use: put back when all went well, closed when not."""
        with self._lock:
            idle = self._idle[member]
            known = idle.pop() if idle else None
        channel = known or self._open_channel(member)
        try:
            yield channel
        except BaseException:
            channel.close()
            raise
        if channel.bulk_bytes:
            channel.close()
        else:
            self._back(member, channel)

    def _back(self, member: PeerMachine, channel: Channel) -> None:
        with self._lock:
            idle = self._idle[member]
            if not self._closed and len(idle) < IDLE_CHANNELS:
                idle.append(channel)
                return
        channel.close()

    def _place(self, name: str) -> _PeerFile | None:
        directory, _, file = name.partition("/")
        save = self._saves().get(directory)
        place = save.where.get(file) if save else None
        if place is None and time.monotonic() - self._looked_s > LOOK_AGAIN_S:
            self._look_round()  # a machine may not have answered before
            save = self._saves().get(directory)
            place = save.where.get(file) if save else None
        return place

    def _placed(self, name: str) -> _PeerFile:
        place = self._place(name)
        if place is None:
            raise FileNotFoundError(errno.ENOENT, "no machine has it in memory", name)
        return place


class _PeerFile:
    """A file: its size, and the machines that have it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.members: list[PeerMachine] = []


class _PeerSave:
    """One save, as far as the others have it."""

    def __init__(self, manifest: str) -> None:
        self.manifest = manifest
        self.where: dict[str, _PeerFile] = {}

    def add(self, member: PeerMachine, files: Mapping[str, int]) -> None:
        for name, size in files.items():
            place = self.where.setdefault(name, _PeerFile(size))
            if place.size == size:
                place.members.append(member)


class Peers:
    """This machine's keeper among those of other machines.

    Args:
        setup: this keeper's.
        holdings: its memory.
        lock: guards it.
        wait_for_earlier: waits until nothing of attempts before one is in flight.
        record: puts an event into the ledger.
        on_copied: told of each save of each step whether other machines have it.
    """

    def __init__(
        self,
        setup: Setup,
        holdings: Holdings,
        lock: threading.RLock,
        *,
        wait_for_earlier: Callable[[int], None],
        record: Callable[..., None],
        on_copied: Callable[[int, wire.CopyMade], None] = lambda *_: None,
    ) -> None:
        self._on_copied = on_copied
        self._copied = SaveName(0)  # the newest one that all who are to hold a copy of it have
        self._held = (0, 0)  # attempt, and number of the newest save that was copied from all
        self._num_holders = 0
        self._setup = setup
        self._holdings = holdings
        self._lock = lock
        self._wait_for_earlier = wait_for_earlier
        self._record = record
        self._store = ReplicaStore(setup.job, holdings, lock, each_step=setup.each_step)
        self._node = ""
        self._key = b""
        self._tls: Tls | None = None
        self._server: ReplicaServer | None = None
        self._replicator: Replicator | None = None
        self._tier: PeerTier | None = None

    @property
    def key(self) -> bytes:
        """The job's key; b"" where nobody has given one."""
        return self._key

    @property
    def num_others(self) -> int:
        """How many other machines can be asked."""
        return len(self._tier.members) if self._tier else 0

    @property
    def tier(self) -> PeerTier:
        """Their memory.

        Raises:
            KeyError: there are none.
        """
        if self._tier is None:
            raise KeyError(PEER)
        return self._tier

    def serve(self, message: wire.Serve, key: bytes, fd: int) -> None:
        """Listen for other machines; a supervisor that comes later takes the place of this one.

        Without a socket (``fd`` is below 0) only the job's key is known from here on.
        """
        self.stop()
        self._node, self._key = message.node, key
        if fd < 0:
            return
        self._tls = tls_of(message.tls)
        self._server = ReplicaServer(
            socket.socket(fileno=fd),
            key,
            self._tls,
            self._store,
            wait_for_earlier=self._wait_for_earlier,
            gives_way=self._setup.rate_bytes is None,
            each_step=self._setup.each_step,
            record=self._record,
        )
        self._replicator = Replicator(
            message.node,
            newest=self._newest,
            view=self._view_of,
            open_channel=self._open_channel,
            rate_bytes=self._setup.rate_bytes,
            record=self._record,
            on_copied=self._told,
            held=lambda attempt: self._held[1] if self._held[0] == attempt else 0,
            each_step=self._setup.each_step,
        )

    def tell(self, message: wire.Members) -> None:
        """An attempt has formed.

        Raises:
            ValueError: nobody has said who we are, or we are not among them.
        """
        nodes = {member.node: member for member in message.members}
        if self._replicator is None or self._node not in nodes:
            raise ValueError(f"{self._node or 'nobody'} is not among the members {sorted(nodes)}")
        others = [member for member in message.members if member.node != self._node]
        before, self._tier = (
            self._tier,
            PeerTier(message.attempt, others, self._open_channel),
        )
        if before is not None:
            before.close()
        replicas = num_replicas(self._setup.replicas, len(nodes))
        machines = [PlacedMachine(node=one.node, labels=one.labels) for one in message.members]
        chosen = holders(machines, replicas)
        self._store.wards = frozenset(node for node in nodes if self._node in chosen[node])
        self._num_holders = len(chosen[self._node])
        self._replicator.to([nodes[node] for node in chosen[self._node]])

    def copied(self, attempt: int) -> int:
        """The number of the newest save of an attempt that those who are to hold a copy have."""
        return self._copied.serial if self._copied.attempt == attempt else 0

    def committed(self, newest: SaveName, *, held: int = 0, is_all: bool = False) -> None:
        """A snapshot of this machine is committed.

        Before it is known who is to hold copies nothing is said: once it is, they are brought.

        Args:
            newest: its save.
            held: of ``wire.SaveEnded``.
            is_all: whether no other machine has a part in it.
        """
        self._held = max(self._held, (newest.attempt, held))
        nobody = self._tier is not None and not self._num_holders
        if is_all or nobody or self._setup.replicas == 0:
            self._told(newest, 0, "")
        if self._replicator is not None:
            self._replicator.committed()
            if not self._store.wards:
                self._store.came(newest)

    def stop(self) -> None:
        """End all talk with other machines."""
        for part in (self._replicator, self._tier):
            if isinstance(part, Replicator):
                part.stop()
            elif part is not None:
                part.close()
        if self._server is not None:
            self._server.close()
        self._replicator = self._tier = self._server = None

    # --- inside ---------------------------------------------------------------------------------

    def _told(self, save: SaveName, num: int, reason: str) -> None:
        if not reason and when(save) > when(self._copied):
            self._copied = save
        word = wire.CopyMade(step=save.step, serial=save.serial, num=num, reason=reason)
        self._on_copied(save.attempt, word)

    def _open_channel(self, member: wire.PeerMachine) -> Channel:
        return connect(
            (member.host, member.port),
            self._key,
            protocol.PURPOSE,
            protocol.CONNECT_S,
            silence_s=protocol.SILENCE_S,
            tls=self._tls,
        )

    def _view_of(self, save: str, kept: KeptSnapshot, file: str) -> memoryview | None:
        """A file of one of this machine's own snapshots, unless that is gone."""
        with self._lock:
            books = self._holdings.books
            if books.kept.get(save) is not kept:
                return None
            return MemoryTier(books.arenas, {save: kept}).view(f"{save}/{file}")

    def _newest(self) -> tuple[SaveName, KeptSnapshot] | None:
        """The newest of this machine's own snapshots that a job can be resumed from."""
        with self._lock:
            own = {named(save): kept for save, kept in self._holdings.books.kept.items()}
        for save in sorted(own, key=when, reverse=True):
            try:
                if decode(own[save].manifest, save).kind == FULL:
                    return save, own[save]
            except CheckpointInvalid as error:  # it was read back before it was put there
                logger.warning("%s in memory: %s", save, error.reason)
        return None
