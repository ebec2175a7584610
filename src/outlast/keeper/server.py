"""The keeper itself: connections in, orders out.

One thread accepts, one thread a connection reads, one writes; whatever takes time is done by the
pool. An end that does not read loses the connection, and with it what was in flight: the keeper
never waits. It leaves when everyone said goodbye and nothing is in flight, or some time after the
last worker died without a word.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from outlast.checkpoint.catalog import KnownHealth, stands
from outlast.checkpoint.manifest import FULL, Manifest, decode, named, rank_of
from outlast.keeper import wire
from outlast.keeper.conclude import Committed, Fence, Gate
from outlast.keeper.copies import DurableTier, TierCopies
from outlast.keeper.flight import Pool
from outlast.keeper.memory import Due, Holdings, KeptSnapshot, MemoryTier
from outlast.keeper.peers import Peers, PeerTier
from outlast.keeper.process import KeeperListener, Setup, decode_setup, is_foreign, is_ours, sweep
from outlast.keeper.saves import SavesInFlight
from outlast.keeper.shared_saves import SharedSaves
from outlast.ledger.file import PATIENCE_S, QueuedLedger
from outlast.storage import Directory, Storage, open_storage
from outlast.tiers import PEER

logger = logging.getLogger(__name__)
EARLIER_TIMEOUT_S: Final = 600.0
HELLO_S: Final = 5.0
EMPTY_S: Final = 2.0  # for the next attempt where there is nothing that it could find
TICK_S: Final = 0.1
PERMIT_S: Final = 30.0  # that the end waits for word whether a snapshot may be committed
ASKED_AT_ONCE: Final = 4  # blocks from other machines' memory


class Owner(Protocol):
    """Who acts on what a connection says, and on its end."""

    def handle(self, peer: Connection, message: wire.Message, blob: bytes, fds: list[int]) -> None:
        """Act on one message; what it raises ends the connection."""

    def gone(self, peer: Connection) -> None:
        """The connection has ended."""


class Connection:
    """One connection, to a worker or to a supervisor.

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
        self.wire = wire.KeeperSocket(sock)
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


