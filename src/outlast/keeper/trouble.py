"""What went wrong with a save or a copy, in one line: the error, the path, and what to do about it.

A disk that is full says how much room is missing: what the save needs on it, and what there is for
it. What it has written already counts as room, because a save that fails is not kept.
"""

from __future__ import annotations

import errno
from typing import Final

from outlast.errors import FULL, remedy
from outlast.keeper.flight import Save
from outlast.storage import Directory, Storage

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


def of_save(error: Exception, save: Save, storage: Storage | None) -> str:
    """Why a save cannot be written to its storage. May take time: not under the saves' lock."""
    sizes = [size for rank, one in list(save.ranks.items()) for size in one.sizes(rank)]
    part = "this machine's part of step" if save.is_shared else "step"
    return _of_files(error, storage, str(save.name), sizes, f"{part} {save.step}")


def of_copy(error: Exception, storage: Storage, name: str, sizes: list[int], step: int) -> str:
    """Why files of ``sizes`` bytes cannot be copied below ``name`` of a storage."""
    return _of_files(error, storage, name, sizes, f"step {step}")


def _of_files(
    error: Exception, storage: Storage | None, name: str, sizes: list[int], what: str
) -> str:
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


def _plain(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()  # a path may be in any encoding


def size_of(num_bytes: float) -> str:
    """A number of bytes for people, to three digits."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.3g} {_UNITS[unit]}"
