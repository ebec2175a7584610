"""The peer protocol: what keepers of several machines say to each other, over sealed channels.

One side connects and asks or tells, and the other answers. JSON carries the message, bulk bytes
carry the files. Nothing that arrives can be decoded into anything but the structs below.

A door is the listening side: each connection is served in a thread of its own. Their number is
bounded; a stranger gets no further than the handshake, and is named once in the log and the ledger.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from outlast import ipc
from outlast.errors import CutShort, SealError
from outlast.peer import Channel, Tls, accept

logger = logging.getLogger(__name__)

PURPOSE: Final = "keeper"
SAVING: Final = "keeper/saves"
CONNECT_S: Final = 5.0
SILENCE_S: Final = 10.0  # without an acknowledgement from the other machine's kernel
ANSWER_S: Final = 120.0
LATER_S: Final = 1.0  # between two words that it has not ended yet
QUIET_S: Final = 5.0  # without a word, after which a keeper is not asked any more
PATIENCE_S: Final = 20.0  # with nothing but words that it has not ended
SMALL_BYTES_MAX: Final = 1 << 28  # manifest and small states of a snapshot
HANDSHAKE_S: Final = 10.0
TELL_EVERY_S: Final = 60.0  # the same refusal of the same host again
MAX_TOLD: Final = 256


class ReplicaOffer(ipc.Message, tag="Offer"):
    """A snapshot of ``node`` to be kept; its small files follow as bulk, one behind the other.

    ``files`` and ``small`` are name → size in bytes. ``held`` is the number of the newest save of
    the same attempt that was copied from every machine: its copy is to stay.
    """

    node: str
    save: str
    files: dict[str, int]
    small: dict[str, int]
    held: int = 0


class ReplicaBlock(ipc.Message, tag="Block"):
    """A block of a file of the snapshot that was offered, as bulk."""

    file: str
    index: int


class ReplicaWhole(ipc.Message, tag="Whole"):
    """All blocks of the snapshot that was offered were sent."""


class Withdrawn(ipc.Message):
    """The rest does not come: the snapshot is not there any more."""


class ReplicaVerdict(ipc.Message, tag="Verdict"):
    """To ReplicaOffer: "send", "have" or "refused"; to ReplicaWhole: "have" or "refused"."""

    verdict: Literal["send", "have", "refused"]
    reason: str = ""


class List(ipc.Message):
    """Asks what is in memory, once nothing of attempts before this one is in flight."""

    attempt: int


class Later(ipc.Message):
    """To List: not yet, something of an earlier attempt is still in flight; wait."""


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """What is there of one save: its manifest's hash, and name → size."""

    manifest: str
    files: dict[str, int]


class Listing(ipc.Message):
    """What is in memory, by the names of saves: MessagePack, as bulk."""


class ReplicaRead(ipc.Message, tag="Read"):
    """Asks for ``size`` bytes of a file from byte ``start`` on."""

    save: str
    manifest: str
    file: str
    start: int
    size: int


class Data(ipc.Message):
    """The bytes, as bulk; or why there are none."""

    error: str = ""


# --- how a save ends (see ``shared_saves``) -------------------------------------------------------


class JoinAttempt(ipc.Message, tag="Join"):
    """To rank 0's keeper: this machine has these ranks of an attempt."""

    job: str
    attempt: int
    first: int
    count: int


class PartReport(ipc.Message, tag="Report"):
    """To rank 0's keeper: what one rank wrote; a RankOutcome as bulk."""

    step: int
    serial: int
    rank: int


class SaveOutcome(ipc.Message, tag="Outcome"):
    """From rank 0's keeper: how a save ended. Names of void tensors: MessagePack, as bulk.

    Of a commit, ``manifest`` is its hash, and ``size`` its bytes; ``held``: see ``wire.SaveEnded``.
    """

    step: int
    serial: int
    error: str = ""
    manifest: str = ""
    size: int = 0
    held: int = 0


class WantManifest(ipc.Message, tag="Want"):
    """To rank 0's keeper: the manifest of a save is not in a place that this machine sees."""

    step: int
    serial: int


class Root(ipc.Message):
    """The manifest, as bulk; none if it is not there any more."""

    step: int
    serial: int


class OutcomeTaken(ipc.Message, tag="Done"):
    """To rank 0's keeper: nothing more is needed of it for this save."""

    serial: int


