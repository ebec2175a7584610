"""What is kept: how many snapshots in memory, whose copies on which machine, which checkpoints.

**Snapshots** (:func:`admit`), decided before the first one is taken. The kernel's way of saying
that there was not enough memory is to kill the training. So: numbers first, then as many buffers as
fit, then none (written directly while training waits), always in words.

**Copies of other machines' snapshots** (:func:`holders`). Machines are put into one order, those of
a zone together, in it those of a rack, in it those of a pool; each machine's copies lie one (two: a
third and two thirds) of the way round. So each machine keeps exactly as many copies as there are of
its own, at any number of machines, and a copy lies in another zone whenever no zone has more than
its share of the machines; where one has, in another rack, and so on. Guarantees: all copies of a
snapshot lie on different machines, so that as many machines as there are replicas can be lost at
once. The same facts give the same answer on every machine. Rejected: a ring of neighbours (two
copies in a row fall into one rack; a stride is a ring all the same); the best place for each by a
cost (loads differ, and a newcomer moves everybody's copies as well, for a gain only where labels
are odd).

**Checkpoints** (:func:`removable`). Guarantee: the newest valid checkpoint that a job can be
resumed from is never removed, nor is any of the ``keep`` newest ones. What cannot be resumed from
counts for nothing: if it did, ``keep`` rotten ones, or ``keep`` that hold weights only, would push
out the last that a job can go on from. Of several saves of a step the newest counts, and the others
are of no use. Where the loss is watched, the newest checkpoint that was seen to be healthy stays
besides, however old: a loss that goes wrong is noticed when newer ones have been committed already.
Before any was seen to be healthy, the oldest stays. And so does the next one behind it: where
commits are closer than what it takes to be seen to be healthy, none would live to be. A checkpoint
is anything that sorts, oldest first: a step, or the name of a save.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from outlast.config import LABELS

RESERVE_BYTES: Final = 512 << 20  # what training itself may still need at the least
RESERVE_SHARE: Final = 0.05  # of what is free now
EASY: Final = 0.5  # of what is free: what nobody has asked for takes no more
GIB: Final = 1 << 30
REPLICAS_MAX: Final = 2
Save = TypeVar("Save", bound=Any)


# --- snapshots -----------------------------------------------------------------------------------


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """How many snapshots fit into memory, and why.

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


# --- copies on other machines --------------------------------------------------------------------


class PlacedMachine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine, and what it fails together with.

    Attributes:
        node: its name in the job.
        labels: where it stands, by the words in ``LABELS``; what is not known is left out.
    """

    node: str
    labels: Mapping[str, str] = {}


def num_replicas(setting: int | None, num_machines: int) -> int:
    """How many copies of each machine's snapshot others keep.

    Args:
        setting: as it was set, or None to decide here: one if there is anybody to keep it.
        num_machines: of the attempt.
    """
    wanted = 1 if setting is None else setting
    return max(min(wanted, num_machines - 1), 0)


def holders(machines: Sequence[PlacedMachine], replicas: int) -> dict[str, tuple[str, ...]]:
    """Whose memory holds the copies of each machine's snapshot, by node.

    Args:
        machines: of the attempt; each node once, in any order.
        replicas: how many copies there are to be besides the owner's; fewer if there are not
            enough machines.
    """
    order = [machine.node for machine in sorted(machines, key=_place)]
    count = len(order)
    steps = [number * count // (replicas + 1) for number in range(1, replicas + 1)]
    if replicas >= count:
        steps = list(range(1, count))
    return {
        node: tuple(order[(position + step) % count] for step in steps)
        for position, node in enumerate(order)
    }


def _place(machine: PlacedMachine) -> tuple[str, ...]:
    return (*(machine.labels.get(label, "") for label in LABELS), machine.node)


# --- checkpoints ---------------------------------------------------------------------------------


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
