"""The storage is slow, refuses to write, is full, or is read-only.

Slow and refusing: strace, attached to the keepers (all storage work of checkpoints is theirs),
delays their writing system calls, or lets them fail. The calls are real, the errors come from the
kernel's side of them. What agents and workers write themselves (the ledger, the membership's files)
is not hit. Full: a file system of the job's own (tmpfs, made before it starts) is given no room
beyond what is in it. Read-only: the checkpoints' directory is mounted over itself, read-only, in
each mount namespace in which the job has a process.

Guarantees: no byte of a user's own file system is used up, and nothing there is remounted; a tracer
that is ended lets its process go on as if there had been none.

Rejected: filling the disk (it is not the job's alone), FUSE (a library and a device that few
containers have), device-mapper (the same, and root).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from outlast.drill.faults.fault import Missed, Plain, Promise, Struck, seconds_of, struck
from outlast.drill.target import Target

WRITES: Final = "pwrite64,ftruncate,fsync,mkdir,link,rename"
REFUSED: Final = "pwrite64,ftruncate,fsync,mkdir,link"
ATTACH_S: Final = 20.0
_MOUNTED_AS: Final = "outlast-drill"
POLL_S: Final = 0.005
_UNHURT: Final = Promise(restarts=0, note="saves that fail are told, and made good afterwards")
_SCOPE: Final = Path("/proc/sys/kernel/yama/ptrace_scope")


# --- traced ---------------------------------------------------------------------------------------


class TracedStorage(Plain):
    """What keepers write is slow, or refused.

    Args:
        name: as on the command line.
        injected: what strace does to each of the calls, such as "error=EIO".
        calls: which.
        what: one sentence for a list.
        done: what is said of the strike.
        event: by which the job shows that it has noticed.
        lasts_s: for how long.
    """

    promise = _UNHURT

    def __init__(
        self,
        name: str,
        injected: str,
        calls: str,
        *,
        what: str,
        done: str,
        event: str,
        lasts_s: float,
    ) -> None:
        self.name, self.what, self.lasts_s = name, what, seconds_of("for_s", lasts_s)
        self._options = ("-e", f"trace={calls}", "-e", f"inject={calls}:{injected}")
        self._done, self._event = done, event
        if not event:
            self.promise = Promise(restarts=0, must_notice=False, note="checkpoints come later")
        self._tracers: list[subprocess.Popen[bytes]] = []

    @property
    def until_noticed(self) -> bool:
        """What is refused is healed once a save has met it."""
        return self._event != ""

    def why_not(self, target: Target) -> str:
        """The program strace has to be there, and allowed."""
        if shutil.which("strace") is None:
            return "strace is not here: apt install strace"
        if os.geteuid() != 0 and _SCOPE.exists() and _SCOPE.read_text().strip() != "0":
            return f"processes may not be traced here: as root, or write 0 into {_SCOPE}"
        return ""

    def inject(self, target: Target) -> Struck:
        """Attach to each keeper."""
        pids = [place.keeper for place in target.machines]
        found = [pid for pid in pids if pid is not None]
        if not found:
            raise Missed("there is no keeper now")
        try:
            self._tracers += [attached(pid, self._options) for pid in found]
        except Missed:
            self.heal(target)
            raise
        return struck(target, self._done, self._event)

    def heal(self, target: Target) -> None:
        """Detach."""
        tracers, self._tracers = self._tracers, []
        for tracer in tracers:
            detach(tracer)


def attached(pid: int, options: Sequence[str]) -> subprocess.Popen[bytes]:
    """Strace with ``options``, attached to all threads of a process.

    Raises:
        Missed: it cannot be attached; with what strace said.
    """
    with tempfile.TemporaryFile() as messages:
        tracer = subprocess.Popen(
            ["strace", "-f", "-o", os.devnull, "-p", str(pid), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=messages,
            start_new_session=True,  # Ctrl-C at the drill must not end it before it is told to
        )
        deadline = time.monotonic() + ATTACH_S
        while b"attached" not in (said := _said(messages.fileno())):
            if tracer.poll() is not None or time.monotonic() > deadline:
                detach(tracer)
                words = " ".join(said.decode(errors="replace").split())
                raise Missed(f"strace is not attached to process {pid}: {words}")
            time.sleep(POLL_S)
    return tracer


def detach(tracer: subprocess.Popen[bytes]) -> None:
    """End a strace; its process goes on."""
    if tracer.poll() is None:
        tracer.send_signal(signal.SIGINT)
        try:
            tracer.wait(ATTACH_S)
        except subprocess.TimeoutExpired:
            # One whose process was killed may wait for it for ever (strace 6.1 does, now and then).
            tracer.kill()
            tracer.wait()


def _said(fd: int) -> bytes:
    return os.pread(fd, 65_536, 0)


def slow_storage(seconds: float, for_s: float) -> TracedStorage:
    """Each writing call of a keeper takes ``seconds`` more."""
    seconds = seconds_of("seconds", seconds, above=True)
    return TracedStorage(
        *("slow-storage", f"delay_enter={int(seconds * 1e6)}", WRITES),
        what="each write, sync and rename of checkpoints takes longer",
        done=f"each writing call of a keeper takes {seconds * 1000:.0f} ms longer, "
        "from step {step} on",
        event="",
        lasts_s=for_s,
    )


def broken_storage(for_s: float) -> TracedStorage:
    """Keepers' writes fail with EIO."""
    return TracedStorage(
        *("break-storage", "error=EIO", REFUSED),
        what="what is written of checkpoints fails: input/output error (EIO)",
        done="keepers' writes fail with EIO, from step {step} on",
        event="storage_error",
        lasts_s=for_s,
    )