class Detail(ipc.Message):
    """From rank 0's keeper: replicas differ; which digests has this rank in these groups?"""

    step: int
    serial: int
    rank: int
    groups: tuple[str, ...]


class Digests(ipc.Message):
    """The answer: piece → digest, MessagePack, as bulk."""

    step: int
    serial: int
    rank: int


class KeeperBeat(ipc.Message, tag="Beat"):
    """From rank 0's keeper, now and then while a save is in flight: are you there?

    The answer says of each save in flight there how often something of it has moved, and whether
    it waits for a worker's copy.
    """

    moves: dict[int, tuple[int, bool]] = msgspec.field(default_factory=dict)


class Brought(ipc.Message):
    """To rank 0's keeper: what becomes of this machine's files of a save in a slower tier.

    Said now and then while they are brought (``done`` bytes so far), and when they are there or
    do not come.
    """

    serial: int
    tier: str
    done: int = 0
    state: Literal["", "there", "never"] = ""
    reason: str = ""


Message = (
    ReplicaOffer
    | ReplicaBlock
    | ReplicaWhole
    | Withdrawn
    | ReplicaVerdict
    | List
    | Later
    | Listing
    | ReplicaRead
    | Data
    | JoinAttempt
    | PartReport
    | SaveOutcome
    | WantManifest
    | Root
    | OutcomeTaken
    | Detail
    | Digests
    | KeeperBeat
    | Brought
)
_codec: Final = ipc.Codec(Message)
_listing: Final = msgspec.msgpack.Decoder(dict[str, Listed])


def say(
    channel: Channel,
    message: Message,
    bulk: Iterable[bytes | memoryview] = (),
    pace: Callable[[int], None] | None = None,
) -> None:
    """Send a message.

    Raises:
        OSError: the other side is gone.
    """
    channel.send(_codec.encode(message), bulk, pace=pace)


def out_of_turn(channel: Channel, message: Any) -> ValueError:
    """The error of a message that nobody waits for."""
    return ValueError(f"{channel.peer} says {message.__struct_config__.tag} out of turn")


def hear(channel: Channel, timeout_s: float | None = None) -> Any:
    """The next message; None at the end.

    Raises:
        OSError, SealError: the other side is gone, or is not to be believed.
        ValueError: what came is not a message.
    """
    raw = channel.receive(timeout_s)
    if raw is None:
        return None
    try:
        return _codec.decode(raw)
    except ValueError as error:
        raise ValueError(f"{channel.peer} says what is not understood: {error}") from None


def ask(
    channel: Channel,
    message: Message,
    kind: type[Any],
    *,
    bulk: Iterable[bytes | memoryview] = (),
    timeout_s: float = ANSWER_S,
) -> Any:
    """Send a message and return its answer.

    Whoever answers Later is waited for once more, but not for ever.

    Raises:
        OSError, SealError: see :func:`hear`.
    """
    say(channel, message, bulk)
    answer = hear(channel, timeout_s)
    until_s = time.monotonic() + PATIENCE_S
    while isinstance(answer, Later):
        if time.monotonic() >= until_s:
            raise TimeoutError(f"{channel.peer} has something in flight that does not end")
        answer = hear(channel, timeout_s)
    if answer is None:
        raise ConnectionResetError(f"{channel.peer} left without an answer")
    if not isinstance(answer, kind):
        raise ConnectionAbortedError(
            f"{channel.peer} answers with a {answer.__struct_config__.tag}"
        )
    return answer


def take_bulk(channel: Channel, most: int) -> bytearray:
    """The bulk of the last message, of at most so many bytes.

    Raises:
        ValueError: it is larger.
    """
    if channel.bulk_bytes > most:
        raise ValueError(f"{channel.peer} sends {channel.bulk_bytes} bytes where {most} are taken")
    data = bytearray(channel.bulk_bytes)
    channel.receive_into(memoryview(data))
    return data


def decode_listing(data: bytes | bytearray) -> dict[str, Listed]:
    """What a Listing's bulk says.

    Raises:
        ValueError: nothing.
    """
    try:
        return _listing.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"a listing is not understood: {error}") from None


class Door:
    """The listening side of the peer protocol.

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
                silence_s=SILENCE_S,
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


def tls_of(files: tuple[str, str, str] | None) -> Tls | None:
    """The files of ``[peer]`` as a worker or a supervisor names them."""
    if files is None:
        return None
    cert, key, ca = map(Path, files)
    return Tls(cert=cert, key=key, ca=ca)
