"""Numbers of attempts, as files on the job's storage: what is there, not how it comes there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from outlast.storage import Storage

FOLDER: Final = "membership"
_NAME: Final = re.compile(r"attempt-(\d{12})\.json")


def claimed_numbers(storage: Storage) -> list[int]:
    """The numbers that are claimed and not forgotten yet, the newest last.

    Raises:
        OSError: storage cannot be asked.
    """
    found = (_NAME.fullmatch(name) for name in storage.children(FOLDER))
    return sorted(int(match[1]) for match in found if match)


def name_of(number: int) -> str:
    """The file that claims ``number``."""
    return f"{FOLDER}/attempt-{number:012d}.json"
