"""Which steps there are, and removing those that may go.

Guarantees: the manifest of a step that goes is removed durably before any file that it names; an
unfinished step is never taken for a checkpoint; one whose manifest does not verify is not counted
among those that are kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

import msgspec

from outlast.checkpoint.manifest import FULL, MANIFEST, STEP_NAME, decode, step_name
from outlast.checkpoint.places import Place
from outlast.checkpoint.standing import stands
from outlast.errors import CheckpointInvalid
from outlast.policy.retention import removable
from outlast.policy.rollbacks import Rollback
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


def find_standing(places: Sequence[Place]) -> set[int] | None:
    """The committed steps of all places together; None where no place can be listed."""
    found: list[Steps] = []
    for place in places:
        with contextlib.suppress(OSError):
            found.append(find_steps(place.storage))
    return {step for steps in found for step in steps.committed} if found else None


def remove_step(storage: Storage, step: int) -> None:
    """Remove one step: first, durably, the manifest; then the rest.

    Raises:
        OSError: as the storage gave it.
    """
    storage.remove(f"{step_name(step)}/{MANIFEST}")
    storage.remove_tree(step_name(step))


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the checkpoints besides what lies in them.

    Attributes:
        healthy: steps that were seen to be healthy; None where nobody watches.
        rollbacks: what they have undone counts as not valid.
    """

    healthy: frozenset[int] | None = None
    rollbacks: tuple[Rollback, ...] = ()


class Expendable(msgspec.Struct, frozen=True):
    """What retention allows to remove.

    Attributes:
        steps: those that may go, oldest first.
        unreadable: the first manifest that could not be read; its step is left alone.
    """

    steps: tuple[int, ...]
    unreadable: OSError | None = None


def expendable(
    storage: Storage,
    *,
    keep: int,
    invalid: Collection[int] = (),
    in_use: Collection[int] = (),
    health: Health = Health(),  # noqa: B008 - frozen
) -> Expendable:
    """The steps that may go; see ``policy.retention``. Manifests are read, data is not.

    Args:
        storage: where checkpoints lie.
        keep: how many that a job can be resumed from stay, at least 1.
        invalid: steps that are known not to verify, besides those whose manifests do not.
        in_use: steps that somebody writes or reads now; they stay.
        health: which were seen to be healthy, and which were undone.

    Raises:
        OSError: the storage cannot be listed.
    """
    steps = find_steps(storage)
    rotten, weights_only, left = set(invalid), set[int](), set(in_use)
    unreadable: OSError | None = None
    for step in steps.committed:
        if step in rotten:
            continue
        try:
            manifest = decode(storage.read(f"{step_name(step)}/{MANIFEST}"), step)
            if not stands(manifest, health.rollbacks):
                rotten.add(step)
            elif manifest.kind != FULL:
                weights_only.add(step)
        except CheckpointInvalid:
            rotten.add(step)
        except FileNotFoundError:
            left.add(step)  # somebody removes it at this moment
        except OSError as error:
            unreadable = unreadable or error
            left.add(step)
    # A step that is left alone does not count as kept either: it may not be readable tomorrow.
    found = removable(
        [step for step in steps.committed if step not in left or step in in_use],
        steps.unfinished,
        keep=keep,
        invalid=rotten,
        weights_only=weights_only,
        in_use=left,
        healthy=health.healthy,
    )
    return Expendable(tuple(found), unreadable)


def prune(
    storage: Storage,
    *,
    keep: int,
    invalid: Collection[int],
    in_use: Collection[int] = (),
    health: Health = Health(),  # noqa: B008 - frozen
) -> list[int]:
    """Remove what retention allows; returns the steps removed.

    Raises:
        OSError: the first step that could not be read or removed; all others were tried, so that
            one that cannot go does not fill the storage with those after it.
    """
    found = expendable(storage, keep=keep, invalid=invalid, in_use=in_use, health=health)
    removed = []
    failure = found.unreadable
    for step in found.steps:
        try:
            remove_step(storage, step)
        except OSError as error:
            failure = failure or error
        else:
            removed.append(step)
    if failure is not None:
        raise failure
    return removed
