"""What is made of a failed attempt on this machine: seen, judged, written down, waited for.

**Judged** (:class:`FailureHandler`). The agent gives what its workers left behind, :class:`Witness`
what this machine has seen, and the ledger what other machines have had; the policy decides. Then
the machine asks to be left out, or backs off, before it says that it is ready again. A wait is over
at once when a notice comes or when the job ends elsewhere. The other machines are told that the
workers here have ended: they wait a few seconds, then go on without this one where enough of them
stay, and take it in again when it is ready. What can go wrong: the ledger cannot be read, or not
within a second, so that failures on other machines are not known; then each machine judges by its
own, and a rollback is a counted restart.

**Seen**, where workers themselves could say nothing:

=================================  ==============================================================
source                             says
=================================  ==============================================================
cgroup: memory.oom_control (v1),   how many processes of the agent's own group the OOM killer has
memory.events (v2)                 ended, by its group's limit or by the whole machine's
/proc/vmstat: oom_kill             the same of the whole machine; only where the group is unreadable
/dev/kmsg, if it may be read       which processes those were, and the GPU driver's Xids
NVML, where nvidia-ml-py is there  uncorrectable ECC errors, and Xids without the kernel's log
=================================  ==============================================================

Counters only rise, so what counts is what was added since a moment shortly before. That moment
moves on while nothing fails (``look``): a process of somebody else that was killed an hour ago
proves nothing. What cannot be read is silent: it is a fact less, never an error. In a container the
kernel's log, where it can be read at all, has the host's process numbers: that a worker is not
named there proves nothing.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from outlast.attempt.beat import BeatSeen
from outlast.config import Settings
from outlast.errors import StorageError
from outlast.health.processes import oom_kills
from outlast.launch.machines import TROUBLE_S, Machines
from outlast.ledger.file import Ledger
from outlast.ledger.narrator import say
from outlast.ledger.past import Glance, GlanceResult, Past
from outlast.policy.attribution import AgentView, Stakes
from outlast.policy.exclusion import lasts_s
from outlast.policy.failures import (
    CONSEQUENCES,
    Failure,
    Kind,
    Remedy,
    Signs,
    is_echo,
    kind_of,
    most_telling,
)
from outlast.policy.restart import FAILURES, RestartLimits, RestartPolicy, RestartVerdict

EACH_S: Final = 5.0  # between two moments to count from
RECORD_BYTES: Final = 8192  # the kernel's longest record
RECORDS_MAX: Final = 2000  # read at a time
ASK_S: Final = 1.0  # between two questions to NVML
CLOSE_S: Final = 0.5
XIDS_MAX: Final = 100
_KILLED: Final = re.compile(rb"Killed process (\d+)")
_XID: Final = re.compile(rb"NVRM: Xid \([^)]*\): (\d+)")


class Witness:
    """What one machine has seen: killed processes and errors of GPUs.

    Args:
        root: where its ``/proc``, ``/sys`` and ``/dev`` are; another in tests.
        clock: seconds.
    """

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counter = _counter(root)
        self._log = KernelLog(root / "dev/kmsg")
        self._gpus = Gpus()
        self._looked_s = clock()
        now = self._now()
        self._before, self._latest = now, now

    def close(self) -> None:
        """Give back what it holds."""
        self._log.close()
        self._gpus.close()

    def begin(self) -> None:
        """An attempt begins: what was before is none of its failures' causes."""
        self._log.read()
        for source in (self._log, self._gpus):
            source.forget(time.monotonic())
        self._before = self._latest = self._now()

    def look(self) -> None:
        """While nothing fails: now and then, what is counted from moves on."""
        now_s = self._clock()
        if now_s - self._looked_s >= EACH_S:
            self._looked_s = now_s
            self._log.read()
            for source in (self._log, self._gpus):
                source.forget(time.monotonic() - 2 * EACH_S)
            self._before, self._latest = self._latest, self._now()

    def signs(self) -> Signs:
        """What has been seen since five to ten seconds before now."""
        self._log.read()
        (kills_before, errors_before), (kills, errors) = self._before, self._now()
        is_known = errors is not None and errors_before is not None
        return Signs(
            oom_kills=max(kills - kills_before, 0),
            oom_pids=frozenset(self._log.killed),
            xids=(*self._log.xids, *self._gpus.xids),
            ecc_errors=max((errors or 0) - (errors_before or 0), 0) if is_known else 0,
        )

    def _now(self) -> tuple[int, int | None]:
        return self._counter(), self._gpus.errors()


