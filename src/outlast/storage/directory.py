"""A directory of a local or shared file system, and its files while they are written or read.

The order of system calls is the whole point: a file's bytes are fsynced before its name appears,
the name's directory is fsynced before anybody is told, and so is the directory above a directory
that was just made (a rename is not durable without it).

Guarantees: a file has its name only after all its bytes are durable, and is durable under that
name when ``finish`` returns; a positional file that was not written in full never gets its name.
It is written under a name that no reader takes for a file: ``.NAME.RANDOM.part`` beside the final
one.

Rejected: writing to the final name (a writer of a dead attempt could still hold it open); O_TMPFILE
(not on every shared file system); for ``put_new``, claiming the name with O_EXCL and writing behind
it (a crash in between leaves a claim that nobody can tell from a writer that is slow).

``Spares`` are files that nobody needs any more, kept to be written over. Writing over blocks that a
file already has costs the file system no allocation: 1.7 times as fast as a new file where this was
measured. A spare's old bytes are never shown: it is written in full and cut to its size before it
gets a name again.

What could go wrong, and does not: a spare that somebody else still reads or has mapped (an
evaluation that loaded an old checkpoint, say) would change under their eyes, and so would its hard
links. A spare with either is not used. The kernel tells by granting a write lease only on a file
that nobody else has open; where it grants none (most network file systems), nothing is recycled.
A spare lost to another process is no error: a new file is written.

Big files are read and written past the page cache (O_DIRECT). A checkpoint's bytes are used once:
copying them through the cache costs a core and evicts what the training loop reads. A direct
transfer needs the memory's address, the offset and the length aligned; what is not goes another
way, always right, only slower. Rejected: asking statx for the alignment (kernel 6.1 and newer only;
a page satisfies every disk we know, and a file system that wants more says EINVAL, upon which
callers go on without); mixing direct and buffered transfers within a page, where the cache may
write stale bytes back. Hence ``ALIGN`` is at least the page size.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from outlast.durable import make_directories, name_new, sync_directory

# --- past the page cache --------------------------------------------------------------------------

ALIGN: Final = max(4096, mmap.PAGESIZE)

# EINVAL: what file systems without direct transfers say, at opening or at the first transfer.
REFUSED: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})

_CACHESTAT: Final = 451  # the same number on all platforms of Linux that PyTorch runs on


def open_direct(path: Path, flags: int) -> int | None:
    """A descriptor for direct transfers, or None where this file system has none."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in REFUSED:
            return None
        raise


def bytes_of(data: memoryview | bytes) -> memoryview:
    """``data`` seen as plain bytes."""
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def aligned_bytes(view: memoryview, offset: int) -> int:
    """How many bytes from the start of ``view`` can be transferred directly at ``offset``."""
    length = len(view) - len(view) % ALIGN
    if not length or offset % ALIGN or address_of(view) % ALIGN:
        return 0
    return length


class _Buffer(ctypes.Structure):
    """Python's ``Py_buffer``."""

    _fields_ = (
        *(("buf", ctypes.c_void_p), ("obj", ctypes.c_void_p), ("len", ctypes.c_ssize_t)),
        *(("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int)),
        *((name, ctypes.c_void_p) for name in ("format", "shape", "strides", "suboffsets", "more")),
    )


def address_of(view: memoryview) -> int:
    """Where a non-empty ``view`` lies in memory; read-only ones too.

    NumPy would say it as well; importing it is half of what a keeper needs for its start.
    """
    found = _Buffer()
    python = ctypes.pythonapi
    python.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(found), ctypes.c_int(0))
    address = int(found.buf)
    python.PyBuffer_Release(ctypes.byref(found))
    return address


def mostly_cached(fd: int, size: int) -> bool:
    """Whether at least half of an open file of ``size`` bytes is in the page cache.

    Where the kernel does not say, yes: reading through the cache is never wrong.
    """
    if not size:
        return True
    num_pages = _cachestat(fd)
    if num_pages is None:
        num_pages = _mincore(fd, size)
    return num_pages is None or num_pages * mmap.PAGESIZE * 2 >= size


class _CacheRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def _cachestat(fd: int) -> int | None:
    """Pages in the cache by cachestat(2): Linux 6.5 and newer; a length of 0 means all."""
    counts = _Counts()
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(_CACHESTAT),
        ctypes.c_uint(fd),
        ctypes.byref(_CacheRange(0, 0)),
        ctypes.byref(counts),
        ctypes.c_uint(0),
    )
    return None if failed else int(counts.cached)


