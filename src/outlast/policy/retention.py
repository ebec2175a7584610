"""Which checkpoints may go.

Guarantee: the newest valid checkpoint that a job can be resumed from is never among them, nor is
any of the ``keep`` newest ones. What cannot be resumed from counts for nothing: if it did, ``keep``
rotten ones, or ``keep`` that hold weights only, would push out the last that a job can go on from.

Where the loss is watched, the newest checkpoint that was seen to be healthy stays besides, however
old: a loss that goes wrong is noticed when newer ones have been committed already. Before any was
seen to be healthy, the oldest stays. And so does the next one behind it: where commits are closer
than what it takes to be seen to be healthy, none would live to be.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def removable(
    committed: Collection[int],
    unfinished: Collection[int],
    *,
    keep: int,
    invalid: Collection[int],
    weights_only: Collection[int] = (),
    in_use: Collection[int] = (),
    healthy: Collection[int] | None = None,
) -> Sequence[int]:
    """Steps whose directories may be removed, oldest first.

    Args:
        committed: steps that have a manifest.
        unfinished: steps that have a directory and no manifest.
        keep: how many valid checkpoints that can be resumed from stay, at least 1.
        invalid: committed steps that are known not to verify.
        weights_only: committed steps that cannot be resumed from.
        in_use: steps that somebody writes or reads now; they stay.
        healthy: steps that were seen to be healthy; None where nobody watches.

    Returns:
        Valid steps beyond ``keep``, but for the one to roll back to and the next; those of weights
        only that are older than the oldest of the ``keep`` (without any to keep: beyond the
        ``keep`` newest); and invalid or unfinished ones older than the newest valid step (a newer
        unfinished one may be in the making).
    """
    keep = max(keep, 1)
    valid = set(committed) - set(invalid)
    restartable = sorted(valid - set(weights_only))
    weights = sorted(valid & set(weights_only))
    if not restartable:
        return sorted(set(weights[:-keep]) - set(in_use))
    oldest_kept, newest = restartable[-keep:][0], restartable[-1]
    # Only what is there: an invalid step may have been removed since, or never have been.
    useless = (set(committed) & set(invalid)) | (set(unfinished) - set(committed))
    gone = {
        *restartable[:-keep],
        *(step for step in weights if step < oldest_kept),
        *(step for step in useless if step < newest),
    }
    if healthy is not None:
        proven = set(restartable) & set(healthy)
        gone.discard(max(proven, default=restartable[0]))
        if proven:
            gone.discard(min((step for step in restartable if step > max(proven)), default=-1))
    return sorted(gone - set(in_use))
