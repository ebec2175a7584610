"""Hangs: what the watchers of all machines saw is put together, and one sentence comes of it.

On one machine its watcher's suspicion is judged where it arrives. On several each agent shows what
its own watcher has seen through the attempt's store, under a number that grows with each suspicion;
the agent of rank 0 judges, all learn of it. Each says at once that it is there, and then what it
has seen; one that does not even say that, twice in a row, is silent. While a machine does not show
its ranks, nobody is named but a process that is stopped. Where the verdict of rank 0's agent does
not come, each agent judges by what it finds.

Looks are not of one moment: a machine that was frozen answers seconds late, and the job may have
gone on meanwhile. So before anybody is named all tell once more how far their ranks are.

Guarantees: the agent's own loop only ever reads ``named``; nothing here waits for long, and nothing
that fails here stops training. A verdict is of one attempt, and ends no other. It stands before it
is written down: the hang may be that nothing can be written. A store that fails is connected to
again, as long as the attempt lasts.
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

from outlast.attempt.beat import BeatReader
from outlast.attempt.link import PREFIX, connect
from outlast.config import Settings
from outlast.health.hang import NAME, text_path
from outlast.health.messages import Ask, Evidence, Suspicion
from outlast.health.pulse import TIMEOUT_VARIABLE
from outlast.launch.health import Health
from outlast.ledger.file import Ledger
from outlast.ledger.narrator import say
from outlast.policy.failures import Failure
from outlast.policy.hang import (
    Activity,
    HangLimits,
    HangSettings,
    Named,
    NotYet,
    RankLook,
    collective_timeout_s,
    has_gone_on,
    held_by,
    judge,
)

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.2  # between two looks whether another machine suspects
# The same of very many: rank 0's store hears a thousand looks a second.
PER_MACHINE_S: Final = 0.001
FRESH_S: Final = 1.0  # a suspicion of ours that is no older is our evidence
GATHER_S: Final = 2.5  # until our own watcher has answered
OTHERS_S: Final = GATHER_S + 1.0  # after ours is there, until the others' must be
PLACES_S: Final = 1.0  # until they have told how far their ranks are
VERDICT_S: Final = GATHER_S + OTHERS_S + PLACES_S + 1.0  # until rank 0's agent must have said
AGAIN_S: Final = 1.0  # until a store that has failed is tried again
WRITTEN_S: Final = 1.0  # that the end of an attempt waits for what is written down of a hang
STORE_S: Final = 5.0
POLL_S: Final = 0.02  # between two looks at a key that is waited for
JOIN_S: Final = 1.0
FOLDER: Final = "hangs"


class HangReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one machine shows."""

    node: str
    seen: tuple[RankLook, ...]


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """How far the ranks of one machine are: rank → completed steps, collectives begun."""

    now: dict[int, tuple[int | None, int]]


class HangVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a suspicion: ``named`` is None where it is too soon."""

    named: Named | None = None
    seen: tuple[RankLook, ...] = ()


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
        chosen: HangSettings | None,
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
        self._own: tuple[float, tuple[RankLook, ...]] | None = (
            None  # our newest suspicion, and when
        )
        self._answer: Evidence | None = None
        self._attempt = self._settled = 0
        self._unproven: tuple[Activity, int | None] | None = None  # the last one
        self._held: set[tuple[int, str]] = set()  # ranks, and who traces them, as was said
        self._written = threading.Event()
        self._written.set()
        self._group: Any = None
        self._exchange: _AgentExchange | None = None
        self._last: _AgentExchange | None = None  # that may still wait for its store
        health.hear(Suspicion, self._suspected)
        health.hear(Evidence, self._answered)

    def set_timeout(self) -> None:
        """Before workers start: torch's own time-out is to come after ours."""
        if self.chosen is None:
            os.environ.pop(TIMEOUT_VARIABLE, None)
        else:
            limits = HangLimits(self.chosen, self._health.learned(NAME))
            os.environ[TIMEOUT_VARIABLE] = f"{collective_timeout_s(limits):.0f}"

    def begin(self, group: Any) -> None:
        """The workers ``group`` of an attempt have started."""
        self.end()
        with self._lock:
            self.named, self._own, self._answer = None, None, None
            self._held.clear()
            self._attempt, self._group = self._ledger.attempt, group
        if self.chosen is not None and group.group_world_size > 1:
            self._exchange = _AgentExchange(self, group)

    def end(self) -> None:
        """They are being ended."""
        self._written.wait(WRITTEN_S)  # the ledger has the hang before what comes of it
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.stop()
            self._last = exchange

    def close(self) -> None:
        """The agent ends."""
        self.end()
        if self._last is not None:
            self._last.join(JOIN_S)

    # --- what the watcher says, in the thread that listens to it ---------------------------------

    def _suspected(self, suspicion: Suspicion) -> None:
        if suspicion.attempt != self._attempt or self.named is not None:
            return
        with self._lock:
            self._own = time.monotonic(), suspicion.seen
            exchange = self._exchange
        # A person wants to know why nothing goes on, and nothing is done.
        for one in suspicion.seen:
            if (words := held_by(one)) and (one.rank, one.tracer) not in self._held:
                self._held.add((one.rank, one.tracer))
                say(words)
        if exchange is not None:
            exchange.wake.set()
        elif self._group.group_world_size == 1:
            found = judge(suspicion.seen)
            if isinstance(found, Named) and not has_gone_on(suspicion.seen, self.places().now):
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

    def evidence(self, number: int) -> tuple[RankLook, ...]:
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

    def places(self) -> Places:
        """How far the ranks here are now, as they say themselves."""
        found = {}
        for worker in self._group.workers:
            with (
                contextlib.suppress(OSError, ValueError),
                contextlib.closing(BeatReader(self._beats, worker.local_rank)) as heard,
            ):
                step = heard.beat.step if heard.beat is not None else None
                found[worker.global_rank] = step, heard.pulse.begun if heard.pulse else -1
        return Places(now=found)

    def settle(self, attempt: int, named: Named, seen: Sequence[RankLook]) -> None:
        """It is known who hangs: the agent ends the attempt, and the ledger has it.

        Nothing happens where that attempt is over already.
        """
        with self._lock:
            if attempt != self._attempt or self._settled == attempt:
                return
            self._settled, group = attempt, self._group
            self._written.clear()
            self._learn(named)
            stacks = self._stacks(group)  # the next attempt's are left in the same place
            age_s = max((one.age_s for one in seen), default=0.0)
            beat_t = time.time() - age_s
            self.named = named
        try:
            place = Path(FOLDER) / f"attempt-{attempt:05d}"
            if group.group_rank == 0:
                fields = self._told(named, seen, place) | {"beat_t": beat_t}
                rank = named.ranks[0] if named.ranks else None
                entry = self._ledger.entry("hang", rank, fields)
                entry = msgspec.structs.replace(entry, attempt=attempt)
                self._ledger.write(entry, durable=True)
        finally:
            self._written.set()
        with contextlib.suppress(OSError):  # a disk that is full costs the stacks, and no more
            _leave(stacks, self._directory / place)

    def _learn(self, named: Named) -> None:
        if named.is_proven or self.chosen is None:
            return
        here = named.kind, named.step
        limits = HangLimits(self.chosen, self._health.learned(NAME))
        limits.too_soon(named.kind, named.given_s, again=here == self._unproven)
        self._unproven = here
        self._health.teach(NAME, limits.state())

    def _told(self, named: Named, seen: Sequence[RankLook], place: Path) -> dict[str, Any]:
        return {
            "ranks": list(named.ranks),
            "nodes": list(named.nodes),
            "step": None if named.step is None else named.step - 1,
            "phase": named.kind.value,
            "place": named.place,
            "sentence": named.sentence,
            "proven": named.is_proven,
            "silent_s": round(max((one.age_s for one in seen), default=0.0), 3),
            "limit_s": round(named.given_s, 3),
            "longest_s": round(self._longest_s(named.kind), 3),
            "begun": {str(one.rank): one.begun for one in seen},
            "stacks": str(place),
        }

    def _longest_s(self, kind: Activity) -> float:
        return HangLimits(self.chosen or HangSettings(), self._health.learned(NAME)).longest_s(kind)

    def _stacks(self, group: Any) -> dict[int, bytes]:
        found = {}
        for worker in group.workers:
            with contextlib.suppress(OSError):
                found[worker.global_rank] = text_path(self._beats, worker.local_rank).read_bytes()
        return found


