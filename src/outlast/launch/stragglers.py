"""Slow ranks, found and dealt with: what each machine's watcher tells comes together here.

The watcher tells its agent what this machine's workers' newest steps were spent on. An agent puts
that under one key of its own in the attempt's store, over what was there. Rank 0's agent reads all
of them, has ``policy.stragglers`` judge the steps that all ranks have told, and does what the
settings say: the ledger, a command, another machine.

Guarantees: all of it is in a thread of its own, with a store's client of its own, and nothing waits
for it: a store that does not answer ends the judging of this attempt and nothing else. While a
machine tells nothing (its watcher is gone) nobody is judged.

The load on rank 0's machine: at most ``pace.WORDS_S`` words a second from all machines, some
kilobytes each, and a look at all of them every ``interval_s``; docs/stragglers.md has figures.

Rejected: through the membership's connections (each word would pass through the coordinator's
loop, which has failures to hear of).
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import msgspec

from outlast.attempt.link import PREFIX, connect
from outlast.config import Settings
from outlast.health.watched import Timings, interval_s
from outlast.launch.machines import Machines
from outlast.ledger.events import encode
from outlast.ledger.file import Ledger
from outlast.ledger.narrator import say
from outlast.policy.stragglers import StepReports, Straggler, Stragglers

logger = logging.getLogger(__name__)

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
