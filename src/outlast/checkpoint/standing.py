"""A place as a job sees it that has rolled back: checkpoints that were undone are not there.

Whether one was follows from its manifest (see ``policy.rollbacks``), so it holds for every tier,
and for what is copied there late. Only reading is another: whoever writes the step anew finds the
old manifest and makes way for its own.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import msgspec

from outlast.checkpoint.manifest import MANIFEST, Manifest
from outlast.checkpoint.places import Place
from outlast.policy.rollbacks import Rollback, is_undone


class _Head(msgspec.Struct):
    attempt: int
    step: int


class Standing:
    """A storage without the manifests of what was undone.

    Args:
        storage: the place itself; whatever is not about manifests is asked of it.
        rollbacks: of the job.
    """

    def __init__(self, storage: Any, rollbacks: Sequence[Rollback]) -> None:
        self._storage = storage
        self._rollbacks = rollbacks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def exists(self, name: str) -> bool:
        """Whether there is a file ``name``, and is not that of an undone checkpoint."""
        if not _is_manifest(name):
            return bool(self._storage.exists(name))
        try:
            self.read(name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return bool(self._storage.exists(name))  # it is there, and cannot be read now
        return True

    def read(self, name: str) -> bytes:
        """The whole (small) file ``name``.

        Raises:
            FileNotFoundError: there is none, or it is the manifest of what was undone.
        """
        data: bytes = self._storage.read(name)
        if _is_manifest(name) and _was_undone(data, self._rollbacks):
            raise FileNotFoundError(errno.ENOENT, "undone by a rollback", name)
        return data


def standing(places: Sequence[Place], rollbacks: Sequence[Rollback]) -> list[Place]:
    """The places as a job sees them after ``rollbacks``."""
    if not rollbacks:
        return list(places)
    return [place._replace(storage=Standing(place.storage, rollbacks)) for place in places]


def stands(manifest: Manifest, rollbacks: Sequence[Rollback]) -> bool:
    """Whether a checkpoint may be gone on from."""
    return not is_undone(rollbacks, manifest.attempt, manifest.step)


def _is_manifest(name: str) -> bool:
    return name.rpartition("/")[2] == MANIFEST


def _was_undone(data: bytes, rollbacks: Sequence[Rollback]) -> bool:
    try:
        head = msgspec.json.decode(data, type=_Head)
    except msgspec.MsgspecError:
        return False  # damaged: whoever reads it finds out
    return is_undone(rollbacks, head.attempt, head.step)