def _leave(stacks: dict[int, bytes], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, text in stacks.items():
        (folder / f"rank-{rank:05d}.txt").write_bytes(text)


def hang_of(settings: Settings) -> HangSettings | None:
    """How long workers may be without progress, as the owner has set it; None: off."""
    chosen = settings.health_hang
    if chosen.is_off:
        return None
    return HangSettings(
        fixed_s=chosen.seconds,
        floor_s=settings.health_hang_floor_s,
        ceiling_s=settings.health_hang_ceiling_s,
    )


def failure_of(named: Named, chosen: HangSettings | None, hosts: tuple[str, ...] = ()) -> Failure:
    """A hang as the failure that ended the attempt.

    Args:
        named: who hung.
        chosen: what the owner has set.
        hosts: names of the machines of those ranks.
    """
    had_all = chosen is not None and named.given_s >= chosen.ceiling_s
    return Failure(
        rank=named.ranks[0] if named.ranks else 0,
        exit_code=-signal.SIGKILL,
        message=f"hang: {named.sentence}",
        step=None if named.step is None else named.step - 1,
        proven=named.is_proven or had_all,
        stack=named.stack,
        hosts=hosts,
    )


class _AgentExchange:
    """A thread that talks with the other machines' agents, over the store of one attempt."""

    def __init__(self, hangs: Hangs, group: Any) -> None:
        self.wake = threading.Event()
        self._hangs = hangs
        self._group = group
        self._attempt = hangs.attempt
        self._stopping = False
        self._store: Any = None
        self._number = 0  # of the next suspicion
        self._silent: set[int] = set()  # machines that did not answer the last one
        self._thread = threading.Thread(target=self._run, name="outlast-hang", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more; a store that does not answer is not waited for: its machine may be gone."""
        self._stopping = True
        self.wake.set()

    def join(self, seconds: float) -> None:
        """Wait for the thread."""
        self._thread.join(seconds)

    def _run(self) -> None:
        address, port = self._group.master_addr, int(self._group.master_port)
        while not self._stopping:
            try:
                self._talk(connect(address, port, timedelta(seconds=STORE_S)))
            except Exception:  # the attempt may be over, or the store's machine slow for once
                logger.info("the others are not heard for now", exc_info=True)
                self.wake.clear()
                if not self._stopping:  # or what woke us to end would be forgotten
                    self.wake.wait(AGAIN_S)

    def _talk(self, store: Any) -> None:
        self._store = store
        look_s = max(LOOK_S, self._group.group_world_size * PER_MACHINE_S)
        while not self._stopping:
            self.wake.wait(look_s)
            self.wake.clear()
            if self._stopping:
                return
            if self._hangs.suspects and not store.check([self._key(self._number, "asked")]):
                store.set(self._key(self._number, "asked"), "")
            elif not store.check([self._key(self._number, "asked")]):
                continue
            while store.check([self._key(self._number + 1, "asked")]):
                self._number += 1  # where we have missed some, nobody waits for them
            if self._stopping:  # the store took long: what our watcher says is of another attempt
                return
            number, self._number = self._number, self._number + 1
            self._one(number)

    def _one(self, number: int) -> None:
        """One suspicion, from showing what we have to the verdict."""
        hangs, group = self._hangs, self._group
        self._store.set(self._key(number, f"{group.group_rank}/here"), "")
        seen = hangs.evidence(number)
        if self._stopping:
            return
        report = HangReport(node=hangs._ledger.node, seen=seen)
        self._put(self._key(number, group.group_rank), report)
        self._store.delete_key(self._key(number - 2, group.group_rank))  # else it grows for weeks
        if group.group_rank == 0:
            verdict = self._judge(number, OTHERS_S)
            self._put(self._key(number, "verdict"), verdict)
            self._store.delete_key(self._key(number - 2, "verdict"))
        else:
            found = self._wait_for_verdict(number)
            self._store.delete_key(self._key(number - 2, f"{group.group_rank}/places"))
            verdict = found or self._judge(number, 0.0)
        if verdict.named is not None:
            hangs.settle(self._attempt, verdict.named, verdict.seen)

    def _judge(self, number: int, wait_s: float) -> HangVerdict:
        deadline_s = time.monotonic() + wait_s
        seen: list[RankLook] = []
        blind: list[int] = []
        for rank in range(self._group.group_world_size):
            left_s = max(deadline_s - time.monotonic(), 0.01)
            report = self._wait(self._key(number, rank), HangReport, left_s)
            if report is None or not report.seen:  # or its watcher is just being replaced
                blind.append(rank)
            else:
                seen += report.seen
        silent = {one for one in blind if not self._store.check([self._key(number, f"{one}/here")])}
        is_for_long = silent == set(blind) and silent <= self._silent
        self._silent = silent
        found = judge(seen, self._names(blind), is_silent_for_long=is_for_long)
        named = None if isinstance(found, NotYet) else found
        if named is not None and has_gone_on(seen, self._places(number, blind)):
            logger.info("somebody was late, and has gone on: %s", named.sentence)
            named = None
        return HangVerdict(named=named, seen=tuple(seen) if named is not None else ())

    def _places(self, number: int, blind: Sequence[int]) -> dict[int, tuple[int | None, int]]:
        """How far all ranks are that were seen, as far as their machines say so in time."""
        now = self._hangs.places().now
        if self._group.group_rank:
            return now  # rank 0's agent says nothing: nobody else would answer
        self._store.set(self._key(number, "places"), "")
        deadline_s = time.monotonic() + PLACES_S
        for rank in range(1, self._group.group_world_size):
            if rank not in blind:
                left_s = max(deadline_s - time.monotonic(), 0.01)
                told = self._wait(self._key(number, f"{rank}/places"), Places, left_s)
                now |= told.now if told is not None else {}
        return now

    def _wait_for_verdict(self, number: int) -> HangVerdict | None:
        """That of rank 0's agent; tells meanwhile how far the ranks here are, if asked."""
        deadline_s = time.monotonic() + VERDICT_S
        verdict, asked = self._key(number, "verdict"), self._key(number, "places")
        while not self._store.check([verdict]):
            if self._stopping or time.monotonic() > deadline_s:
                return None
            if asked and self._store.check([asked]):
                self._put(
                    self._key(number, f"{self._group.group_rank}/places"), self._hangs.places()
                )
                asked = ""
            time.sleep(POLL_S)
        return msgspec.json.decode(self._store.get(verdict), type=HangVerdict)

    def _names(self, ranks: Sequence[int]) -> list[str]:
        hosts = self._hangs.hosts()
        return [hosts[one] if one < len(hosts) else f"machine {one}" for one in ranks]

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
            time.sleep(POLL_S)
        return msgspec.json.decode(self._store.get(key), type=kind)
