"""What agents say to each other. Nothing that arrives can become anything but these structs."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from outlast import ipc
from outlast.policy.exclusion import Exclusion

MEMBERS_MANY: Final = 64
PACK_BYTES: Final = 1 << 16


class Join(ipc.Message):
    """To the coordinator: here is a machine.

    Attributes:
        node: the agent's own name, unique for this process.
        host: its machine's name.
        address: where its hub listens, host:port.
        attempt: the largest attempt that it has heard of.
        workers: how many it runs.
        keeper: host and port where its keeper talks to others, or None.
        warming: it is not ready yet to start workers quickly.
        labels: zone, rack, pool, as far as known.
        knows: the fingerprint of the last attempt that it was in.
        fixed: the number of machines that the data were tied to in that attempt, or 0.
        script: what it runs, without the way to it; "" where that is not known.
        out: machines that are left out, as far as it has heard, for as long as is left.
    """

    node: str
    host: str
    address: str
    attempt: int
    knows: str = ""
    fixed: int = 0
    script: str = ""
    out: tuple[Exclusion, ...] = ()
    workers: int = 1
    keeper: tuple[str, int] | None = None
    warming: bool = False
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class Watch(ipc.Message):
    """To another machine of the attempt: this connection only shows that both can be reached."""

    node: str


class Ready(ipc.Message):
    """Its workers up to those of ``attempt`` have ended, or it never had any: it waits for Go.

    ``workers``: how many of it begin; 0: as many as it has joined with.
    """

    attempt: int = 0
    workers: int = 0


class Fill(ipc.Message):
    """More of its workers could begin now than train: a place was empty, and it could be taken."""


class Leaving(ipc.Message):
    """The machine has had notice."""


class Remains(ipc.Message):
    """It leaves later: its workers, which have yet to hand over, go into the next attempt.

    From the coordinator, to all: ``node`` does.
    """

    node: str = ""


class WorkersEnded(ipc.Message, tag="Ended"):
    """Its workers up to those of ``attempt`` have ended; it will be ready in a while."""

    attempt: int


class Exclude(ipc.Message, tag="LeaveOut"):
    """A machine is to be left out, see :class:`outlast.policy.exclusion.Exclusion`.

    Attributes:
        out: which one, and why.
        gentle: its workers may go on to a step's end.
    """

    out: Exclusion
    gentle: bool


class Readmit(ipc.Message, tag="LetIn"):
    """A machine that was left out may take part again. Both ways."""

    host: str


class Excluded(ipc.Message, tag="LeftOut"):
    """From the coordinator: so it is; ``goes``: enough others stay, so that it really goes."""

    out: Exclusion
    goes: bool


class Done(ipc.Message):
    """All its workers have finished their work."""


class Fixed(ipc.Message):
    """The job's data are tied to so many machines; 0: to no number any more. Both ways."""

    machines: int


class Needs(ipc.Message):
    """Workers that are asked to stop at a step's end were seen to need so many seconds for it."""

    seconds: float


class Bye(ipc.Message):
    """It goes, on purpose: its workers have ended.

    ``broke``: in the midst of a step, which the others' cannot end without them.
    """

    reason: str = "left"
    broke: bool = False


class Apart(ipc.Message):
    """The machine cannot reach ``other``."""

    other: str


class Together(ipc.Message):
    """The machine reaches ``other`` again."""

    other: str


class Finish(ipc.Message):
    """A machine asks that the job ends everywhere."""

    exit_code: int
    reason: str


class Welcome(ipc.Message):
    """From the coordinator: you are in; wait for Go. The job has ``min_nodes`` to ``max_nodes``.

    ``runs``: others train; what that means for this machine is said next (``Waits``).
    """

    node: str
    min_nodes: int
    max_nodes: int
    runs: bool = False


class Refused(ipc.Message):
    """From the coordinator: this machine was started for something else."""

    reason: str


class Referral(ipc.Message):
    """From one that does not coordinate: ``node`` does, at ``address``."""

    node: str
    address: str


