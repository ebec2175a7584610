"""A place as a job sees it: without what rollbacks have undone and without other jobs' saves.

Both follow from the manifest (see ``policy.rollbacks``), so they hold for every tier, and for what
is copied there late. A manifest that cannot be understood is another job's if its directory says so
(see ``names``); where nobody says, it is taken for this job's: a job that has lost what it had is
not to begin anew in silence.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import msgspec

from outlast.checkpoint.manifest import ABANDONED, MANIFEST, Manifest
from outlast.checkpoint.names import parse, signed_by
from outlast.checkpoint.places import Place
from outlast.policy.rollbacks import Rollback, is_undone


class _Head(msgspec.Struct):
    job: str
    attempt: int
    step: int


class Standing:
    """A storage without the manifests of what is no checkpoint of this job, or was undone.

    Args:
        storage: the place itself; whatever is not about manifests is asked of it.
        job: id of the job.
        rollbacks: of the job.

    Attributes:
        others: newest step of each other job whose checkpoints were seen here.
    """

    def __init__(self, storage: Any, job: str, rollbacks: Sequence[Rollback]) -> None:
        self.others: dict[str, int] = {}
        self._storage = storage
        self._job = job
        self._rollbacks = rollbacks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def exists(self, name: str) -> bool:
        """Whether there is a file ``name``, and is not the manifest of what is not this job's."""
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
            FileNotFoundError: there is none, or it is the manifest of what is not this job's.
        """
        data: bytes = self._storage.read(name)
        if _is_manifest(name) and not self._stands(name, data):
            raise FileNotFoundError(errno.ENOENT, "not a checkpoint of this job that stands", name)
        return data

    def _stands(self, name: str, data: bytes) -> bool:
        if data == ABANDONED:
            return False
        save = parse(name.partition("/")[0])
        try:
            head = msgspec.json.decode(data, type=_Head)
        except (msgspec.MsgspecError, UnicodeDecodeError):  # damaged: whoever reads it finds out
            job = None if save is None else signed_by(self._storage, save)
            return job in (None, self._job)
        if head.job != self._job:
            self.others[head.job] = max(self.others.get(head.job, 0), head.step)
            return False
        return not is_undone(self._rollbacks, head.attempt, head.step)


def standing(places: Sequence[Place], job: str, rollbacks: Sequence[Rollback]) -> list[Place]:
    """The places as a job sees them after ``rollbacks``."""
    return [place._replace(storage=Standing(place.storage, job, rollbacks)) for place in places]


def stands(manifest: Manifest, rollbacks: Sequence[Rollback]) -> bool:
    """Whether a checkpoint may be gone on from."""
    return not is_undone(rollbacks, manifest.attempt, manifest.step)


def _is_manifest(name: str) -> bool:
    return name.rpartition("/")[2] == MANIFEST
