"""A whole checkpoint read, or every byte of it verified, in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outlast.checkpoint.manifest import Manifest, Place, SaveName, state_file
from outlast.checkpoint.reader import Checkpoint, open_checkpoint
from outlast.checkpoint.tensors import fresh
from outlast.storage import Storage


def load(
    where: Storage | Sequence[Place],
    which: int | SaveName,
    *,
    rank: int = 0,
    everything: bool = True,
) -> Checkpoint:
    """Open a save and read all tensors of one rank's state.

    Args:
        where: the places it may lie in, or one storage.
        which: which save; of a step the newest that can be opened.
        rank: whose state; beyond the ranks that saved, they are taken in turn.
        everything: verify all other files too.

    Raises:
        CheckpointInvalid: a file is right in no place; names it.
        OSError: a place failed in another way.
    """
    checkpoint = open_checkpoint(where, which, rank=rank)
    wanted = {leaf.name: fresh(leaf.shape, leaf.dtype) for leaf in checkpoint.leaves()}
    checkpoint.read(wanted.items(), share=(0, 1) if everything else None)
    return checkpoint


def verify(
    where: Storage | Sequence[Place],
    which: int | SaveName,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Verify every byte of a save; ``progress`` is told (bytes done, bytes in all).

    Raises:
        CheckpointInvalid: names the first file that does not verify.
        OSError: a place failed in another way.
    """
    checkpoint = open_checkpoint(where, which)
    total = checkpoint.inventory.num_bytes
    done = 0

    def more(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, total)

    more(checkpoint.inventory.file(state_file(0)).size)
    checkpoint.read((), share=(0, 1), progress=more)
    return checkpoint.manifest
