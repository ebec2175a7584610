"""Places that hold files, behind one protocol; what the files mean is not known here.

``directory``  a local or shared file system: the order of fsyncs, O_DIRECT, files written over
``object``     a bucket of an object store
``trust``      whether a place can decide who comes first, and whether it outlasts the machine

Guarantees: ``put`` is atomic (a reader sees the old bytes, the new bytes or nothing) and durable
when it returns; a blob from ``create`` becomes visible under its name only in ``finish``, in full
and durably; ``remove`` is durable when it returns. Names are relative, of plain characters, and
can never lead out of the storage.

What can go wrong: any operation raises OSError, a directory's as the system gave it and without a
second try (but for room that its own spare files took), an object store's in one line and after
what :class:`Patience` allows.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from outlast.errors import FULL, ConfigError, remedy
from outlast.storage.directory import Directory
from outlast.storage.object import ObjectStore, Patience
from outlast.tiers import OBJECT_SCHEMES

__all__ = [
    "Blob",
    "CopiesReader",
    "Directory",
    "ObjectStore",
    "Patience",
    "Reader",
    "Storage",
    "in_words",
    "open_storage",
    "unwritten",
]


class Blob(Protocol):
    """A file being written: bytes come, then ``finish`` or ``abandon`` is called once.

    Attributes:
        positional: whether ``write_at`` may be called in any order and from several threads.
            Otherwise offsets must follow each other without a gap, from one thread.
    """

    positional: bool

    def write(self, data: memoryview | bytes) -> None:
        """Append ``data``; not to be mixed with ``write_at``."""

    def write_at(self, data: memoryview | bytes, offset: int) -> None:
        """Write ``data`` at byte ``offset``; the size was given to ``create``."""

    def finish(self) -> None:
        """Make the file durable and visible under its name."""

    def abandon(self) -> None:
        """Forget what was written."""


class Reader(Protocol):
    """An open file; may be read by several threads at once.

    Attributes:
        size: of the file, in bytes.
    """

    size: int

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill ``buffer`` from byte ``offset``; returns the bytes read, fewer only at the end."""

    def close(self) -> None:
        """Let go of the file."""


@runtime_checkable
class CopiesReader(Reader, Protocol):
    """An open file of which several machines have a copy, and which is read from one of them."""

    def read_copy(self, number: int, buffer: memoryview, offset: int) -> int:
        """``read_into`` from another copy, where the bytes of the one before were wrong.

        Args:
            number: of the copy, from 1.
            buffer: filled from byte ``offset``.
            offset: in the file.

        Raises:
            FileNotFoundError: there are not so many.
        """


class Storage(Protocol):
    """What the checkpoint room needs of a place."""

    def describe(self, name: str = "") -> str:
        """The place of ``name`` as a person would write it."""

    def children(self, name: str = "") -> list[str]:
        """Names directly below ``name``, sorted; empty when there is nothing."""

    def exists(self, name: str) -> bool:
        """Whether there is a file ``name``."""

    def size(self, name: str) -> int:
        """Size of the file ``name`` in bytes; FileNotFoundError if there is none."""

    def read(self, name: str) -> bytes:
        """The whole (small) file ``name``."""

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        """Fill ``buffer`` from byte ``offset`` of ``name``; returns the bytes read."""

    def open(self, name: str) -> Reader:
        """Open ``name`` for reading many blocks; FileNotFoundError if there is none."""

    def put(self, name: str, data: bytes) -> None:
        """Write the whole file ``name`` atomically and durably."""

    def put_new(self, name: str, data: bytes) -> bool:
        """``put``, but only if there is no ``name`` yet; False, and nothing done, if there is."""

    def create(self, name: str, size: int | None = None) -> Blob:
        """Start writing the file ``name``, which will have ``size`` bytes if that is given."""

    def remove(self, name: str) -> None:
        """Remove the file ``name`` durably; nothing happens when there is none."""

    def remove_tree(self, name: str, last: Sequence[str] = ()) -> None:
        """Remove all below ``name`` durably; nothing happens when there is nothing.

        What is directly below ``name`` under one of the names in ``last`` goes when all else is
        gone durably, in that order.
        """


def open_storage(url: str, *, num_spares: int = 0) -> Storage:
    """The storage at ``url``; nothing is read, written or connected to yet.

    Args:
        url: a directory's path, or ``s3://``, ``gs://``, ``az://`` and a bucket with a prefix.
        num_spares: how many big files a directory keeps to be written over.

    Raises:
        ConfigError: nothing here can be used as ``url`` says.
    """
    scheme, separator, _ = url.partition("://")
    if not separator:
        if not url:
            raise ConfigError(
                "the place of a storage is empty; write a directory or a bucket's URL"
            )
        return Directory(Path(url), num_spares)
    if scheme not in OBJECT_SCHEMES:
        known = ", ".join(f"{known}://" for known in OBJECT_SCHEMES)
        raise ConfigError(f"there is no storage for {scheme}://; write a directory or {known}")
    return ObjectStore(url)


# --- errors of places, for people -----------------------------------------------------------------

KEEP_FEWER: Final = (
    "free space there, keep fewer checkpoints (checkpoint.keep, or keep of a [[tier]]), or save "
    "to another place (--dir, or url of a [[tier]])"
)
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")


def in_words(error: Exception, storage: Storage | None = None) -> str:
    """An error as people and the ledger read it; of a directory, with where and what to do."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno and isinstance(storage, Directory):
        where = "" if error.filename else f" in {storage.describe()}"
        text += f"{where}; {remedy(error)}"
    return _plain(text)


def unwritten(
    error: Exception, storage: Storage | None, name: str, sizes: list[int], what: str
) -> str:
    """Why files cannot be written, in one line; of a full disk, how much room is missing.

    What they have written already counts as room: of what fails nothing is kept.

    Args:
        error: what was raised.
        storage: where they should go; None: to no storage.
        name: of the directory there.
        sizes: of the files, in bytes.
        what: they are, as in "step 400".
    """
    number = getattr(error, "errno", None)
    if number not in FULL:
        return in_words(error, storage)
    if not isinstance(storage, Directory):
        return f"{in_words(error)}; {KEEP_FEWER}"
    place = storage.describe()
    words = f"{getattr(error, 'strerror', None) or error}: {what} needs "
    try:
        room = storage.room(name)
    except OSError:
        return _plain(f"{words}{size_of(sum(sizes))} in {place}; {KEEP_FEWER}")
    needed = sum(-(-size // room.block_bytes) + 1 for size in (*sizes, 1)) * room.block_bytes
    if number == errno.EDQUOT:
        there = "of which your quota there leaves less"
    elif not room.num_files:
        there = "which makes more files than the file system can hold (no inodes are free)"
    else:
        free, by_now = size_of(room.num_bytes), " by now" * (room.num_bytes >= needed)
        if free == size_of(needed):
            free = f"{needed - room.num_bytes} bytes less"
        there = f"and {free} are free{by_now}"
    return _plain(f"{words}{size_of(needed)} in {place}, {there}; {KEEP_FEWER}")


def size_of(num_bytes: float) -> str:
    """A number of bytes for people, to three digits."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.3g} {_UNITS[unit]}"


def _plain(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()  # a path may be in any encoding
