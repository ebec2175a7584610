"""``ledger.jsonl``: one event a line, appended by every process of the job.

Guarantees: a line is one ``write`` on a descriptor opened with O_APPEND, so lines of several
processes on one machine do not mix; events that matter are fsynced before ``append`` returns; a
reader skips a torn line (power went in the middle of a write) and a writer that finds one starts
on a fresh line.

What can go wrong: a full disk or a vanished directory. The ledger then counts the lost events and
says so once in the log, and once more when it works again; it never raises into training. Behind
the first line that is written again stands a ``watch_gap``: how many are missing, and why. A
rollback is kept beside it then (``JOB/rollbacks``).

Rejected: a database (one more thing to be torn), one file per process (a reader at 3 a.m. wants
one file).

``QueuedLedger``'s writer does not wait for the disk. An agent that writes down a worker's loss
before it restarts the workers would wait for storage that hangs, and for an fsync where it does
not. Here a thread writes; times are those of the call. A keeper or a session waits for what it
promises to others, but not for longer than ``patience_s``.

Guarantees: events of this process keep their order; ``close`` waits for what is due, as long as
storage does not hang.
What can go wrong: a machine that dies in these milliseconds takes its last words along; storage
that hangs for long fills the queue, whose newest events are then counted as lost.

``JOB/rollbacks`` is room on disk for rollbacks that a full disk keeps out of the ledger. An attempt
that does not know of a rollback goes on from behind the sign. So room for some is made when a job
starts that may roll back, and written over in place when it is needed: blocks that are there
already take no more of a disk, nor of a quota. The lines are the ledger's own; whoever reads the
past reads them too, and the next attempt writes them into the ledger once that can be.

What can go wrong: a file system that never writes in place (btrfs, ZFS) may have no room all the
same; one that is read-only, or fails, takes nothing. Then the rollback is not known, and that is
said.

Rejected: a file for it in each tier (a tier that cannot be reached when the job starts would be
believed to have none); room in the ledger itself (other events would use it up).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from outlast.durable import sync_directory
from outlast.errors import remedy
from outlast.ledger.events import Event, EventName, decode, encode

ROLLBACKS: Final = "rollbacks"
ROOM_BYTES: Final = 64 << 10  # for ten and more; each has up to 200 values of its window
_BLANK: Final = b"\n"


def make_room(directory: Path, *, forget: bool = False) -> None:
    """Have the file there, in full size.

    Args:
        directory: the job's.
        forget: whether all that is in it is in the ledger.

    Raises:
        OSError: the disk does not take it.
    """
    fd = os.open(directory / ROLLBACKS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = 0 if forget else os.fstat(fd).st_size
        if size < ROOM_BYTES:
            _write(fd, _BLANK * (ROOM_BYTES - size), size)
        sync_directory(directory)  # what is kept there later writes nothing but bytes
    finally:
        os.close(fd)


def keep(directory: Path, line: bytes) -> bool:
    """Write a line of the ledger there; whether it is on disk."""
    try:
        fd = os.open(directory / ROLLBACKS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return False
    try:
        before = os.pread(fd, os.fstat(fd).st_size, 0).rstrip(_BLANK)
        if line.rstrip(_BLANK) not in before.split(_BLANK):
            _write(fd, line, len(before) + len(_BLANK) if before else 0)
        sync_directory(directory)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def kept(directory: Path) -> list[Event]:
    """What was kept there, oldest first; what cannot be read is left out."""
    try:
        lines = (directory / ROLLBACKS).read_bytes().split(_BLANK)
    except OSError:
        return []
    events = (decode(line) for line in lines if line)
    return [event for event in events if event is not None]


def _write(fd: int, data: bytes, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written
    os.fsync(fd)


logger = logging.getLogger(__name__)

FILE_NAME = "ledger.jsonl"


class Ledger:
    """Appends events of one process to a job's ledger.

    Args:
        directory: the job's directory; it must exist.
        job: the job's id.
        attempt: the attempt that events belong to; assignable.
        rank: the worker's rank, or None for an agent.
    """

    def __init__(self, directory: Path, *, job: str, attempt: int = 0, rank: int | None = None):
        self.path = directory / FILE_NAME
        self.job = job
        self.attempt = attempt
        self.rank = rank
        self.node = socket.gethostname()
        self.lost_events = 0
        self._lock = threading.Lock()
        self._fails = False
        self._gap: tuple[float, int, str] | None = None  # since when, events lost before, and why
        self._fd: int | None = None
        self._has_name = False  # durably

    def append(
        self, event: EventName, *, durable: bool = True, rank: int | None = None, **fields: Any
    ) -> Event:
        """Append one event; with ``durable`` it is on disk when this returns.

        Never raises for a failing disk: the loss is counted in ``lost_events``.
        """
        entry = self.entry(event, rank, fields)
        self.write(entry, durable=durable)
        return entry

    def record(self, event: EventName, **fields: Any) -> bool:
        """Append an event that others will rely on; whether it is on disk."""
        lost = self.lost_events
        self.append(event, **fields)
        return self.lost_events == lost

    def entry(self, event: EventName, rank: int | None, fields: dict[str, Any]) -> Event:
        """An event of this process, now."""
        return Event(
            t=time.time(),
            mono=time.monotonic(),
            job=self.job,
            attempt=self.attempt,
            node=self.node,
            rank=self.rank if rank is None else rank,
            event=event,
            fields=fields,
        )

    def write(self, entry: Event, *, durable: bool) -> bool:
        """Append an event that may be older; whether the file has it. Never raises."""
        line = encode(entry)
        with self._lock:
            try:
                if self._fd is None:
                    self._fd = _open_at_line_start(self.path)
                    with contextlib.suppress(OSError):  # a line that can be read is worth having
                        self._sync_name()
                if os.write(self._fd, line) != len(line):  # what fitted on a disk that is full now
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if durable:
                    os.fsync(self._fd)
                    self._sync_name()
            except OSError as error:
                if not self._fails and not self.rank:  # of all ranks' processes, one says so
                    words = f"{error.strerror or error}; {remedy(error)}"
                    logger.warning("the ledger %s cannot be written: %s", self.path, words)
                self._fails = True
                self._gap = self._gap or (entry.t, self.lost_events, error.strerror or str(error))
                is_kept = entry.event == "rollback" and keep(self.path.parent, line)
                self.lost_events += not is_kept
                self._close()  # what comes next starts on a fresh line
                return False
            if self._fails and not self.rank:
                lost = f"; {self.lost_events} events are lost" if self.lost_events else ""
                logger.warning("the ledger %s can be written again%s", self.path, lost)
            self._fails = False
            self._note_gap()
        return True

    def _note_gap(self) -> None:
        """With the lock held, behind the first line that could be written: what is missing."""
        gap, self._gap = self._gap, None
        if gap is None or self.lost_events == gap[1] or self._fd is None:
            return
        from_t, before, reason = gap
        fields = {
            "what": "ledger",
            "reason": reason,
            "from_t": from_t,
            "seconds": round(time.time() - from_t, 3),
            "lost": self.lost_events - before,
        }
        line = encode(self.entry("watch_gap", None, fields))
        try:
            if os.write(self._fd, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:  # it is full again: once there is room for another line, and for this one
            self._gap = gap
            self._close()

    def close(self) -> None:
        """Close the file; a later ``append`` opens it again."""
        with self._lock:
            self._close()

    def _sync_name(self) -> None:
        """Keep the file's name: an fsync of the file does not, and its maker may be dead."""
        if not self._has_name:
            sync_directory(self.path.parent)
            self._has_name = True

    def _close(self) -> None:
        self._has_name = False
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None