def _mincore(fd: int, size: int) -> int | None:
    """Pages in the cache by mincore(2), which wants a mapping."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapping:
            states = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
            view = memoryview(mapping)
            address = address_of(view)
            view.release()
            failed = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), states)
    except OSError:
        return None
    return None if failed else sum(state & 1 for state in states.raw)


# --- files to be written over ---------------------------------------------------------------------

DIRECTORY: Final = ".spare"
MIN_BYTES: Final = 64 * 2**20  # below this, allocation costs nothing worth having
SUFFIX: Final = ".safetensors"
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})

Result = TypeVar("Result")


class Spares:
    """At most ``limit`` files below ``root/.spare``, shared by all processes that use ``root``."""

    def __init__(self, root: Path, limit: int) -> None:
        self._directory = root / DIRECTORY
        self.limit = limit
        self._num_drops = 0
        self._lock = threading.Lock()

    def keep_from(self, directory: Path) -> None:
        """Take the files of a ``directory`` that is about to be removed, as far as there is room.

        Failures leave the file where it is, to be removed with the rest.
        """
        if not self.limit:
            return
        with contextlib.suppress(OSError):
            paths = sorted(directory.iterdir())
            worth = [p for p in paths if p.suffix == SUFFIX and _size_if_ours(p) >= MIN_BYTES]
            for path in worth[: max(self.limit - len(self._sizes()), 0)]:
                self._directory.mkdir(exist_ok=True)
                os.rename(path, self._directory / os.urandom(8).hex())  # noqa: PTH104

    def take(self, size: int, path: Path) -> bool:
        """Give ``path``, which is not there yet, the spare nearest in ``size``; False: none had."""
        if not self.limit or size < MIN_BYTES:
            return False
        try:
            sizes = self._sizes()
        except OSError:
            return False
        for spare in sorted(sizes, key=lambda found: abs(sizes[found] - size)):
            try:
                os.rename(spare, path)  # noqa: PTH104
            except OSError:
                continue  # another process had it first
            if _nobody_has_open(path) and _size_if_ours(path) >= 0:
                return True
            with contextlib.suppress(OSError):
                path.unlink()
        return False

    def drop(self) -> bool:
        """Remove all spares; whether there was one."""
        try:
            spares = list(self._directory.iterdir())
        except OSError:
            return False
        dropped = False
        for spare in spares:
            with contextlib.suppress(OSError):
                spare.unlink()
                dropped = True
        self._num_drops += dropped
        return dropped

    def make_room_for(self, act: Callable[[], Result]) -> Result:
        """``act()``; if the disk is full, once more without any spares."""
        num_drops = self._num_drops
        try:
            return act()
        except OSError as error:
            if error.errno not in FULL:
                raise
            with self._lock:  # of several writers that met a full disk, one drops and all go on
                if self._num_drops == num_drops and not self.drop():
                    raise
        return act()

    def _sizes(self) -> dict[Path, int]:
        try:
            paths = list(self._directory.iterdir())
        except FileNotFoundError:
            return {}
        sizes = {path: _size_if_ours(path) for path in paths}
        return {path: size for path, size in sizes.items() if size >= 0}


def _size_if_ours(path: Path) -> int:
    """The size of a plain file without a second name (a backup by hard links, say), or -1."""
    try:
        found = path.lstat()
    except OSError:
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 else -1


def _nobody_has_open(path: Path) -> bool:
    """Whether no process, this one included, has the file open or mapped."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Somebody who opens the file this very moment makes the kernel send us a signal; the
        # usual one (SIGIO) would end the process, this one is ignored unless somebody asks for it.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


# No component starts with a dot, so a name can neither lead out nor meet an unfinished part.
NAME: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*\Z")

PART_PREFIX: Final = "."


def checked(name: str) -> str:
    """``name``, which is the root if it is empty.

    Raises:
        ValueError: it is not plain.
    """
    if name and not NAME.match(name):
        raise ValueError(f"{name!r} is not a name of this storage")
    return name


class DiskRoom(NamedTuple):
    """What a file system has left for this user, in bytes and in files; bytes go by blocks."""

    num_bytes: int
    num_files: int
    block_bytes: int


