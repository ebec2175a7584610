"""What is said over the keeper's socket: framed messages, some with file descriptors.

JSON carries the message. Bytes that JSON would only blow up follow it in the same frame (see
:mod:`outlast.ipc`).

Both ends are of one :func:`version`: it is part of the socket's name, so that an Outlast that was
upgraded and a keeper of before, which still runs, never meet. It follows from the messages
themselves; a number that somebody has to raise is forgotten once.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import msgspec
import xxhash

from outlast import ipc
from outlast.checkpoint.manifest import Contents, TensorEntry
from outlast.policy.rollbacks import Rollback

NO_NONCE: Final = "00000000"
# What the messages' fields do not show: the frame, and how an arena is filled. Raised by hand.
_MEANING: Final = 1
_WORDS: Final = frozenset({"title", "description"})  # of a schema: for people


class Hello(ipc.Message):
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


class Recall(ipc.Message):
    """Asks for the committed snapshots in memory, once nothing of earlier attempts is in flight."""


class Serve(ipc.Message):
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


class Members(ipc.Message):
    """From a supervisor: the machines of an attempt that this one takes part in.

    ``term`` has formed it; ``members`` are empty where this keeper does not talk to others.
    ``lost`` are machines of the attempt before it.
    """

    attempt: int
    term: str = msgspec.field(default="", name="reign")
    members: tuple[PeerMachine, ...] = ()
    lost: tuple[Lost, ...] = ()


class MembersKnown(ipc.Message, tag="Told"):
    """To a supervisor: the members of this attempt are known from here on."""

    attempt: int


class Reserve(ipc.Message):
    """Asks for memory for this rank's snapshots: ``num_bytes`` each, one of ``workers`` here.

    ``buffers`` are what the owner has set; without that there are up to ``useful``. ``versions``
    of the newest snapshots here are not given back for it, as long as there is memory; there must
    be room for ``copies`` snapshots of other machines besides.
    """

    num_bytes: int
    buffers: int | None
    useful: int = 1
    workers: int = 1
    versions: int = 1
    copies: int = 0


class Rejected(ipc.Message):
    """Names of saves that a resume has found not to be valid."""

    saves: tuple[str, ...]


class Judged(ipc.Message):
    """What is known of the job's checkpoints; it replaces what was said before.

    Attributes:
        healthy: steps that were seen to be healthy; None where nobody watches.
        rollbacks: what was undone.
    """

    healthy: tuple[int, ...] | None
    rollbacks: tuple[Rollback, ...] = ()


class Layout(ipc.Message):
    """How a rank's shard file is made up; the frame's bytes are the file's header.

    ``tensors`` says so in a job of one rank, ``contents`` where there are several, with what else
    the rank holds. ``num_elements`` is how many elements all ranks together must write of tensors
    that are nobody's own, 0 where that is not known: rank 0 says it.
    ``groups`` says of each piece that other ranks hold too which ranks these are: pieces of one
    group are held by the same ranks, and a group has the same name on all of them.
    """

    number: int
    size: int
    tensors: dict[str, TensorEntry] = msgspec.field(default_factory=dict)
    contents: Contents = Contents()
    num_elements: int = 0
    groups: dict[str, str] = msgspec.field(default_factory=dict)


class BeginSave(ipc.Message, tag="Begin"):
    """A snapshot begins to be copied into ``arena``; what was there before is gone.

    ``started_s`` is the monotonic time at which the loop was stopped for it; ``tiers`` are those it
    is for, None for all. ``each_step``: training waits for it and for its copies elsewhere.
    """

    step: int
    serial: int
    layout: int
    arena: int
    tiers: tuple[str, ...] | None
    kind: str
    exact: bool
    started_s: float
    each_step: bool = False


class BlocksReady(ipc.Message, tag="Ready"):
    """Blocks of the file are complete in the arena."""

    step: int
    serial: int
    blocks: tuple[int, ...]


class Complete(ipc.Message):
    """The snapshot is whole; the frame's bytes are the rank's small state.

    ``digests`` are those of the tensors that other ranks hold too, written here or not.
    """

    step: int
    serial: int
    digests: dict[str, str]


class Void(ipc.Message):
    """The snapshot must not be believed; ``names`` are the tensors that changed under the copy."""

    step: int
    serial: int
    reason: str
    names: tuple[str, ...] = ()


class Absent(ipc.Message):
    """This rank has no snapshot to give to a save that all have agreed on.

    With ``names`` it is void (an empty name: the structure has changed) and to be taken again.
    ``is_told``: the ledger has it already.
    """

    step: int
    serial: int
    reason: str
    names: tuple[str, ...] = ()
    is_told: bool = False


class Lead(ipc.Message):
    """From rank 0: the other machines' keepers report their ranks' parts to this one.

    A listening socket comes with the frame, whose bytes are the key of this session. ``tls`` are
    the files of ``[peer]``: certificate, key, authority.
    """

    tls: tuple[str, str, str] | None = None


class Follow(ipc.Message):
    """From another machine's first rank: the keeper of rank 0 is there.

    The frame's bytes are the key of this session; ``tls`` as above.
    """

    host: str
    port: int
    tls: tuple[str, str, str] | None = None


class Goodbye(ipc.Message, tag="Bye"):
    """This end leaves on purpose; a supervisor's word that the job is over carries a deadline."""

    over: bool = False
    deadline_s: float | None = None


