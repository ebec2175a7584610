"""Whether a state is still the one that a snapshot was taken of: by its content.

The snapshot lies in memory that this worker shares with the keeper, laid out as the plan says. What
another rank has written of it is compared by its digest, which was reported at the time.

Guarantees: a yes is a proof, whatever wrote to the tensors, and past whatever counter. Anything
that cannot be compared (another structure, memory that was used again) is a no.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch

from outlast.checkpoint.boundary import local_of
from outlast.checkpoint.capture import digest_of
from outlast.checkpoint.plan import DigestCheck, Write, WritePlan
from outlast.training.flight import State


class Copy(NamedTuple):
    """A snapshot as it lies in memory.

    Attributes:
        step: completed steps.
        plan: where everything lies.
        digests: key → digest of each piece that other ranks hold too.
        text: this rank's small state.
        arena: number of the memory.
        narrow: names of tensors that are stored in fewer bits.
    """

    step: int
    plan: WritePlan
    digests: Mapping[str, str]
    text: bytes
    arena: int
    narrow: Collection[str]


def is_copy_of(copy: Copy, state: State, buffer: torch.Tensor) -> bool:
    """Whether ``buffer`` holds ``state``, bit for bit, as far as this rank has a part in it."""
    plan = copy.plan
    if buffer.numel() < plan.size or set(copy.narrow) != set(state.narrow):
        return False
    parts: list[Write | DigestCheck] = [*plan.writes, *plan.checks]
    if {part.piece.name for part in parts} != set(state.tensors):
        return False
    for part in parts:
        name, tensor = part.piece.name, state.tensors[part.piece.name]
        is_whole = tuple(tensor.shape) == part.piece.whole
        if not is_whole or (tensor.dtype != part.dtype and name not in state.narrow):
            return False
    for write in plan.writes:
        there = buffer[write.start : write.end]
        here = local_of(state.tensors, write).detach().to("cpu", write.dtype)
        here = here.resolve_conj().resolve_neg().contiguous().view(-1)
        if here.numel() and not torch.equal(here.view(torch.uint8), there):
            return False
    return all(
        copy.digests.get(check.piece.key)
        == digest_of(local_of(state.tensors, check).to(check.dtype))
        for check in plan.checks
    )