def _counter(root: Path) -> Callable[[], int]:
    """What reads how many processes were killed for want of memory."""
    for path in _group_files(root):
        if oom_kills(path) is not None:
            return lambda: oom_kills(path) or 0
    return lambda: oom_kills(root / "proc/vmstat") or 0


def _group_files(root: Path) -> list[Path]:
    """Where this process's memory group may tell it: as this process sees it, and as its mount."""
    found: list[Path] = []
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            inside = group.lstrip("/")
            if "memory" in controllers.split(","):
                mount = root / "sys/fs/cgroup/memory"
                found += [mount / inside / "memory.oom_control", mount / "memory.oom_control"]
            elif not controllers:
                mount = root / "sys/fs/cgroup"
                found += [mount / inside / "memory.events", mount / "memory.events"]
    return found


class KernelLog:
    """What the kernel has said from now on: killed processes and the GPU driver's errors.

    Args:
        path: of the log.
    """

    def __init__(self, path: Path) -> None:
        self._seen: list[tuple[float, str, int]] = []
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def close(self) -> None:
        """Read no more."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @property
    def killed(self) -> set[int]:
        """Processes that were killed for want of memory."""
        return {number for _, what, number in self._seen if what == "killed"}

    @property
    def xids(self) -> list[int]:
        """Error numbers of GPUs."""
        return [number for _, what, number in self._seen if what == "xid"]

    def forget(self, before_s: float) -> None:
        """Forget what was read before a moment of the monotonic clock."""
        self._seen = [one for one in self._seen if one[0] >= before_s]

    def read(self) -> None:
        """What is new."""
        for _ in range(RECORDS_MAX):
            if self._fd is None:
                return
            try:
                record = os.read(self._fd, RECORD_BYTES)
            except BrokenPipeError:  # records were lost: the next read goes on behind them
                continue
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            if not record:
                return
            self._take(record)

    def _take(self, record: bytes) -> None:
        now_s = time.monotonic()
        for what, pattern in (("killed", _KILLED), ("xid", _XID)):
            self._seen += [(now_s, what, int(found)) for found in pattern.findall(record)]


class Gpus:
    """What NVML says of this machine's GPUs; nothing where it is not there.

    Asked in a thread of its own: a driver whose GPU has fallen off the bus may never answer.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []
        self._errors: int | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        if importlib.util.find_spec("pynvml") is not None:
            self._thread = threading.Thread(target=self._run, name="outlast-gpus", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_S)

    def errors(self) -> int | None:
        """Uncorrectable ECC errors that all GPUs had counted when they were asked last.

        None before the first answer: what they had counted long ago is not to look new.
        """
        return self._errors

    @property
    def xids(self) -> list[int]:
        """Error numbers."""
        return [number for _, number in self._seen]

    def forget(self, before_s: float) -> None:
        """Forget the numbers from before a moment of the monotonic clock."""
        self._seen = [one for one in self._seen if one[0] >= before_s]

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # whatever a driver does that is not well
            import pynvml as nvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
            handles = [nvml.nvmlDeviceGetHandleByIndex(one) for one in range(count)]
            events = nvml.nvmlEventSetCreate()
            for handle in handles:
                with contextlib.suppress(nvml.NVMLError):
                    kind = nvml.nvmlEventTypeXidCriticalError
                    nvml.nvmlDeviceRegisterEvents(handle, kind, events)
            while handles and not self._stopping.is_set():
                self._errors = sum(_uncorrected(nvml, handle) for handle in handles)
                with contextlib.suppress(nvml.NVMLError):  # none has come
                    found = nvml.nvmlEventSetWait_v2(events, int(ASK_S * 1000))
                    one = (time.monotonic(), int(found.eventData))
                    self._seen = [*self._seen[-XIDS_MAX:], one]
                self._stopping.wait(ASK_S)
            nvml.nvmlShutdown()


def _uncorrected(nvml: Any, handle: Any) -> int:
    try:
        kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))
    except nvml.NVMLError:  # one without ECC, or off the bus
        return 0


POLL_S: Final = 0.1
TWO: Final = 2  # machines: one alone is never left out
SAY_S: Final = 30.0  # between two words about a long wait


