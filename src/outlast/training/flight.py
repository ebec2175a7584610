"""What is saved, how a save ends, and what is known of one while it is on its way."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from outlast.checkpoint.capture import Capture
from outlast.checkpoint.manifest import BLOCK_BYTES, FULL
from outlast.checkpoint.plan import WritePlan


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """How a save ended.

    Attributes:
        step: of the snapshot.
        error: "" when it was committed.
        void: whether it is to be taken again.
        told: whether the ledger has the error: the keeper writes it down, unless it has died.
        by_storage: whether the error is the storage's.
        tier: the durable one that has it; "" if it is in memory alone, or nowhere.
        took_s: from the boundary to the commit; 0 where there was none.
    """

    step: int
    error: str = ""
    void: bool = False
    told: bool = True
    by_storage: bool = False
    tier: str = ""
    took_s: float = 0.0


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What is saved at a boundary.

    Attributes:
        step: completed steps.
        data: key → small state, in which tensors are named.
        tensors: name → live tensor.
        lazy: names of tensors that only the optimizers change.
        order: name → when they are touched.
        narrow: names of tensors that are stored in bfloat16.
        kind: "full" or "weights".
    """

    step: int
    data: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    lazy: frozenset[str]
    order: Mapping[str, int]
    narrow: frozenset[str] = frozenset()
    kind: str = FULL


class Flight:
    """A save on its way."""

    def __init__(self, step: int, serial: int, kind: str = FULL) -> None:
        self.step = step
        self.kind = kind
        self.serial = serial
        self.since_s = time.monotonic()
        self.arena = 0  # none yet
        self.room = threading.Condition()
        self.written_blocks: set[int] = set()
        self.over = False
        self.capture: Capture | None = None
        self.state: State | None = None
        self.plan: WritePlan | None = None

    def free_block(self, block: int) -> None:
        """The keeper has written ``block``: in a ring its place is free."""
        with self.room:
            self.written_blocks.add(block)
            self.room.notify_all()

    def wait_for_room(self, block: int, ring_bytes: int) -> None:
        """In a ring, wait until the block that lay in this one's place was written.

        Raises:
            OSError: the save is over.
        """
        before = block - ring_bytes // BLOCK_BYTES
        if not ring_bytes or before < 0:
            return
        with self.room:
            self.room.wait_for(lambda: before in self.written_blocks or self.over)
        if self.over:
            raise OSError("the save ended before its snapshot was whole")

    def end(self) -> None:
        """The save is over."""
        with self.room:
            self.over = True
            self.room.notify_all()
