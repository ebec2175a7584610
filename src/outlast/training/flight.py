"""Saves on their way: the snapshot that lies in memory, how a save ends, and who waits for it.

A snapshot lies in memory that this worker shares with the keeper, laid out as the plan says.
Whether a state is still the one that it was taken of is told by its content; what another rank has
written of it is compared by its digest, which was reported at the time.

Guarantees: a yes is a proof, whatever wrote to the tensors, and past whatever counter. Anything
that cannot be compared (another structure, memory that was used again) is a no.

People hear of the first save that fails, and that saving works again. It is said here and not from
the ledger: a disk that takes no checkpoint often takes no event. A script that has asked for a save
(``session.save()``) hears of it through a ``PendingSave``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import msgspec
import torch

from outlast.checkpoint.boundary import local_of
from outlast.checkpoint.capture import Capture, digest_of
from outlast.checkpoint.manifest import BLOCK_BYTES, FULL
from outlast.checkpoint.plan import DigestCheck, Write, WritePlan
from outlast.errors import ConfigError
from outlast.script.states import BoundaryState


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
        self.state: BoundaryState | None = None
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


class SnapshotCopy(NamedTuple):
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


def is_copy_of(copy: SnapshotCopy, state: BoundaryState, buffer: torch.Tensor) -> bool:
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


class Unsaved:
    """Of one session, on rank 0.

    Args:
        say: tells people.

    Attributes:
        is_ending: the session's end waits for its save, and says itself what becomes of it.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.is_ending = False
        self._say = say
        self._since = 0  # the step whose save failed first; 0 while saves work

    def ended(self, written: Written) -> None:
        """A save is over."""
        if written.by_storage and not self._since and not self.is_ending:
            self._since = written.step
            self._say(
                f"step {written.step} was not saved: {written.error}; training goes on, and it is "
                "said when a later save works"
            )
        elif written.tier and self._since:
            self._say(
                f"step {written.step} is saved: saving works again (it had failed since step "
                f"{self._since})"
            )
            self._since = 0


class PendingSave:
    """A checkpoint that was asked for.

    Attributes:
        not_before: the first step boundary at which it can be taken.
    """

    def __init__(self, not_before: int, may_wait: Callable[[int], bool] = lambda _: True) -> None:
        self.not_before = not_before
        self._may_wait = may_wait
        self.error = ""
        self._step: int | None = None
        self._committed = False
        self._changed = threading.Condition()

    @property
    def step(self) -> int | None:
        """The step it is taken at, or None while the ranks have not agreed yet."""
        return self._step

    @property
    def committed(self) -> bool:
        """Whether it is complete and readable."""
        return self._committed

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is committed or has failed; whether it is committed.

        A save that comes while another is in flight is put off to a later boundary. Asked by the
        loop before that boundary, the answer is False at once: waiting would be for itself.

        Raises:
            ConfigError: the same without a time-out.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._committed and not self.error:
                # The ranks may still agree on a later step than the one that was asked for.
                if not self._may_wait(self.not_before if self._step is None else self._step):
                    if timeout_s is not None:
                        break  # it was put off to a later boundary: ask again after that
                    raise ConfigError(
                        "wait() is called before the step boundary at which the save is taken, and "
                        "would wait for ever; call it in a later step, or leave it to the "
                        "session's end"
                    )
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            return self._committed

    def decide(self, step: int) -> None:
        """It is taken at ``step``."""
        with self._changed:
            if self._step is None:
                self._step = step
                self._changed.notify_all()

    def end(self, error: str, step: int) -> None:
        """It is committed (``error`` is "") or has failed, with the snapshot of ``step``."""
        with self._changed:
            self._step = step  # a later one than was decided, if the first was void
            self._committed = not error
            self.error = error
            self._changed.notify_all()


class Saves:
    """The saves that were asked for and have not ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[PendingSave] = []

    def add(self, not_before: int, may_wait: Callable[[int], bool] = lambda _: True) -> PendingSave:
        """Keep track of a new one; ``may_wait`` says whether the caller may wait for a step."""
        pending = PendingSave(not_before, may_wait)
        with self._lock:
            self._open.append(pending)
        return pending

    def open(self) -> list[PendingSave]:
        """Those that have not ended."""
        with self._lock:
            return list(self._open)

    def give_up(self, step: int) -> None:
        """The attempt is over, after ``step``: none of them is to be waited for."""
        for pending in self.open():
            pending.end("the attempt is over", step)

    def decided(self, step: int) -> None:
        """All ranks act after ``step``: whoever asked for it or before is served."""
        for pending in self.open():
            if pending.not_before <= step:
                pending.decide(step)

    def written(self, step: int, error: str) -> None:
        """The save of ``step`` has ended."""
        with self._lock:
            ended = [p for p in self._open if p.not_before <= step]
            self._open = [p for p in self._open if p.not_before > step]
        for pending in ended:
            pending.end(error, step)
