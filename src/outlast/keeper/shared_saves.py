"""The end of a save whose ranks are on several machines: all keepers and that of rank 0.

The keeper of rank 0 leads: the others come to it, each with one sealed connection for an attempt.
A follower reports its ranks' parts, of a bounded size each, and is told how each save ended. Of a
commit it is told the manifest's hash, and asks for the manifest where it does not find it in a
tier. What becomes of files in slower tiers is said over the same connection.

Where rank 0 is, and the session's key, are handed over by the workers when their sessions begin;
from then on no worker is needed. An attempt's conversation goes on for as long as one of its saves
is in flight, beside that of the next attempt.

Guarantees: no save waits for ever.

- A connection that ends fails at once what its machine has not reported yet. A keeper that does not
  answer for ``SILENT_S`` is cut off, with the same effect. Where a machine answers, but nothing
  moves, see ``SaveLimits``.
- A follower that was cut off comes back, reports again what still counts, and is told what became
  of each save meanwhile.
- A report that is not answered for ``SILENT_S``, or for ``LOST_S`` without a connection, has
  failed: training goes on. So has a report of an attempt that is over here, once nobody listens at
  the address of rank 0's keeper: only a session of that attempt could open it again, and a worker
  that resumes waits for this.
- A session's key is known only to those who could read the attempt's store. Where an agent has
  given the keepers the job's key, both are needed.

Rejected: a thread that polls all connections (one that stalls in the middle of a message would hold
up the others); sending the manifest to everybody (machines × ranks bytes through one machine,
although most see the tier that it lies in).
"""

from __future__ import annotations

import bisect
import hashlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import xxhash

from outlast.checkpoint.manifest import SaveName
from outlast.errors import OutlastError
from outlast.keeper import protocol, wire
from outlast.keeper.copies import Arrived, WordsHeard, WordsSaid
from outlast.keeper.flight import RankOutcome, Save
from outlast.keeper.peers import Peers
from outlast.keeper.protocol import Door, tls_of
from outlast.keeper.saves import SavesInFlight
from outlast.peer import Channel, Tls, connect

logger = logging.getLogger(__name__)

BEAT_S: Final = 5.0  # between two questions whether a machine's keeper is there
SILENT_S: Final = 20.0  # without an answer to them
OWED_S: Final = 30.0  # that this keeper stays for those who have yet to take in an outcome
LOOK_S: Final = 1.0
STRANGERS: Final = 64  # connections beyond one for each rank
PART_BYTES_MAX: Final = protocol.SMALL_BYTES_MAX
MEMBER_GONE: Final = "its machine's keeper died before the commit; the older checkpoint stands"
MEMBER_SILENT: Final = f"its machine's keeper has not answered for {SILENT_S:.0f} s"
LOST_S: Final = 10.0  # without a connection
PAUSE_S: Final = 0.2  # between two tries to connect
PAUSE_MAX_S: Final = 2.0
FLUSH_S: Final = 2.0  # at the end, for what has yet to be said
VOID_MAX: Final = 256  # names of one rank that are passed on
ERROR_MAX: Final = 4096  # characters of an error
LEADER_LOST: Final = "the keeper of rank 0 cannot be reached"
LEADER_GONE: Final = "the keeper of rank 0 has ended, and so has the attempt"
LEADER_SILENT: Final = f"the keeper of rank 0 has said nothing for {SILENT_S:.0f} s"


class MemberKeeper:
    """Another machine's keeper."""

    def __init__(self, channel: Channel, join: protocol.JoinAttempt) -> None:
        self.channel = channel
        self.ranks = range(join.first, join.first + join.count)
        self.heard_s = self.asked_s = time.monotonic()
        self.is_busy = False  # it is being sent a manifest: nothing else is to wait for that
        self.words = MEMBER_GONE
        self.moves: dict[int, tuple[int, bool]] = {}
        self.owed: dict[int, float] = {}  # serial → since when it has been told and not answered

    def say(self, message: protocol.Message, bulk: bytes = b"") -> None:
        """Tell it; one that is gone is found by whoever receives from it."""
        try:
            protocol.say(self.channel, message, [bulk] if bulk else ())
        except OSError as error:
            logger.info("%s: %s", self.channel.peer, error)


class SaveLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long nothing of a save may move, in seconds, before it has failed.

    Attributes:
        gone_s: while a rank is missing whose machine's keeper was there, and is not any more.
        absent_s: while one is missing whose machine's keeper has not come yet.
        stall_s: while it is keepers and their tiers that have something to do.
        late_s: while a living worker has to begin, or to copy: its step may take long.
    """

    gone_s: float = 5.0
    absent_s: float = 20.0
    stall_s: float = 60.0
    late_s: float = 300.0


class SaveLeader:
    """This machine's side of an attempt, where it has rank 0.

    Args:
        listener: where the others come to; closed by ``close``.
        key: says what they must have.
        tls: files for TLS, or None.
        hears: acts on what they say.
        hello: says which attempt it is.
        local: this machine's ranks.
        record: puts an event into the ledger.
    """

    leads = True
    limits = SaveLimits()

    def __init__(
        self,
        listener: socket.socket,
        key: Callable[[], bytes],
        tls: Tls | None,
        hears: SavesInFlight,
        *,
        hello: wire.Hello,
        local: set[int],
        record: Callable[..., None],
    ) -> None:
        self._hears = hears
        self._hello = hello
        self.attempt, self._world_size = hello.attempt, hello.world_size
        self._local = local
        self._lock = threading.Lock()
        self._members: dict[int, MemberKeeper] = {}  # by first rank
        self._firsts: list[int] = []  # sorted
        self._gone: dict[int, range] = {}  # whose keepers were there
        self._brought = WordsHeard()
        self._closing = threading.Event()
        self._door = Door(
            listener,
            key,
            tls,
            purpose=protocol.SAVING,
            talk=self._talk,
            record=record,
            places=hello.world_size + STRANGERS,
        )
        threading.Thread(target=self._watch, name="outlast-lead", daemon=True).start()

    def close(self) -> None:
        """Talk to nobody any more."""
        self._closing.set()
        self._door.close()

    @property
    def idle(self) -> bool:
        """Whether everybody who is there has taken in what became of the last saves."""
        now_s = time.monotonic()
        with self._lock:
            return all(
                now_s - since_s > OWED_S
                for member in self._members.values()
                for since_s in member.owed.values()
            )

    # --- what is said to them -------------------------------------------------------------------

    def report(self, step: int, serial: int, rank: int, part: RankOutcome) -> None:
        """Nobody but this machine's keeper needs to know of its ranks' parts."""

    def want(self, step: int, serial: int) -> None:
        """The manifest is made here."""

    def done(self, serial: int) -> None:
        """Nobody waits for that."""

    def tell(self, ended: wire.SaveEnded, manifest: bytes, to: object = None) -> None:
        """Tell all, or one of them, how a save ended. Not with the saves' lock held."""
        outcome = protocol.SaveOutcome(
            step=ended.step,
            serial=ended.serial,
            error=ended.error,
            manifest=xxhash.xxh3_128_hexdigest(manifest) if manifest else "",
            size=len(manifest),
            held=ended.held,
        )
        void = msgspec.msgpack.encode(ended.void) if ended.void else b""
        with self._lock:
            members = [to] if isinstance(to, MemberKeeper) else list(self._members.values())
            for member in members:
                member.owed[ended.serial] = time.monotonic()
        for member in members:
            member.say(outcome, void)

    def detail(self, step: int, serial: int, rank: int, groups: tuple[str, ...]) -> bool:
        """Ask for a rank's single digests; whether its machine can be asked."""
        member = self.member_of(rank)
        if member is not None:
            member.say(protocol.Detail(step=step, serial=serial, rank=rank, groups=groups))
        return member is not None

    # --- what is known of them ------------------------------------------------------------------

    def member_of(self, rank: int) -> MemberKeeper | None:
        """The keeper that has this rank, if it is there."""
        with self._lock:
            place = bisect.bisect_right(self._firsts, rank) - 1
            member = self._members[self._firsts[place]] if place >= 0 else None
        return member if member is not None and rank in member.ranks else None

    def moves(self, serial: int) -> int:
        """Grows when something of a save has moved on another machine."""
        with self._lock:
            return sum(one.moves.get(serial, (0, True))[0] for one in self._members.values())

    def arrived(self, tier: str, serial: int) -> Arrived:
        """What other machines say of their files of a save in a slower tier."""
        with self._lock:
            living = [member.ranks for member in self._members.values()]
            return self._brought.arrived(tier, serial, living, list(self._gone.values()))

    def patience(self, save: Save, rank: int) -> tuple[float, str]:
        """How long this rank may be missing while nothing moves; and what is then said of it."""
        if rank in save.local:
            waits, words = save.needs_workers, "it has not got on"
        elif (member := self.member_of(rank)) is not None:
            waits, words = member.moves.get(save.serial, (0, True))[1], "it has not got on"
        elif any(rank in ranks for ranks in list(self._gone.values())):
            return self.limits.gone_s, "its machine's keeper has been gone"
        else:
            return self.limits.absent_s, "its machine's keeper has not come to that of rank 0"
        return (self.limits.late_s if waits else self.limits.stall_s), words

    # --- threads --------------------------------------------------------------------------------

    def _talk(self, channel: Channel) -> None:
        join = protocol.hear(channel, protocol.CONNECT_S)
        if not isinstance(join, protocol.JoinAttempt) or (join.job, join.attempt) != (
            self._hello.job,
            self.attempt,
        ):
            raise ValueError(f"{channel.peer} does not belong to attempt {self.attempt}")
        member = MemberKeeper(channel, join)
        ranks = member.ranks
        if not ranks or ranks.start < 0 or ranks.stop > self._world_size:
            raise ValueError(f"{channel.peer} says that it has {ranks}")
        if self._local & set(ranks):
            raise ValueError(f"{channel.peer} says that it has this machine's ranks")
        with self._lock:
            before = self._members.get(join.first)
            self._members[join.first] = member
            self._gone.pop(join.first, None)
            self._firsts = sorted(self._members)
        if before is not None:
            before.channel.close()
        try:
            while (message := protocol.hear(channel)) is not None:
                self._heard(member, message)
        finally:
            with self._lock:
                is_current = self._members.get(join.first) is member
                if is_current:
                    del self._members[join.first]
                    self._gone[join.first] = ranks
                    self._firsts = sorted(self._members)
            if is_current and not self._closing.is_set():  # else it talks to our successor
                self._hears.machine_gone(self.attempt, ranks, member.words)

    def _heard(self, member: MemberKeeper, message: protocol.Message) -> None:
        channel = member.channel
        member.heard_s = time.monotonic()
        match message:
            case protocol.PartReport() if message.rank in member.ranks:
                data = protocol.take_bulk(channel, PART_BYTES_MAX)
                part = msgspec.json.decode(data, type=RankOutcome)
                self._hears.reported(self._hello, message, part, member)
            case protocol.Digests() if message.rank in member.ranks:
                data = protocol.take_bulk(channel, protocol.SMALL_BYTES_MAX)
                digests = msgspec.msgpack.decode(data, type=dict[str, str])
                self._hears.detailed(self.attempt, message, digests)
            case protocol.WantManifest():
                root = self._hears.manifest_of(self.attempt, message.serial)
                member.is_busy = True
                try:
                    member.say(protocol.Root(step=message.step, serial=message.serial), root)
                finally:
                    member.is_busy = False
            case protocol.OutcomeTaken():
                with self._lock:
                    member.owed.pop(message.serial, None)
            case protocol.KeeperBeat():
                member.moves = message.moves
            case protocol.Brought():
                with self._lock:
                    self._brought.note(member.ranks, message)
            case _:
                raise protocol.out_of_turn(channel, message)

    def _watch(self) -> None:
        beat_s = time.monotonic()
        was_busy = False
        while not self._closing.wait(LOOK_S):
            try:
                is_busy = self._hears.overdue(self.attempt, self)
                now_s = time.monotonic()
                if is_busy and not was_busy:
                    beat_s = now_s - BEAT_S
                    self._forgive(now_s)
                was_busy = is_busy
                if is_busy and now_s - beat_s >= BEAT_S:
                    beat_s = now_s
                    self._beat(now_s)
            except (OSError, OutlastError):
                logger.exception("other machines' keepers are not looked after")

    def _forgive(self, now_s: float) -> None:
        """Nobody was asked while nothing was in flight."""
        with self._lock:
            for member in self._members.values():
                member.heard_s = now_s

    def _beat(self, now_s: float) -> None:
        with self._lock:
            members = [one for one in self._members.values() if not one.is_busy]
        for member in members:
            if now_s - member.heard_s > SILENT_S:
                member.words = MEMBER_SILENT
                member.channel.close()
            else:
                member.say(protocol.KeeperBeat())


