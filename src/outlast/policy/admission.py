"""How many snapshots fit into this machine's memory, decided before the first one is taken.

The kernel's way of saying that there was not enough is to kill the training. So: numbers first,
then as many buffers as fit, then none (written directly while training waits), always in words.
"""

from __future__ import annotations

from typing import Final

import msgspec

RESERVE_BYTES: Final = 512 << 20  # what training itself may still need at the least
RESERVE_SHARE: Final = 0.05  # of what is free now
EASY: Final = 0.5  # of what is free: what nobody has asked for takes no more
GIB: Final = 1 << 30


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided.

    Attributes:
        buffers: snapshots that may be in memory at once; 0: written directly.
        words: what to tell people, "" when they get what they asked for.
    """

    buffers: int
    words: str = ""


def admit(
    snapshot_bytes: int, *, wanted: int | None, available_bytes: int, useful: int = 1
) -> Admission:
    """Decide how many buffers there are.

    Args:
        snapshot_bytes: one snapshot of all workers of this machine.
        wanted: buffers asked for, None for as many as are useful.
        available_bytes: memory that can be had without swapping.
        useful: that many, but for one no more than ``EASY`` of what is free.
    """
    asked = wanted
    if asked is None:
        asked = useful if useful * snapshot_bytes <= EASY * available_bytes else 1
    usable = max(available_bytes - max(RESERVE_BYTES, int(available_bytes * RESERVE_SHARE)), 0)
    fit = asked if not snapshot_bytes else min(asked, usable // snapshot_bytes)
    if fit == asked:
        return Admission(buffers=asked)
    sizes = (
        f"a snapshot takes {snapshot_bytes / GIB:.2f} GiB of this machine's memory and "
        f"{available_bytes / GIB:.2f} GiB are free"
    )
    if fit:
        many = "buffer" if fit == 1 else "buffers"
        return Admission(buffers=int(fit), words=f"{sizes}: {fit} {many} in place of {asked}")
    return Admission(
        buffers=0,
        words=f"{sizes}: checkpoints are written directly and training waits for each; "
        "free memory, or save less often",
    )
