"""Which checkpoints may go.

Guarantee: the newest valid checkpoint that a job can be resumed from is never among them, nor is
any of the ``keep`` newest ones. What cannot be resumed from counts for nothing: if it did, ``keep``
rotten ones, or ``keep`` that hold weights only, would push out the last that a job can go on from.
Of several saves of a step the newest counts, and the others are of no use.

Where the loss is watched, the newest checkpoint that was seen to be healthy stays besides, however
old: a loss that goes wrong is noticed when newer ones have been committed already. Before any was
seen to be healthy, the oldest stays. And so does the next one behind it: where commits are closer
than what it takes to be seen to be healthy, none would live to be.

A checkpoint is anything that sorts, oldest first: a step, or the name of a save.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

Save = TypeVar("Save", bound=Any)


def removable(
    committed: Collection[Save],
    unfinished: Collection[Save],
    *,
    keep: int,
    invalid: Collection[Save],
    weights_only: Collection[Save] = (),
    superseded: Collection[Save] = (),
    in_use: Collection[Save] = (),
    healthy: Collection[Save] | None = None,
) -> Sequence[Save]:
    """Checkpoints whose directories may be removed, oldest first.

    Args:
        committed: those that have a manifest.
        unfinished: directories without a manifest that nobody can be writing any more.
        keep: how many valid checkpoints that can be resumed from stay, at least 1.
        invalid: committed ones that are known not to verify.
        weights_only: committed ones that cannot be resumed from.
        superseded: committed ones whose step was saved again since, and that is valid.
        in_use: those that somebody writes or reads now; they stay.
        healthy: those that were seen to be healthy; None where nobody watches.

    Returns:
        Valid ones beyond ``keep``, but for the one to roll back to and the next; those of weights
        only that are older than the oldest of the ``keep`` (without any to keep: beyond the
        ``keep`` newest); invalid ones older than the newest valid one; and what is superseded or
        unfinished. Without any to resume from, invalid and unfinished ones stay.
    """
    keep = max(keep, 1)
    valid = set(committed) - set(invalid)
    old = valid & set(superseded)
    restartable = sorted(valid - old - set(weights_only))
    weights = sorted((valid - old) & set(weights_only))
    if not restartable:
        return sorted((old | set(weights[:-keep])) - set(in_use))
    oldest_kept, newest = restartable[-keep:][0], restartable[-1]
    # Only what is there: an invalid one may have been removed since, or never have been.
    useless = set(committed) & set(invalid)
    gone = {
        *old,
        *restartable[:-keep],
        *(save for save in weights if save < oldest_kept),
        *(save for save in useless if save < newest),
        *(set(unfinished) - set(committed)),
    }
    if healthy is not None:
        proven = set(restartable) & set(healthy)
        gone.discard(max(proven, default=restartable[0]))
        if proven:
            gone -= {min((save for save in restartable if save > max(proven)), default=None)}
    return sorted(gone - set(in_use))
