"""Name saves and the places in which they lie.

    step-000000001200.a0003.s0017.1f3c9a2b
    step-STEP.aATTEMPT.sSERIAL.NONCE

Each save of a step has a directory that no other save ever writes into. Each session draws a new
nonce, so two attempts with one number (each half of a split job takes itself for the job) share no
name either. What an older attempt still writes goes into its own directories. A step that is saved
again is superseded by another directory's manifest; the older save stays until retention removes
it.

Saves sort by step, then by attempt and number: of several saves of a step the last one is the
newest. ``step-000000001200`` alone is how formats 1 and 2 wrote it; it sorts before all others.

A directory says whose it is before anything else is written into it (``save.json``): retention must
recognise what it removes, also where there is no manifest, or one that does not verify.

Places are memory, local, shared and object storage, in order of speed. All have the same layout, so
a block that is wrong in one place can be taken from another.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from outlast.storage import Storage

# --- names of saves -------------------------------------------------------------------------------

NOTE: Final = "save.json"
_NOTE_FORMAT: Final = 1
_NO_NOTE: Final = (
    *(FileNotFoundError, NotADirectoryError, IsADirectoryError),
    *(msgspec.MsgspecError, UnicodeDecodeError),
)
_NAME: Final = re.compile(
    r"^step-([0-9]{12})(?:\.a([0-9]{4,12})\.s([0-9]{4,12})\.([0-9a-f]{8}))?\Z"
)


class SaveName(NamedTuple):
    """Which save of which step; ``str`` of it is its directory's name.

    Attributes:
        step: completed optimizer steps.
        attempt: the attempt that wrote it.
        serial: its number among the session's saves.
        nonce: eight hexadecimal digits, the session's own; "" for a directory of format 1 or 2.
    """

    step: int
    attempt: int = -1
    serial: int = -1
    nonce: str = ""

    def __str__(self) -> str:
        if not self.nonce:
            return f"step-{self.step:012d}"
        return f"step-{self.step:012d}.a{self.attempt:04d}.s{self.serial:04d}.{self.nonce}"

    @property
    def written(self) -> tuple[int, int]:
        """When it was begun, beside the job's other saves: (attempt, number)."""
        return self.attempt, self.serial


def new_nonce() -> str:
    """What tells a session's saves from those of all others."""
    return os.urandom(4).hex()


def parse(name: str) -> SaveName | None:
    """The save whose directory has this name; None for what is not a save's."""
    found = _NAME.match(name)
    if found is None:
        return None
    step, attempt, serial, nonce = found.groups()
    if nonce is None:
        return SaveName(int(step))
    save = SaveName(int(step), int(attempt), int(serial), nonce)
    return save if str(save) == name else None  # one name for each save, and no other spelling


def named(name: str) -> SaveName:
    """``parse`` of what must be a save's name.

    Raises:
        ValueError: it is not.
    """
    save = parse(name)
    if save is None:
        raise ValueError(f"{name!r} is not the name of a save")
    return save


def save_of(path: str) -> SaveName:
    """The save whose directory ``path`` lies in.

    Raises:
        ValueError: it lies in none.
    """
    return named(path.partition("/")[0])


class _Note(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    job: str
    step: int
    attempt: int
    serial: int


def sign(storage: Storage, save: SaveName, job: str) -> None:
    """Say in the save's directory whose it is; comes before all of its files.

    Raises:
        OSError: as the storage gave it.
    """
    note = _Note(
        format=_NOTE_FORMAT, job=job, step=save.step, attempt=save.attempt, serial=save.serial
    )
    storage.put(f"{save}/{NOTE}", msgspec.json.encode(note))


def signed_by(storage: Storage, save: SaveName) -> str | None:
    """The job that a save's directory says it is of; None where it does not say.

    Raises:
        OSError: it cannot be read now.
    """
    with contextlib.suppress(*_NO_NOTE):
        note = msgspec.json.decode(storage.read(f"{save}/{NOTE}"), type=_Note)
        if (note.step, note.attempt, note.serial) == save[:3]:
            return note.job
    return None


# --- places ---------------------------------------------------------------------------------------


class Place(NamedTuple):
    """One tier as a reader sees it.

    Attributes:
        name: of the tier.
        storage: where its files lie.
        in_memory: whether that is some machine's memory, and no storage at all.
    """

    name: str
    storage: Storage
    in_memory: bool = False


def as_places(where: Storage | Sequence[Place]) -> tuple[Place, ...]:
    """Several places as they are; a storage by itself is one."""
    if isinstance(where, Sequence):
        return tuple(where)
    return (Place("local", where),)