class Keeper:
    """The keeper's process: connections in, orders out.

    Args:
        setup: what it was told.

    Raises:
        OSError, ConfigError: it cannot listen, or a tier cannot be opened.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._ledger = QueuedLedger(
            Path(setup.directory), job=setup.job, rank=0, patience_s=PATIENCE_S
        )
        self._ledger_lock = threading.Lock()
        tiers = [DurableTier(tier.name, open_storage(tier.url), tier.keep) for tier in setup.tiers]
        self._tiers: dict[str, Storage] = {tier.name: tier.storage for tier in tiers}
        self._connections: set[Connection] = set()
        self._holdings = Holdings(setup.inherited, self._to_supervisors)
        self._pool = Pool()
        self._gate = Gate(Fence(open_storage(setup.claims))) if setup.claims else None
        self._saves = SavesInFlight(
            setup.job,
            self._tiers,
            self._holdings.books,
            self._pool,
            record=self._record,
            on_committed=self._committed,
            on_change=self._holdings.note,
            gate=self._gate,
            copied=self._newest_copied,
        )
        self._peers = Peers(
            setup,
            self._holdings,
            self._saves.lock,
            wait_for_earlier=lambda attempt: self._saves.wait_for_earlier(
                attempt, EARLIER_TIMEOUT_S
            ),
            record=self._record,
            on_copied=self._copied,
        )
        self._shared_saves = SharedSaves(self._saves, self._peers, record=self._record)
        self._copies = TierCopies(
            setup.job,
            tiers,
            self._record,
            self._saves.names,
            self._due,
            others=self._shared_saves,
            memory=MemoryTier(self._holdings.books.arenas, self._holdings.books.kept),
        )
        self._copies.go_on(dict(self._holdings.books.due))
        self._asking = Pool(ASKED_AT_ONCE)  # what waits for other machines keeps no disk waiting
        self._deadline_s: float | None = None
        self._permit: _Permit | None = None  # to bring what is in memory alone
        self._stays_until_s = time.monotonic() + setup.linger_s
        self._listener = KeeperListener(Path(setup.socket))

    def run(self) -> bool:
        """Serve until nobody needs it any more; whether everything was done that was due."""
        self._listener.settimeout(TICK_S)
        sweep(Path(self._setup.socket))
        while not (self._may_leave() and not self._brings_more() and self._listener.close()):
            try:
                sock = self._listener.accept()
            except TimeoutError:
                self._saves.tick()
                self._shared_saves.tidy()
                self._tell_progress()
                self._replan()
                continue
            if is_ours(sock):
                with self._saves.lock:
                    self._connections.add(Connection(self, sock))
            else:
                sock.close()
        is_done = self._saves.idle and self._copies.is_complete
        self._copies.stop()
        self._shared_saves.stop()
        self._peers.stop()
        if self._gate is not None:
            self._gate.stop()
        self._ledger.close()
        return is_done

    # --- messages -------------------------------------------------------------------------------

    def handle(self, peer: Connection, message: Any, blob: bytes, fds: list[int]) -> None:
        """Act on one message.

        Raises:
            ValueError, KeyError: it makes no sense; the connection is given up.
        """
        wanted = (
            peer.supervises if isinstance(message, wire.Serve) else isinstance(message, wire.Lead)
        )
        listener = fds.pop() if wanted and fds else -1
        for fd in fds:  # nobody hands us memory
            os.close(fd)
        if isinstance(message, wire.Hello):
            self._hello(peer, message)
            return
        if peer.supervises:
            self._supervised(peer, message, blob, listener)
            return
        if peer.hello is None:
            raise ValueError(f"{message.__struct_config__.tag} from nobody")
        if isinstance(message, wire.ABOUT_SAVES):
            self._about_a_save(peer, peer.hello, message, blob)
            return
        self._worker(peer, peer.hello, message, blob, listener)

    def _worker(
        self, peer: Connection, hello: wire.Hello, message: Any, blob: bytes, listener: int
    ) -> None:
        """What a worker says that is not about one save."""
        match message:
            case wire.Goodbye():
                self._bye(peer, message)
            case wire.Recall():
                self._start_recall(peer, hello)
            case wire.Reserve():
                self._reserve(peer, hello, message)
            case wire.Rejected() | wire.Judged():
                self._told(message)
            case wire.Lead() if listener >= 0:
                self._shared_saves.lead(hello, message, blob, listener)
            case wire.Follow():
                self._shared_saves.follow(hello, message, blob)
            case wire.Layout():
                peer.layouts[message.number] = message
            case wire.Fetch():
                pool = self._asking if message.tier == PEER else self._pool
                pool.put(lambda: self._fetch(peer, message))
            case _:
                raise ValueError(f"{message.__struct_config__.tag} is not for a keeper")

    def _told(self, message: wire.Rejected | wire.Judged) -> None:
        """What a worker knows of the checkpoints that are there."""
        if isinstance(message, wire.Rejected):
            self._copies.invalid.update(named(save) for save in message.saves)
            return
        healthy = None if message.healthy is None else frozenset(message.healthy)
        self._copies.health = KnownHealth(healthy=healthy, rollbacks=message.rollbacks)

    def _supervised(self, peer: Connection, message: Any, blob: bytes, listener: int) -> None:
        match message:
            case wire.Goodbye():
                self._bye(peer, message)
            case wire.Serve():
                self._peers.serve(message, blob, listener)
            case wire.Members():
                if self._gate is not None:
                    self._gate.told(message.attempt, message.term)
                for lost in message.lost:
                    ranks = range(lost.first, lost.first + lost.count)
                    self._saves.machine_lost(lost.attempt, ranks)
                if message.members:
                    self._peers.tell(message)
                peer.send(wire.MembersKnown(attempt=message.attempt))
            case _:
                raise ValueError(f"{message.__struct_config__.tag} from a supervisor")

    def _about_a_save(self, peer: Connection, hello: wire.Hello, message: Any, blob: bytes) -> None:
        attempt, rank = hello.attempt, int(peer.rank or 0)
        match message:
            case wire.BeginSave():
                self._begin(peer, hello, message)
            case wire.Absent():
                self._saves.absent(peer, message, hello=hello)
            case wire.BlocksReady():
                self._saves.ready(attempt, rank, message)
            case wire.Complete():
                self._saves.complete(attempt, rank, message, blob)
            case wire.Void():
                self._saves.void(attempt, rank, message)

    def gone(self, peer: Connection) -> None:
        """A connection has ended."""
        if peer.hello is not None and peer.rank is not None:
            self._saves.lost(peer.hello.attempt, peer)
        with self._saves.lock:
            self._connections.discard(peer)
            if peer.hello is not None and not peer.has_left:  # it may come again
                books = self._holdings.books
                holds = bool(books.kept or books.due or not self._saves.idle)
                stays_s = self._setup.linger_s if holds else min(EMPTY_S, self._setup.linger_s)
                self._stays_until_s = time.monotonic() + stays_s
            nobody = not self._ranks()
        if nobody and peer.hello is not None:  # not one that only looked whether we live
            self._saves.nobody_is_left()
            self._copies.end(is_over=True)

    def _hello(self, peer: Connection, message: wire.Hello) -> None:
        if message.job != self._setup.job:
            raise ValueError(f"this is the keeper of job {self._setup.job}")
        if peer.hello is not None:
            raise ValueError("Hello twice")
        if self._gate is not None and message.term:
            self._gate.told(message.attempt, message.term)
        with self._saves.lock:
            peer.rank, peer.hello = message.rank, message
            if message.rank is not None:
                if message.rank in message.local:  # not one that only looks
                    self._saves.know(message.attempt, message.local)
                self._deadline_s = self._permit = None
                self._copies.end(is_over=False)
                self._keep_spares()
                return
            for number, fd in self._holdings.all().items():
                peer.send(wire.Hold(arena=number), fds=(fd,))

    def _keep_spares(self) -> None:
        """Each worker of this machine writes a file, over one that retention has let go."""
        num_workers = len(self._ranks())
        for storage in self._tiers.values():
            if isinstance(storage, Directory):
                storage.keep_spares(num_workers)

    def _bye(self, peer: Connection, message: wire.Goodbye) -> None:
        with self._saves.lock:
            peer.has_left = True
            if message.over and peer.rank is None:
                peer.is_over = True
                if message.deadline_s is not None:
                    self._deadline_s = time.monotonic() + message.deadline_s
            if peer.is_over and not self._ranks():
                self._copies.end(is_over=True)
        if peer.rank is not None:  # it leaves on purpose: at the end, or because the machine goes
            self._copies.bring_newest()

    def _start_recall(self, peer: Connection, hello: wire.Hello) -> None:
        """Answer when nothing of earlier attempts is in flight, in a thread that may wait."""
        threading.Thread(
            target=self._recall, args=(peer, hello), name="outlast-recall", daemon=True
        ).start()

    def _recall(self, peer: Connection, hello: wire.Hello) -> None:
        self._saves.wait_for_earlier(
            hello.attempt, EARLIER_TIMEOUT_S, lambda words: peer.send(wire.RecallWaits(words=words))
        )
        with self._saves.lock:
            books = self._holdings.books
            kept = books.everything()
            used = sorted({arena for one in kept.values() for arena, _ in one.files.values()})
            files = {save: one.files for save, one in kept.items()}
            small = msgspec.msgpack.encode({save: one.small for save, one in kept.items()})
            fds = tuple(books.arenas[number].fd for number in used)
            answer = wire.Recalled(
                arenas=tuple(used), files=files, num_peers=self._peers.num_others
            )
            peer.send(answer, small, fds)

    def _reserve(self, peer: Connection, hello: wire.Hello, message: wire.Reserve) -> None:
        with self._saves.lock:
            answer = self._holdings.reserve(
                message,
                rank=int(peer.rank or 0),
                attempt=hello.attempt,
                ranks=self._ranks(),
                in_use=self._saves.arenas(),
            )
            peer.ring_bytes = answer.ring_bytes
            arenas = self._holdings.books.arenas
            peer.send(answer, fds=tuple(arenas[number].fd for number in answer.arenas))

    def _begin(self, peer: Connection, hello: wire.Hello, message: wire.BeginSave) -> None:
        books = self._holdings.books
        if peer.rank is None or message.arena not in books.of_rank(peer.rank):
            raise ValueError(f"arena {message.arena} is not this rank's")
        layout = peer.layouts[message.layout]
        room = peer.ring_bytes or books.arenas[message.arena].num_bytes
        if not peer.ring_bytes and layout.size > room:
            raise ValueError(f"{layout.size} bytes do not fit into an arena of {room}")
        self._saves.begin(
            peer,
            message,
            layout,
            hello=hello,
            ring_bytes=peer.ring_bytes,
        )

    def _fetch(self, peer: Connection, message: wire.Fetch) -> None:
        try:
            is_peers = message.tier == PEER
            blob = _read(self._peers.tier if is_peers else self._tiers[message.tier], message)
            answer = wire.Fetched(number=message.number)
        except (OSError, KeyError, ValueError) as error:
            blob = b""
            answer = wire.Fetched(
                number=message.number,
                error=f"{getattr(error, 'strerror', None) or error}",
                errno=getattr(error, "errno", None) or 0,
            )
        peer.send(answer, blob)

    # --- the books and the end ------------------------------------------------------------------

    def _committed(self, committed: Committed) -> None:
        self._copies.committed(committed)
        if not committed.each_step or committed.held:  # else all there is may lie in what is left
            with self._saves.lock:
                self._holdings.leave_out(committed.ranks, self._saves.arenas())
        is_all = len(committed.ranks) == committed.manifest.world_size
        self._peers.committed(committed.manifest.save, held=committed.held, is_all=is_all)

    def _newest_copied(self, attempt: int) -> int:
        return self._peers.copied(attempt)

    def _copied(self, attempt: int, word: wire.CopyMade) -> None:
        """Those who wait for copies of each step hear of them."""
        if self._setup.each_step:
            with self._saves.lock:
                for peer in self._connections:
                    if peer.rank is not None and peer.hello and peer.hello.attempt == attempt:
                        peer.send(word)

    def _due(self, tier: str, due: Due, is_due: bool) -> None:
        """What a successor has to bring to a tier, should there be one."""
        with self._saves.lock:
            known = self._holdings.books.due
            if is_due:
                known[tier] = due
            elif known.get(tier) == due:  # or a newer one is due by now
                del known[tier]
            self._holdings.note()

    def _record(self, event: Any, *, attempt: int | None = None, **fields: Any) -> None:
        with self._ledger_lock:
            if attempt is not None:
                self._ledger.attempt = attempt
            self._ledger.append(event, **fields)

    def _to_supervisors(self, message: wire.Message, fds: tuple[int, ...] = ()) -> None:
        for peer in self._connections:
            if peer.supervises:
                peer.send(message, fds=fds)

    def _ranks(self) -> set[int]:
        """The ranks that are connected."""
        return {peer.rank for peer in self._connections if peer.rank is not None}

    def _may_leave(self) -> bool:
        with self._saves.lock:
            now = time.monotonic()
            if self._deadline_s is not None and now > self._deadline_s:
                return True
            known = [peer for peer in self._connections if peer.hello is not None]
            if any(peer.rank is not None or not peer.is_over for peer in known):
                return False
            if any(now - peer.since_s < HELLO_S for peer in self._connections.difference(known)):
                return False  # it is about to say who it is
            if not (self._saves.idle and self._copies.idle and self._shared_saves.idle):
                return False
            return bool(known) or now >= self._stays_until_s

    def _brings_more(self) -> bool:
        """Whether there was a snapshot in memory alone, which then goes to the first tier.

        So it comes to no more than time where the script has failed and nobody goes on.
        """
        now = time.monotonic()
        if self._deadline_s is not None and now > self._deadline_s:
            return False
        if self._permit is not None:  # asked for, and perhaps not answered
            if now < self._permit.until_s and not self._permit.is_known:
                return True
            return self._permit.is_given and self._copies.bring_from_memory(self._permit.committed)
        committed = self._newest_alone()
        if committed is None:
            return False
        self._permit = permit = _Permit(committed, now + PERMIT_S)
        if self._gate is None:
            permit.hear("")
        else:
            self._gate.ask(_Permit, committed.manifest.attempt, permit.hear)
        return True

    def _newest_alone(self) -> Committed | None:
        """The newest snapshot here that counts, if no tier has it."""
        health, invalid = self._copies.health, self._copies.invalid
        with self._saves.lock:
            kept = {named(save): one for save, one in self._holdings.books.kept.items()}
        for save in sorted(kept.keys() - invalid, reverse=True):
            manifest = decode(kept[save].manifest, save)
            if manifest.kind == FULL and stands(manifest, health.rollbacks):
                return None if kept[save].tier else _as_committed(kept[save], manifest)
        return None

    def _tell_progress(self) -> None:
        with self._saves.lock:
            if any(peer.is_over for peer in self._connections):
                words, done, total = self._copies.progress()
                self._to_supervisors(
                    wire.CopyProgress(words=words, done_bytes=done, total_bytes=total)
                )

    def _replan(self) -> None:
        """While the end waits for slower tiers, and not for ever."""
        if self._deadline_s is not None and not self._saves.names():
            self._copies.replan(self._deadline_s - time.monotonic())


class _Permit:
    """Whether a snapshot may be committed that has stayed in memory until the end."""

    def __init__(self, committed: Committed, until_s: float) -> None:
        self.committed, self.until_s = committed, until_s
        self.is_known = self.is_given = False

    def hear(self, refused: str) -> None:
        """The gate's answer, in its thread."""
        self.is_given = not refused
        self.is_known = True
        if refused:
            logger.warning("step %d stays in memory: %s", self.committed.manifest.step, refused)