class Fetch(ipc.Message):
    """Asks for bytes of a file in a tier that only the keeper may touch."""

    number: int
    tier: str
    operation: str
    name: str
    start: int = 0
    size: int = 0
    copy: int = 0  # of those that other machines have, the one to be asked first


class Fetched(ipc.Message):
    """The answer; the frame's bytes are the file's, or JSON for other operations."""

    number: int
    error: str = ""
    errno: int = 0


class Reserved(ipc.Message):
    """Memory for snapshots; one descriptor for each arena comes with the frame.

    With ``ring_bytes`` the arenas hold only that much: a snapshot goes through block by block. In
    ``alone`` lies the newest snapshot, which no tier has; -1: there is none.
    """

    arenas: tuple[int, ...]
    num_bytes: int
    ring_bytes: int
    words: str
    alone: int = -1


class BlockWritten(ipc.Message, tag="Written"):
    """A block of a ring was written: its place is free again."""

    step: int
    serial: int
    block: int


class SaveEnded(ipc.Message, tag="Ended"):
    """A save is over: committed if ``error`` is "", to the durable ``tier`` or to memory alone.

    ``void`` names tensors that made it so; it is then to be taken again. ``by_storage``: the error
    is the storage's. ``held`` is the number of the newest save of the attempt that was copied from
    every machine when this one was made, 0 for none; see ``BeginSave.each_step``.
    """

    step: int
    serial: int
    error: str = ""
    void: tuple[str, ...] = ()
    by_storage: bool = False
    tier: str = ""
    held: int = 0
    num_bytes: int = 0
    num_files: int = 0
    timings: dict[str, float] = msgspec.field(default_factory=dict)


class CopyMade(ipc.Message, tag="Elsewhere"):
    """Other machines hold this machine's part of a save, or why they do not (``reason``).

    ``num`` machines hold it: 0 with a reason, or where this machine is to leave no copies.
    """

    step: int
    serial: int
    num: int = 0
    reason: str = ""


class Recalled(ipc.Message):
    """Committed snapshots in memory: name of the save → file → (arena, bytes).

    The descriptors of the arenas come with the frame, in the order of ``arenas``. Its bytes are
    MessagePack: name of the save → small files. ``num_peers`` says how many other machines' memory
    can be asked.
    """

    arenas: tuple[int, ...]
    files: dict[str, dict[str, tuple[int, int]]]
    num_peers: int = 0


class RecallWaits(ipc.Message, tag="Waits"):
    """To a worker that has sent Recall: one line for people, what took long and what is done."""

    words: str


class Hold(ipc.Message):
    """To a supervisor: keep this descriptor (it comes with the frame) under ``arena``."""

    arena: int


class Drop(ipc.Message):
    """To a supervisor: close the descriptor kept under ``arena``."""

    arena: int


class CopyProgress(ipc.Message, tag="Progress"):
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
    | CopyMade
    | Recalled
    | RecallWaits
    | Hold
    | Drop
    | CopyProgress
)
ABOUT_SAVES: Final = (BeginSave, Absent, BlocksReady, Complete, Void)


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


class KeeperSocket(ipc.FrameSocket):
    """One end of the keeper's socket."""

    codec = ipc.Codec(Message)
    max_bytes = 1 << 30
    has_bulk = True