def _open_at_line_start(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            os.write(fd, b"\n")
    except OSError:
        os.close(fd)
        raise
    return fd


def read_events(
    directory: Path, *, offset: int = 0, on_unread: Callable[[], object] = lambda: None
) -> Iterator[Event]:
    """The events of the job in ``directory``, in the order they were appended.

    Args:
        directory: the job's directory; without a ledger there are no events.
        offset: byte to start from, the start of a line.
        on_unread: called for each line that cannot be read: torn by a crash, or damaged.
    """
    try:
        with (directory / FILE_NAME).open("rb") as file:
            file.seek(offset)
            for line in file:
                event = decode(line)
                if event is not None:
                    yield event
                elif line.strip():
                    on_unread()
    except FileNotFoundError:
        return


class Follower:
    """Reads a ledger that is still being written: each ``poll`` gives the events that are new.

    Args:
        directory: the job's.
        tail_bytes: how much of what is there already the first ``poll`` reads; None: all of it.
        most_bytes: how much one ``poll`` reads, but for a line that is longer; -1: all there is.

    Attributes:
        offset: byte up to which it has read.
    """

    def __init__(
        self, directory: Path, *, tail_bytes: int | None = None, most_bytes: int = -1
    ) -> None:
        self._path = directory / FILE_NAME
        self._tail_bytes = tail_bytes
        self._most_bytes = most_bytes
        self.offset = 0

    def poll(self) -> list[Event]:
        """The complete lines appended since the last call."""
        try:
            with self._path.open("rb") as file:
                if self._tail_bytes is not None:
                    self.offset = max(file.seek(0, os.SEEK_END) - self._tail_bytes, 0)
                    self._tail_bytes = None
                    if self.offset:  # in the middle of a line, perhaps: on to the next
                        file.seek(self.offset - 1)
                        self.offset += len(file.readline()) - 1
                file.seek(self.offset)
                data = file.read(self._most_bytes)
                if len(data) == self._most_bytes:
                    data += file.readline()  # to the end of a line
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        events = (decode(line) for line in whole.splitlines())
        return [event for event in events if event is not None]


WAITING_MAX: Final = 10_000
CLOSE_S: Final = 5.0
PATIENCE_S: Final = 2.0  # of those who promise to others what they write down


class QueuedLedger(Ledger):
    """A :class:`Ledger` written by a thread of its own.

    Args:
        directory, job, attempt, rank: as a Ledger's.
        patience_s: how long ``append`` waits for an event that is to be durable; once that was in
            vain, not at all until the disk has caught up.
    """

    def __init__(
        self,
        directory: Path,
        *,
        job: str,
        attempt: int = 0,
        rank: int | None = None,
        patience_s: float = 0.0,
    ):
        super().__init__(directory, job=job, attempt=attempt, rank=rank)
        self._patience_s = patience_s
        self._is_behind = False
        self._due: queue.Queue[tuple[Event, bool] | threading.Event | None] = queue.Queue(
            WAITING_MAX
        )
        self._thread = threading.Thread(target=self._write_on, name="outlast-ledger", daemon=True)
        self._thread.start()

    def append(
        self, event: EventName, *, durable: bool = True, rank: int | None = None, **fields: Any
    ) -> Event:
        """Have one event appended soon; after ``close``, now."""
        entry = self.entry(event, rank, fields)
        if not self._thread.is_alive():
            self.write(entry, durable=durable)
            return entry
        try:
            self._due.put_nowait((entry, durable))
        except queue.Full:
            self._gap = self._gap or (entry.t, self.lost_events, "its disk does not answer")
            self.lost_events += 1
            return entry
        if durable and self._patience_s and not self._is_behind:
            self._is_behind = not self.flush(self._patience_s)
        return entry

    def record(self, event: EventName, **fields: Any) -> bool:
        """Append an event that others will rely on; whether it is on disk, in some seconds."""
        lost = self.lost_events
        self.append(event, **fields)
        return (not self._thread.is_alive() or self.flush(CLOSE_S)) and self.lost_events == lost

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until all that was appended is written; whether it is, in this time."""
        written = threading.Event()
        try:
            self._due.put(written, timeout=timeout_s)
        except queue.Full:
            return False
        return written.wait(timeout_s)

    def close(self) -> None:
        """Write what is due, for at most some seconds, and close the file."""
        try:
            self._due.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        except queue.Full:
            self._note_gap()
        if self._thread.is_alive():
            logger.warning("the ledger %s does not take its last events: its disk hangs", self.path)
        else:
            super().close()

    def _write_on(self) -> None:
        while (due := self._due.get()) is not None:
            if isinstance(due, threading.Event):
                due.set()
            else:
                entry, durable = due
                self.write(entry, durable=durable)
            if self._due.empty():
                self._is_behind = False