class Directory:
    """A storage that is a directory; ``root`` is made when something is first written.

    Args:
        root: where.
        num_spares: how many big files of removed trees are kept to be written over, below
            ``root/.spare``; they give way when the disk is full.
    """

    def __init__(self, root: Path, num_spares: int = 0) -> None:
        self.root = root
        self._spares = Spares(root, num_spares)
        self._durable: set[Path] = set()  # directories whose names are

    def describe(self, name: str = "") -> str:
        """The path of ``name``."""
        return str(self.root / name)

    def children(self, name: str = "") -> list[str]:
        """Names directly below ``name``, sorted; parts of unfinished writes are left out."""
        try:
            names = os.listdir(self._path(name))  # noqa: PTH208
        except FileNotFoundError:
            return []
        return sorted(found for found in names if not found.startswith(PART_PREFIX))

    def exists(self, name: str) -> bool:
        """Whether there is a file ``name``."""
        return self._path(name).is_file()

    def size(self, name: str) -> int:
        """Size of the file ``name`` in bytes."""
        return self._path(name).stat().st_size

    def read(self, name: str) -> bytes:
        """The whole file ``name``."""
        return self._path(name).read_bytes()

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        """Fill ``buffer`` from byte ``offset`` of ``name``; returns the bytes read."""
        with self._path(name).open("rb", buffering=0) as file:
            file.seek(offset)
            done = 0
            while done < len(buffer):
                count = file.readinto(buffer[done:])
                if not count:
                    break
                done += count
            return done

    def put(self, name: str, data: bytes) -> None:
        """Write the whole file ``name`` atomically and durably."""
        blob = self.create(name)
        try:
            blob.write(data)
            blob.finish()
        except BaseException:
            blob.abandon()
            raise

    def put_new(self, name: str, data: bytes, *, private: bool = False) -> bool:
        """``put``, but only if there is no ``name`` yet; False, and nothing done, if there is.

        With ``private``, the file and directories made for it are for this user alone.
        """
        path = self._path(name)
        above = 0o700 if private else 0o777
        self._spares.make_room_for(lambda: self._make_directories(path.parent, above))
        blob = FileBlob(path, self._spares, 0o600 if private else 0o644)
        try:
            blob.write(data)
            return blob.finish_new()
        except BaseException:
            blob.abandon()
            raise

    def open(self, name: str) -> FileReader:
        """Open ``name`` for reading many blocks; FileNotFoundError if there is none."""
        return FileReader(self._path(name))

    def create(self, name: str, size: int | None = None) -> FileBlob:
        """Start writing the file ``name``, which will have ``size`` bytes if that is given."""
        path = self._path(name)
        self._spares.make_room_for(lambda: self._make_directories(path.parent))
        if size is None:
            return FileBlob(path, self._spares)
        return PlacedBlob(path, self._spares, size)

    def remove(self, name: str) -> None:
        """Remove the file ``name`` durably."""
        path = self._path(name)
        try:
            path.unlink()
        except FileNotFoundError:  # perhaps by another process, which has yet to make it durable
            if not path.parent.is_dir():
                return
        sync_directory(path.parent)

    def remove_tree(self, name: str, last: Sequence[str] = ()) -> None:
        """Remove ``name`` and all below it, durably; nothing happens when there is none.

        Nobody may need its files any more: some may be kept to be written over. Those in ``last``
        go when all others are gone durably, in that order.
        """
        path = self._path(name)
        if path == self.root:
            raise ValueError("the root of a storage is not removed")
        self._spares.keep_from(path)
        self._durable.discard(path)
        try:
            if last:
                _remove_all_but(path, last)
                there = [late for late in last if os.path.lexists(path / late)]
                for late in there[:-1]:
                    self.remove(f"{name}/{late}")
                # The very last goes with the directory itself: an empty one would be nobody's.
            shutil.rmtree(path, ignore_errors=False)
        except FileNotFoundError:
            if path.exists():  # something inside went away under our hands
                raise
            return
        sync_directory(path.parent)

    def room(self, name: str) -> DiskRoom:
        """What there is for files below ``name``; those that are there already take none of it.

        Raises:
            OSError: the file system does not say.
        """
        path = self._path(name)
        used = 0
        for directory, _, files in os.walk(path):
            for file in files:
                with contextlib.suppress(FileNotFoundError):  # given up just now
                    used += os.lstat(os.path.join(directory, file)).st_blocks
        while not path.exists():
            path = path.parent
        found = os.statvfs(path)
        return DiskRoom(
            found.f_bavail * found.f_frsize + used * 512,
            found.f_favail if found.f_files else 1,  # btrfs counts none
            found.f_frsize,
        )

    def keep_spares(self, num_spares: int) -> None:
        """Keep at least so many big files of removed trees: one for each writer."""
        self._spares.limit = max(self._spares.limit, num_spares)

    def _path(self, name: str) -> Path:
        return self.root / checked(name)

    def _make_directories(self, path: Path, mode: int = 0o777) -> None:
        if path not in self._durable or not path.is_dir():
            self._durable.update(make_directories(path, mode, self._durable))


