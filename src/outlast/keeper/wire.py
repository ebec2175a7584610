"""What is said over the keeper's socket: framed messages, some with file descriptors.

A frame is twelve bytes (lengths of the JSON and of what follows it, number of descriptors) and both
parts. JSON carries the message, the rest carries bytes that would only be blown up by it. Nothing
that arrives can be decoded into anything but the structs below.

Both ends are of one :func:`version`: it is part of the socket's name, so that an Outlast that was
upgraded and a keeper of before, which still runs, never meet. It follows from the messages
themselves; a number that somebody has to raise is forgotten once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
import threading
from typing import Any, Final

import msgspec
import xxhash

from outlast.checkpoint.manifest import Contents, TensorEntry
from outlast.keeper import descriptors
from outlast.policy.rollbacks import Rollback

_HEAD: Final = struct.Struct("<III")
MAX_FRAME: Final = 1 << 30
SEND_TIMEOUT_S: Final = 20
SEND_BUFFER_BYTES: Final = 4 << 20
NO_NONCE: Final = "00000000"
# What the messages' fields do not show: the frame, and how an arena is filled. Raised by hand.
_MEANING: Final = 1
_WORDS: Final = frozenset({"title", "description"})  # of a schema: for people


class _WireMessage(msgspec.Struct, kw_only=True, tag=True):
    """What all messages have in common: the class's name says what they are."""


class Hello(_WireMessage):
    """A worker, or with ``rank`` None a supervisor that holds the memory, introduces itself.

    ``nonce`` is the session's, the same on all ranks: part of the names of its saves. ``term`` has
    formed the attempt, where no supervisor says so (see ``Members``). ``num_local`` ranks from
    ``first_local`` on are this machine's; None: all of them.
    """

    job: str
    attempt: int = 0
    nonce: str = NO_NONCE
    rank: int | None = None
    world_size: int = 1
    term: str = msgspec.field(default="", name="reign")
    first_local: int = 0
    num_local: int | None = None

    @property
    def local(self) -> range:
        """The ranks of this machine."""
        count = self.world_size if self.num_local is None else self.num_local
        return range(self.first_local, self.first_local + count)


class Recall(_WireMessage):
    """Asks for the committed snapshots in memory, once nothing of earlier attempts is in flight."""


class Serve(_WireMessage):
    """From a supervisor: talk to other machines' keepers, as ``node``.

    A listening socket comes with the frame, whose bytes are the job's key. ``tls`` are the files of
    ``[peer]``: certificate, key, authority.
    """

    node: str
    tls: tuple[str, str, str] | None = None


class PeerMachine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of an attempt: its name, where its keeper listens, and its labels (zone, …)."""

    node: str
    host: str
    port: int
    labels: dict[str, str] = {}

    def __hash__(self) -> int:
        return hash((self.node, self.host, self.port))


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that is given up for lost: the ranks that it had in an attempt before."""

    attempt: int
    first: int
    count: int


class Members(_WireMessage):
    """From a supervisor: the machines of an attempt that this one takes part in.

    ``term`` has formed it; ``members`` are empty where this keeper does not talk to others.
    ``lost`` are machines of the attempt before it.
    """

    attempt: int
    term: str = msgspec.field(default="", name="reign")
    members: tuple[PeerMachine, ...] = ()
    lost: tuple[Lost, ...] = ()


class MembersKnown(_WireMessage, tag="Told"):
    """To a supervisor: the members of this attempt are known from here on."""

    attempt: int


class Reserve(_WireMessage):
    """Asks for memory for this rank's snapshots: ``num_bytes`` each, one of ``workers`` here.

    ``buffers`` are what the owner has set; without that there are up to ``useful``.
    """

    num_bytes: int
    buffers: int | None
    useful: int = 1
    workers: int = 1


class Rejected(_WireMessage):
    """Names of saves that a resume has found not to be valid."""

    saves: tuple[str, ...]


class Judged(_WireMessage):
    """What is known of the job's checkpoints; it replaces what was said before.

    Attributes:
        healthy: steps that were seen to be healthy; None where nobody watches.
        rollbacks: what was undone.
    """

    healthy: tuple[int, ...] | None
    rollbacks: tuple[Rollback, ...] = ()