class Halt(ipc.Message):
    """To an agent: end your workers (``gentle``: at a step's end) and get ready."""

    reason: str
    gentle: bool = False


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One machine of an attempt."""

    node: str
    host: str
    address: str
    workers: int = 1
    keeper: tuple[str, int] | None = None
    labels: dict[str, str] = {}


class Go(ipc.Message):
    """The attempt starts: your place is your place among ``members``; ``aside`` wait meanwhile.

    ``fixed``: the number of machines that the job's data are tied to, or 0.
    ``term`` is the coordinator's: what the attempt's claim must say for its keepers to commit.
    """

    attempt: int
    members: tuple[Member, ...]
    store: str
    aside: tuple[str, ...] = ()
    fixed: int = 0
    term: str = msgspec.field(default="", name="reign")


class GoOn(ipc.Message):
    """As Go, to those who have a list already: that list without ``gone``, then ``added``.

    ``before`` is that list's fingerprint: two attempts that never met may have the same number.
    What every machine is told about thousands of others is by far the most that is sent.
    """

    attempt: int
    before: str
    gone: tuple[str, ...]
    added: tuple[Member, ...]
    store: str
    aside: tuple[str, ...] = ()
    fixed: int = 0
    term: str = msgspec.field(default="", name="reign")


class Departs(ipc.Message):
    """From the coordinator: ``node`` has had notice; ``goes_on``: enough others stay."""

    node: str
    host: str
    goes_on: bool


class JobEnded(ipc.Message, tag="Over"):
    """To an agent: the job is over, on all machines."""

    exit_code: int
    reason: str


class Superseded(ipc.Message):
    """This coordinator has been overtaken: look up who is it now."""


class Waits(ipc.Message):
    """What the coordinator waits for, in words; ``runs``: others train, and that goes on.

    ``workers``: how many the machines have that would come before this one, by rank, where others
    train that have sessions, and this one is taken in once it is ready; empty elsewhere.
    ``lacks``: the job has too few machines, or none, and waits for more.
    """

    words: str
    runs: bool = False
    workers: tuple[int, ...] = ()
    lacks: bool = False


Message = (
    Join
    | Watch
    | Ready
    | Fill
    | Leaving
    | Remains
    | WorkersEnded
    | Exclude
    | Excluded
    | Readmit
    | Done
    | Fixed
    | Needs
    | Bye
    | Apart
    | Together
    | Finish
    | Welcome
    | Refused
    | Referral
    | Halt
    | Go
    | GoOn
    | Departs
    | JobEnded
    | Superseded
    | Waits
)
OF_WORKERS: Final = (
    Ready,
    WorkersEnded,
    Done,
)  # what is outdated once their machine is ready again
_codec = ipc.Codec(Message, pack_over=PACK_BYTES)  # packed: a list of very many machines
encode, decode = _codec.encode, _codec.decode


def fingerprint(go: Go) -> str:
    """What no other list of machines of this number has."""
    if len(go.members) < MEMBERS_MANY:
        return ""
    names = ",".join(member.node for member in go.members)
    return hashlib.sha256(f"{go.attempt}:{names}".encode()).hexdigest()[:32]


def changes(before: Go | None, go: Go) -> GoOn | None:
    """What to tell those who know ``before``; None where the list itself is needed, or small."""
    if before is None or min(len(go.members), len(before.members)) < MEMBERS_MANY:
        return None
    here = {member.node for member in go.members}
    known = {member.node for member in before.members}
    message = GoOn(
        attempt=go.attempt,
        before=fingerprint(before),
        gone=tuple(member.node for member in before.members if member.node not in here),
        added=tuple(member for member in go.members if member.node not in known),
        store=go.store,
        aside=go.aside,
        fixed=go.fixed,
        term=go.term,
    )
    return message if changed(before, message) == go else None


def changed(before: Go, message: GoOn) -> Go:
    """The whole of what ``message`` says to those who know ``before``."""
    gone = set(message.gone)
    staying = tuple(member for member in before.members if member.node not in gone)
    return Go(
        attempt=message.attempt,
        members=staying + message.added,
        store=message.store,
        aside=message.aside,
        fixed=message.fixed,
        term=message.term,
    )
