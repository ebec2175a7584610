"""Run a probe in a process of its own, and leave it behind at its deadline.

The probe's process (``main``) reads one line of JSON and writes one line of JSON. It ends with the
process that started it. The probes here:

- ``place`` tries a place for checkpoints as a save uses it: small file, conditional put, much data,
  removal; through the storages that the keeper writes with, so that what works here works there.
  What was written lies below ``doctor-…``, and is removed; so are directories that had to be made.
- ``past`` reads the job's own record: how large its state is, how long a step takes, its versions.
- ``platform`` asks the sources of notices whether one would be heard.
- ``stacks`` reads another process's stack, of a process that does nothing.
- ``gpus`` asks NVML about the GPUs, and reads the newest Xid lines of the kernel where it may. Each
  question is asked by itself: a GPU or driver that does not know one answers the others.
- ``messages`` has ``apprise`` read the addresses of those who are told of incidents.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import fcntl
import importlib
import importlib.util
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from outlast.checkpoint.manifest import parse
from outlast.durable import mount_of
from outlast.errors import OutlastError
from outlast.health.processes import die_with
from outlast.health.send import Errand, answers_to
from outlast.ledger.file import read_events
from outlast.ledger.job import read_job
from outlast.ledger.measured import Measured
from outlast.notice import Watcher
from outlast.notice.platform import IN_POD, choose
from outlast.notice.source import LONGEST_TIMEOUT_S, MetadataWatcher, TokenWatcher
from outlast.policy.fitness import GpuFacts, GpusFacts, PlaceFacts, PlatformFacts, StackFacts
from outlast.storage import Directory, ObjectStore, Patience, Storage, open_storage
from outlast.storage.trust import (
    distrust,
    doubt_of_lasting,
    doubt_of_mount,
    outlasts,
)

ASKED_S: Final = 1.0  # to remove what it has written
KILLED_S: Final = 0.5  # for a killed process to be gone; one in the kernel's hands never is
ERROR_BYTES: Final = 4000
Kind = TypeVar("Kind")
_left_behind: list[subprocess.Popen[bytes]] = []  # to be waited for by nobody, until we end


class Child:
    """One probe, in a process of its own.

    Args:
        name: of the probe, see ``main``.
        request: its arguments, as JSON can hold them.
        limit_s: after which it is given up.
    """

    def __init__(self, name: str, request: Mapping[str, Any], limit_s: float) -> None:
        self.name = name
        self.request = request
        self.limit_s = limit_s
        self.started_s = time.monotonic()
        self.timed_out = False
        # Into memory, not through pipes: nothing that a probe prints can hold it up.
        self._out = os.memfd_create("outlast-doctor-out", os.MFD_CLOEXEC)
        self._err = os.memfd_create("outlast-doctor-err", os.MFD_CLOEXEC)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "outlast.health.doctor.probes", name],
            stdin=subprocess.PIPE,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )
        self.tell(request)

    def tell(self, message: Mapping[str, Any]) -> None:
        """One more line for it; nothing happens when it has ended."""
        stdin = self._process.stdin
        if stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                stdin.write(json.dumps(message).encode() + b"\n")
                stdin.flush()

    def is_over(self) -> bool:
        """Whether it has ended; one whose time is over is ended now."""
        if self._process.poll() is not None:
            return True
        if time.monotonic() - self.started_s > self.limit_s:
            self.timed_out = True
            self._end()
            return True
        return False

    def lines(self) -> list[bytes]:
        """What it has said so far, whole lines only."""
        size = os.fstat(self._out).st_size
        return os.pread(self._out, size, 0).split(b"\n")[:-1]

    def answer(self, kind: type[Kind]) -> Kind | None:
        """Its last word; None where it came to none."""
        with contextlib.suppress(msgspec.MsgspecError, IndexError):
            return msgspec.json.decode(self.lines()[-1], type=kind)
        return None

    def problem(self) -> str:
        """Why it came to none, in words."""
        if self.timed_out:
            return f"it did not end within {self.limit_s:.0f} s"
        said = os.pread(self._err, 1 << 20, 0)[-ERROR_BYTES:].decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        code = self._process.poll()
        if code is not None and code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return last or f"ended with {code}"

    def close(self) -> None:
        """End it, if it has not ended, and forget what it said."""
        self._end()
        for fd in (self._out, self._err):
            if fd >= 0:
                os.close(fd)
        self._out = self._err = -1

    def ask_to_end(self) -> None:
        """Let it remove what it has written, and end; nothing is waited for."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                self._process.terminate()

    def _end(self) -> None:
        """A process that the kernel holds is left behind."""
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ASKED_S)
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            try:
                self._process.wait(KILLED_S)
            except subprocess.TimeoutExpired:
                _left_behind.append(self._process)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


