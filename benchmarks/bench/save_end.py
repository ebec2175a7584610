"""A save's end as rank 0's keeper sees it: the real code, with machines that are only simulated.

Each machine's report comes as the bytes that its keeper would send, is decoded, counted and
compared; then the manifest is made, checked and put, and all are told. What is left out is the
network: sockets, and the sealing of what goes through them.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from outlast.checkpoint.manifest import PartEntry
from outlast.keeper import protocol, wire
from outlast.keeper.flight import Pool, RankOutcome
from outlast.keeper.memory import Books
from outlast.keeper.saves import SavesInFlight
from outlast.keeper.shared_saves import MemberKeeper, SaveLeader
from outlast.peer import listen
from outlast.storage import Directory

LOCAL = 8  # ranks of a machine
STEP, SERIAL = 1000, 1
TIER = "local"


class SaveEnd(NamedTuple):
    """What one save's end has cost."""

    reports_s: float
    commit_s: float
    report_bytes: int
    outcome_bytes: int
    manifest_bytes: int


class OneThread(Pool):
    """Does what it is given when it is told to, in the calling thread."""

    def __init__(self) -> None:
        super().__init__(0)
        self._acts: deque[Callable[[], None]] = deque()

    def put(self, act: Callable[[], None]) -> None:
        """Have ``act`` done by ``run``."""
        self._acts.append(act)

    def run(self) -> None:
        """Until nothing is left."""
        while self._acts:
            self._acts.popleft()()


class Rank0:
    """Rank 0's worker, which only listens."""

    rank: int | None = 0
    is_gone = False

    def __init__(self) -> None:
        self.ended: list[wire.SaveEnded] = []

    def send(self, message: wire.Message, blob: bytes = b"") -> None:
        """Keep how the save ended."""
        if isinstance(message, wire.SaveEnded):
            self.ended.append(message)


class Wire:
    """Both ends of a channel: what has come, and how much was sent."""

    peer = "a machine"
    bulk_bytes = 0

    def __init__(self, frames: Iterable[tuple[bytes, bytes]]) -> None:
        self.frames = deque(frames)
        self.sent: list[int] = []
        self._bulk = b""

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """The next message."""
        if not self.frames:
            return None
        message, self._bulk = self.frames.popleft()
        self.bulk_bytes = len(self._bulk)
        return message

    def receive_into(self, buffer: memoryview) -> None:
        """Its bulk."""
        buffer[:] = self._bulk

    def send(self, message: bytes, bulk: Iterable[bytes] = (), **_: object) -> None:
        """Count it."""
        self.sent.append(len(message) + sum(map(len, bulk)))

    def close(self) -> None:
        """Nothing is open."""


def report(rank: int, entry: PartEntry, structure: str) -> tuple[bytes, bytes]:
    """What the keeper of ``rank`` sends once its files are there."""
    part = RankOutcome(entry=entry, structure=structure, num_elements=1, num_files=3)
    head = protocol.PartReport(step=STEP, serial=SERIAL, rank=rank)
    return msgspec.json.encode(head), msgspec.json.encode(part)


def save_end(job: str, parts: Iterable[tuple[PartEntry, str]], directory: Path) -> SaveEnd:
    """Have one save of a job end in ``directory``; a rank's part is its entry and structure."""
    reports = [report(rank, *part) for rank, part in enumerate(parts)]
    num_ranks, local = len(reports), range(LOCAL)
    hello = wire.Hello(job=job, attempt=1, rank=0, world_size=num_ranks, num_local=LOCAL)
    pool, peer = OneThread(), Rank0()
    saves = SavesInFlight(
        job,
        {TIER: Directory(directory)},
        Books(),
        pool,
        record=lambda *_, **__: None,
        on_committed=lambda _: None,
        on_change=lambda: None,
    )
    saves.know(1, range(1))  # the other ranks of its machine report like those of others
    leader = SaveLeader(
        listen("127.0.0.1"),
        lambda: b"",
        None,
        saves,
        hello=hello,
        local={0},
        record=lambda *_, **__: None,
    )
    with contextlib.closing(leader):
        saves.meet(1, leader)
        wires = {}
        for first in range(0, num_ranks, LOCAL):
            ranks = range(max(first, 1), min(first + len(local), num_ranks))
            join = protocol.JoinAttempt(job=job, attempt=1, first=ranks.start, count=len(ranks))
            wires[first] = Wire(reports[rank] for rank in ranks)
            leader._members[ranks.start] = MemberKeeper(wires[first], join)  # type: ignore[arg-type]
        begin = wire.BeginSave(
            step=STEP,
            serial=SERIAL,
            layout=1,
            arena=1,
            tiers=None,
            kind="full",
            exact=True,
            started_s=time.monotonic(),
        )
        saves.begin(peer, begin, wire.Layout(number=1, size=0), hello=hello, ring_bytes=0)
        saves.complete(1, 0, wire.Complete(step=STEP, serial=SERIAL, digests={}), b"{}")
        pool.run()
        start_s = time.process_time()
        for member in list(leader._members.values()):
            while (message := protocol.hear(member.channel)) is not None:
                leader._heard(member, message)
        heard_s = time.process_time()
        pool.run()
        end_s = time.process_time()
    (ended,) = peer.ended
    if ended.error:
        raise RuntimeError(ended.error)
    manifest = next(directory.glob("*/manifest.json"))
    return SaveEnd(
        reports_s=heard_s - start_s,
        commit_s=end_s - heard_s,
        report_bytes=max(len(head) + len(bulk) for head, bulk in reports),
        outcome_bytes=max(size for one in wires.values() for size in one.sent),
        manifest_bytes=manifest.stat().st_size,
    )
