"""A directory of a local or shared file system.

The order of system calls is the whole point: a file's bytes are fsynced before its name appears,
the name's directory is fsynced before anybody is told, and so is the directory above a directory
that was just made (a rename is not durable without it).

Rejected: writing to the final name (a writer of a dead attempt could still hold it open); O_TMPFILE
(not on every shared file system); for ``put_new``, claiming the name with O_EXCL and writing behind
it (a crash in between leaves a claim that nobody can tell from a writer that is slow).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from outlast.durable import sync_directory
from outlast.storage.files import PART_PREFIX, FileBlob, FileReader, PlacedBlob
from outlast.storage.names import checked
from outlast.storage.spares import Spares


class Room(NamedTuple):
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

    def room(self, name: str) -> Room:
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
        return Room(
            found.f_bavail * found.f_frsize + used * 512,
            found.f_favail if found.f_files else 1,  # btrfs counts none
            found.f_frsize,
        )

    def keep_spares(self, num_spares: int) -> None:
        """Keep at least so many big files of removed trees: one for each writer."""
        self._spares.limit = max(self._spares.limit, num_spares)

    def drop_spares(self) -> None:
        """Give the space of files kept to be written over back to the disk."""
        self._spares.drop()

    def _path(self, name: str) -> Path:
        return self.root / checked(name)

    def _make_directories(self, path: Path, mode: int = 0o777) -> None:
        missing = []
        while not path.is_dir():
            missing.append(path)
            path = path.parent
        for directory in reversed(missing):
            directory.mkdir(mode if directory == missing[0] else 0o777, exist_ok=True)
            sync_directory(directory.parent)


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
