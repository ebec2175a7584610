"""What this machine has seen of a failure, where workers themselves could say nothing.

=================================  ==============================================================
source                             says
=================================  ==============================================================
cgroup: memory.oom_control (v1),   how many processes of the agent's own group the OOM killer has
memory.events (v2)                 ended, by its group's limit or by the whole machine's
/proc/vmstat: oom_kill             the same of the whole machine; only where the group is unreadable
/dev/kmsg, for who may read it     which processes those were, and the GPU driver's Xids
NVML, where nvidia-ml-py is there  uncorrectable ECC errors, and Xids without the kernel's log
=================================  ==============================================================

Counters only rise, so what counts is what was added since a moment shortly before. That moment
moves on while nothing fails (``look``): a process of somebody else that was killed an hour ago
proves nothing. What cannot be read is silent: it is a fact less, never an error.

In a container the kernel's log, where it can be read at all, has the host's process numbers: that a
worker is not named there proves nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from outlast.policy.failures import Signs

EACH_S: Final = 5.0  # between two moments to count from
RECORD_BYTES: Final = 8192  # the kernel's longest record
RECORDS_MAX: Final = 2000  # read at a time
ASK_S: Final = 1.0  # between two questions to NVML
CLOSE_S: Final = 0.5
XIDS_MAX: Final = 100
_KILLED: Final = re.compile(rb"Killed process (\d+)")
_XID: Final = re.compile(rb"NVRM: Xid \([^)]*\): (\d+)")


class Witness:
    """Of one machine.

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
        if _read_count(path) is not None:
            return lambda: _read_count(path) or 0
    return lambda: _read_count(root / "proc/vmstat") or 0


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


def _read_count(path: Path) -> int | None:
    """The line ``oom_kill N``, or None where there is none."""
    try:
        for line in path.read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    except (OSError, ValueError):
        pass
    return None


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
