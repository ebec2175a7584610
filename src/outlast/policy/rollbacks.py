"""What a rollback undoes, and which batches it leaves out: the rules that every reader follows.

A rollback goes back to ``step``: whatever attempts up to its own made of later steps is on a branch
that nobody goes on from, also what is committed late, or copied to a slow tier tomorrow. A manifest
names its attempt and its step, so that each reader sees by itself whether it stands; nothing is
written into a checkpoint, and none has to be found and removed before a job may go on.

A step counts what the optimizer did, so the steps after a rollback have the numbers of those that
were undone. Batches are therefore counted apart: in each loop of the script from 1, those left out
included. A batch keeps its number through rollbacks.

Rejected: removing what is undone (a tier that cannot be reached would keep it, and the evidence
would be gone); a flag in each checkpoint (a crash between two of them, and the manifest is what
commits: it does not change).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec


class Batches(msgspec.Struct, frozen=True, kw_only=True):
    """Batches that follow each other in one loop of the script.

    Attributes:
        loop: number of the loop, from 1.
        first, last: their numbers in it, from 1.
    """

    loop: int
    first: int
    last: int


class Rollback(msgspec.Struct, frozen=True, kw_only=True):
    """One rollback.

    Attributes:
        attempt: the newest attempt whose work it undoes.
        step: completed steps that stand; 0 for none.
        first: the first step that showed a sign.
        batches: what is left out from now on; None where the job was stopped.
    """

    attempt: int
    step: int
    first: int
    batches: Batches | None = None


def is_undone(rollbacks: Iterable[Rollback], attempt: int, step: int) -> bool:
    """Whether what ``attempt`` made of ``step`` completed steps is not to be gone on from."""
    return any(one.attempt >= attempt and step > one.step for one in rollbacks)


def left_out(rollbacks: Sequence[Rollback]) -> list[Batches]:
    """The batches that no attempt is to train on from now on."""
    return [one.batches for one in rollbacks if one.batches is not None]


def is_left_out(ranges: Iterable[Batches], loop: int, number: int) -> bool:
    """Whether batch ``number`` of ``loop`` is one of them."""
    return any(one.loop == loop and one.first <= number <= one.last for one in ranges)
