"""The end of a save on the other machines: this keeper goes to that of rank 0. See ``leader``.

Guarantees: what this machine's ranks have to say is said as soon as there is a connection, and
again over each new one, for as long as it counts. What has been reported and is not answered for
``leader.SILENT_S``, or for ``LOST_S`` without a connection, has failed: training goes on. So has
what was reported of an attempt that is over here, once nobody listens at rank 0's keeper's address:
only a session of that attempt could open the door again, and whoever resumes waits for this.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import msgspec

from outlast.errors import OutlastError
from outlast.keeper import parley, wire
from outlast.keeper.arrivals import Said
from outlast.keeper.commit import Part
from outlast.keeper.leader import SILENT_S
from outlast.peer import Channel, Tls, connect

logger = logging.getLogger(__name__)

LOST_S: Final = 10.0  # without a connection
PAUSE_S: Final = 0.2  # between two tries to connect
PAUSE_MAX_S: Final = 2.0
LOOK_S: Final = 1.0
FLUSH_S: Final = 2.0  # at the end, for what has yet to be said
VOID_MAX: Final = 256  # names of one rank that are passed on
ERROR_MAX: Final = 4096  # characters of an error
LOST: Final = "the keeper of rank 0 cannot be reached"
GONE: Final = "the keeper of rank 0 has ended, and so has the attempt"
SILENT: Final = f"the keeper of rank 0 has said nothing for {SILENT_S:.0f} s"


class Hears(Protocol):
    """Who acts on what rank 0's keeper says: see ``Saves``."""

    def unanswered(self, attempt: int) -> list[tuple[int, int, int, Part]]:
        """(step, serial, rank, part) of everything that has been reported and still counts."""

    def decided(self, hello: wire.Hello, message: parley.Outcome, void: tuple[str, ...]) -> None:
        """How a save ended."""

    def given(self, attempt: int, message: parley.Root, data: bytes) -> None:
        """The manifest that was asked for; b"" if there is none."""

    def digests_of(self, attempt: int, message: parley.Detail) -> dict[str, str]:
        """A rank's single digests in some groups."""

    def moves(self, attempt: int) -> dict[int, tuple[int, bool]]:
        """By save: how often something of it has moved; whether it waits for a worker."""

    def is_past(self, attempt: int) -> bool:
        """Whether a later attempt has asked for what is there."""

    def left_alone(self, attempt: int, words: str) -> None:
        """Nobody decides any more about what has been reported."""


class Follower:
    """This machine's side of an attempt whose rank 0 is elsewhere.

    Args:
        address: of rank 0's keeper.
        key: says what both sides must have.
        tls: files for TLS, or None.
        hears: acts on what it says.
        hello: says which attempt it is, and which ranks are this machine's.
        said: what has become of this machine's files in slower tiers; see ``arrivals``.
    """

    leads = False

    def __init__(
        self,
        address: tuple[str, int],
        key: Callable[[], bytes],
        tls: Tls | None,
        hears: Hears,
        *,
        hello: wire.Hello,
        said: Said,
    ) -> None:
        self._address = address
        self._key = key
        self._tls = tls
        self._hears = hears
        self._said = said
        self._hello, self.attempt = hello, hello.attempt
        self._join = parley.Join(
            job=hello.job,
            attempt=hello.attempt,
            first=hello.local.start,
            count=len(hello.local),
        )
        self._channel: Channel | None = None
        self._lost_s = time.monotonic()  # when there was a connection last
        self._heard_s = 0.0
        self._closing = threading.Event()
        self._out: queue.SimpleQueue[tuple[parley.Message, bytes] | None] = queue.SimpleQueue()
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

    def report(self, step: int, serial: int, rank: int, part: Part) -> None:
        """A rank of this machine has its part."""
        if part.error:
            part = Part(
                error=part.error[:ERROR_MAX], void=part.void[:VOID_MAX], by_storage=part.by_storage
            )
        message = parley.Report(step=step, serial=serial, rank=rank)
        self._out.put((message, msgspec.json.encode(part)))

    def want(self, step: int, serial: int) -> None:
        """Ask for the manifest of a save."""
        self._out.put((parley.Want(step=step, serial=serial), b""))

    def done(self, serial: int) -> None:
        """Nothing more is needed for this save."""
        self._out.put((parley.Done(serial=serial), b""))

    def bring(self, word: parley.Brought) -> None:
        """Say what becomes of this machine's files in a slower tier."""
        self._out.put((word, b""))

    def tell(self, ended: wire.Ended, manifest: bytes, to: object = None) -> None:
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
                parley.say(channel, item[0], [item[1]] if item[1] else ())
            except OSError as error:
                logger.info("%s: %s", channel.peer, error)
                channel.close()  # whoever receives from it makes another

    def _look(self) -> None:
        """Whether what has been reported may still be answered."""
        now_s = time.monotonic()
        channel = self._channel
        if channel is None:
            if now_s - self._lost_s > LOST_S:
                self._hears.left_alone(self.attempt, LOST)
        elif not self._hears.unanswered(self.attempt):
            self._heard_s = now_s
        elif now_s - self._heard_s > SILENT_S:
            self._hears.left_alone(self.attempt, SILENT)
            channel.close()

    def _run(self) -> None:
        pause_s = PAUSE_S
        while not self._closing.is_set():
            try:
                channel = connect(
                    self._address,
                    self._key(),
                    parley.SAVING,
                    parley.CONNECT_S,
                    silence_s=parley.SILENCE_S,
                    tls=self._tls,
                )
            except (OSError, OutlastError) as error:
                logger.info("%s: %s", LOST, error)
                if isinstance(error, ConnectionRefusedError) and self._hears.is_past(self.attempt):
                    self._hears.left_alone(self.attempt, GONE)
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
                continue
            pause_s = PAUSE_S
            try:
                self._talk(channel)
            except (OSError, OutlastError, ValueError) as error:
                logger.info("%s: %s", LOST, error)
            except Exception:
                logger.exception("the connection to the keeper of rank 0 is given up")
            finally:
                self._channel, self._lost_s = None, time.monotonic()
                channel.close()
            self._closing.wait(PAUSE_S)

    def _talk(self, channel: Channel) -> None:
        parley.say(channel, self._join)
        self._heard_s = time.monotonic()
        self._channel = channel
        for step, serial, rank, part in self._hears.unanswered(self.attempt):
            self.report(step, serial, rank, part)
        for word in self._said.of(self.attempt):
            self.bring(word)
        while not self._closing.is_set() and (message := parley.hear(channel)) is not None:
            self._heard(channel, message)
            self._heard_s = time.monotonic()

    def _heard(self, channel: Channel, message: parley.Message) -> None:
        match message:
            case parley.Outcome():
                data = parley.take_bulk(channel, parley.SMALL_BYTES_MAX)
                void = msgspec.msgpack.decode(data, type=tuple[str, ...]) if data else ()
                self._hears.decided(self._hello, message, void)
            case parley.Root():
                data = parley.take_bulk(channel, parley.SMALL_BYTES_MAX)
                self._hears.given(self.attempt, message, bytes(data))
            case parley.Detail():
                found = msgspec.msgpack.encode(self._hears.digests_of(self.attempt, message))
                answer = parley.Digests(step=message.step, serial=message.serial, rank=message.rank)
                self._out.put((answer, found))
            case parley.Beat():
                self._out.put((parley.Beat(moves=self._hears.moves(self.attempt)), b""))
            case _:
                raise parley.out_of_turn(channel, message)
