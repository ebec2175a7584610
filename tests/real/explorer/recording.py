"""A recording: what a process did to the storage below a directory, call by call, with all bytes.

strace follows a process from its start (``Tracer``); ``read`` makes operations of its log. What
changes nothing durable is not traced, or left out here; a call that would change something and is
not understood is an error, not a gap: nobody has asked yet what a power loss makes of it.

Calls of several threads overlap. An operation takes effect when its call has returned; an fsync is
taken to cover only what had returned when the fsync began. Both err on the side of losing more.
"""

from __future__ import annotations

import collections
import contextlib
import re
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import psutil

# What may change storage. An ioctl can (FICLONE), and so can a shared mapping.
TRACED = (
    *("open", "openat", "openat2", "creat", "write", "pwrite64", "writev", "pwritev", "pwritev2"),
    *("truncate", "ftruncate", "fallocate", "rename", "renameat", "renameat2", "link", "linkat"),
    *("symlink", "symlinkat", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir", "mknod"),
    *("mknodat", "fsync", "fdatasync", "syncfs", "sync_file_range", "copy_file_range", "sendfile"),
    *("splice", "ioctl", "mmap", "msync", "chmod", "fchmod", "fchmodat", "chown", "fchown"),
    *("lchown", "fchownat", "utimensat", "setxattr", "lsetxattr", "fsetxattr", "removexattr"),
    *("lremovexattr", "fremovexattr", "io_uring_setup", "io_submit"),
)
_WRITES = ("write", "pwrite64", "writev", "pwritev", "pwritev2", "ioctl")
_BYTES = 1 << 20  # of a string that strace writes down in full
_LINE = re.compile(r"(\d+) +(.*)")
_WHOLE = re.compile(r"(\w+)\((.*)\) += +(-?\d+|\?|0x[0-9a-f]+)(.*)")
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})")
_FD = re.compile(r"(\d+|AT_FDCWD)<(.*)>")


class Unknown(AssertionError):
    """A call that changes storage and that the explorer does not know."""


class Change(NamedTuple):
    """A name below the root that stands for another file (or directory) from now on, or nothing.

    Attributes:
        directory: number of the directory that the name is in.
        name: the name.
        what: number of the file or directory; None: the name is gone.
    """

    directory: int
    name: str
    what: int | None


class Operation(NamedTuple):
    """One call, as the model of power losses sees it.

    Attributes:
        kind: "names", "write", "size", "sync" or "said".
        began, ended: the lines of the log where the call began and ended.
        call: in words, for a person.
        where: the name of the call, and the how manieth of that name it was of its thread.
        what: of a write, a new size or a sync: number of the file or directory; of what was said:
            the ledger's, where it is a line of that.
        at: of a write: where; of a size: how many bytes.
        data: of a write: its bytes; of what was said: the line.
        changes: of "names": all of them happen, or none.
    """

    kind: str
    began: int
    ended: int
    call: str
    where: tuple[str, int]
    what: int = -1
    at: int = 0
    data: bytes = b""
    changes: tuple[Change, ...] = ()


class Recording(NamedTuple):
    """What was there, and what was done.

    Attributes:
        directories: those that were there: number → path below the root, "" for the root itself.
        files: those that were there: number → (its names, its bytes).
        operations: in the order in which they ended.
    """

    directories: dict[int, str]
    files: dict[int, tuple[tuple[str, ...], bytes]]
    operations: tuple[Operation, ...]


def under_strace(log: Path, *command: object) -> list[str]:
    """What starts ``command`` under strace, which writes ``log``."""
    options = ["-f", "--seccomp-bpf", "-y", "-qq", "-xx", "-s", str(_BYTES), "-e", "signal=none"]
    trace = ["-e", f"trace={','.join(TRACED)}", "-o", str(log)]
    return ["strace", *options, *trace, *map(str, command)]


def onward(under: list[str]) -> list[str]:
    """The same for a process that comes next: its calls follow in the same log."""
    return [under[0], "-A", *under[1:]]