# --- mounted --------------------------------------------------------------------------------------


class FullStorage(Plain):
    """The job's file system has no room left (ENOSPC).

    Args:
        for_s: for how long.
    """

    name = "fill-storage"
    what = "the job's file system is full (ENOSPC); it has one of its own for that"
    # The ledger is there, too: what fails is said, and often cannot be written down.
    promise = Promise(restarts=0, must_notice=False, note=_UNHURT.note)

    def __init__(self, for_s: float = 5.0) -> None:
        self.lasts_s = seconds_of("for_s", for_s)
        self._is_mine = self._is_full = False

    def why_not(self, target: Target) -> str:
        """A file system has to be mounted, over nothing."""
        if _has_its_own(target.directory):
            return ""
        if target.directory.exists() and any(target.directory.iterdir()):
            return f"{target.directory} is not empty: no file system can be mounted there"
        return cannot_mount()

    def prepare(self, target: Target) -> None:
        """Mount a file system in memory over the job's directory, if no other fault has."""
        if _has_its_own(target.directory):
            return
        target.directory.mkdir(parents=True, exist_ok=True)
        mount("-t", "tmpfs", "-o", "mode=0755", _MOUNTED_AS, str(target.directory))
        self._is_mine = True

    def inject(self, target: Target) -> Struck:
        """Leave no room beyond what is used."""
        for _ in range(100):
            place = os.statvfs(target.directory)
            used = (place.f_blocks - place.f_bfree) * place.f_frsize
            try:
                mount("-o", f"remount,size={max(used, place.f_frsize)}", str(target.directory))
            except CannotMount:  # it has grown meanwhile
                continue
            self._is_full = True
            return struck(
                target, "the job's file system is full, from step {step} on", "storage_error"
            )
        raise Missed("it grows faster than it can be filled")

    def heal(self, target: Target) -> None:
        """Give it back its room: half of the machine's memory, tmpfs' own default."""
        if self._is_full:
            self._is_full = False
            mount("-o", "remount,size=50%", str(target.directory))

    def release(self, target: Target) -> None:
        """Unmount it, if this fault mounted it; what was in it stays, on the file system below."""
        if not self._is_mine:
            return
        kept = target.directory.with_name(f"{target.directory.name}.kept")
        shutil.copytree(target.directory, kept, symlinks=True)
        unmount(target.directory)
        self._is_mine = False
        target.directory.rmdir()
        kept.rename(target.directory)