BLOCK_BYTES: Final = 16 << 20
ROUND_BYTES: Final = 1 << 20
LONG_S: Final = 1.0  # a file that took so long says enough
FILE_S: Final = 2.0  # that the largest one is meant to take
FREE_SHARE: Final = 4  # of the free space one in so many bytes is written at most
BIGGEST_BYTES: Final = {True: 1 << 30, False: 128 << 20}  # a directory's, a bucket's
WRITERS: Final = 2
TRIES: Final = 3
OLD_S: Final = 3600.0
PATIENCE: Final = Patience(connect_s=3, stall_s=8, request_s=20, retry_s=4)
_URL_FIRST: Final = re.compile(r"^\w+ [a-z0-9]+://\S+: ")
_OURS: Final = re.compile(r"doctor-[0-9a-f]{12}\Z")


def probe_place(url: str, *, writes: bool, locks: bool) -> PlaceFacts:
    """What the place at ``url`` can do.

    Args:
        url: a directory, or a bucket's.
        writes: whether its bandwidth is measured.
        locks: whether it must hold a lock.
    """
    facts = PlaceFacts()
    try:
        storage = open_storage(url)
    except OutlastError as error:
        return _failed(facts, "open", error)
    if isinstance(storage, ObjectStore):
        storage = ObjectStore(url, patience=PATIENCE)
    with _made_directories(url):
        _try(storage, facts, writes=writes, locks=locks)
    return facts


def _try(storage: Storage, facts: PlaceFacts, *, writes: bool, locks: bool) -> None:
    folder = f"doctor-{uuid.uuid4().hex[:12]}"
    root = storage.root if isinstance(storage, Directory) else None
    facts.outlasts = root is None or outlasts(str(root))
    if root is not None:
        _space(root, facts)
        in_pod = bool(os.environ.get(IN_POD))
        lasting = doubt_of_lasting(mount_of(str(root)), in_pod=in_pod)
        facts.lasting, facts.lasting_todo = lasting or ("", "")
    parts: list[tuple[str, Callable[[], None]]] = [
        ("small", lambda: _small(storage, folder, facts)),
        ("conditional", lambda: _conditional(storage, folder, facts)),
    ]
    if root is not None and locks:
        parts.append(("lock", lambda: _lock(root, folder, facts)))
    if writes:
        parts.append(("big", lambda: _write(storage, folder, facts)))
    parts.append(("remove", lambda: storage.remove_tree(folder)))
    doing = ""
    try:
        for stage, act in parts:
            doing = stage
            act()
        doing = ""
        _space(root, facts)
        with contextlib.suppress(OSError):
            _tidy(storage, root, facts)
    except OSError as error:
        _failed(facts, doing, error)
        if root is not None and facts.number in (errno.EACCES, errno.EPERM):
            facts.owner = _owner(root)
    finally:
        if doing:  # it failed, or was asked to end
            with contextlib.suppress(OSError):
                storage.remove_tree(folder)


def _owner(path: Path) -> str:
    """Whose it is, and who asks."""
    while not path.exists() and path != path.parent:
        path = path.parent
    with contextlib.suppress(OSError):
        found = path.stat()
        return (
            f"{path} belongs to {found.st_uid}:{found.st_gid}, mode {found.st_mode & 0o777:o}; "
            f"this process is {os.geteuid()}:{os.getegid()}"
        )
    return ""


def _failed(facts: PlaceFacts, stage: str, error: Exception) -> PlaceFacts:
    facts.stage = stage
    number = getattr(error, "errno", None)
    facts.number = number if isinstance(number, int) else 0
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    words = _URL_FIRST.sub("", words)  # where it was is said by whoever shows it
    facts.error = words[:1].lower() + words[1:] if words[1:2].islower() else words
    return facts


@contextlib.contextmanager
def _made_directories(url: str) -> Iterator[None]:
    """Directories of a place that is not there yet are gone again afterwards."""
    missing: list[Path] = []
    if "://" not in url:
        path = Path(url)
        while not path.exists() and path != path.parent:
            missing.append(path)
            path = path.parent
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the job has begun to use it meanwhile
            for path in missing:
                path.rmdir()


