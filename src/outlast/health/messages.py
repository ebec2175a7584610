"""What an agent and its watcher say to each other, over a socket that keeps messages apart.

=========  ==============  =====================================================================
who        message         meaning
=========  ==============  =====================================================================
agent      ``Begin``       workers have started: watch them
agent      ``End``         the attempt is over, or is being ended: look away
watcher    ``Alive``       about once a second; without it for long the watcher is replaced
watcher    ``Learned``     what a symptom knows and a successor must not lose
watcher    ``Suspicion``   workers have made no progress for their limit, and this is how they look
agent      ``Ask``         another machine suspects: how do the workers here look?
watcher    ``Evidence``    so
watcher    ``Timings``     what this machine's workers' newest steps were spent on
watcher    ``Gap``         a symptom has failed, and was not looked for
=========  ==============  =====================================================================

Every message is a struct whose class's name is its tag; unknown ones are refused.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Final

import msgspec

from outlast import ipc
from outlast.policy.hang import HangSettings, RankLook

MAX_BYTES: Final = 1 << 20  # as they come; the kernel takes some 400 KiB at once
PACK_BYTES: Final = 1 << 14  # from here on they are packed: stacks of many ranks are much alike
_PACKED: Final = b"z"  # no struct's encoding begins so
SEND_BUFFER_BYTES: Final = 1 << 20
State = dict[str, list[float]]


class WatchedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of this machine."""

    local_rank: int
    rank: int
    pid: int


class Begin(ipc.Message):
    """Workers have started.

    Attributes:
        attempt: its number.
        node: the machine's name.
        beats: the agent's private directory.
        world_size: workers of all machines.
        workers: of this machine.
        hang: how long workers may be without progress; None where nobody wants to know.
        learned: symptom → what it said last.
    """

    attempt: int
    node: str
    beats: str
    world_size: int
    workers: tuple[WatchedWorker, ...]
    hang: HangSettings | None = None
    learned: dict[str, State] = msgspec.field(default_factory=dict)


class End(ipc.Message):
    """Nothing is to be watched until the next ``Begin``."""


class Alive(ipc.Message):
    """The watcher runs."""


class Learned(ipc.Message):
    """What ``symptom`` has learned so far, of the attempt with this number."""

    symptom: str
    attempt: int
    state: State


class Suspicion(ipc.Message):
    """All workers of this machine, of which some have made no progress for their limit."""

    attempt: int
    seen: tuple[RankLook, ...]


class Ask(ipc.Message):
    """How do the workers look now? ``number`` comes back in the answer."""

    number: int


class Evidence(ipc.Message):
    """All workers of this machine."""

    attempt: int
    number: int
    seen: tuple[RankLook, ...]


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """The newest steps of some workers, who tell the same ones: in thousands, one word is cheaper.

    Attributes:
        ranks: whose.
        kinds: of each the number of its kind of work.
        steps: their numbers, ascending: 8 bytes each, in this machine's order.
        seconds: of each rank, of each step its compute, wait, data and stall: 4 bytes each.
    """

    ranks: tuple[int, ...]
    kinds: tuple[int, ...]
    steps: bytes
    seconds: bytes


class Timings(ipc.Message):
    """The newest steps of this machine's workers, those that were told before included.

    Attributes:
        attempt: its number.
        node: the machine's name.
        ranks: of the workers that have said something, each once.
    """

    attempt: int
    node: str
    ranks: tuple[Times, ...]


class Gap(ipc.Message):
    """For so long, up to now, nobody has looked for ``symptom``."""

    symptom: str
    reason: str
    seconds: float


FromAgent = Begin | End | Ask
FromWatcher = Alive | Learned | Suspicion | Evidence | Timings | Gap


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends, for the agent and for its watcher."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return ends


class Voice(ipc.PacketSocket):
    """One end of it."""

    codec = ipc.Codec(
        FromAgent | FromWatcher, msgspec.msgpack, pack_over=PACK_BYTES - 1, mark=_PACKED
    )
    max_bytes = MAX_BYTES
    waits = False
