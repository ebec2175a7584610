"""Hangs and slow ranks: what the watchers of all machines saw is put together and judged.

**Hangs.** On one machine its watcher's suspicion is judged where it arrives. On several each agent
shows what its own watcher has seen through the attempt's store, under a number that grows with each
suspicion; the agent of rank 0 judges, all learn of it, and one sentence comes of it. Each says at
once that it is there, and then what it has seen; one that does not even say that, twice in a row,
is silent. While a machine does not show its ranks, nobody is named but a process that is stopped.
Where the verdict of rank 0's agent does not come, each agent judges by what it finds. Looks are not
of one moment: a machine that was frozen answers seconds late, and the job may have gone on
meanwhile. So before anybody is named all tell once more how far their ranks are.

Guarantees: the agent's own loop only ever reads ``named``; nothing here waits for long, and nothing
that fails here stops training. A verdict is of one attempt, and ends no other. It stands before it
is written down: the hang may be that nothing can be written. A store that fails is connected to
again, as long as the attempt lasts.

**Slow ranks.** The watcher tells its agent what this machine's workers' newest steps were spent on.
An agent puts that under one key of its own in the attempt's store, over what was there. Rank 0's
agent reads all of them, has ``policy.stragglers`` judge the steps that all ranks have told, and
does what the settings say: the ledger, a command, another machine.

Guarantees: all of it is in a thread of its own, with a store's client of its own, and nothing waits
for it: a store that does not answer ends the judging of this attempt and nothing else. While a
machine tells nothing (its watcher is gone) nobody is judged. The load on rank 0's machine: at most
``watched.WORDS_S`` words a second from all machines, some kilobytes each, and a look at all of them
every ``interval_s``; docs/stragglers.md has figures. Rejected: through the membership's connections
(each word would pass through the coordinator's loop, which has failures to hear of).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
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
from outlast.health.pulse import TIMEOUT_VARIABLE
from outlast.health.watched import Ask, Evidence, Suspicion, Timings, interval_s
from outlast.launch.health import Health
from outlast.launch.machines import Machines
from outlast.ledger.events import encode
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
from outlast.policy.stragglers import StepReports, Straggler, Stragglers

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
    """What one machine shows of its ranks in a hang."""

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
    """One machine's part in judging hangs.

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


STORE: Final = timedelta(seconds=10)
NOTIFY_S: Final = 30.0  # for the command
NOTIFYING_MAX: Final = 4
REPLACED_S: Final = 3600.0  # before the machine may take part again
STOP_S: Final = 1.0
CHECKS: Final = 64  # machines of which nothing was heard that are asked for in one look
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Timings)


