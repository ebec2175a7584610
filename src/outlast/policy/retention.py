"""Which checkpoints may go.

Guarantee: the newest valid checkpoint that a job can be resumed from is never among them, nor is
any of the ``keep`` newest ones. What cannot be resumed from counts for nothing: if it did, ``keep``
rotten ones, or ``keep`` that hold weights only, would push out the last that a job can go on from.
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
) -> Sequence[int]:
    """Steps whose directories may be removed, oldest first.

    Args:
        committed: steps that have a manifest.
        unfinished: steps that have a directory and no manifest.
        keep: how many valid checkpoints that can be resumed from stay, at least 1.
        invalid: committed steps that are known not to verify.
        weights_only: committed steps that cannot be resumed from.
        in_use: steps that somebody writes or reads now; they stay.

    Returns:
        Valid steps beyond ``keep``; those of weights only that are older than the oldest kept one
        (without any to keep: beyond the ``keep`` newest); and invalid or unfinished ones older than
        the newest valid step (a newer unfinished one may be in the making).
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
    return sorted(gone - set(in_use))
