"""What the agent and the server say to each other: framed messages, some with descriptors.

MessagePack and not JSON: arguments and environment are bytes in no particular encoding. Each end
is used by one thread.
"""

from __future__ import annotations

import msgspec

from outlast import ipc


class ForkedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that is to be forked.

    Attributes:
        arguments: of ``outlast.launch.worker``: [-m] SCRIPT [ARGUMENT…].
        command: the command line that a cold worker would have.
        environ: its complete environment.
        redirected: which of 1 and 2 go to a descriptor that comes along, in this order.
    """

    arguments: list[bytes]
    command: list[bytes]
    environ: dict[bytes, bytes]
    redirected: list[int]


class Start(ipc.Message):
    """To the server: fork these, with the descriptors of all of them in order."""

    workers: list[ForkedWorker]


class Script(ipc.Message):
    """To the server: import ahead what this script will import, as far as that is safe."""

    arguments: list[bytes]


class Reaped(ipc.Message):
    """To the server: the agent knows how these ended; their ids may be given out again."""

    pids: list[int]


class ServerReady(ipc.Message, tag="Ready"):
    """To the agent: everything is imported."""


class Started(ipc.Message):
    """To the agent: the workers' process ids, in the order they were asked for."""

    pids: list[int]


class ForkRefused(ipc.Message, tag="Refused"):
    """To the agent: a fork would not be a fresh start; ``reason`` completes "because"."""

    reason: str


class Exited(ipc.Message):
    """To the agent: a worker has ended, with a code as subprocess has it (negative: a signal)."""

    pid: int
    code: int


class Preloaded(ipc.Message):
    """To the agent: which of the script's imports are done, and why others are not."""

    modules: list[str]
    declined: dict[str, str]


Message = Start | Script | Reaped | ServerReady | Started | ForkRefused | Exited | Preloaded


class Wire(ipc.FrameSocket):
    """One end of the connection."""

    codec = ipc.Codec(Message, msgspec.msgpack)
    max_bytes = 1 << 28
