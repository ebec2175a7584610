"""The files of a Directory while they are written or read.

Guarantees: a file has its name only after all its bytes are durable, and is durable under that
name when ``finish`` returns; a positional file that was not written in full never gets its name.

Written under a name that no reader takes for a file: ``.NAME.RANDOM.part`` beside the final one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from outlast.durable import sync_directory
from outlast.storage.direct import (
    ALIGN,
    REFUSED,
    aligned_bytes,
    bytes_of,
    mostly_cached,
    open_direct,
)
from outlast.storage.spares import Spares

PART_PREFIX: Final = "."

_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1


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
        done = self._spares.make_room_for(lambda: _name_new(self._part, self._path))
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


def _name_new(part: Path, path: Path) -> bool:
    """Give a whole file its name unless that is taken: True if it was done.

    Linking is what every POSIX file system makes atomic, NFS too. Where there are no links (FAT,
    SMB, most mounts of an object store) there may be a renaming that does not replace; where that
    is missing as well, nothing is atomic and it is better to say so.
    """
    try:
        os.link(part, path)
    except FileExistsError:
        # An NFS client repeats a call whose answer was lost: the name may be there through us.
        return part.stat().st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _rename_new(part, path)
    return True


def _rename_new(part: Path, path: Path) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.renameat2(
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(part)),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(path)),
        ctypes.c_uint(_RENAME_NOREPLACE),
    ):
        return True
    number = ctypes.get_errno()
    if number == errno.EEXIST:
        return False
    if number in {errno.EINVAL, *_NO_LINKS}:
        what = "neither hard links nor renaming without replacing work on this file system"
        raise OSError(number, what, str(path))
    raise OSError(number, os.strerror(number), str(path))
