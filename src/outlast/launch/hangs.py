"""Hangs: what the watchers of all machines saw is put together, and one sentence comes of it.

On one machine its watcher's suspicion is judged where it arrives. On several each agent shows what
its own watcher has seen through the attempt's store, under a number that grows with each suspicion;
the agent of rank 0 judges, all learn of it. A machine that shows nothing within a second is named
for that. Where the verdict of rank 0's agent does not come, each agent judges by what it finds.

Guarantees: the agent's own loop only ever reads ``named``; nothing here waits for long, and nothing
that fails here stops training.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec

from outlast.attempt.link import PREFIX, connect
from outlast.config import Settings
from outlast.health.hang import NAME, text_path
from outlast.health.messages import Ask, Evidence, Suspicion
from outlast.health.pulse import TIMEOUT_VARIABLE
from outlast.launch.health import Health
from outlast.ledger.file import Ledger
from outlast.policy.blame import Named, NotYet, Seen, judge
from outlast.policy.failures import Failure
from outlast.policy.hang import Kind, Limits, Set, collective_timeout_s

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.2  # between two looks whether another machine suspects
FRESH_S: Final = 1.0  # a suspicion of ours that is no older is our evidence
GATHER_S: Final = 2.5  # until our own watcher has answered
OTHERS_S: Final = 1.0  # after ours is there, until the others' must be
VERDICT_S: Final = 3.0  # until the verdict of rank 0's agent must be there
STORE_S: Final = 5.0
JOIN_S: Final = 1.0
FOLDER: Final = "hangs"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one machine shows."""

    node: str
    seen: tuple[Seen, ...]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a suspicion: ``named`` is None where it is too soon."""

    named: Named | None = None
    seen: tuple[Seen, ...] = ()


class Hangs:
    """One machine's part in it.

    Args:
        health: its watcher.
        ledger: the job's.
        directory: the job's; stacks are left in it.
        beats: the agent's private directory.
        chosen: what the owner has set; None where hangs are not looked for.
        hosts: names of the attempt's machines by rank, as far as they are known.

    Attributes:
        named: who hangs, once that is known; until the next attempt begins.
    """

    def __init__(
        self,
        health: Health,
        ledger: Ledger,
        directory: Path,
        beats: Path,
        *,
        chosen: Set | None,
        hosts: Callable[[], list[str]] = list,
    ) -> None:
        self.named: Named | None = None
        self.hosts = hosts
        self.chosen = chosen
        self._health = health
        self._ledger = ledger
        self._directory = directory
        self._beats = beats
        self._lock = threading.Condition()
        self._own: tuple[float, tuple[Seen, ...]] | None = None  # our newest suspicion, and when
        self._answer: Evidence | None = None
        self._attempt = self._settled = 0
        self._group: Any = None
        self._exchange: _Exchange | None = None
        health.hear(Suspicion, self._suspected)
        health.hear(Evidence, self._answered)

    def set_timeout(self) -> None:
        """Before workers start: torch's own time-out is to come after ours."""
        if self.chosen is None:
            os.environ.pop(TIMEOUT_VARIABLE, None)
        else:
            limits = Limits(self.chosen, self._health.learned(NAME))
            os.environ[TIMEOUT_VARIABLE] = f"{collective_timeout_s(limits):.0f}"

    def begin(self, group: Any) -> None:
        """The workers ``group`` of an attempt have started."""
        self.end()
        with self._lock:
            self.named, self._own, self._answer = None, None, None
            self._attempt, self._group = self._ledger.attempt, group
        if self.chosen is not None and group.group_world_size > 1:
            self._exchange = _Exchange(self, group)

    def end(self) -> None:
        """They are being ended."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.stop()

    # --- what the watcher says, in the thread that listens to it ---------------------------------

    def _suspected(self, suspicion: Suspicion) -> None:
        if suspicion.attempt != self._attempt or self.named is not None:
            return
        with self._lock:
            self._own = time.monotonic(), suspicion.seen
            exchange = self._exchange
        if exchange is not None:
            exchange.wake.set()
        elif self._group.group_world_size == 1:
            found = judge(suspicion.seen)
            if isinstance(found, Named):
                self.settle(suspicion.attempt, found, suspicion.seen)

    def _answered(self, evidence: Evidence) -> None:
        with self._lock:
            self._answer = evidence
            self._lock.notify_all()

    @property
    def attempt(self) -> int:
        """The number of the attempt that is watched."""
        return self._attempt

    # --- for the exchange ------------------------------------------------------------------------

    @property
    def suspects(self) -> bool:
        """Whether our watcher has a suspicion that is fresh."""
        own = self._own
        return own is not None and time.monotonic() - own[0] < FRESH_S

    def evidence(self, number: int) -> tuple[Seen, ...]:
        """What our watcher sees; asked, unless it has just said so."""
        with self._lock:
            own, self._own = self._own, None
        if own is not None and time.monotonic() - own[0] < FRESH_S:
            return own[1]
        if not self._health.tell(Ask(number=number)):
            return ()
        with self._lock:
            self._lock.wait_for(lambda: self._has_answered(number), GATHER_S)
            found = self._answer if self._has_answered(number) else None
        return found.seen if found is not None else ()

    def _has_answered(self, number: int) -> bool:
        answer = self._answer
        return answer is not None and (answer.number, answer.attempt) == (number, self._attempt)

    def settle(self, attempt: int, named: Named, seen: Sequence[Seen]) -> None:
        """It is known who hangs: the agent ends the attempt, and the ledger has it.

        Nothing happens where that attempt is over already.
        """
        with self._lock:
            if attempt != self._attempt or self._settled == attempt:
                return
            self._settled, group = attempt, self._group
        if not named.is_proven and self.chosen is not None:
            limits = Limits(self.chosen, self._health.learned(NAME))
            limits.too_soon(named.kind, named.given_s)
            self._health.teach(NAME, limits.state())
        place = Path(FOLDER) / f"attempt-{attempt:05d}"
        if group.group_rank == 0:
            self._write_down(named, seen, place)
        self.named = named  # not before: the agent goes on to the next attempt
        with contextlib.suppress(OSError):  # a disk that is full costs the stacks, and no more
            self._leave_stacks(group, self._directory / place)

    def _write_down(self, named: Named, seen: Sequence[Seen], place: Path) -> None:
        age_s = max((one.age_s for one in seen), default=0.0)
        self._ledger.append(
            "hang",
            rank=named.ranks[0] if named.ranks else None,
            ranks=list(named.ranks),
            nodes=list(named.nodes),
            step=None if named.step is None else named.step - 1,
            phase=named.kind.value,
            place=named.place,
            sentence=named.sentence,
            proven=named.is_proven,
            beat_t=time.time() - age_s,
            silent_s=round(age_s, 3),
            limit_s=round(named.given_s, 3),
            longest_s=round(self._longest_s(named.kind), 3),
            begun={str(one.rank): one.begun for one in seen},
            stacks=str(place),
        )

    def _longest_s(self, kind: Kind) -> float:
        return Limits(self.chosen or Set(), self._health.learned(NAME)).longest_s(kind)

    def _leave_stacks(self, group: Any, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for worker in group.workers:
            with contextlib.suppress(OSError):
                text = text_path(self._beats, worker.local_rank).read_text()
                (folder / f"rank-{worker.global_rank:05d}.txt").write_text(text)


def hang_of(settings: Settings) -> Set | None:
    """How long workers may be without progress, as the owner has set it; None: off."""
    chosen = settings.health_hang
    if chosen.is_off:
        return None
    return Set(
        fixed_s=chosen.seconds,
        floor_s=settings.health_hang_floor_s,
        ceiling_s=settings.health_hang_ceiling_s,
    )


def failure_of(named: Named) -> Failure:
    """A hang as the failure that ended the attempt."""
    return Failure(
        rank=named.ranks[0] if named.ranks else 0,
        exit_code=-signal.SIGKILL,
        message=f"hang: {named.sentence}",
        step=None if named.step is None else named.step - 1,
    )


class _Exchange:
    """A thread that talks with the other machines' agents, over the store of one attempt."""

    def __init__(self, hangs: Hangs, group: Any) -> None:
        self.wake = threading.Event()
        self._hangs = hangs
        self._group = group
        self._attempt = hangs.attempt
        self._stopping = False
        self._store: Any = None
        self._thread = threading.Thread(target=self._run, name="outlast-hang", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more; does not wait for a store that does not answer."""
        self._stopping = True
        self.wake.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        address, port = self._group.master_addr, int(self._group.master_port)
        try:
            self._store = connect(address, port, timedelta(seconds=STORE_S))
            number = 0
            while not self._stopping:
                self.wake.wait(LOOK_S)
                self.wake.clear()
                if self._stopping:
                    return
                if self._hangs.suspects:
                    self._store.set(self._key(number, "asked"), "")
                elif not self._store.check([self._key(number, "asked")]):
                    continue
                self._one(number)
                number += 1
        except RuntimeError:
            return  # the store is gone: so is the attempt

    def _one(self, number: int) -> None:
        """One suspicion, from showing what we have to the verdict."""
        hangs, group = self._hangs, self._group
        seen = hangs.evidence(number)
        if self._stopping:
            return
        report = Report(node=hangs._ledger.node, seen=seen)
        self._put(self._key(number, group.group_rank), report)
        if group.group_rank == 0:
            verdict = self._judge(number, OTHERS_S)
            self._put(self._key(number, "verdict"), verdict)
        else:
            found = self._wait(self._key(number, "verdict"), Verdict, VERDICT_S)
            verdict = found or self._judge(number, 0.0)
        if verdict.named is not None:
            hangs.settle(self._attempt, verdict.named, verdict.seen)

    def _judge(self, number: int, wait_s: float) -> Verdict:
        deadline_s = time.monotonic() + wait_s
        seen: list[Seen] = []
        silent: list[str] = []
        for rank in range(self._group.group_world_size):
            left_s = max(deadline_s - time.monotonic(), 0.01)
            report = self._wait(self._key(number, rank), Report, left_s)
            if report is None:
                hosts = self._hangs.hosts()
                silent.append(hosts[rank] if rank < len(hosts) else f"machine {rank}")
            else:
                seen += report.seen
        found = judge(seen, silent)
        named = None if isinstance(found, NotYet) else found
        return Verdict(named=named, seen=tuple(seen))

    def _key(self, number: int, what: str | int) -> str:
        return f"{PREFIX}/hang/{number}/{what}"

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, msgspec.json.encode(value))

    def _wait(self, key: str, kind: Callable[..., Any], timeout_s: float) -> Any:
        """The value of ``key``; None where it does not come in time."""
        deadline_s = time.monotonic() + timeout_s
        while not self._store.check([key]):
            if self._stopping or time.monotonic() > deadline_s:
                return None
            time.sleep(0.02)
        return msgspec.json.decode(self._store.get(key), type=kind)