def end(process: subprocess.Popen) -> None:
    """Kill what strace runs; strace then ends by itself."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL)
    process.wait(60)


class Before(NamedTuple):
    """A tree as it was when the recording began; all of it counts as durable."""

    directories: dict[int, str]
    files: dict[int, tuple[tuple[str, ...], bytes]]


def look(root: Path) -> Before:
    """What lies below ``root`` now."""
    directories: dict[int, str] = {0: ""}
    names: dict[int, tuple[tuple[str, ...], bytes]] = {}
    numbers: dict[int, int] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        found = path.lstat()
        number = numbers.setdefault(found.st_ino, len(numbers) + 1)
        if path.is_dir():
            directories[number] = name
        else:
            names[number] = ((*names.get(number, ((), b""))[0], name), path.read_bytes())
    return Before(directories, names)


def read(log: Path, root: Path, before: Before, heard: Path) -> Recording:
    """Make operations of a log.

    Args:
        log: as strace wrote it.
        root: what lies below it is looked at.
        before: the tree at the start.
        heard: a file outside of it; what is written there was said by the process.

    Raises:
        Unknown: a call that is not understood.
    """
    reader = _Reader(root, before, heard)
    began: dict[str, tuple[int, str]] = {}
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for number, line in enumerate(log.read_text().splitlines()):
        match = _LINE.match(line)
        assert match is not None, line
        thread, text = match.groups()
        if text.endswith("<unfinished ...>"):
            began[thread] = number, text.removesuffix("<unfinished ...>").rstrip()
            continue
        start = number
        if resumed := re.match(r"<\.\.\. \w+ resumed>(.*)", text):
            start, head = began.pop(thread)
            text = head + resumed[1]
        if whole := _WHOLE.match(text):
            name, arguments, result, _ = whole.groups()
            counts[thread, name] += 1
            reader.take(start, number, (name, counts[thread, name]), arguments, result)
        else:
            assert text.startswith(("+++", "---")) or "= ?" in text, text
    return Recording(before.directories, before.files, tuple(reader.operations))


def _plain(text: str) -> bytes:
    """The bytes of one string of strace's."""
    return bytes.fromhex(text.replace("\\x", ""))


class _Descriptor:
    """An open file: where the next write goes."""

    def __init__(self, what: int, *, appends: bool) -> None:
        self.what, self.appends, self.at = what, appends, 0