def _space(root: Path | None, facts: PlaceFacts) -> None:
    if root is None:
        return
    while not root.exists() and root != root.parent:
        root = root.parent
    with contextlib.suppress(OSError):
        found = os.statvfs(root)
        facts.free_bytes = found.f_bavail * found.f_frsize
        facts.total_bytes = found.f_blocks * found.f_frsize


def _small(storage: Storage, folder: str, facts: PlaceFacts) -> None:
    took_s = []
    for number in range(TRIES):
        data = os.urandom(512)
        begun_s, begun_t = time.monotonic(), time.time()
        storage.put(f"{folder}/small-{number}", data)
        took_s.append(time.monotonic() - begun_s)
        if storage.read(f"{folder}/small-{number}") != data:
            raise OSError("a file has other bytes than were written")
        if took_s[-1] == min(took_s):
            _clock(storage, f"{folder}/small-{number}", facts, begun_t, took_s[-1])
        if sum(took_s) > LONG_S:
            break
    facts.small_s = min(took_s)


def _clock(storage: Storage, name: str, facts: PlaceFacts, begun_t: float, took_s: float) -> None:
    """The place's own clock, from the time that it has given a file."""
    if isinstance(storage, Directory):
        if not facts.outlasts:
            return  # this machine's own
        written_t, step_s = (storage.root / name).stat().st_mtime, 0.01
    else:
        import obstore

        found = obstore.head(storage._store, name)["last_modified"]  # type: ignore[attr-defined]
        written_t, step_s = found.timestamp(), 1.0  # whole seconds
    facts.clock_offset_s = written_t + step_s / 2 - (begun_t + took_s / 2)
    facts.clock_bound_s = took_s / 2 + step_s / 2


def _conditional(storage: Storage, folder: str, facts: PlaceFacts) -> None:
    found = distrust(storage, folder)
    facts.put_new = found is None
    facts.doubt, facts.todo = found or doubt_of_mount(storage) or ("", "")


