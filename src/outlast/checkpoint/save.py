"""The order of a save, across ranks, without a collective.

Each rank writes its own files; rank 0 commits when every rank has said that its files are durable.
Ranks talk through an ``Exchange`` (a key-value store), in a thread that training never waits for:

1. rank 0 takes away a manifest of the same step that a resume has rejected, durably, and tells the
   digests of its tensors;
2. every other rank compares: a tensor with the same bytes is replicated and left to rank 0, one
   that differs is that rank's own;
3. every rank writes its tensors, then its small state, and reports their hashes;
4. rank 0 merges the reports and puts the manifest: the commit.

A rank that dies or fails on the way leaves the older commit in force.

Rejected: believing that what the user calls replicated is replicated. Comparing digests costs a
hash at 27 GB/s and catches the rank whose buffers went their own way.
"""

from __future__ import annotations

import collections
import json
import time
from collections.abc import Iterator
from typing import Any, Final, Protocol

import msgspec

from outlast.checkpoint.blocks import write_hashed
from outlast.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Chunk,
    FileEntry,
    Manifest,
    TensorEntry,
    encode,
    own_name,
    shard_file,
    state_file,
    step_name,
)
from outlast.checkpoint.shard import Placed, header, replace
from outlast.checkpoint.snapshot import Snapshot
from outlast.errors import StorageError
from outlast.storage import Storage

OWN: Final = "outlast"  # the key whose tensors always belong to their rank: random states, data