class Layout(_WireMessage):
    """How a rank's shard file is made up; the frame's bytes are the file's header.

    ``tensors`` says so in a job of one rank, ``contents`` where there are several, with what else
    the rank holds. ``num_elements`` is how many elements all ranks together must write of tensors
    that are nobody's own, 0 where that is not known: rank 0 says it.
    ``groups`` says of each piece that other ranks hold too which ranks these are: pieces of one
    group are held by the same ranks, and a group has the same name on all of them.
    """

    number: int
    size: int
    tensors: dict[str, TensorEntry] = {}
    contents: Contents = Contents()
    num_elements: int = 0
    groups: dict[str, str] = {}


class BeginSave(_WireMessage, tag="Begin"):
    """A snapshot begins to be copied into ``arena``; what was there before is gone.

    ``started_s`` is the monotonic time at which the loop was stopped for it; ``tiers`` are those it
    is for, None for all.
    """

    step: int
    serial: int
    layout: int
    arena: int
    tiers: tuple[str, ...] | None
    kind: str
    exact: bool
    started_s: float


class BlocksReady(_WireMessage, tag="Ready"):
    """Blocks of the file are complete in the arena."""

    step: int
    serial: int
    blocks: tuple[int, ...]


class Complete(_WireMessage):
    """The snapshot is whole; the frame's bytes are the rank's small state.

    ``digests`` are those of the tensors that other ranks hold too, written here or not.
    """

    step: int
    serial: int
    digests: dict[str, str]


class Void(_WireMessage):
    """The snapshot must not be believed; ``names`` are the tensors that changed under the copy."""

    step: int
    serial: int
    reason: str
    names: tuple[str, ...] = ()


class Absent(_WireMessage):
    """This rank has no snapshot to give to a save that all have agreed on.

    With ``names`` it is void (an empty name: the structure has changed) and to be taken again.
    ``is_told``: the ledger has it already.
    """

    step: int
    serial: int
    reason: str
    names: tuple[str, ...] = ()
    is_told: bool = False


class Lead(_WireMessage):
    """From rank 0: the other machines' keepers report their ranks' parts to this one.

    A listening socket comes with the frame, whose bytes are the key of this session. ``tls`` are
    the files of ``[peer]``: certificate, key, authority.
    """

    tls: tuple[str, str, str] | None = None


class Follow(_WireMessage):
    """From another machine's first rank: the keeper of rank 0 is there.

    The frame's bytes are the key of this session; ``tls`` as above.
    """

    host: str
    port: int
    tls: tuple[str, str, str] | None = None


class Goodbye(_WireMessage, tag="Bye"):
    """This end leaves on purpose; a supervisor's word that the job is over carries a deadline."""

    over: bool = False
    deadline_s: float | None = None


class Fetch(_WireMessage):
    """Asks for bytes of a file in a tier that only the keeper may touch."""

    number: int
    tier: str
    operation: str
    name: str
    start: int = 0
    size: int = 0


class Fetched(_WireMessage):
    """The answer; the frame's bytes are the file's, or JSON for other operations."""

    number: int
    error: str = ""
    errno: int = 0


class Reserved(_WireMessage):
    """Memory for snapshots; one descriptor for each arena comes with the frame.

    With ``ring_bytes`` the arenas hold only that much: a snapshot goes through block by block. In
    ``alone`` lies the newest snapshot, which no tier has; -1: there is none.
    """

    arenas: tuple[int, ...]
    num_bytes: int
    ring_bytes: int
    words: str
    alone: int = -1


class BlockWritten(_WireMessage, tag="Written"):
    """A block of a ring was written: its place is free again."""

    step: int
    serial: int
    block: int


class SaveEnded(_WireMessage, tag="Ended"):
    """A save is over: committed if ``error`` is "", to the durable ``tier`` or to memory alone.

    ``void`` names tensors that made it so; it is then to be taken again. ``by_storage``: the error
    is the storage's.
    """

    step: int
    serial: int
    error: str = ""
    void: tuple[str, ...] = ()
    by_storage: bool = False
    tier: str = ""
    num_bytes: int = 0
    num_files: int = 0
    timings: dict[str, float] = {}


