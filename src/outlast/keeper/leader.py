"""The end of a save on the machine of rank 0: other machines' keepers come here.

Each keeps one sealed connection for an attempt. It reports its ranks' parts, of a bounded size
each, and is told how each save ended; of a commit it is told the manifest's hash, and asks for the
manifest where it does not find it in a tier. No worker is needed for any of it.

Guarantees: no save waits for ever. A connection that ends fails what its machine has not reported
yet, at once; a keeper that does not answer for ``SILENT_S`` is cut off, with the same effect; of a
machine that answers, but where nothing moves, see ``Limits``. Whoever was cut off comes back,
reports again, and is told what became of each save meanwhile.

Rejected: a thread that polls all connections (a stalled one in the middle of a message would hold
up the others); sending the manifest to everybody (machines × ranks bytes through one machine,
although most see the tier that it lies in).
"""

from __future__ import annotations

import bisect
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

import msgspec
import xxhash

from outlast.errors import OutlastError
from outlast.keeper import parley, wire
from outlast.keeper.arrivals import Arrived, Heard
from outlast.keeper.commit import Part
from outlast.keeper.door import Door
from outlast.keeper.flight import Save
from outlast.peer import Channel, Tls

logger = logging.getLogger(__name__)

BEAT_S: Final = 5.0  # between two questions whether a machine's keeper is there
SILENT_S: Final = 20.0  # without an answer to them
OWED_S: Final = 30.0  # that this keeper stays for those who have yet to take in an outcome
LOOK_S: Final = 1.0
STRANGERS: Final = 64  # connections beyond one for each rank
PART_BYTES_MAX: Final = parley.SMALL_BYTES_MAX
GONE: Final = "its machine's keeper died before the commit; the older checkpoint stands"
SILENT: Final = f"its machine's keeper has not answered for {SILENT_S:.0f} s"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
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


class Hears(Protocol):
    """Who acts on what other machines say: see ``Saves``."""

    def reported(
        self, hello: wire.Hello, message: parley.Report, part: Part, source: object
    ) -> None:
        """A rank of another machine has its part."""

    def detailed(self, attempt: int, message: parley.Digests, digests: dict[str, str]) -> None:
        """A rank's single digests, which were asked for."""

    def machine_gone(self, attempt: int, ranks: range, words: str) -> None:
        """These ranks report nothing any more."""

    def manifest_of(self, attempt: int, serial: int) -> bytes:
        """The manifest of a save that was committed; b"" if it is not known any more."""

    def overdue(self, attempt: int, leader: Leader) -> bool:
        """Fail what has not moved for too long; whether anything of the attempt is in flight."""


class Member:
    """Another machine's keeper."""

    def __init__(self, channel: Channel, join: parley.Join) -> None:
        self.channel = channel
        self.ranks = range(join.first, join.first + join.count)
        self.heard_s = self.asked_s = time.monotonic()
        self.is_busy = False  # it is being sent a manifest: nothing else is to wait for that
        self.words = GONE
        self.moves: dict[int, tuple[int, bool]] = {}
        self.owed: dict[int, float] = {}  # serial → since when it has been told and not answered

    def say(self, message: parley.Message, bulk: bytes = b"") -> None:
        """Tell it; one that is gone is found by whoever receives from it."""
        try:
            parley.say(self.channel, message, [bulk] if bulk else ())
        except OSError as error:
            logger.info("%s: %s", self.channel.peer, error)


class Leader:
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
    limits = Limits()

    def __init__(
        self,
        listener: socket.socket,
        key: Callable[[], bytes],
        tls: Tls | None,
        hears: Hears,
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
        self._members: dict[int, Member] = {}  # by first rank
        self._firsts: list[int] = []  # sorted
        self._gone: dict[int, range] = {}  # whose keepers were there
        self._brought = Heard()
        self._closing = threading.Event()
        self._door = Door(
            listener,
            key,
            tls,
            purpose=parley.SAVING,
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

    def report(self, step: int, serial: int, rank: int, part: Part) -> None:
        """Nobody but this machine's keeper needs to know of its ranks' parts."""

    def want(self, step: int, serial: int) -> None:
        """The manifest is made here."""

    def done(self, serial: int) -> None:
        """Nobody waits for that."""

    def tell(self, ended: wire.Ended, manifest: bytes, to: object = None) -> None:
        """Tell all, or one of them, how a save ended. Not with the saves' lock held."""
        outcome = parley.Outcome(
            step=ended.step,
            serial=ended.serial,
            error=ended.error,
            manifest=xxhash.xxh3_128_hexdigest(manifest) if manifest else "",
            size=len(manifest),
        )
        void = msgspec.msgpack.encode(ended.void) if ended.void else b""
        with self._lock:
            members = [to] if isinstance(to, Member) else list(self._members.values())
            for member in members:
                member.owed[ended.serial] = time.monotonic()
        for member in members:
            member.say(outcome, void)

    def detail(self, step: int, serial: int, rank: int, groups: tuple[str, ...]) -> bool:
        """Ask for a rank's single digests; whether its machine can be asked."""
        member = self.member_of(rank)
        if member is not None:
            member.say(parley.Detail(step=step, serial=serial, rank=rank, groups=groups))
        return member is not None

    # --- what is known of them ------------------------------------------------------------------

    def member_of(self, rank: int) -> Member | None:
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
        join = parley.hear(channel, parley.CONNECT_S)
        if not isinstance(join, parley.Join) or (join.job, join.attempt) != (
            self._hello.job,
            self.attempt,
        ):
            raise ValueError(f"{channel.peer} does not belong to attempt {self.attempt}")
        member = Member(channel, join)
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
            while (message := parley.hear(channel)) is not None:
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

    def _heard(self, member: Member, message: parley.Message) -> None:
        channel = member.channel
        member.heard_s = time.monotonic()
        match message:
            case parley.Report() if message.rank in member.ranks:
                data = parley.take_bulk(channel, PART_BYTES_MAX)
                part = msgspec.json.decode(data, type=Part)
                self._hears.reported(self._hello, message, part, member)
            case parley.Digests() if message.rank in member.ranks:
                data = parley.take_bulk(channel, parley.SMALL_BYTES_MAX)
                digests = msgspec.msgpack.decode(data, type=dict[str, str])
                self._hears.detailed(self.attempt, message, digests)
            case parley.Want():
                root = self._hears.manifest_of(self.attempt, message.serial)
                member.is_busy = True
                try:
                    member.say(parley.Root(step=message.step, serial=message.serial), root)
                finally:
                    member.is_busy = False
            case parley.Done():
                with self._lock:
                    member.owed.pop(message.serial, None)
            case parley.Beat():
                member.moves = message.moves
            case parley.Brought():
                with self._lock:
                    self._brought.note(member.ranks, message)
            case _:
                raise parley.out_of_turn(channel, message)

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
                member.words = SILENT
                member.channel.close()
            else:
                member.say(parley.Beat())