class SaveFollower:
    """This machine's side of an attempt whose rank 0 is elsewhere.

    Args:
        address: of rank 0's keeper.
        key: says what both sides must have.
        tls: files for TLS, or None.
        hears: acts on what it says.
        hello: says which attempt it is, and which ranks are this machine's.
        said: what has become of this machine's files in slower tiers; see ``copies``.
    """

    leads = False

    def __init__(
        self,
        address: tuple[str, int],
        key: Callable[[], bytes],
        tls: Tls | None,
        hears: SavesInFlight,
        *,
        hello: wire.Hello,
        said: WordsSaid,
    ) -> None:
        self._address = address
        self._key = key
        self._tls = tls
        self._hears = hears
        self._said = said
        self._hello, self.attempt = hello, hello.attempt
        self._join = protocol.JoinAttempt(
            job=hello.job,
            attempt=hello.attempt,
            first=hello.local.start,
            count=len(hello.local),
        )
        self._channel: Channel | None = None
        self._lost_s = time.monotonic()  # when there was a connection last
        self._heard_s = 0.0
        self._closing = threading.Event()
        self._out: queue.SimpleQueue[tuple[protocol.Message, bytes] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="outlast-report", daemon=True)
        self._writer.start()
        threading.Thread(target=self._run, name="outlast-follow", daemon=True).start()

    def close(self) -> None:
        """Say what has yet to be said, and hang up."""
        self._out.put(None)
        self._writer.join(FLUSH_S)
        self._closing.set()
        if (channel := self._channel) is not None:
            channel.close()

    @property
    def idle(self) -> bool:
        """Whether everything was said that can be."""
        return self._out.empty() or self._channel is None

    # --- what is said ---------------------------------------------------------------------------

    def report(self, step: int, serial: int, rank: int, part: RankOutcome) -> None:
        """A rank of this machine has its part."""
        if part.error:
            part = RankOutcome(
                error=part.error[:ERROR_MAX], void=part.void[:VOID_MAX], by_storage=part.by_storage
            )
        message = protocol.PartReport(step=step, serial=serial, rank=rank)
        self._out.put((message, msgspec.json.encode(part)))

    def want(self, step: int, serial: int) -> None:
        """Ask for the manifest of a save."""
        self._out.put((protocol.WantManifest(step=step, serial=serial), b""))

    def done(self, serial: int) -> None:
        """Nothing more is needed for this save."""
        self._out.put((protocol.OutcomeTaken(serial=serial), b""))

    def bring(self, word: protocol.Brought) -> None:
        """Say what becomes of this machine's files in a slower tier."""
        self._out.put((word, b""))

    def tell(self, ended: wire.SaveEnded, manifest: bytes, to: object = None) -> None:
        """It is rank 0's keeper that tells."""

    def detail(self, step: int, serial: int, rank: int, groups: Iterable[str]) -> bool:
        """It is rank 0's keeper that asks."""
        return False

    # --- threads --------------------------------------------------------------------------------

    def _write(self) -> None:
        while True:
            try:
                item = self._out.get(timeout=LOOK_S)
            except queue.Empty:
                self._look()
                continue
            if item is None:
                return
            if (channel := self._channel) is None:
                continue  # it is said again once there is a connection
            try:
                protocol.say(channel, item[0], [item[1]] if item[1] else ())
            except OSError as error:
                logger.info("%s: %s", channel.peer, error)
                channel.close()  # whoever receives from it makes another

    def _look(self) -> None:
        """Whether what has been reported may still be answered."""
        now_s = time.monotonic()
        channel = self._channel
        if channel is None:
            if now_s - self._lost_s > LOST_S:
                self._hears.left_alone(self.attempt, LEADER_LOST)
        elif not self._hears.unanswered(self.attempt):
            self._heard_s = now_s
        elif now_s - self._heard_s > SILENT_S:
            self._hears.left_alone(self.attempt, LEADER_SILENT)
            channel.close()

    def _run(self) -> None:
        pause_s = PAUSE_S
        while not self._closing.is_set():
            try:
                channel = connect(
                    self._address,
                    self._key(),
                    protocol.SAVING,
                    protocol.CONNECT_S,
                    silence_s=protocol.SILENCE_S,
                    tls=self._tls,
                )
            except (OSError, OutlastError) as error:
                logger.info("%s: %s", LEADER_LOST, error)
                if isinstance(error, ConnectionRefusedError) and self._hears.is_past(self.attempt):
                    self._hears.left_alone(self.attempt, LEADER_GONE)
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
                continue
            pause_s = PAUSE_S
            try:
                self._talk(channel)
            except (OSError, OutlastError, ValueError) as error:
                logger.info("%s: %s", LEADER_LOST, error)
            except Exception:
                logger.exception("the connection to the keeper of rank 0 is given up")
            finally:
                self._channel, self._lost_s = None, time.monotonic()
                channel.close()
            self._closing.wait(PAUSE_S)

    def _talk(self, channel: Channel) -> None:
        protocol.say(channel, self._join)
        self._heard_s = time.monotonic()
        self._channel = channel
        for step, serial, rank, part in self._hears.unanswered(self.attempt):
            self.report(step, serial, rank, part)
        for word in self._said.of(self.attempt):
            self.bring(word)
        while not self._closing.is_set() and (message := protocol.hear(channel)) is not None:
            self._heard(channel, message)
            self._heard_s = time.monotonic()

    def _heard(self, channel: Channel, message: protocol.Message) -> None:
        match message:
            case protocol.SaveOutcome():
                data = protocol.take_bulk(channel, protocol.SMALL_BYTES_MAX)
                void = msgspec.msgpack.decode(data, type=tuple[str, ...]) if data else ()
                self._hears.decided(self._hello, message, void)
            case protocol.Root():
                data = protocol.take_bulk(channel, protocol.SMALL_BYTES_MAX)
                self._hears.given(self.attempt, message, bytes(data))
            case protocol.Detail():
                found = msgspec.msgpack.encode(self._hears.digests_of(self.attempt, message))
                answer = protocol.Digests(
                    step=message.step, serial=message.serial, rank=message.rank
                )
                self._out.put((answer, found))
            case protocol.KeeperBeat():
                self._out.put((protocol.KeeperBeat(moves=self._hears.moves(self.attempt)), b""))
            case _:
                raise protocol.out_of_turn(channel, message)


