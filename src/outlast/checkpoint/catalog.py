"""Which steps there are, and removing those that may go.

Guarantees: the manifest of a step that goes is removed durably before any file that it names; an
unfinished step is never taken for a checkpoint.
"""

from __future__ import annotations

from outlast.checkpoint.manifest import MANIFEST, STEP_NAME, step_name
from outlast.policy.retention import removable
from outlast.storage import Storage


class Steps:
    """The steps that have a directory: ``committed`` with a manifest, ``unfinished`` without."""

    def __init__(self, committed: list[int], unfinished: list[int]) -> None:
        self.committed = committed
        self.unfinished = unfinished


def find_steps(storage: Storage) -> Steps:
    """All steps, oldest first. A manifest's presence is a claim; only reading it can verify it.

    Raises:
        OSError: the storage cannot be listed.
    """
    committed: list[int] = []
    unfinished: list[int] = []
    for name in storage.children():
        match = STEP_NAME.match(name)
        if match:
            found = committed if storage.exists(f"{name}/{MANIFEST}") else unfinished
            found.append(int(match[1]))
    return Steps(committed, unfinished)


def remove_step(storage: Storage, step: int) -> None:
    """Remove one step: first, durably, the manifest; then the rest.

    Raises:
        OSError: as the storage gave it.
    """
    storage.remove(f"{step_name(step)}/{MANIFEST}")
    storage.remove_tree(step_name(step))


def prune(storage: Storage, *, keep: int, invalid: set[int]) -> list[int]:
    """Remove what retention allows; returns the steps removed.

    Raises:
        OSError: the first step that could not be removed; all others were tried, so that one that
            cannot go does not fill the storage with those after it.
    """
    steps = find_steps(storage)
    removed = []
    failure: OSError | None = None
    for step in removable(steps.committed, steps.unfinished, keep=keep, invalid=invalid):
        try:
            remove_step(storage, step)
        except OSError as error:
            failure = failure or error
        else:
            removed.append(step)
    if failure is not None:
        raise failure
    return removed
