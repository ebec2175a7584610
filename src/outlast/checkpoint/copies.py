"""One file of a checkpoint in the places that hold it: each block from the first where it is right.

Guarantees: a block is handed on only after its hash was compared with the manifest's.
What can go wrong: no place has it (CheckpointInvalid with every place's reason), or one of them
could not be read at all (OSError: it may have it after all).

Nothing here knows of tensors or needs torch: the keeper copies and mends with it.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import mmap
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
import xxhash

from outlast.checkpoint.manifest import BLOCK_BYTES, FileEntry
from outlast.checkpoint.names import save_of
from outlast.checkpoint.places import Place
from outlast.errors import CheckpointInvalid
from outlast.storage import Reader

PAGE: Final = 4096
_HUGE_PAGE: Final = 2 << 20
MISSING: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class Bounce:
    """Memory for one block of a file: aligned as direct reads want it, in huge pages if it can be.

    Reading into pages of 4 KiB is half as fast, and memory that was used before is not faulted in
    anew: one of these serves many blocks.
    """

    def __init__(self, entry: FileEntry) -> None:
        wanted = -(-max(min(entry.size, BLOCK_BYTES), 1) // PAGE) * PAGE
        spare = _HUGE_PAGE if wanted >= _HUGE_PAGE else 0
        memory = mmap.mmap(-1, wanted + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if spare:
            with contextlib.suppress(OSError):  # without huge pages it is only slower
                memory.madvise(mmap.MADV_HUGEPAGE)
        start = -address_of(memoryview(memory)) % (spare or 1)
        self.view = memoryview(memory)[start : start + wanted]


def address_of(view: memoryview) -> int:
    """Where ``view``, which may be read-only and must not be empty, lies in memory."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def copy_bytes(target: int, source: int, num_bytes: int) -> None:
    """Copy between addresses; other threads run meanwhile."""
    ctypes.memmove(target, source, num_bytes)


class FileCopies:
    """A file that may lie in several places; may be used by several threads at once.

    Args:
        places: where it may lie, the one to be read first first.
        path: its name there, with the save's directory.
        entry: size and hashes, from the manifest.

    Attributes:
        problems: place → the first thing that was found wrong with it there.
        used: name of a place → number of blocks taken from it.
        missing: places that do not have the file.
    """

    def __init__(self, places: Sequence[Place], path: str, entry: FileEntry) -> None:
        self.path = path
        self.entry = entry
        self.problems: dict[str, str] = {}
        self.used: collections.Counter[str] = collections.Counter()
        self.missing: set[str] = set()
        self._places = tuple(places)
        self._short = path.rpartition("/")[2]
        self._readers: dict[str, Reader] = {}
        self._lock = threading.Lock()

    def block_range(self, index: int) -> tuple[int, int]:
        """First byte of a block, and the byte after its last."""
        start = index * BLOCK_BYTES
        return start, min(start + BLOCK_BYTES, self.entry.size)

    def block(self, index: int, buffer: memoryview) -> memoryview:
        """The verified bytes of a block: a part of ``buffer``, or a place's own memory.

        Args:
            index: which block.
            buffer: at least as long as the block, rounded up to pages.

        Raises:
            CheckpointInvalid: no place has it; gives every place's reason.
            OSError: no place that can be read has it.
        """
        problems: list[str] = []
        failure: OSError | None = None
        for place in self._places:
            try:
                data, problem = self._from(place, index, buffer)
            except MISSING:
                problem = f"{self._short} is missing"
                self.missing.add(place.name)
            except OSError as error:
                problem, failure = f"{self._short}: {in_words(error)}", failure or error
            if not problem:
                with self._lock:
                    self.used[place.name] += 1
                return data
            with self._lock:
                self.problems.setdefault(place.name, problem)
            problems.append(f"{place.name}: {problem}" if len(self._places) > 1 else problem)
        reason = "; ".join(problems)
        if failure is None:
            raise CheckpointInvalid(save_of(self.path).step, reason)
        if len(self._places) == 1:
            raise failure
        raise OSError(failure.errno or errno.EIO, reason)

    def whole(self) -> bytes:
        """All of a small file, verified.

        Raises:
            CheckpointInvalid, OSError: see ``block``.
        """
        buffer, raw = Bounce(self.entry).view, bytearray()
        for index in range(len(self.entry.xxh3_128)):
            raw += self.block(index, buffer)
        return bytes(raw)

    def close(self) -> None:
        """Let go of the file everywhere; it is opened anew if it is read again."""
        with self._lock:
            readers, self._readers = self._readers, {}
        for reader in readers.values():
            reader.close()

    def _from(self, place: Place, index: int, buffer: memoryview) -> tuple[memoryview, str]:
        start, end = self.block_range(index)
        data = self._seen(place)
        if data is not None:
            size, data = len(data), data[start:end]
        else:
            reader = self._reader(place)
            size = reader.size
        if size != self.entry.size:
            return buffer, f"{self._short} has {size} bytes and should have {self.entry.size}"
        if data is None:
            whole_pages = -(-(end - start) // PAGE) * PAGE  # so that its end is read directly too
            if reader.read_into(buffer[:whole_pages], start) < end - start:
                return buffer, f"{self._short} ended while it was read"
            data = buffer[: end - start]
        if xxhash.xxh3_128_hexdigest(data) != self.entry.xxh3_128[index]:
            blocks = len(self.entry.xxh3_128)
            return buffer, f"{self._short} does not match its checksum (block {index} of {blocks})"
        return data, ""

    def _seen(self, place: Place) -> memoryview | None:
        """The file as it lies in this machine's memory, if that is where the place is."""
        view = getattr(place.storage, "view", None)
        found: memoryview | None = view(self.path) if callable(view) else None
        return found

    def _reader(self, place: Place) -> Reader:
        with self._lock:
            reader = self._readers.get(place.name)
            if reader is None:
                reader = self._readers[place.name] = place.storage.open(self.path)
            return reader


def in_words(error: OSError) -> str:
    """An error of the system as a person wants it."""
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    return f"{name}: {error.strerror or error}"
