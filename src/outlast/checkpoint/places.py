"""Places that hold checkpoints, in order of speed: memory, local, shared, object.

Every place has the same layout, so that a block that is wrong in one can be taken from another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outlast.storage import Storage


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
