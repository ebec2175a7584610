"""A directory of a local or shared file system.

The order of system calls is the whole point: a file's bytes are fsynced before its name appears,
the name's directory is fsynced before anybody is told, and so is the directory above a directory
that was just made (a rename is not durable without it).

Rejected: writing to the final name (a writer of a dead attempt could still hold it open); O_TMPFILE
(not on every shared file system).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Final

# No component starts with a dot, so a name can neither lead out nor meet an unfinished part.
NAME: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*\Z")
PART_PREFIX: Final = "."


class Directory:
    """A storage that is a directory; ``root`` is made when something is first written."""

    def __init__(self, root: Path) -> None:
        self.root = root

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

    def create(self, name: str) -> FileBlob:
        """Start writing the file ``name``."""
        path = self._path(name)
        self._make_directories(path.parent)
        return FileBlob(path)

    def remove(self, name: str) -> None:
        """Remove the file ``name`` durably."""
        path = self._path(name)
        try:
            path.unlink()
        except FileNotFoundError:
            return
        sync_directory(path.parent)

    def remove_tree(self, name: str) -> None:
        """Remove ``name`` and all below it."""
        path = self._path(name)
        if path == self.root:
            raise ValueError("the root of a storage is not removed")
        shutil.rmtree(path, ignore_errors=False)

    def _path(self, name: str) -> Path:
        if not name:
            return self.root
        if not NAME.match(name):
            raise ValueError(f"{name!r} is not a name of this storage")
        return self.root / name

    def _make_directories(self, path: Path) -> None:
        missing = []
        while not path.is_dir():
            missing.append(path)
            path = path.parent
        for directory in reversed(missing):
            directory.mkdir(exist_ok=True)
            sync_directory(directory.parent)


class FileBlob:
    """A file of a Directory while it is written, under a name that no reader takes for a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Random: in containers a restarted process has the number of the one that died here.
        self._part = path.parent / f"{PART_PREFIX}{path.name}.{os.urandom(8).hex()}.part"
        self._fd = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, data: memoryview | bytes) -> None:
        """Append ``data`` in full."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def finish(self) -> None:
        """Data, then name, then directory: each durable before the next."""
        os.fsync(self._fd)
        self._close()
        os.rename(self._part, self._path)  # noqa: PTH104
        sync_directory(self._path.parent)

    def abandon(self) -> None:
        """Forget what was written; a part that cannot be removed is harmless."""
        with contextlib.suppress(OSError):  # what made us abandon is what must be heard
            if self._fd >= 0:
                self._close()
        with contextlib.suppress(OSError):
            self._part.unlink()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1  # also after a close that fails, the number is free
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Make the names in ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