def _lock(root: Path, folder: str, facts: PlaceFacts) -> None:
    fd = os.open(root / folder / "small-0", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        facts.locks = True
    except OSError:
        facts.locks = False
    finally:
        os.close(fd)


def _write(storage: Storage, folder: str, facts: PlaceFacts) -> None:
    """Files of growing size, until one says enough."""
    is_directory = isinstance(storage, Directory)
    most = BIGGEST_BYTES[is_directory]
    if facts.free_bytes is not None:
        most = min(most, facts.free_bytes // FREE_SHARE)
    size = ROUND_BYTES
    # Of no use to a file system that packs, and aligned for direct writing.
    block = mmap.mmap(-1, BLOCK_BYTES)
    block.write(os.urandom(BLOCK_BYTES))
    with memoryview(block) as data:
        while True:
            begun_s = time.monotonic()
            _one_file(storage, f"{folder}/big", size, data)
            took_s = max(time.monotonic() - begun_s, 1e-6)
            facts.written_bytes, facts.written_s = size, took_s
            storage.remove(f"{folder}/big")
            wanted = min(int(size / took_s * FILE_S), 16 * size, most)
            wanted -= wanted % ROUND_BYTES
            if took_s >= LONG_S or wanted <= size:
                return
            size = wanted


def _one_file(storage: Storage, name: str, size: int, data: memoryview) -> None:
    blob = storage.create(name, size)
    offsets = range(0, size, BLOCK_BYTES)

    def write(offset: int) -> None:
        blob.write_at(data[: min(BLOCK_BYTES, size - offset)], offset)

    try:
        if blob.positional:
            with ThreadPoolExecutor(WRITERS, "outlast-doctor-write") as pool:
                for _ in pool.map(write, offsets):
                    pass
        else:
            for offset in offsets:
                write(offset)
        blob.finish()
    except BaseException:
        blob.abandon()
        raise


def _tidy(storage: Storage, root: Path | None, facts: PlaceFacts) -> None:
    """Count what is there, and remove what an earlier doctor had to leave behind."""
    names = storage.children()
    facts.held_steps = len({save.step for save in map(parse, names) if save is not None})
    for name in filter(_OURS.match, names):
        is_old = root is None or time.time() - (root / name).stat().st_mtime > OLD_S
        if root is not None and is_old:
            storage.remove_tree(name)


class PriorRun(msgspec.Struct, frozen=True, kw_only=True):
    """What is known from before; None where nothing is.

    Attributes:
        state_bytes: of the newest whole checkpoint.
        step_s: a slow step.
        versions: with which the job began.
        problem: why its record cannot be read, in words.
    """

    state_bytes: int | None = None
    step_s: float | None = None
    versions: dict[str, str] | None = None
    problem: str = ""


def probe_past(directory: str) -> PriorRun:
    """Read the record of the job in ``directory``; an empty answer where there is no job yet."""
    path = Path(directory)
    if not (path / "job.json").exists():
        return PriorRun()
    try:
        job = read_job(path)
        measured = Measured(read_events(path))
    except OutlastError as error:
        return PriorRun(problem=str(error))
    step = measured.step
    return PriorRun(
        state_bytes=max(measured.sizes.values(), default=None),
        step_s=step.slow_s if step else None,
        versions=job.versions,
    )


def probe_platform(
    platform: str,
    base_url: str,
    *,
    file: str,
    command: list[str],
    grace_s: float | None,
    end: str = "",
) -> PlatformFacts:
    """The sources of notices that the settings ask for, each asked once.

    Args:
        platform: ``notice.platform``.
        base_url: ``notice.base_url``.
        file: ``notice.file``, or "".
        command: ``notice.command``.
        grace_s: ``notice.grace``, or None.
        end: ``notice.end``, or "".
    """
    chosen = choose(
        platform,
        base_url,
        file=Path(file) if file else None,
        command=command,
        end=datetime.fromisoformat(end) if end else None,
    )
    silent: dict[Watcher, str] = {}
    if chosen.watchers:
        with concurrent.futures.ThreadPoolExecutor(len(chosen.watchers)) as pool:
            said = zip(chosen.watchers, pool.map(_silence_of, chosen.watchers), strict=True)
            silent = {watcher: words for watcher, words in said if words}
    lost = [one.name for one in silent if isinstance(one, TokenWatcher) and one.loses_tokens()]
    return PlatformFacts(
        reason=chosen.reason,
        was_set=platform not in ("auto", "none"),
        silent=list(silent.values()),
        loses_tokens=lost,
        num_sources=len(chosen.watchers),
        notice_s=grace_s or chosen.lead_s or chosen.grace_s,
    )


def _silence_of(watcher: Watcher) -> str:
    """Why this source would not be heard; "" if it would."""
    if isinstance(watcher, MetadataWatcher):
        watcher._timeout_s = LONGEST_TIMEOUT_S  # the first answer of some takes longer
        return "" if watcher.answers() else watcher.last_error
    watcher.poll()
    return getattr(watcher, "last_error", "")


STACK_LIMIT_S: Final = 8.0
_SCOPE: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_READY_S: Final = "import time; print(flush=True); time.sleep(60)"


def probe_stacks() -> StackFacts:
    """Start a process beside and read its stack, as is done with a rank that hangs."""
    scope = None
    with contextlib.suppress(OSError, ValueError):
        scope = int(_SCOPE.read_text())
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None or importlib.util.find_spec("outlast") is None:
        return StackFacts(installed=False, ptrace_scope=scope)
    # The reader is no ancestor of what it reads, as the agent's watcher is none of a rank.
    with subprocess.Popen(
        [sys.executable, "-S", "-c", _READY_S], stdout=subprocess.PIPE
    ) as sleeper:
        assert sleeper.stdout is not None  # noqa: S101 - asked for
        sleeper.stdout.readline()
        command = [program, "dump", "--pid", str(sleeper.pid), "--nonblocking"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=STACK_LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as problem:
            return StackFacts(installed=True, error=str(problem), ptrace_scope=scope)
        finally:
            sleeper.kill()
    if done.returncode == 0:
        return StackFacts(installed=True, read=True, ptrace_scope=scope)
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    error = said[0] if said else f"it ended with {done.returncode}"
    return StackFacts(installed=True, error=error, ptrace_scope=scope)


LINES_MAX: Final = 20_000
_XID: Final = re.compile(rb"NVRM: Xid \(([^)]*)\): (\d+)")
_DRIVER: Final = Path("/proc/driver/nvidia")
# Reasons for which clocks are down that are a matter of health or of the power supply; the others
# (idle, an owner's own limit) are as somebody wants them.
_THROTTLES: Final = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def probe_gpus() -> GpusFacts:
    """All GPUs of this machine; an empty answer where there are none."""
    try:
        import pynvml  # type: ignore[import-not-found]
    except ImportError:
        error = "NVML is not installed, so the health of the GPUs is not known"
        return GpusFacts(error=error if _DRIVER.exists() else "", xids=_xids())
    return look(pynvml)


def look(nvml: Any) -> GpusFacts:
    """Look at all GPUs with ``nvml`` at hand (pynvml, or what stands for it in a test)."""
    try:
        nvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - no library, no driver, no right: all in its words
        wrong = f"the driver does not answer: {error}"
        return GpusFacts(error=wrong if _DRIVER.exists() else "", xids=_xids())
    facts = GpusFacts(driver=str(_asked(nvml.nvmlSystemGetDriverVersion) or ""), xids=_xids())
    for index in range(_asked(nvml.nvmlDeviceGetCount) or 0):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except Exception as error:  # noqa: BLE001 - "fell off the bus" comes here
            facts.error = f"GPU {index} does not answer: {error}"
            continue
        facts.gpus.append(_gpu(nvml, handle, index))
    return facts


def _gpu(nvml: Any, handle: Any, index: int) -> GpuFacts:
    name = _asked(lambda: nvml.nvmlDeviceGetName(handle)) or "GPU"
    gpu = GpuFacts(index=index, model=name.decode() if isinstance(name, bytes) else str(name))
    gpu.uncorrected = _asked(
        lambda: int(
            nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        )
    )
    remapped = _asked(lambda: tuple(nvml.nvmlDeviceGetRemappedRows(handle)))
    if remapped is not None:  # corrected, uncorrected, pending, failed
        gpu.retired_pending, gpu.remap_failed = bool(remapped[2]), bool(remapped[3])
    else:
        gpu.retired_pending = _asked(
            lambda: bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
        )
    reasons = _asked(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))) or 0
    gpu.throttled = [words for bit, words in _THROTTLES.items() if reasons & bit]
    gpu.temperature_c = _asked(
        lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    )
    gpu.used_bytes = _asked(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used)) or 0
    states = [
        _asked(lambda link=link: int(nvml.nvmlDeviceGetNvLinkState(handle, link)))  # type: ignore[misc]
        for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))
    ]
    gpu.links_up = states.count(1)
    return gpu