class Recalled(_WireMessage):
    """Committed snapshots in memory: name of the save → file → (arena, bytes).

    The descriptors of the arenas come with the frame, in the order of ``arenas``. Its bytes are
    MessagePack: name of the save → small files. ``num_peers`` says how many other machines' memory
    can be asked.
    """

    arenas: tuple[int, ...]
    files: dict[str, dict[str, tuple[int, int]]]
    num_peers: int = 0


class RecallWaits(_WireMessage, tag="Waits"):
    """To a worker that has sent Recall: one line for people, what took long and what is done."""

    words: str


class Hold(_WireMessage):
    """To a supervisor: keep this descriptor (it comes with the frame) under ``arena``."""

    arena: int


class Drop(_WireMessage):
    """To a supervisor: close the descriptor kept under ``arena``."""

    arena: int


class CopyProgress(_WireMessage, tag="Progress"):
    """To a supervisor that waits for the end: what is still being copied."""

    words: str
    done_bytes: int
    total_bytes: int


Message = (
    Hello
    | Recall
    | Serve
    | Members
    | MembersKnown
    | Reserve
    | Rejected
    | Judged
    | Layout
    | BeginSave
    | BlocksReady
    | Complete
    | Void
    | Absent
    | Lead
    | Follow
    | Goodbye
    | Fetch
    | Fetched
    | Reserved
    | BlockWritten
    | SaveEnded
    | Recalled
    | RecallWaits
    | Hold
    | Drop
    | CopyProgress
)
ABOUT_SAVES: Final = (BeginSave, Absent, BlocksReady, Complete, Void)
_decoder = msgspec.json.Decoder(Message)


@functools.cache
def version() -> str:
    """Eight hexadecimal digits: the same for all who understand each other's messages."""
    schema = msgspec.json.schema_components([Message])
    form = msgspec.json.encode([_MEANING, _without_words(schema)], order="sorted")
    return xxhash.xxh32_hexdigest(form)


def _without_words(schema: Any) -> Any:
    """A JSON schema without what only people read."""
    if isinstance(schema, dict):
        is_word = {name for name in _WORDS & schema.keys() if isinstance(schema[name], str)}
        return {
            str(name): _without_words(value)
            for name, value in schema.items()
            if name not in is_word
        }
    if isinstance(schema, list | tuple):
        return [_without_words(one) for one in schema]
    return schema


class KeeperSocket:
    """One end of a connection. ``send`` may be called by several threads, ``receive`` by one."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        # Nobody waits for an end that does not read, least of all a training loop.
        limit = struct.pack("ll", SEND_TIMEOUT_S, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._sending = threading.Lock()
        self._fds: list[int] = []
        self._buffer = bytearray()

    def send(self, message: Any, blob: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Send one frame.

        Raises:
            OSError: the other end is gone.
        """
        text = msgspec.json.encode(message)
        data = _HEAD.pack(len(text), len(blob), len(fds)) + text
        with self._sending:
            descriptors.send(self.sock, data, fds)
            if blob:
                self.sock.sendall(blob)

    def receive(self) -> tuple[Any, bytes, list[int]] | None:
        """The next frame with its bytes and descriptors; None when the other end is gone.

        Raises:
            ValueError: what came is not a message.
        """
        head = self._take(_HEAD.size)
        if head is None:
            return None
        length, extra, num_fds = _HEAD.unpack(head)
        if length + extra > MAX_FRAME:
            raise ValueError(f"a message of {length + extra} bytes")
        text, blob = self._take(length), self._take(extra)
        if text is None or blob is None:
            return None
        # Descriptors come no later than their frame's first byte, but perhaps with an earlier one.
        if len(self._fds) < num_fds:
            raise ValueError("a message without its descriptors")
        try:
            message = _decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(str(error)) from None
        fds, self._fds = self._fds[:num_fds], self._fds[num_fds:]
        return message, blob, fds

    def close(self) -> None:
        """Let go; a thread that waits in ``receive`` is woken, and closes what nobody took."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def drop_descriptors(self) -> None:
        """Close what came with no message; for the thread that receives, at its end."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)

    def _take(self, size: int) -> bytes | None:
        while len(self._buffer) < size:
            try:
                data, fds = descriptors.receive(self.sock)
            except OSError:
                return None
            self._fds += fds
            if not data:
                return None
            self._buffer += data
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken
