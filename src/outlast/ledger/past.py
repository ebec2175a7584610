"""What an attempt must know of those before it, without reading the whole ledger each time.

The agent keeps count and hands it to its workers, with the place up to which it has read: a restart
after months reads what the last attempt has written, not the months.

What can go wrong: a ledger that was replaced by a shorter one is read anew.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from outlast.errors import StorageError
from outlast.ledger.events import Event, decode
from outlast.ledger.file import FILE_NAME
from outlast.policy.rollbacks import Batches, Rollback, is_undone

VARIABLE: Final = "OUTLAST_PAST"  # set by our agent for its workers
CHUNK_BYTES: Final = 4 << 20
_FULL: Final = "full"
# A line's head as it is written: what most lines are needed for is seen without decoding them.
_HEAD: Final = re.compile(
    rb'\{"t":[^,{]+,"mono":[^,{]+,"job":"[^"\\]*","attempt":(\d+),"node":"(?:[^"\\]|\\.)*",'
    rb'"rank":[^,{]+,"event":"(\w+)"'
)
_ENTIRE: Final = frozenset({b"commit", b"healthy", b"rollback", b"left_out", b"let_in"})
REMEMBERED: Final = 64  # of the newest commits, and of those that were seen to be healthy


class _Known(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What was found so far; see :class:`Past`."""

    offset: int
    attempt: int = 0
    promised: int = 0
    commits: list[int] = []
    healthy: list[int] = []
    rollbacks: list[Rollback] = []


class Past:
    """A fold over the events of a job.

    Args:
        directory: the job's.
        word: another Past's, of the same ledger; what is none is ignored.

    Attributes:
        attempt: the largest number of an attempt; 0 for none.
        promised: the newest step that was committed and can be resumed from; 0 for none.
        commits: the newest such steps, those that a rollback has undone left out.
        healthy: those of them, and of the ones before, that were seen to be healthy.
        rollbacks: oldest first.
        left_out: machines that were left out, and the newest word on each; known only to a Past
            that has read the whole ledger.
    """

    def __init__(self, directory: Path, word: str = "") -> None:
        self._path = directory / FILE_NAME
        self.left_out: dict[str, Event] = {}
        try:
            self._known = msgspec.json.decode(word, type=_Known)
        except msgspec.MsgspecError:
            self._known = _Known(offset=0)

    @property
    def attempt(self) -> int:
        """The largest number of an attempt."""
        return self._known.attempt

    @property
    def promised(self) -> int:
        """The newest step that was committed and stands."""
        return self._known.promised

    @property
    def commits(self) -> list[int]:
        """The newest steps that were committed and stand."""
        return list(self._known.commits)

    @property
    def healthy(self) -> list[int]:
        """The newest steps that were seen to be healthy and stand."""
        return list(self._known.healthy)

    @property
    def rollbacks(self) -> list[Rollback]:
        """All rollbacks, oldest first."""
        return list(self._known.rollbacks)

    @property
    def word(self) -> str:
        """What was found so far, for another process."""
        return msgspec.json.encode(self._known).decode()

    def look(self) -> Past:
        """Read what is new, as far as its lines are whole; returns this one.

        Raises:
            StorageError: the ledger cannot be read; one that is not there yet has no events.
        """
        try:
            with self._path.open("rb") as file:
                self._read(file)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StorageError(
                f"the ledger in {self._path.parent} cannot be read: {error.strerror or error}"
            ) from None
        return self

    def _read(self, file: BinaryIO) -> None:
        if file.seek(0, os.SEEK_END) < self._known.offset:
            self._known = _Known(offset=0)
        file.seek(self._known.offset)
        rest = b""
        while chunk := file.read(CHUNK_BYTES):
            whole, newline, rest = (rest + chunk).rpartition(b"\n")
            self._known.offset += len(whole) + len(newline)
            for line in whole.split(b"\n"):
                self._take(line)

    def _take(self, line: bytes) -> None:
        known = self._known
        head = _HEAD.match(line)
        if head is not None and head[2] not in _ENTIRE:
            known.attempt = max(known.attempt, int(head[1]))
            return
        event = decode(line)
        if event is not None:
            known.attempt = max(known.attempt, event.attempt)
            self._checkpoint(event)
            self._machine(event)

    def _machine(self, event: Event) -> None:
        host = str(event.get("node") or event.node)  # read from disk, the field is the head's
        if event.event == "let_in":
            self.left_out.pop(host, None)
        elif event.event == "left_out":
            self.left_out[host] = event

    def _checkpoint(self, event: Event) -> None:
        known = self._known
        step = event.get("step")
        if isinstance(step, bool) or not isinstance(step, int):
            return
        if event.event == "rollback":
            self._roll_back(event)
        elif not is_undone(known.rollbacks, event.attempt, step):
            if event.event == "commit" and event.get("kind", _FULL) == _FULL:
                known.promised = max(known.promised, step)
                known.commits = _with(known.commits, step)
            elif event.event == "healthy":
                known.healthy = _with(known.healthy, step)

    def _roll_back(self, event: Event) -> None:
        """What was committed behind it counts no more, and neither what is committed late."""
        rollback = rollback_of(event)
        if rollback is None:
            return
        known = self._known
        known.rollbacks = [*known.rollbacks, rollback]
        known.commits = [step for step in known.commits if step <= rollback.step]
        known.healthy = [step for step in known.healthy if step <= rollback.step]
        known.promised = min(known.promised, rollback.step)


def rollback_of(event: Event) -> Rollback | None:
    """What an event of that name says, if it can be understood."""
    try:
        return Rollback(
            attempt=event.attempt,
            step=msgspec.convert(event.get("step"), int),
            first=msgspec.convert(event.get("first"), int),
            batches=msgspec.convert(event.get("batches"), Batches | None),
        )
    except msgspec.ValidationError:
        return None


def _with(steps: list[int], step: int) -> list[int]:
    return sorted({*steps, step})[-REMEMBERED:]