class FailureHandler:
    """Judges failed attempts for one machine's agent, and does what follows.

    Args:
        policy: decides.
        ledger: the job's.
        past: what is known of it.
        machines: the others.
        must_leave: whether this machine has had notice.
    """

    def __init__(
        self,
        policy: RestartPolicy,
        ledger: Ledger,
        past: Past,
        machines: Machines,
        must_leave: Callable[[], bool],
    ) -> None:
        self._policy = policy
        self._ledger = ledger
        self._glance = Glance(past)
        self._machines = machines
        self._must_leave = must_leave
        self._witness = Witness()
        self._host = socket.gethostname()

    def close(self) -> None:
        """Give back what it holds."""
        self._witness.close()

    def begin(self) -> None:
        """An attempt begins."""
        self._witness.begin()

    def look(self) -> None:
        """At each look at the workers, while nothing fails."""
        self._witness.look()

    def kind_of(self, failure: Failure) -> Kind:
        """Of one worker's failure, by itself."""
        return kind_of(failure, self._witness.signs())

    def judge(
        self, failures: Sequence[Failure], lasted_s: float, *, echoes: bool, updates: int = 0
    ) -> RestartVerdict:
        """What follows an attempt in which these happened; a restart is written down.

        Args:
            failures: of this machine's workers.
            lasted_s: how long the attempt lasted.
            echoes: whether connections that broke may be the echo of a loss elsewhere.
            updates: optimizer updates that one of them was seen to make.
        """
        now_t = time.time()
        seen = self._look_back()
        attempt = self._ledger.attempt
        window_s = self._policy.limits.window_s
        sightings = tuple(one for one in seen.sightings if now_t - one.t < window_s)
        here = AgentView(host=self._host, attempt=attempt, seen=sightings)
        verdict = self._policy.judge(
            failures,
            lasted_s=lasted_s,
            leaving=self._must_leave(),
            signs=self._witness.signs(),
            now_s=now_t,
            chance=random.random(),  # noqa: S311 - so that machines do not come back together
            elsewhere=self._elsewhere(seen, now_t),
            echoes=echoes,
            updates=updates,
            rolled_back=any(one.attempt == attempt for one in seen.rollbacks),
            follows=self._follows(failures),
            alone=not self._machines.are_many,
            here=here if self._machines.are_many else None,
            num_out=len(seen.went_out),
            stakes=self._stakes(seen, now_t),
        )
        for host in seen.left_out.keys() & set(verdict.cleared):
            self._ledger.append("let_in", node=host)
        return verdict

    def next_attempt(self) -> int:
        """The number of the next attempt, where nobody else says it.

        Raises:
            StorageError: the ledger cannot be read.
        """
        return max(self._glance.look().attempt, self._ledger.attempt) + 1

    def word(self) -> str:
        """What is known of the past, for a worker that need not read it again."""
        return self._look_back().word

    def note_lost(self, lost: Iterable[tuple[Failure, Any, BeatSeen | None]]) -> None:
        """Write down workers that were lost: our view of each, torch's, and its last beat."""
        for one, failure, seen in lost:
            self._ledger.append(
                "worker_lost",
                rank=one.rank,
                pid=failure.pid,
                exit_code=max(failure.exitcode, 0),
                signal=failure.signal_name() if failure.exitcode < 0 else None,
                step=one.step,
                beat_t=seen.t if seen else None,
                error=one.message,
                kind=self.kind_of(one).value,
            )

    def write_down(self, verdict: RestartVerdict) -> None:
        """A restart, for people, for other agents and for the next one on this machine."""
        seen = verdict.sighting
        self._ledger.append(
            "restart",
            reason=verdict.reason,
            restarts=self._policy.restarts,
            kind=verdict.kind.value if verdict.kind else None,
            action=verdict.action.value if verdict.kind else None,
            own=verdict.own,
            wait_s=round(verdict.wait_s, 3),
            without_progress=verdict.without_progress,
            weighed=verdict.weighed,
            cause=seen.cause if seen else "",
            hosts=list(seen.hosts) if seen else [],
            step=seen.step if seen else None,
        )

    def act(self, verdict: RestartVerdict, *, is_first: bool) -> RestartVerdict:
        """Do what is to be done before the next attempt; what follows in the end.

        Args:
            verdict: a restart.
            is_first: whether this machine speaks for all, where what all of them have seen is one
                machine's.
        """
        if is_first or not verdict.host:
            self._ask_others(verdict)
        self._machines.workers_ended()  # at once: others ask whether their own losses come of it
        if verdict.wait_s and not self._back_off(verdict.wait_s) and not self._machines.are_many:
            return self._policy.judge([], lasted_s=0.0, leaving=True)
        return verdict  # where there are others, the rendezvous finds that this machine must go

    def _ask_others(self, verdict: RestartVerdict) -> None:
        if verdict.action is Remedy.LEAVE_OUT:
            weighed = f"{verdict.weighed}; " if verdict.weighed else "its own failures, "
            reason = f"{weighed}the last one: {verdict.reason}"
            host = verdict.host or None
            asked = self._machines.exclude(reason, for_s=self._out_s(host), host=host)
        elif verdict.action is Remedy.ELSEWHERE:
            asked = self._machines.exclude(verdict.reason, for_s=self._out_s(None), spare_only=True)
        else:
            return
        if not asked and verdict.action is Remedy.LEAVE_OUT:
            say("there is no other machine that could go on: this one is tried again")

    def _out_s(self, host: str | None) -> float:
        """For how long a machine is to be left out; None: this one."""
        limits, last = self._policy.limits, self._look_back().left_out.get(host or self._host)
        return lasts_s(limits.exclude_for_s, last, time.time(), limits.window_s)

    def _stakes(self, seen: GlanceResult, now_t: float) -> dict[str, Stakes]:
        """What each machine of the attempt adds; nothing where the owner's number is to decide."""
        limits, hosts, workers = self._policy.limits, self._machines.hosts, self._machines.workers
        by_host: collections.Counter[str] = collections.Counter()
        for host, count in zip(hosts, workers, strict=False):
            by_host[host] += count
        if not limits.weighs or len(by_host) < TWO:
            return {}
        num_out = sum(until_t > now_t for until_t, _ in seen.left_out.values())
        return {
            host: Stakes(
                workers=count,
                all_workers=by_host.total(),
                machines=len(by_host),
                cost_s=seen.cost_s,
                pause_s=seen.pause_s,
                out_s=lasts_s(
                    limits.exclude_for_s, seen.left_out.get(host), now_t, limits.window_s
                ),
                since_t=seen.since_t,
                away=seen.left_out.get(host, (0.0, 0.0)),
                has_spare=self._machines.num_aside > num_out,
            )
            for host, count in by_host.items()
        }

    def _back_off(self, wait_s: float) -> bool:
        """Wait; whether this machine stays."""
        until_s = time.monotonic() + wait_s
        say_s = time.monotonic() + SAY_S
        while (left_s := until_s - time.monotonic()) > 0:
            if self._must_leave():
                return False
            if self._machines.ends_now is not None:
                return True  # the rendezvous says so
            if time.monotonic() > say_s:
                say_s += SAY_S
                say(f"the next attempt begins in {left_s:.0f} s")
            time.sleep(min(left_s, POLL_S))
        return not self._must_leave()

    def _look_back(self) -> GlanceResult:
        with contextlib.suppress(StorageError):  # rank 0 finds out, and says so, itself
            return self._glance.look()
        return self._glance.seen

    def _follows(self, failures: Sequence[Failure]) -> bool:
        """Whether they may come of another machine's trouble; waits a while for word of it."""
        if self._must_leave():  # whose failures are not judged by their kinds
            return False
        kinds = [self.kind_of(one) for one in failures if not is_echo(one)]
        return (
            bool(kinds)
            and most_telling(kinds) in CONSEQUENCES
            and self._machines.have_trouble(TROUBLE_S)
        )

    def _elsewhere(self, seen: GlanceResult, now_t: float) -> set[str]:
        """Kinds of failures that other machines have had within the window.

        Also of those that did not count against them: what fails everywhere is nobody's own.
        """
        window_s = self._policy.limits.window_s
        known = [
            (host, t, kind) for host, failures in seen.own_failures.items() for t, kind in failures
        ]
        known += [(host, one.t, one.kind) for one in seen.sightings for host in one.hosts]
        return {kind for host, t, kind in known if host != self._host and now_t - t < window_s}


