"""Numbers of attempts, as files on the job's storage: what is there, not how it comes there."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from outlast.storage import Storage

FOLDER: Final = "membership"
_NAME: Final = re.compile(r"attempt-(\d{12})\.json")


class Claimed(msgspec.Struct, frozen=True):
    """As much of a claim as says whose it is; ``term`` is "" where nobody can tell."""

    term: str = msgspec.field(default="", name="reign")
    members: tuple[str, ...] = ()

    @property
    def is_for_one(self) -> bool:
        """Whether it is of an agent that runs the job by itself: it names nobody else."""
        return bool(self.term) and self.members == (self.term,)


def claimed_numbers(storage: Storage) -> list[int]:
    """The numbers that are claimed and not forgotten yet, the newest last.

    Raises:
        OSError: storage cannot be asked.
    """
    found = (_NAME.fullmatch(name) for name in storage.children(FOLDER))
    return sorted(int(match[1]) for match in found if match)


def claimed(storage: Storage, number: int) -> Claimed:
    """Who has claimed ``number``, as far as it can be told.

    Raises:
        OSError: storage cannot be asked.
    """
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(storage.read(name_of(number)), type=Claimed)
    return Claimed()


def name_of(number: int) -> str:
    """The file that claims ``number``."""
    return f"{FOLDER}/attempt-{number:012d}.json"