def _asked(question: Callable[[], Any]) -> Any:
    """The answer, or None where this GPU has none."""
    try:
        return question()
    except Exception:  # noqa: BLE001 - NVML's errors, and names that an older binding lacks
        return None


def _xids() -> list[str]:
    """The kernel's newest Xid lines; none where they may not be read."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            for _ in range(LINES_MAX):
                try:
                    line = os.read(fd, 8192)
                except BrokenPipeError:  # overwritten while we read
                    continue
                match = _XID.search(line)
                if match:
                    found.append(f"Xid {match[2].decode()} on {match[1].decode(errors='replace')}")
        except BlockingIOError:
            pass
        finally:
            os.close(fd)
    return found


def probe_messages(urls: list[str]) -> list[str]:
    """For each address "" or why no message can be sent there; nothing is sent."""
    return answers_to(Errand(urls=tuple(urls)))


_PROBES: Final[dict[str, Callable[..., object]]] = {
    "place": probe_place,
    "past": probe_past,
    "platform": probe_platform,
    "stacks": probe_stacks,
    "gpus": probe_gpus,
    "messages": probe_messages,
}
_LARGE: Final = ("compute", "meeting")  # in modules of their own


def main() -> None:
    """Run the probe that the command line names."""
    die_with(os.getppid())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was written is removed
    name = sys.argv[1]
    if name not in (*_PROBES, *_LARGE):
        raise SystemExit(f"there is no probe {name}")
    request = json.loads(sys.stdin.readline() or "null")
    if request is None:
        raise SystemExit("nobody says what to look at")
    # What libraries print must not stand between our lines.
    out = os.dup(1)
    os.dup2(2, 1)

    def say(answer: object) -> None:
        os.write(out, msgspec.json.encode(answer) + b"\n")

    if name in _LARGE:
        probe = importlib.import_module(f"outlast.health.doctor.{name}").probe
    else:
        probe = _PROBES[name]
    if name == "meeting":
        probe(say=say, **request)
    else:
        say(probe(**request))
    os._exit(0)  # threads of clients and of torch need not be waited for


if __name__ == "__main__":
    main()