class _Reader:
    """Replays calls on names, so that each is known by the file that it concerns."""

    def __init__(self, root: Path, before: Before, heard: Path) -> None:
        self.operations: list[Operation] = []
        self._root, self._heard = str(root), str(heard)
        self._names = {name: number for number, name in before.directories.items()}
        self._directories = set(before.directories)
        self._sizes = {}
        for number, (names, data) in before.files.items():
            self._names |= dict.fromkeys(names, number)
            self._sizes[number] = len(data)
        self._next = max(self._names.values(), default=0) + 1
        self._opened: dict[tuple[str, str], _Descriptor] = {}
        self._began = self._ended = 0
        self._call, self._where = "", ("", 0)

    def take(self, began: int, ended: int, where: tuple[str, int], arguments: str, result: str):
        """One call that has returned."""
        self._began, self._ended, self._where, name = began, ended, where, where[0]
        if result.startswith("-") or result == "?":
            return
        parts = _split(arguments)
        # What is written is no path, whatever it looks like.
        paths = self._paths(parts[:1] if name in _WRITES else parts)
        ours = [path for path in paths if self._below(path) is not None]
        if not ours:
            if name in ("io_uring_setup", "io_submit"):
                raise Unknown(f"{name}: what it writes is not seen")
            if name in ("write", "writev") and self._heard in paths:
                self._said(self._bytes(name, parts, int(result)))
            return
        self._call = f"{name} {' -> '.join(self._below(path) or '.' for path in ours)}"
        act = getattr(self, f"call_{name}", None)
        if act is None:
            raise Unknown(f"nobody has asked what a power loss makes of: {self._call}")
        act(parts, result)

    # --- what a call is about ----------------------------------------------------------------

    def _below(self, path: str) -> str | None:
        if path == self._root:
            return ""
        return path[len(self._root) + 1 :] if path.startswith(f"{self._root}/") else None

    def _paths(self, parts: list[str]) -> list[str]:
        """Every path that the arguments name, in their order."""
        found: list[str] = []
        base: str | None = None
        for part in parts:
            if match := _FD.fullmatch(part):
                base = _ESCAPED.sub(lambda one: chr(int(one[1], 16)), match[2] or "")
                if match[1] != "AT_FDCWD":
                    found.append(base)
            elif part.startswith('"') and not part.endswith('"...'):
                try:
                    text = _plain(part.strip('"')).decode()
                except (ValueError, UnicodeDecodeError):
                    continue  # what is written, not a path
                if base is not None and found and found[-1] == base and not text.startswith("/"):
                    found[-1] = f"{base}/{text}" if text else base
                elif text.startswith("/") or base is not None:
                    found.append(text if text.startswith("/") else f"{base}/{text}")
        return found

    def _parent(self, path: str) -> tuple[int, str]:
        """The directory's number and the name in it."""
        above, _, name = path.rpartition("/")
        return self._names[above], name

    def _bytes(self, name: str, parts: list[str], count: int) -> bytes:
        if name == "writev":
            found = b"".join(_plain(one) for one in re.findall(r'iov_base="([^"]*)"', parts[1]))
        else:
            assert not parts[1].endswith("..."), "strace was told to write down more"
            found = _plain(parts[1].strip('"'))
        return found[:count]

    def _add(self, kind: str, **fields) -> None:
        self.operations.append(
            Operation(
                kind=kind,
                began=self._began,
                ended=self._ended,
                call=self._call,
                where=self._where,
                **fields,
            )
        )

    def _said(self, data: bytes, what: int = -1) -> None:
        self._call = "said"
        for line in data.splitlines():
            self._add("said", data=line, what=what)

    def _change(self, *changes: tuple[str, int | None]) -> None:
        """All of these at once, here and in the log."""
        made = []
        for path, what in changes:
            made.append(Change(*self._parent(path), what))
            if what is None:
                del self._names[path]
            else:
                self._names[path] = what
        self._add("names", changes=tuple(made))

    def _new(self) -> int:
        self._next += 1
        return self._next - 1

    # --- the calls ---------------------------------------------------------------------------

    def call_openat(self, parts: list[str], result: str) -> None:
        (path,) = self._paths(parts)
        flags = set(parts[2].split("|"))
        if not flags & {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC"}:
            return
        if flags & {"O_TMPFILE", "__O_TMPFILE"}:
            raise Unknown(f"a file without a name: {self._call}")
        name = self._below(path)
        assert name is not None
        if name not in self._names:
            number = self._new()
            self._sizes[number] = 0
            self._change((name, number))
        what = self._names[name]
        if "O_TRUNC" in flags and self._sizes[what]:
            self._sizes[what] = 0
            self._add("size", what=what, at=0)
        opened = _Descriptor(what, appends="O_APPEND" in flags)
        self._opened[result, path] = opened

    def _at(self, part: str) -> _Descriptor | None:
        match = _FD.fullmatch(part)
        path = _ESCAPED.sub(lambda one: chr(int(one[1], 16)), match[2])
        return self._opened.get((match[1], path))

    def call_write(self, parts: list[str], result: str) -> None:
        self._write_as("write", parts, int(result))

    def call_writev(self, parts: list[str], result: str) -> None:
        self._write_as("writev", parts, int(result))

    def _write_as(self, name: str, parts: list[str], count: int) -> None:
        opened = self._at(parts[0])
        if opened is None:
            raise Unknown(f"a write to what was opened unseen: {self._call}")
        at = self._sizes[opened.what] if opened.appends else opened.at
        data = self._bytes(name, parts, count)
        self._put(opened.what, at, data)
        opened.at = at + count

    def call_pwrite64(self, parts: list[str], result: str) -> None:
        opened = self._at(parts[0])
        if opened is None:
            raise Unknown(f"a write to what was opened unseen: {self._call}")
        self._put(opened.what, int(parts[3]), self._bytes("write", parts, int(result)))

    def _put(self, what: int, at: int, data: bytes) -> None:
        self._sizes[what] = max(self._sizes[what], at + len(data))
        self._add("write", what=what, at=at, data=data)
        path = next((name for name, number in self._names.items() if number == what), "")
        if path.rpartition("/")[2] == "ledger.jsonl":
            self._said(data, what)

    def call_ftruncate(self, parts: list[str], result: str) -> None:
        opened = self._at(parts[0])
        assert opened is not None, self._call
        self._sizes[opened.what] = int(parts[1])
        self._add("size", what=opened.what, at=int(parts[1]))

    def call_fsync(self, parts: list[str], result: str) -> None:
        (path,) = self._paths(parts[:1])
        what = self._names.get(self._below(path))
        if what is not None:  # a directory that was removed meanwhile has nothing to keep
            self._add("sync", what=what)

    call_fdatasync = call_fsync

    def call_mkdir(self, parts: list[str], result: str) -> None:
        (path,) = self._paths(parts[:1])
        number = self._new()
        self._directories.add(number)
        self._change((self._below(path), number))

    def call_rmdir(self, parts: list[str], result: str) -> None:
        (path,) = self._paths(parts[:1])
        self._change((self._below(path), None))

    def call_unlink(self, parts: list[str], result: str) -> None:
        (path,) = self._paths(parts[:1])
        self._change((self._below(path), None))

    def call_unlinkat(self, parts: list[str], result: str) -> None:
        (path,) = self._paths(parts[:2])
        self._change((self._below(path), None))

    def call_rename(self, parts: list[str], result: str) -> None:
        old, new = self._paths(parts)
        if self._below(old) is None or self._below(new) is None:
            raise Unknown(f"a file that comes from elsewhere or goes there: {self._call}")
        what = self._names[self._below(old)]
        if what in self._directories:
            raise Unknown(f"a directory that is renamed: {self._call}")
        if self._names.get(self._below(new)) == what:
            return  # two names of one file: nothing is done
        self._change((self._below(old), None), (self._below(new), what))

    def call_renameat2(self, parts: list[str], result: str) -> None:
        if parts[4] not in ("0", "RENAME_NOREPLACE"):
            raise Unknown(f"{self._call} with {parts[4]}")
        self.call_rename(parts[:4], result)

    def call_link(self, parts: list[str], result: str) -> None:
        old, new = self._paths(parts)
        self._change((self._below(new), self._names[self._below(old)]))

    def call_mmap(self, parts: list[str], result: str) -> None:
        if "PROT_WRITE" in parts[2] and "MAP_SHARED" in parts[3]:
            raise Unknown(f"a mapping that is written to: {self._call}")

    def call_ioctl(self, parts: list[str], result: str) -> None:
        if "CLONE" in parts[1] or "DEDUPE" in parts[1]:
            raise Unknown(f"{self._call} {parts[1]}")

    def call_chmod(self, parts: list[str], result: str) -> None:
        """Who may read a file is nothing that a reader of ours goes by."""

    call_fchmod = call_fchmodat = call_utimensat = call_chmod


def _split(arguments: str) -> list[str]:
    """The arguments of a call: strings have no comma, as all of their bytes are escaped."""
    found, depth, at = [], 0, 0
    for number, sign in enumerate(arguments):
        depth += (sign in "[{(") - (sign in "]})")
        if sign == "," and not depth:
            found.append(arguments[at:number].strip())
            at = number + 1
    return [*found, arguments[at:].strip()] if arguments else []
