"""From a state at a step boundary to a committed checkpoint, as far as a worker has a part in it.

The training thread plans, copies what cannot wait, and goes on; copiers do the rest; the keeper
writes and commits. Saves that are in flight are counted, never more than there are buffers, so
nothing queues up and nothing blocks. A snapshot that turns out void is taken again at the next
boundary, all of it at once.

A snapshot lies in memory that this worker shares with the keeper, laid out as the plan says.
Whether a state is still the one that it was taken of is told by its content; what another rank has
written of it is compared by its digest, which was reported at the time (``is_copy_of``).

Guarantees: a yes to that is a proof, whatever wrote to the tensors, and past whatever counter.
Anything that cannot be compared (another structure, memory that was used again) is a no.
What can go wrong: the keeper dies (saves in flight fail, the next ones go to its successor), or
cannot be had at all (every save fails, in words; training goes on).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import torch

from outlast.attempt.link import Link
from outlast.attempt.over import over
from outlast.checkpoint import devices
from outlast.checkpoint.capture import Capture, Copiers, Remembered, digest_of, local_of
from outlast.checkpoint.manifest import BLOCK_BYTES, FULL, small_state
from outlast.checkpoint.plan import (
    DigestCheck,
    Held,
    Share,
    Write,
    WritePlan,
    make,
    name_of,
    num_bytes,
    outline,
    structure,
)
from outlast.config import Settings
from outlast.errors import ConfigError, OutlastError
from outlast.keeper import wire
from outlast.keeper.client import GONE, KeeperLine
from outlast.keeper.process import setup_of
from outlast.script.objects import BoundaryState
from outlast.training.books import Attempt
from outlast.training.sharing import (
    KeeperMeeting,
    KeptSteps,
    Sharing,
    SnapshotRoom,
    StepKept,
    local_ranks,
)

logger = logging.getLogger(__name__)

SHARE_TIMEOUT_S: Final = 120.0
MAX_VOID: Final = 3  # snapshots in a row that may be void before the save is called failed
AGREEING: Final = "the ranks are agreeing on who writes what"
OTHER: Final = "the state has other tensors than before"
DIED: Final = "the keeper died before the commit; the older checkpoint stands"
ENDED: Final = "the attempt ended before the commit; the older checkpoint stands"
ROOM_S: Final = 2.0  # that a rank waits for word of the save before
NOT_KEPT: Final = "this machine has no room to keep a snapshot while the next is taken"
NUMBERS_OF_A_STEP: Final = 16  # more than a step is tried to be saved
LOOK_S: Final = 0.1  # whether the attempt is over, while a step is being kept
HEAD_BYTES: Final = 1 << 20  # room for a file's header when memory is reserved ahead


class Planned(NamedTuple):
    """What this rank does of a kind of save, and what that was worked out for."""

    narrow: frozenset[str]
    pieces: Sequence[Held]
    share: Share
    number: int  # of the layout, as the keeper knows it
    plan: WritePlan


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
    """A save on its way; the loop waits for one of ``each_step``."""

    def __init__(
        self, step: int, serial: int, kind: str = FULL, *, each_step: bool = False
    ) -> None:
        self.step = step
        self.kind = kind
        self.each_step = each_step
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


class Engine:
    """One worker's part in saving.

    Attributes:
        committed_step: the newest step that is committed to a durable tier, to be resumed from.
        failures: saves that failed.
        line: the connection to the keeper.

    Args:
        settings: the job's.
        link: the other ranks.
        job: the job's id.
        attempt: number of this attempt, and whose it is where no agent says so.
        on_written: told of each save's end, in a thread that is not the training thread.
        on_change: told that a snapshot may have become possible, in some thread.
        say: tells people what they must know.
    """

    def __init__(
        self,
        settings: Settings,
        link: Link,
        *,
        job: str,
        attempt: Attempt,
        on_written: Callable[[Written], None],
        on_change: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self.committed_step = 0
        self.failures = 0
        self._link = link
        local = local_ranks(link)
        self._on_written = on_written
        self._on_change = on_change
        self._say = say
        self.line = KeeperLine(
            setup_of(settings, job, claims=attempt.claims),
            wire.Hello(
                job=job,
                attempt=attempt.number,
                nonce=attempt.nonce or wire.NO_NONCE,
                rank=link.rank,
                world_size=link.world_size,
                term=attempt.term,
                first_local=local.start,
                num_local=len(local),
            ),
            on_message=self._heard,
            on_lost=self._keeper_died,
            on_back=self._keeper_back,
            say=say,
        )
        self._changed = threading.Condition()
        self._flights: dict[int, Flight] = {}
        self._last = Written(step=0)
        self._serial = 0
        self._voids = 0
        self._always_at_once = False
        self._at_once = False  # the next snapshot: nothing is left for later
        self._eager: set[str] = set()  # names that were seen to change under a copy
        self._own: set[str] = set()  # names that differ from rank to rank
        self._structures: dict[str, tuple[Any, Sequence[Held]]] = {}  # by kind of save
        self._plans: dict[str, Planned] = {}  # by kind of save
        self._layouts = 0
        self._remembered = Remembered()
        self._room = SnapshotRoom(settings, link.world_size)
        each_step = settings.checkpoint_each_step
        self._says_room = not link.rank or (each_step and link.rank == local.start)
        self._sharing = Sharing(link, on_change)
        self._meeting = KeeperMeeting(settings, link, local, self.line, say)
        self._unsaid: list[wire.Absent] = []  # of saves whose keeper has died
        self._copiers = Copiers(self._copied)
        self._copies: dict[int, SnapshotCopy] = {}  # by serial: what lies in memory of a save
        # Of ``committed_step``, while it lies there.
        self._committed_copy: SnapshotCopy | None = None
        self._steps = KeptSteps(self._room)

    # --- beginning and end ----------------------------------------------------------------------

    def stop(self, timeout_s: float, *, clean: bool, copying_s: float | None = None) -> None:
        """Let saves in flight end, for at most ``timeout_s``, and leave.

        Args:
            timeout_s: for saves in flight.
            clean: otherwise the keeper stays for the next attempt, with the memory.
            copying_s: how long slower tiers may take to get what is due there; None for as long as
                it takes.
        """
        self.wait(timeout_s)
        self._copiers.stop()
        self._sharing.stop()
        try:
            self.line.close(clean=clean, copying_s=copying_s)
        finally:
            self._meeting.stop()
            self._room.close()

    # --- saving ---------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether a snapshot could be taken now."""
        with self._changed:
            return not self._why_not()

    @property
    def keeps(self) -> bool:
        """Whether a snapshot stays in this machine's memory until the next one is whole."""
        return self._room.keeps

    @property
    def memory_bytes(self) -> int:
        """Memory that this worker's snapshots, and what is kept of others for them, may take."""
        return self._room.total_bytes

    @property
    def idle_soon(self) -> bool:
        """Whether all that is missing is the ranks' agreement: milliseconds, and only once."""
        with self._changed:
            return self._why_not() in ("", AGREEING)

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way, as far as this moment knows."""
        return bool(self._flights)

    def _why_not(self) -> str:
        if not self._has_room():
            return "the save before it is still being written"
        if self._copiers.current is not None:
            return "the snapshot before it is still being copied"
        if self._sharing.has_begun and not self._sharing.is_settled:
            return AGREEING
        return "" if self.line.client else GONE

    def _has_room(self) -> bool:
        return len(self._flights) < self._room.num_buffers and self._room.is_free(self._busy())

    def _busy(self) -> set[int]:
        return {flight.arena for flight in self._flights.values()}

    def stuck(self, seconds: float) -> int:
        """The step of a save that has been on its way for longer than ``seconds``; 0 if none is."""
        now = time.monotonic()
        with self._changed:
            late = [f.step for f in self._flights.values() if now - f.since_s > seconds]
        return min(late, default=0)

    def why_not(self) -> str:
        """Why a snapshot cannot be taken now, in words."""
        with self._changed:
            return self._why_not()

    def prepare(self, state: BoundaryState) -> None:
        """After the first step: agree with the other ranks, and have memory made ready."""
        pieces = self._pieces(state)
        self._own |= state.own
        self._sharing.offer(pieces, self._own)
        devices.Thread(
            target=self._reserve_ahead, args=(pieces,), name="outlast-reserve", daemon=True
        ).start()

    def capture(
        self,
        state: BoundaryState,
        tiers: tuple[str, ...] | None,
        started_s: float,
        *,
        each_step: bool = False,
        agreed_s: float = SHARE_TIMEOUT_S,
    ) -> int:
        """Take a snapshot; returns its size in bytes once training may go on.

        Args:
            state: what to save; its tensors are live.
            tiers: where it is to go; None for everywhere.
            started_s: monotonic time at which the loop was stopped.
            each_step: the loop waits for it (``wait_until_kept``), and nobody else is told.
            agreed_s: how long the ranks' agreement on who writes what is waited for.

        Raises:
            OSError, OutlastError: no snapshot could be begun; every rank is told.
        """
        flight = self._take_off(state.step, state.kind, each_step=each_step)
        if each_step:  # who goes on from what survivors hold has not waited for earlier ones
            self.line.settle()
        try:
            return self._begin(flight, state, tiers, started_s, agreed_s)
        except (OSError, OutlastError, RuntimeError) as error:
            self._remembered.let_go()
            self._absent(flight, f"{type(error).__name__}: {error}")
            raise

    def count_from(self, step: int) -> None:
        """Number the saves from here on by the step, so that all ranks count alike at each.

        One that has taken a step's snapshot once more than others, or not at all, would otherwise
        be beside them for ever.
        """
        self._serial = max(self._serial, step * NUMBERS_OF_A_STEP)

    def refuse(self, step: int, reason: str, *, each_step: bool = False) -> None:
        """This rank cannot take part in a save that all have agreed on."""
        self._absent(self._take_off(step, each_step=each_step), reason)

    def wait_until_kept(self, timeout_s: float, *, copied: bool) -> StepKept:
        """Wait for the snapshot of this step that was just begun, as far as its attempt lasts.

        Args:
            timeout_s: how long at most.
            copied: whether other machines are to have it too.
        """
        serial, until_s = self._serial, time.monotonic() + timeout_s
        with self._changed:
            while True:
                kept = self._steps.how(serial, copied=copied)
                left_s = until_s - time.monotonic()
                if kept is not None or over.is_over or left_s <= 0:
                    break
                self._changed.wait(min(left_s, LOOK_S))
            if kept is None:
                return self._steps.late(serial)
            return kept

    @property
    def is_copying(self) -> bool:
        """Whether a snapshot has not copied everything yet."""
        return self._copiers.current is not None

    def before_optimizer(self) -> None:
        """What the snapshot in progress has not copied yet is copied now: it is about to change."""
        capture = self._copiers.current
        if capture is not None:
            capture.wait()

    def distrust(self) -> None:
        """Optimizers will not say when they step: from here on nothing is left for later."""
        self._always_at_once = True

    def take_at_once(self) -> None:
        """Of the next snapshot nothing is left for later."""
        self._at_once = True

    def wait(self, timeout_s: float | None) -> Written | None:
        """How the last save ended, waited for; None when one has not within ``timeout_s``."""
        self.before_optimizer()  # whoever waits may as well help
        with self._changed:
            if self._changed.wait_for(lambda: not self._flights, timeout_s):
                return self._last
            return None

    def holds(self, state: BoundaryState) -> bool:
        """Whether ``state`` is, to the bit, the newest commit; False where that is not certain."""
        copy, reserved = self._committed_copy, self._room.reserved
        if copy is None or reserved is None or reserved.ring_bytes or copy.step != state.step:
            return False
        try:
            text = small_state(state.step, self._link.rank, copy.plan.own, state.data)
            buffer = self._room.buffer(copy.arena)
            return text == copy.text and buffer is not None and is_copy_of(copy, state, buffer)
        except (OSError, OutlastError, RuntimeError) as error:
            logger.warning("the state could not be compared with its snapshot: %s", error)
            return False

    def give_up(self) -> None:
        """The attempt is over: what other ranks have a part in does not end any more."""
        self._sharing.stop()
        for flight in list(self._flights.values()):
            self._over(flight.serial, Written(step=flight.step, error=ENDED, told=False))

    def wait_for_writing(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight, without a hand in it; whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._flights, timeout_s)

    def wait_for_copies(self, timeout_s: float) -> bool:
        """Wait until what is in flight needs this process no more; whether that came in time."""
        self.before_optimizer()
        with self._changed:
            is_whole = lambda: all(one.capture is None for one in self._flights.values())  # noqa: E731
            return self._changed.wait_for(is_whole, timeout_s)

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until a snapshot can be taken; whether it can."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._has_room() and not self.is_copying, timeout_s
            )

    # --- the training thread --------------------------------------------------------------------

    def _take_off(self, step: int, kind: str = FULL, *, each_step: bool = False) -> Flight:
        with self._changed:
            self._serial += 1
            if not each_step:  # which has an arena of its own
                self._copies, self._committed_copy = {}, None  # its memory may be written to
            flight = Flight(step, self._serial, kind, each_step=each_step)
            self._flights[self._serial] = flight
        return flight

    def _begin(
        self,
        flight: Flight,
        state: BoundaryState,
        tiers: tuple[str, ...] | None,
        started_s: float,
        agreed_s: float,
    ) -> int:
        at_once = self._at_once or self._always_at_once
        lazy = frozenset() if at_once else self._may_be_late(state.lazy)
        known = self._plans.get(state.kind)
        again = (
            known is not None
            and known.narrow == state.narrow
            and self._remembered.again(known.plan, lazy, state.tensors)
        )
        pieces = known.pieces if known is not None and again else self._pieces(state)
        if not self._sharing.has_begun:
            self._own |= state.own
            self._sharing.offer(pieces, self._own)
        # What is agreed on is who writes what of everything, also where weights alone are saved.
        is_whole = state.kind == FULL or FULL not in self._structures
        whole = pieces if is_whole else self._structures[FULL][1]
        share = self._sharing.of(whole, agreed_s)
        if share is None and self._link.world_size == 1:  # nobody else must hear of it first
            self._sharing.offer(whole, self._own)
            share = self._sharing.of(whole, SHARE_TIMEOUT_S)
        if share is None:
            self._remembered.let_go()
            is_late = flight.each_step and not self._sharing.is_settled  # they need not begin anew
            self._absent(flight, *((AGREEING,) if is_late else (OTHER, ("",))))
            return 0
        if share.problem:
            raise ConfigError(share.problem)
        number, plan = self._plan(state, pieces, share)
        again = again and known is not None and plan is known.plan
        self._reserve(plan.size, beyond=HEAD_BYTES if flight.each_step else 0)
        reserved = self._room.reserved
        assert reserved is not None  # noqa: S101 - it was made
        if tiers == () and not self._room.keeps:
            raise ConfigError(NOT_KEPT)
        with self._changed:
            # Rank 0 knows how the save before has ended; here the word of it may be under way.
            self._changed.wait_for(lambda: self._room.is_free(self._busy()), ROOM_S)
            busy = self._busy()
            flight.arena, buffer = self._room.take(busy)
            self._written_over(flight.arena)
        self.line.send(
            wire.BeginSave(
                step=state.step,
                serial=flight.serial,
                layout=number,
                arena=flight.arena,
                tiers=tiers,
                kind=state.kind,
                exact=not state.narrow,
                started_s=started_s,
                each_step=flight.each_step,
            )
        )
        if at_once:
            self._at_once = False
        capture = Capture(
            plan,
            state.tensors,
            lazy,
            buffer,
            ring_bytes=reserved.ring_bytes,
            on_blocks=lambda blocks: self._full(flight, blocks),
            wait_for_room=lambda block: flight.wait_for_room(block, reserved.ring_bytes),
            remembered=self._remembered,
            again=again,
        )
        flight.capture, flight.state, flight.plan = capture, state, plan
        capture.take_now()
        self._copiers.submit(capture)
        return plan.size

    def _written_over(self, arena: int) -> None:
        self._steps.taken(arena)
        self._copies = {one: copy for one, copy in self._copies.items() if copy.arena != arena}
        if self._committed_copy is not None and self._committed_copy.arena == arena:
            self._committed_copy = None

    def _may_be_late(self, lazy: frozenset[str]) -> frozenset[str]:
        return lazy - self._eager if self._eager else lazy

    def _pieces(self, state: BoundaryState) -> Sequence[Held]:
        # Names, shapes and dtypes are compared, not worked out anew, while they stay the same.
        key = state.narrow, list(state.tensors), outline(state.tensors)
        known = self._structures.get(state.kind)
        if known is not None and known[0] == key:
            return known[1]
        pieces = structure(state.tensors, state.narrow)
        self._structures[state.kind] = (key, pieces)
        return pieces

    def _plan(
        self, state: BoundaryState, pieces: Sequence[Held], share: Share
    ) -> tuple[int, WritePlan]:
        known = self._plans.get(state.kind)
        if known is not None and known.pieces is pieces and known.share is share:
            return known.number, known.plan
        plan = make(pieces, self._link.rank, share, state.order)
        self._layouts += 1
        number = self._layouts
        self.line.send(
            wire.Layout(
                number=number,
                size=plan.size,
                tensors=plan.tensors if self._link.world_size == 1 else {},
                contents=plan.contents,
                num_elements=share.num_elements if state.kind == FULL else 0,
                groups=share.groups,
            ),
            plan.head,
        )
        self._plans[state.kind] = Planned(state.narrow, pieces, share, number, plan)
        return number, plan

    def _reserve(self, size: int, *, beyond: int, is_ahead: bool = False) -> None:
        client = self.line.client
        if client is None:
            raise ConnectionResetError(GONE)
        words = self._room.reserve(client, size, beyond=beyond, is_ahead=is_ahead)
        if words and self._says_room:
            self._say(words)

    # --- other threads --------------------------------------------------------------------------

    def _reserve_ahead(self, pieces: Sequence[Held]) -> None:
        try:
            share = self._sharing.of(pieces, SHARE_TIMEOUT_S)
            if share is not None:
                rank = self._link.rank
                mine = [p for p, _ in pieces if share.writers.get(p.key, rank) == rank]
                self.line.settle()  # who goes on from what survivors hold has not waited for that
                size = sum(num_bytes(piece) for piece in mine)
                self._reserve(size, beyond=HEAD_BYTES, is_ahead=True)
        except (OSError, OutlastError) as error:
            if not over.is_over:  # else the next attempt sees to it
                logger.warning("memory for snapshots: %s", error)

    def _full(self, flight: Flight, blocks: Sequence[int]) -> None:
        message = wire.BlocksReady(step=flight.step, serial=flight.serial, blocks=tuple(blocks))
        self.line.send_quietly(message)

    def _copied(self, capture: Capture) -> None:
        """A copier's word: a snapshot is whole, or is not to be believed."""
        with self._changed:
            self._changed.notify_all()
            found = [f for f in self._flights.values() if f.capture is capture]
        self._on_change()
        if not found:  # given up meanwhile
            return
        try:
            self._tell_copied(found[0], capture)
        finally:
            with self._changed:
                found[0].capture = None
                self._changed.notify_all()

    def _tell_copied(self, flight: Flight, capture: Capture) -> None:
        state, plan = flight.state, flight.plan
        flight.state = flight.plan = None
        assert state is not None and plan is not None  # noqa: S101, PT018 - set with the capture
        step, serial = flight.step, flight.serial
        if capture.error is not None or capture.void or capture.moved:
            names, how = tuple(sorted(set(capture.void))), "changed under the copy"
            with self._changed:
                self._eager |= set(names)
            if capture.moved:
                names, how = tuple(capture.moved), "is not of the dtype or shape that it was"
            reason = f"{', '.join(names[:3])} {how}"
            if capture.error is not None:
                names, reason = (), f"{type(capture.error).__name__}: {capture.error}"
            self.line.send_quietly(wire.Void(step=step, serial=serial, reason=reason, names=names))
            return
        text = small_state(step, self._link.rank, plan.own, state.data)
        arena, narrow = flight.arena, state.narrow
        self._copies[serial] = SnapshotCopy(step, plan, capture.digests, text, arena, narrow)
        done = wire.Complete(step=step, serial=serial, digests=capture.digests)
        self.line.send_quietly(done, text)

    def _absent(self, flight: Flight, reason: str, names: tuple[str, ...] = ()) -> None:
        message = wire.Absent(step=flight.step, serial=flight.serial, reason=reason, names=names)
        try:
            self.line.send(message)
        except OSError:
            self._unsaid.append(message)
            told = not flight.each_step  # else this rank alone knows
            self._over(flight.serial, Written(step=flight.step, error=reason, told=told))

    def _heard(self, message: Any, blob: bytes) -> None:
        """What the keeper says."""
        match message:
            case wire.SaveEnded():
                self._ended(message)
            case wire.BlockWritten():
                flight = self._flights.get(message.serial)
                if flight is not None:
                    flight.free_block(message.block)
            case wire.CopyMade():
                with self._changed:
                    self._steps.copied(message)
                    self._changed.notify_all()
            case wire.RecallWaits():
                self._say(message.words)

    def _ended(self, message: wire.SaveEnded) -> None:
        known = self._flights.get(message.serial)
        if known is None:  # its end is known: the keeper died meanwhile
            return
        if known.each_step:
            self._step_ended(known, message)
            return
        written = Written(
            step=message.step,
            error=message.error,
            by_storage=message.by_storage,
            tier=message.tier,
        )
        if not message.error:
            self._voids = 0
            is_full = known.kind == FULL
            with self._changed:
                # What is in memory alone is gone with the machine; weights alone don't resume.
                if message.tier and is_full:
                    self.committed_step = max(self.committed_step, message.step)
                    self._committed_copy = self._copies.get(message.serial)
            self._room.ended(known.arena, alone=not message.tier and is_full)
            took_s = time.monotonic() - known.since_s
            written = msgspec.structs.replace(written, took_s=took_s)
        elif message.void:
            is_failure = self._voids == MAX_VOID
            self._voids = 0 if is_failure else self._voids + 1
            self.failures += is_failure
            self._take_again(message.void)
            # Also for the saves behind one that has failed: gradients in the making come and go.
            written = Written(step=message.step, error=message.error, void=not is_failure)
        else:
            self.failures += 1
        self._over(message.serial, written)

    def _step_ended(self, flight: Flight, message: wire.SaveEnded) -> None:
        """What the loop waits for is nobody's checkpoint: no cadence and no count hears of it."""
        if not message.error:
            with self._changed:
                self._steps.whole(flight.serial, flight.arena, message.held)
        elif message.void:
            self._take_again(message.void)
        void = bool(message.void)
        self._over(flight.serial, Written(step=flight.step, error=message.error, void=void))

    def _take_again(self, void: Collection[str]) -> None:
        """A snapshot was void: the next one is taken at once, by another agreement of all ranks."""
        self._at_once = True
        with self._changed:
            self._own |= {name_of(n) for n in void if "[" in n}
        if FULL in self._structures:
            self._sharing.offer(self._structures[FULL][1], self._own)

    def _over(self, serial: int, written: Written) -> None:
        with self._changed:
            flight = self._flights.pop(serial, None)
            if flight is not None and flight.each_step:
                kept = StepKept(written.error, void=written.void, is_own=not written.told)
                self._steps.ended(serial, kept)
            else:
                self._last = written
            self._changed.notify_all()
        if flight is None:
            return
        flight.end()
        if flight.each_step:
            self._on_change()
        else:
            self._on_written(written)

    def _keeper_back(self) -> None:
        """Other machines are not to wait for what the keeper before this one had."""
        unsaid, self._unsaid = self._unsaid, []
        if self._meeting.is_needed:
            for message in unsaid:
                self.line.send_quietly(message)
        self._on_change()

    def _keeper_died(self) -> None:
        """What was in flight has failed; the next goes to the keeper's successor."""
        self._committed_copy = None
        self._room.forget()
        self._plans = {}
        for flight in list(self._flights.values()):
            absent = wire.Absent(
                step=flight.step, serial=flight.serial, reason=DIED, is_told=not self._link.rank
            )
            self._unsaid.append(absent)
            self.failures += not flight.each_step
            self._over(flight.serial, Written(step=flight.step, error=DIED, told=False))