class StragglerMonitor:
    """Slow ranks of one attempt after the other, as one machine's agent deals with them.

    Args:
        ledger: the job's.
        machines: of the job.
        settings: what is done about a slow rank.
    """

    def __init__(self, ledger: Ledger, machines: Machines, settings: Settings) -> None:
        self._ledger = ledger
        self._machines = machines
        self._settings = settings
        self._round: _AttemptThread | None = None
        self._last: _AttemptThread | None = None
        self._notifying: list[threading.Thread] = []
        self._replaced_s: dict[str, float] = {}  # machine → when that was asked for
        self._has_failed = False  # the command, which is said once

    def begin(self, group: Any) -> None:
        """Workers have started."""
        self.end()
        world_size = group.workers[0].world_size
        if world_size < 2:
            return
        self._round = _AttemptThread(group, self._ledger.attempt, self._found)
        self._round.start()

    def heard(self, timings: Timings) -> None:
        """In the thread that listens to the watcher: what this machine's steps were spent on."""
        current = self._round
        if current is not None:
            current.tell(timings)

    def end(self) -> None:
        """They have ended, or are being ended."""
        current, self._round = self._round, None
        if current is not None:
            current.stop()
            self._last = current

    def close(self) -> None:
        """The agent ends."""
        self.end()
        for one in (self._last, *self._notifying):
            if one is not None:
                one.join(STOP_S)

    # --- in the round's thread -------------------------------------------------------------------

    def _found(self, findings: list[tuple[str, list[Straggler]]]) -> None:
        """News, by machine: (its name, its ranks)."""
        for host, found in findings:
            worst = max(found, key=lambda one: one.factor)
            action = self._action(worst)
            fields = msgspec.structs.asdict(worst)
            for name in ("factor", "own_s", "others_s", "lost_s"):
                fields[name] = float(f"{fields[name]:.4g}")
            del fields["rank"]
            event = self._ledger.append(
                "straggler",
                rank=worst.rank,
                node=host,
                ranks=[one.rank for one in found],
                action=action,
                **fields,
            )
            if action != "report" and self._settings.health_notify:
                self._start_notifying(encode(event))
            if action in ("replace", "leave out"):
                self._replace(host, worst, spare_only=action == "replace")

    def _action(self, found: Straggler) -> str:
        """What is done about it; a burst is over before anything could be done."""
        chosen = self._settings.health_straggler
        if found.over:
            return "report" if chosen == "report" else "notify"
        return chosen

    def _start_notifying(self, event: bytes) -> None:
        self._notifying = [one for one in self._notifying if one.is_alive()]
        if len(self._notifying) < NOTIFYING_MAX:  # a command that hangs is not started for ever
            thread = threading.Thread(
                target=self._notify, args=(event,), name="outlast-notify", daemon=True
            )
            self._notifying.append(thread)
            thread.start()

    def _notify(self, event: bytes) -> None:
        words = self._settings.health_notify
        try:
            subprocess.run(
                words,
                input=event,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=NOTIFY_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            if not self._has_failed:
                self._has_failed = True
                say(f"health.notify failed, and training goes on: {words[0]}: {_why(error)}")

    def _replace(self, host: str, found: Straggler, *, spare_only: bool) -> None:
        now_s = time.monotonic()
        if now_s - self._replaced_s.get(host, -REPLACED_S) < REPLACED_S:
            return
        self._replaced_s[host] = now_s
        reason = f"rank {found.rank} is slow: its {found.of} takes {found.factor:.2f} times a step"
        asked = self._machines.exclude(
            reason, for_s=REPLACED_S, host=host, gentle=True, spare_only=spare_only
        )
        if not asked:
            say(
                f"machine {host} cannot be replaced: this job has no other machine that could take "
                "its place (see health.straggler in docs/stragglers.md)"
            )


def _why(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it has not ended within {NOTIFY_S:.0f} s"
    if isinstance(error, subprocess.CalledProcessError):
        return f"exit code {error.returncode}"
    return str(error)


class _AttemptThread:
    """One attempt's thread."""

    def __init__(
        self, group: Any, attempt: int, found: Callable[[list[tuple[str, list[Straggler]]]], None]
    ) -> None:
        self._attempt = attempt
        self._found = found
        self._me, self._machines = group.group_rank, group.group_world_size
        self._address = group.master_addr, group.master_port
        self._interval_s = interval_s(self._machines)
        self._steps = StepReports(group.workers[0].world_size)
        self._judge: Stragglers | None = None
        self._hosts: dict[int, str] = {}  # rank → machine
        self._latest: Timings | None = None
        self._known: list[int] = []  # machines that have told something
        self._client: Any = None
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outlast-stragglers", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def tell(self, timings: Timings) -> None:
        """What this machine's watcher has told."""
        if timings.attempt == self._attempt:
            self._latest = timings
            self._news.set()

    def stop(self) -> None:
        """End; a store that does not answer is not waited for: the workers may be wanted again."""
        self._stopping.set()
        self._news.set()

    def join(self, seconds: float) -> None:
        """Wait for the thread."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._news.wait()
                self._news.clear()
                latest = self._latest
                if latest is not None and not self._stopping.is_set():
                    self._look(latest)
        except (OSError, RuntimeError) as error:  # the store is gone: so is the attempt
            logger.info("slow ranks are not looked for any more in this attempt: %s", error)
        except Exception:
            logger.exception("slow ranks are not looked for any more in this attempt")

    def _look(self, latest: Timings) -> None:
        if self._machines > 1 and self._client is None:
            self._client = connect(*self._address, STORE)
        if self._me:
            self._client.set(_key(self._me), _encoder.encode(latest))
            return
        self._take(latest)
        if self._machines > 1:
            self._read()
        news = self._judged()
        if news and not self._stopping.is_set():
            self._found(by_machine(news, self._hosts))

    def _read(self) -> None:
        unknown = [one for one in range(1, self._machines) if one not in self._known]
        self._known += [one for one in unknown[:CHECKS] if self._client.check([_key(one)])]
        if self._known:
            for raw in self._client.multi_get([_key(one) for one in self._known]):
                self._take(_decoder.decode(raw))

    def _take(self, timings: Timings) -> None:
        if timings.attempt == self._attempt:
            for times in timings.ranks:
                self._hosts.update(dict.fromkeys(times.ranks, timings.node))
                self._steps.add(times.ranks, times.kinds, times.steps, times.seconds)

    def _judged(self) -> list[Straggler]:
        news: list[Straggler] = []
        for step, seconds in self._steps.complete():
            if self._judge is None:
                self._judge = Stragglers(self._steps.kinds)
            compute, wait, data, stall = seconds
            news += self._judge.see(step, compute, wait, data, stall)
        return news


def by_machine(news: list[Straggler], hosts: dict[int, str]) -> list[tuple[str, list[Straggler]]]:
    """Ranks of one machine that are found together are one finding."""
    groups: dict[tuple[str, str, bool], list[Straggler]] = {}
    for one in news:
        groups.setdefault((hosts.get(one.rank, ""), one.cause, one.over), []).append(one)
    return [(host, found) for (host, _, _), found in groups.items()]


def _key(machine: int) -> str:
    return f"{PREFIX}/pace/{machine}"