def _as_committed(kept: KeptSnapshot, manifest: Manifest) -> Committed:
    ranks = {rank_of(name) for name in (*kept.files, *kept.small)}
    return Committed(
        manifest=manifest,
        data=kept.manifest,
        ranks=tuple(sorted(rank for rank in ranks if rank is not None)),
        tiers=None,
        tier="",
        by_us=False,
    )


def _read(storage: Storage | PeerTier, message: wire.Fetch) -> bytes:
    """The answer to one question about a tier."""
    name = message.name
    match message.operation:
        case "children":
            return msgspec.json.encode(storage.children(name))
        case "exists":
            return msgspec.json.encode(storage.exists(name))
        case "size":
            return msgspec.json.encode(storage.size(name))
        case "read":
            return storage.read(name)
        case "read_into":
            buffer = bytearray(message.size)
            view = memoryview(buffer)
            if isinstance(storage, PeerTier):
                count = storage.read_into(name, view, message.start, copy=message.copy)
            else:
                count = storage.read_into(name, view, message.start)
            return bytes(buffer[:count])
    raise ValueError(f"{message.operation} cannot be asked for")


def main() -> None:
    """Read the setup from standard input, serve, and leave."""
    # Who started it says when it is over. Slurm sends a notice to every process of a job step.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="outlast keeper: %(message)s")
    setup = decode_setup(sys.stdin.buffer.read())
    if is_foreign(Path(setup.socket)):  # who has started us would not understand us
        sys.exit("outlast was upgraded while the job ran; start the same command again")
    is_done = Keeper(setup).run()
    os._exit(0 if is_done else 1)