def restart_policy(max_restarts: int, settings: Settings, past: Past) -> RestartPolicy:
    """The restart policy as the owner wants it, with what this machine has had before."""
    limits = RestartLimits(
        without_progress=settings.restart_without_progress,
        failures=FAILURES if settings.restart_failures is None else settings.restart_failures,
        weighs=settings.restart_failures is None,
        window_s=settings.restart_window_s,
        exclude_for_s=settings.restart_leave_out_s,
        back_off_max_s=settings.restart_back_off_s,
    )
    host = socket.gethostname()
    own = [t for t, _ in past.own_failures.get(host, [])] if not settings.restart_let_in else []
    return RestartPolicy(max_restarts, limits=limits, own=own)


def worker_failure(rank: int, failure: Any, step: int | None) -> Failure:
    """What torch's agent knows of a worker that has ended, in our words."""
    message, trace = "", ""
    data = failure.error_file_data
    if isinstance(data, dict) and isinstance(data.get("message"), dict):
        message = str(data["message"].get("message", ""))
        trace = str(data["message"].get("extraInfo", {}).get("py_callstack", ""))
    if not message and failure.exitcode < 0:
        message = f"ended by {failure.signal_name()}"
    return Failure(
        rank=rank,
        exit_code=failure.exitcode,
        traceback=trace,
        message=message,
        step=step,
        pid=failure.pid,
    )