class ReadOnlyStorage(Plain):
    """The place of the job's checkpoints can only be read (EROFS).

    Args:
        for_s: for how long.
    """

    name = "read-only-storage"
    what = "the directory of the job's checkpoints is read-only (EROFS)"
    promise = _UNHURT

    def __init__(self, for_s: float = 5.0) -> None:
        self.lasts_s = seconds_of("for_s", for_s)
        self._mounted: list[tuple[Path, int]] = []  # where, and a handle of the namespace (0: ours)

    @property
    def until_noticed(self) -> bool:
        """It is healed once a save has met it."""
        return True

    def why_not(self, target: Target) -> str:
        """Something has to be mounted."""
        return cannot_mount()

    def inject(self, target: Target) -> Struck:
        """Mount it over itself, in each mount namespace of the job's processes."""
        place = first_place(target)
        if not place.is_dir():
            raise Missed(f"{place} is not there yet")
        try:
            for namespace in _namespaces(target, place):
                self._mounted.append((place, namespace))
                mount("--bind", str(place), str(place), within=namespace)
                mount("-o", "remount,bind,ro", str(place), within=namespace)
        except CannotMount as error:
            self.heal(target)
            raise Missed(str(error)) from None
        return struck(target, f"{place} is read-only, from step {{step}} on", "storage_error")

    def heal(self, target: Target) -> None:
        """Take the mounts away."""
        mounted, self._mounted = self._mounted, []
        for place, namespace in reversed(mounted):
            unmount(place, within=namespace)
            if namespace:
                os.close(namespace)


class CannotMount(RuntimeError):
    """Nothing can be mounted; the message is what the tool said."""


def _has_its_own(directory: Path) -> bool:
    """Whether a fault has mounted a file system over a directory."""
    return any(place == directory and _MOUNTED_AS in line for place, line in _mounts("self"))


def _mounts(process: str) -> Iterator[tuple[Path, str]]:
    """Where something is mounted for a process, in order, and the whole line about it."""
    for line in Path(f"/proc/{process}/mountinfo").read_text().splitlines():
        place = line.split(" ")[4]
        for escaped in ("\\040", "\\011", "\\012", "\\134"):  # the backslash itself comes last
            place = place.replace(escaped, chr(int(escaped[1:], 8)))
        yield Path(place), line


def unmount_below(root: Path) -> None:
    """Unmount everything that is mounted below a directory, the newest mount first."""
    below = [place for place, _ in _mounts("self") if root.resolve() in place.parents]
    for place in reversed(below):
        unmount(place)


def first_place(target: Target) -> Path:
    """The directory of the fastest tier that is one: where checkpoints are committed."""
    return next(iter(target.tiers.values()), target.directory / "checkpoints")


def cannot_mount() -> str:
    """Why nothing can be mounted here; "" if it can."""
    for name in ("mount", "nsenter"):
        if shutil.which(name) is None:
            return f"{name} is not here: apt install util-linux"
    if os.geteuid() != 0:
        return "file systems are mounted as root"
    with tempfile.TemporaryDirectory() as place:
        try:
            mount("-t", "tmpfs", _MOUNTED_AS, place)
        except CannotMount as error:
            return f"nothing can be mounted here: {error}"
        unmount(Path(place))
    return ""


def mount(*arguments: str, within: int = 0) -> None:
    """``mount ARGUMENTS``, in the mount namespace of the handle ``within``; 0: in ours.

    Raises:
        CannotMount: it failed.
    """
    done = _run(["mount", *arguments], within)
    if done.returncode:
        raise CannotMount(" ".join(done.stderr.split()) or f"mount: {done.returncode}")


def unmount(place: Path, within: int = 0) -> None:
    """Unmount what was mounted last at a place, also while it is used; it may be gone already."""
    _run(["umount", "--lazy", str(place)], within)


def _run(command: list[str], within: int) -> subprocess.CompletedProcess[str]:
    if within:
        command = ["nsenter", f"--mount=/proc/{os.getpid()}/fd/{within}", *command]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _namespaces(target: Target, place: Path) -> Iterator[int]:
    """0 for our own mount namespace, and a handle of each other one that the job has.

    A handle outlives the process that it was taken of. A namespace into which what is mounted in
    ours comes by itself is left out.
    """
    seen = {_mounts_of("self")}
    yield 0
    for one in target.machines:
        for pid in one.processes():
            found = _mounts_of(str(pid))
            if found and found not in seen:
                seen.add(found)
                with contextlib.suppress(OSError):  # it has ended
                    if all(mounted != place for mounted, _ in _mounts(str(pid))):
                        yield os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)


def _mounts_of(process: str) -> str:
    try:
        return str(Path(f"/proc/{process}/ns/mnt").readlink())
    except OSError:
        return ""
