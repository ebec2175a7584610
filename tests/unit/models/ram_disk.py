"""A disk of a few bytes in memory, whose owner can die before each durable change of it.

It does what a storage promises (``test_ram_disk.py`` runs the contract of all storages against it),
in as few durable changes as a directory has: a file that is put, a blob that is finished, each file
of a tree that is removed. ``on_change`` is asked before each of them, ``on_use`` before anything.
"""

import errno
import os

from outlast.storage.directory import checked


class Crash(BaseException):
    """The process that was at work is gone; nobody catches it."""


class RamDisk:
    """A storage.

    Attributes:
        files: what is there, by name.
        fails: errno of all that is asked, or 0. ENOSPC is the answer to new bytes only.
        fuse: how many durable changes may still be made before its user is gone; None: any number.
    """

    def __init__(self, name="ram"):
        self.files = {}
        self.fails = 0
        self.fuse = None
        self.on_put = lambda name, data: None
        self.on_remove = lambda name: None
        self._name = name

    def describe(self, name=""):
        return f"/{self._name}/{name}".rstrip("/")

    # --- reading ----------------------------------------------------------------------------------

    def children(self, name=""):
        self._use(name or "any")
        below = f"{name}/" if name else ""
        found = {one[len(below) :].partition("/")[0] for one in self.files if one.startswith(below)}
        return sorted(found)

    def exists(self, name):
        self._use(name)
        return name in self.files

    def size(self, name):
        return len(self._file(name))

    def read(self, name):
        return self._file(name)

    def read_into(self, name, buffer, offset=0):
        return _fill(buffer, self._file(name), offset)

    def open(self, name):
        return _RamReader(self._file(name))

    # --- writing ----------------------------------------------------------------------------------

    def put(self, name, data):
        self._change(name, is_new=True)
        self.files[name] = bytes(data)
        self.on_put(name, bytes(data))

    def put_new(self, name, data):
        self._use(name)
        if name in self.files:
            return False
        self._change(name, is_new=True)
        data = bytes(data)
        is_ours = self.files.setdefault(name, data) is data
        if is_ours:
            self.on_put(name, data)
        return is_ours

    def create(self, name, size=None):
        self._use(name, is_new=True)
        return _RamBlob(self, name, size)

    def remove(self, name):
        self._use(name)
        if name in self.files:
            self._change(name)
            del self.files[name]
            self.on_remove(name)

    def remove_tree(self, name, last=()):
        if not name:
            raise ValueError("the root of a storage is not removed")
        self._use(name)
        names = [one for one in self.files if one.startswith(f"{name}/")]
        later = [f"{name}/{one}" for one in last]
        for one in [*sorted(set(names) - set(later)), *(one for one in later if one in names)]:
            self.remove(one)

    # --- trouble ----------------------------------------------------------------------------------

    def _use(self, name, *, is_new=False):
        checked(name)
        if self.fails and (is_new or self.fails != errno.ENOSPC):
            raise OSError(self.fails, os.strerror(self.fails), self.describe(name))

    def _change(self, name, *, is_new=False):
        self._use(name, is_new=is_new)
        if self.fuse is not None:
            if not self.fuse:
                raise Crash(name)
            self.fuse -= 1

    def _file(self, name):
        self._use(name)
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.describe(name))
        return self.files[name]


class _RamReader:
    def __init__(self, data):
        self._data, self.size = data, len(data)

    def read_into(self, buffer, offset):
        return _fill(buffer, self._data, offset)

    def close(self):
        pass


class _RamBlob:
    """A file in the making: nobody sees it, and nothing is left of it, before ``finish``."""

    positional = True

    def __init__(self, disk, name, size):
        self._disk, self._name, self._size = disk, name, size
        self._data = bytearray()

    def write(self, data):
        self.write_at(data, len(self._data))

    def write_at(self, data, offset):
        end = offset + len(data)
        self._data += bytes(max(end - len(self._data), 0))
        self._data[offset:end] = data

    def finish(self):
        if self._size is not None and len(self._data) != self._size:
            raise ValueError(f"{len(self._data)} of {self._size} bytes written")
        self._disk.put(self._name, bytes(self._data))

    def abandon(self):
        self._data = bytearray()


def _fill(buffer, data, offset):
    part = data[offset : offset + len(buffer)]
    buffer[: len(part)] = part
    return len(part)