def _remove_all_but(path: Path, kept: Collection[str]) -> None:
    """Remove everything directly below ``path`` but those names, durably."""
    for child in path.iterdir():
        if child.name in kept:
            continue
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink(missing_ok=True)
    sync_directory(path)


# --- its files ------------------------------------------------------------------------------------


def part_of(path: Path) -> Path:
    """A name for what will be ``path``, in the same directory.

    Random: in containers a restarted process has the number of the one that died here.
    """
    return path.parent / f"{PART_PREFIX}{path.name}.{os.urandom(8).hex()}.part"


class FileBlob:
    """A file of unknown size, written from its start to its end."""

    positional = False

    def __init__(self, path: Path, spares: Spares, mode: int = 0o644) -> None:
        self._path = path
        self._mode = mode
        self._part = part_of(path)
        self._spares = spares
        self._fd = spares.make_room_for(self._new)

    def write(self, data: memoryview | bytes) -> None:
        """Append ``data`` in full."""
        view = memoryview(data)
        while view:
            view = view[self._try(os.write, self._fd, view) :]

    def write_at(self, data: memoryview | bytes, offset: int) -> None:
        """Refused: offsets need a size."""
        raise ValueError(f"{self._path.name} was created without a size; append to it")

    def finish(self) -> None:
        """Data, then name, then directory: each durable before the next."""
        os.fsync(self._fd)
        self._close()
        self._spares.make_room_for(lambda: os.rename(self._part, self._path))  # noqa: PTH104
        sync_directory(self._path.parent)

    def finish_new(self) -> bool:
        """``finish``, but only if there is no such file yet; whether it was done."""
        os.fsync(self._fd)
        self._close()
        done = self._spares.make_room_for(lambda: name_new(self._part, self._path))
        with contextlib.suppress(OSError):  # renamed already, or harmless
            self._part.unlink()
        sync_directory(self._path.parent)
        return done

    def abandon(self) -> None:
        """Forget what was written; a part that cannot be removed is harmless."""
        with contextlib.suppress(OSError):  # what made us abandon is what must be heard
            if self._fd >= 0:
                self._close()
        with contextlib.suppress(OSError):
            self._part.unlink()

    def _new(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(self._part, flags, self._mode)

    def _try(self, call: Callable[..., int], *arguments: object) -> int:
        """One write; the number of bytes that it took, never 0."""
        count = self._spares.make_room_for(lambda: call(*arguments))
        if count <= 0:
            raise OSError(errno.EIO, "the file system took no bytes", str(self._part))
        return count

    def _close(self) -> None:
        fd, self._fd = self._fd, -1  # also after a close that fails, the number is free
        os.close(fd)


class PlacedBlob(FileBlob):
    """A file of known size, whose blocks may come in any order and from several threads.

    Aligned bytes go straight to the disk; the end of the file, which is seldom aligned, goes there
    with zeros behind it, which ``finish`` cuts off; anything else goes through the page cache.
    """

    positional = True

    def __init__(self, path: Path, spares: Spares, size: int) -> None:
        self._size = size
        self._written = 0
        self._lock = threading.Lock()
        self._open = SharedDescriptors()
        super().__init__(path, spares)
        self._open.add(self._fd)
        self._direct: int | None = None
        try:
            self._direct = open_direct(self._part, os.O_WRONLY)
        except BaseException:
            self.abandon()
            raise
        if self._direct is not None:
            self._open.add(self._direct)

    def write(self, data: memoryview | bytes) -> None:
        """Append ``data``: the same as placing it behind what was written."""
        self.write_at(data, self._written)

    def write_at(self, data: memoryview | bytes, offset: int) -> None:
        """Write ``data`` in full at byte ``offset``; no byte is to be written twice."""
        view = bytes_of(data)
        length = len(view)
        if offset < 0 or offset + length > self._size:
            raise ValueError(
                f"{length} bytes at {offset} of {self._path.name} ({self._size} bytes)"
            )
        with self._open.in_use():
            while view:
                count = self._write_some(view, offset)
                view, offset = view[count:], offset + count
        with self._lock:
            self._written += length

    def finish(self) -> None:
        """Cut to size, then data, name, directory: each durable before the next."""
        if self._written != self._size:  # a spare's old bytes would show in the gap
            raise ValueError(f"{self._path.name}: {self._written} of {self._size} bytes written")
        os.ftruncate(self._fd, self._size)
        super().finish()

    def _new(self) -> int:
        if self._spares.take(self._size, self._part):
            with contextlib.suppress(OSError):
                return os.open(self._part, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with contextlib.suppress(OSError):
                self._part.unlink()
        return super()._new()

    def _write_some(self, view: memoryview, offset: int) -> int:
        direct = self._direct
        if direct is not None:
            length = aligned_bytes(view, offset)
            is_end = len(view) < ALIGN and offset + len(view) == self._size and offset % ALIGN == 0
            try:
                if length:
                    return self._try(os.pwrite, direct, view[:length], offset)
                if is_end:
                    return self._write_end(direct, view, offset)
            except OSError as error:
                if error.errno not in REFUSED:
                    raise
                self._direct = None  # it could be opened, but takes nothing
        return self._try(os.pwrite, self._fd, view, offset)

    def _write_end(self, direct: int, view: memoryview, offset: int) -> int:
        with mmap.mmap(-1, ALIGN) as page:
            page[: len(view)] = bytes(view)
            with memoryview(page) as padded:
                return min(self._try(os.pwrite, direct, padded, offset), len(view))

    def _close(self) -> None:
        self._open.close()


class FileReader:
    """An open file, read from the page cache when it is there and past it when not.

    Attributes:
        size: of the file, in bytes.
    """

    def __init__(self, path: Path) -> None:
        self._open = SharedDescriptors()
        self._fd = self._open.add(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        self._direct: int | None = None
        try:
            self.size = os.fstat(self._fd).st_size
            if not mostly_cached(self._fd, self.size):
                self._direct = open_direct(path, os.O_RDONLY)
        except BaseException:
            self.close()
            raise
        if self._direct is not None:
            self._open.add(self._direct)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill ``buffer`` from byte ``offset``; returns the bytes read, fewer only at the end."""
        view, done = bytes_of(buffer), 0
        with self._open.in_use():
            while done < len(view):
                count = self._read_some(view[done:], offset + done)
                if not count:
                    break
                done += count
        return done

    def close(self) -> None:
        """Let go of the file, as soon as no thread reads from it."""
        self._open.close()

    def _read_some(self, view: memoryview, offset: int) -> int:
        direct = self._direct
        length = aligned_bytes(view, offset) if direct is not None else 0
        if direct is not None and length:
            try:
                return os.preadv(direct, [view[:length]], offset)
            except OSError as error:
                if error.errno not in REFUSED:
                    raise
                self._direct = None
        return os.preadv(self._fd, [view], offset)


class SharedDescriptors:
    """Descriptors that several threads use at once; closed by whoever uses them last.

    A number closed under a thread's hands may be another file's by the time it writes.
    """

    def __init__(self) -> None:
        self._fds: list[int] = []
        self._num_users = 0
        self._closing = False
        self._lock = threading.Lock()

    def add(self, fd: int) -> int:
        """Take ``fd`` into care; returns it."""
        self._fds.append(fd)
        return fd

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """The descriptors stay open inside."""
        with self._lock:
            if self._closing:
                raise ValueError("the file is closed")
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                is_last = self._closing and not self._num_users
            if is_last:
                with contextlib.suppress(OSError):  # whoever closed did not want the file
                    self._close_all()

    def close(self) -> None:
        """Close each once, now or when the last user leaves; a second call does nothing."""
        with self._lock:
            is_last = not self._closing and not self._num_users
            self._closing = True
        if is_last:
            self._close_all()

    def _close_all(self) -> None:
        with contextlib.ExitStack() as stack:  # each is tried, also after one that failed
            for fd in self._fds:
                stack.callback(os.close, fd)