class Exchange(Protocol):
    """How the ranks of one attempt tell each other what a save needs."""

    rank: int
    world_size: int

    def publish(self, key: str, value: bytes) -> None:
        """Set ``key`` for all ranks."""

    def fetch(self, key: str, timeout_s: float) -> bytes:
        """Wait for ``key``; TimeoutError when it does not come."""


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank saves.

    Attributes:
        step: completed steps.
        data: key → small state, in which tensors are named.
        snapshot: the tensors.
    """

    step: int
    data: dict[str, Any]
    snapshot: Snapshot


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's report: what it wrote, or why it could not."""

    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    error: str = ""


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit consists of, in numbers."""

    step: int
    num_bytes: int
    num_files: int


class Saver:
    """Saves one step after the other on one rank.

    Args:
        storage: where checkpoints lie.
        exchange: the other ranks.
        job: id of the job, for the manifest.
        attempt: the attempt that saves, for the manifest.
        timeout_s: how long another rank's part is waited for.
    """

    def __init__(
        self, storage: Storage, exchange: Exchange, *, job: str, attempt: int, timeout_s: float
    ) -> None:
        self._storage = storage
        self._exchange = exchange
        self._job = job
        self._attempt = attempt
        self._timeout_s = timeout_s
        self._tries: collections.Counter[int] = collections.Counter()

    def save(self, captured: Captured) -> Committed:
        """Write this rank's part, and on rank 0 commit; returns when the step is committed.

        Raises:
            OSError: this rank's storage failed.
            StorageError: another rank's did, or its part did not come in time.
        """
        self._tries[captured.step] += 1  # a failed step may be tried again: its keys are used up
        try:
            own = self._own_tensors(captured)
            part = _write_part(self._storage, captured, self._exchange.rank, own)
        except Exception as error:  # whatever it is, the others must not wait for this rank
            self._report(captured.step, Part(error=_in_words(error)))
            raise
        if self._exchange.rank == 0:
            return self._commit(captured.step, part)
        self._report(captured.step, part)
        answer = self._exchange.fetch(self._key(captured.step, "outcome"), self._timeout_s)
        if answer:
            raise StorageError(f"step {captured.step} was not committed: {answer.decode()}")
        return Committed(step=captured.step, num_bytes=0, num_files=0)

    def _own_tensors(self, captured: Captured) -> list[str]:
        """Names of the tensors that this rank writes."""
        snapshot = captured.snapshot
        names = list(snapshot.placed)
        shared = [name for name in names if not name.startswith(f"{OWN}.")]
        key = self._key(captured.step, "digests")
        if self._exchange.rank == 0:
            # A manifest that lies here was rejected by the resume, or this step would be behind us.
            self._storage.remove(f"{step_name(captured.step)}/{MANIFEST}")
            if self._exchange.world_size > 1:
                digests = {name: snapshot.digest(name) for name in shared}
                self._exchange.publish(key, msgspec.json.encode(digests))
            return names
        digests = msgspec.json.decode(self._exchange.fetch(key, self._timeout_s))
        same = {name for name in shared if digests.get(name) == snapshot.digest(name)}
        return [name for name in names if name not in same]

    def _report(self, step: int, part: Part) -> None:
        """Tell rank 0 what was written; from rank 0 itself, tell all that the step failed."""
        if self._exchange.world_size == 1:
            return
        if self._exchange.rank:
            key = self._key(step, f"part/{self._exchange.rank}")
            self._exchange.publish(key, msgspec.json.encode(part))
        else:
            # Ranks that still wait for the digests compare with nothing and go on to the outcome.
            self._exchange.publish(self._key(step, "digests"), b"{}")
            self._tell_outcome(step, part.error)

    def _tell_outcome(self, step: int, error: str) -> None:
        if self._exchange.world_size > 1:
            self._exchange.publish(self._key(step, "outcome"), error.encode())

    def _commit(self, step: int, part: Part) -> Committed:
        try:
            parts = [part, *self._other_parts(step)]
            manifest = Manifest(
                format=FORMAT,
                job=self._job,
                step=step,
                attempt=self._attempt,
                world_size=self._exchange.world_size,
                layout={"data_parallel": self._exchange.world_size},
                created_t=time.time(),
                files={name: entry for one in parts for name, entry in one.files.items()},
                tensors={name: entry for one in parts for name, entry in one.tensors.items()},
            )
            self._storage.put(f"{step_name(step)}/{MANIFEST}", encode(manifest))
        except Exception as error:
            self._tell_outcome(step, _in_words(error))
            raise
        self._tell_outcome(step, "")
        return Committed(
            step=step,
            num_bytes=sum(entry.size for entry in manifest.files.values()),
            num_files=len(manifest.files) + 1,
        )

    def _other_parts(self, step: int) -> Iterator[Part]:
        for rank in range(1, self._exchange.world_size):
            try:
                raw = self._exchange.fetch(self._key(step, f"part/{rank}"), self._timeout_s)
            except TimeoutError:
                raise StorageError(
                    f"step {step} is missing the part of rank {rank} of "
                    f"{self._exchange.world_size} after {self._timeout_s:.0f} s; the older "
                    "checkpoint stays in force"
                ) from None
            part = msgspec.json.decode(raw, type=Part)
            if part.error:
                raise StorageError(
                    f"rank {rank} could not write its part of step {step}: {part.error}"
                )
            yield part

    def _key(self, step: int, what: str) -> str:
        return f"save/{step}.{self._tries[step]}/{what}"


def _in_words(error: Exception) -> str:
    text = str(error) if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
    return text.encode(errors="backslashreplace").decode()  # a path may be in any encoding


def _write_part(storage: Storage, captured: Captured, rank: int, names: list[str]) -> Part:
    directory = step_name(captured.step)
    snapshot = captured.snapshot
    placed = replace(snapshot.placed, names)
    private = [name for name in placed if rank or name.startswith(f"{OWN}.")]
    stored = {name: own_name(name, rank) if name in set(private) else name for name in placed}
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    if placed:
        first = header({stored[name]: where for name, where in placed.items()})
        file = shard_file(rank)
        files[file] = write_hashed(storage, f"{directory}/{file}", _pieces(first, snapshot, placed))
        tensors = {stored[name]: _entry(where, file, len(first)) for name, where in placed.items()}
    small = {
        "format": FORMAT,
        "step": captured.step,
        "rank": rank,
        "own": private,
        "state": captured.data,
    }
    text = json.dumps(small, allow_nan=False, separators=(",", ":")).encode()
    name = state_file(rank)
    files[name] = write_hashed(storage, f"{directory}/{name}", [text])
    return Part(files=files, tensors=tensors)


def _pieces(
    first: bytes, snapshot: Snapshot, placed: dict[str, Placed]
) -> Iterator[memoryview | bytes]:
    yield first
    if len(placed) == len(snapshot.placed):
        yield snapshot.data[: snapshot.num_bytes]  # the arena is laid out like the file
    else:
        for name in placed:
            yield snapshot.bytes_of(name)


def _entry(where: Placed, file: str, data_start: int) -> TensorEntry:
    chunk = Chunk(
        offsets=(0,) * len(where.shape),
        shape=where.shape,
        file=file,
        start=data_start + where.start,
        end=data_start + where.end,
    )
    return TensorEntry(dtype=where.dtype, shape=where.shape, chunks=(chunk,))