# This machine's part in a save of ranks on several machines; nothing of it waits.
Side = SaveLeader | SaveFollower


class SharedSaves:
    """This machine's conversations about saves, one for each attempt.

    Args:
        saves: those in flight.
        peers: knows the job's key, where an agent has given one.
        record: puts an event into the ledger.
    """

    def __init__(
        self,
        saves: SavesInFlight,
        peers: Peers,
        *,
        record: Callable[..., None],
    ) -> None:
        self._saves = saves
        self._peers = peers
        self._record = record
        self._sides: set[SaveLeader | SaveFollower] = set()
        self._said = WordsSaid()
        self._lock = threading.Lock()

    def lead(self, hello: wire.Hello, message: wire.Lead, key: bytes, fd: int) -> None:
        """Rank 0 is on this machine: listen for the others."""
        side = SaveLeader(
            socket.socket(fileno=fd),
            lambda: self._of_both(key),
            tls_of(message.tls),
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
        side = SaveFollower(
            (message.host, message.port),
            lambda: self._of_both(key),
            tls_of(message.tls),
            self._saves,
            hello=hello,
            said=self._said,
        )
        self._meet(hello.attempt, side)

    def bring(self, save: SaveName, word: protocol.Brought) -> None:
        """Say what becomes of this machine's files in a slower tier."""
        self._said.note(save.attempt, word)
        for side in self._of(save.attempt):
            if isinstance(side, SaveFollower):
                side.bring(word)

    def arrived(self, save: SaveName, tier: str) -> Arrived | None:
        """What is known of other machines' files in a slower tier; None: they cannot be asked."""
        for side in self._of(save.attempt):
            if isinstance(side, SaveLeader):
                return side.arrived(tier, save.serial)
        return None

    def _of(self, attempt: int) -> list[SaveLeader | SaveFollower]:
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

    def _meet(self, attempt: int, side: SaveLeader | SaveFollower) -> None:
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
        job_key = self._peers.key
        return hashlib.blake2b(key, key=job_key, digest_size=32).digest() if job_key else key
