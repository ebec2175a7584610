"""Which checkpoints may go.

Guarantee: the newest valid checkpoint is never among them, nor is any of the ``keep`` newest valid
ones. A checkpoint that a resume has rejected counts for nothing: if it did, ``keep`` rotten ones
would push out the last that can be read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def removable(
    committed: Collection[int], unfinished: Collection[int], *, keep: int, invalid: Collection[int]
) -> Sequence[int]:
    """Steps whose directories may be removed, oldest first.

    Args:
        committed: steps that have a manifest.
        unfinished: steps that have a directory and no manifest.
        keep: how many valid checkpoints stay, at least 1.
        invalid: committed steps that are known not to verify.

    Returns:
        Valid steps beyond ``keep``, and invalid or unfinished ones older than the newest valid
        step (a newer unfinished one may be in the making).
    """
    valid = sorted(set(committed) - set(invalid))
    if not valid:
        return []
    newest = valid[-1]
    # Only what is there: an invalid step may have been removed since, or never have been.
    useless = (set(committed) & set(invalid)) | (set(unfinished) - set(committed))
    rotten = {step for step in useless if step < newest}
    return sorted({*valid[: -max(keep, 1)], *rotten})
