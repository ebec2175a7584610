"""Take a snapshot: copy tensors into the arena behind the next forward and backward.

At a step boundary only what may change outside the optimizer is copied at once. The rest (what the
optimizers change, and nothing else does) is copied by two threads that share a queue, while the
loop computes; a hook that runs before each optimizer's step copies what is left and waits for what
is under way.

From GPUs, copies go on a stream of their own, behind the training's stream. What training had put
into its queue at the boundary comes before the copies; the optimizer's stream waits for them on the
device, so the host never waits. Pieces that other ranks hold too are hashed on the device: bringing
a replica to the host only to compare it would cost as much as its copy. While copies are under way
no CUDA graph is captured (see ``boundary``): torch hands out streams in turn from a small pool, so
that ours may be the one that is captured.

Should a tensor change under the copy all the same, the snapshot is void. Its version counters tell;
they are looked at when its copy ends and once more when the training thread is known to be in no
operation: a counter moves only after the bytes have. Writers that go past them are held back, or
seen at the boundary; a tensor's first and last bytes are compared besides.

What can go wrong unseen: what ``boundary`` names, where it leaves those bytes as they were.

Prior art: CheckFreq, DataStates-LLM. Rejected: os.fork (1.4 s of page faults per 2 GB); a team of
OpenMP threads (a descheduled one holds up all the others).
"""

from __future__ import annotations

import collections
import ctypes
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch
import xxhash

from outlast.checkpoint import boundary, devices
from outlast.checkpoint.boundary import Item, Remembered, TensorPiece, source_of
from outlast.checkpoint.manifest import BLOCK_BYTES
from outlast.checkpoint.plan import Write, WritePlan

# --- the snapshot ---------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

NUM_COPIERS: Final = 2
# How long the training thread is given to pass an optimizer's hook before a copier looks itself:
# an operation that it was in the middle of has ended by then.
SETTLE_S: Final = 0.05


class Capture:
    """One snapshot on its way into the arena.

    Args:
        plan: where everything goes.
        tensors: name → live tensor, as ``flatten`` gives them.
        lazy: names that may be copied later than now.
        buffer: the arena as a tensor of bytes; as large as the file, or a ring.
        ring_bytes: size of the ring, 0 if the whole file fits.
        on_blocks: told which blocks are full, in any thread.
        wait_for_room: for a ring, waits until a block's place is free.
        remembered: the sources of the capture before, which must be over.
        again: whether ``remembered`` was asked, and they lie where they lay.

    Attributes:
        digests: key → digest of each piece that other ranks hold too.
        void: names of tensors that changed under the copy.
        moved: names of tensors that are not what the plan says, though their bytes lie there.
        error: what went wrong while copying.
        copied_at_once_bytes: what was not left for later.

    Raises:
        ConfigError: a tensor is not what the plan says.
    """

    def __init__(
        self,
        plan: WritePlan,
        tensors: Mapping[str, torch.Tensor],
        lazy: Collection[str],
        buffer: torch.Tensor,
        *,
        ring_bytes: int = 0,
        on_blocks: Callable[[Sequence[int]], None],
        wait_for_room: Callable[[int], None] = lambda _: None,
        remembered: Remembered | None = None,
        again: bool = False,
    ) -> None:
        self.plan = plan
        self.digests: dict[str, str] = {}
        self.void: list[str] = []
        self.moved: list[str] = []
        self.error: Exception | None = None
        self.copied_at_once_bytes = 0
        self._lazy: Collection[str] = () if ring_bytes else lazy
        self._aliased: set[str] = set()  # in memory that others hold too
        self._buffer = buffer
        self._target = buffer.data_ptr()
        self._ring_bytes = ring_bytes
        self._on_blocks = on_blocks
        self._wait_for_room = wait_for_room
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._left_in_block = _bytes_of_blocks(plan.size)
        self._now: list[Item] = []
        self._checks_now: list[TensorPiece] = []
        self._items: collections.deque[Item] = collections.deque()
        self._checks: collections.deque[TensorPiece] = collections.deque()
        self._trusted: list[TensorPiece] = []  # what is copied later than now
        self._under_way = 0
        self._confirmed = threading.Event()
        self.streams: CudaCopies | None = None
        self._remembered = remembered or Remembered()
        self._is_unread = self._is_again = again
        self._prepare(tensors, again=again)

    def _prepare(self, tensors: Mapping[str, torch.Tensor], *, again: bool) -> None:
        if self._lazy and not again:
            self._aliased = boundary.held_by_others(tensors, self._lazy)
        if again:
            self._trusted = list(self._remembered.sources)
            self._items.extend(self._remembered.items)
            cuda = self._prepare_writes(tensors, self._remembered.rest)
        else:
            cuda = self._prepare_writes(tensors, self.plan.writes)
            later = list(self._trusted)
            self._remembered.keep(self.plan, self._lazy, tensors, later, list(self._items))
        cuda_checks = self._prepare_checks(tensors)
        if cuda or cuda_checks:
            self.streams = CudaCopies(cuda, cuda_checks, self._buffer)

    def _prepare_writes(
        self, tensors: Mapping[str, torch.Tensor], writes: Sequence[Write]
    ) -> list[TensorPiece]:
        cuda: list[TensorPiece] = []
        for write in writes:
            source = source_of(tensors, write)
            lazy = self._may_wait(source)
            if lazy and source.tensor.is_cuda:
                cuda.append(source)
                continue
            queue = self._items if lazy else self._now
            parts = write.parts
            if len(parts) > 1 and not source.address and not self._ring_bytes:
                parts = ((write.start, write.end - write.start),)
            source.num_parts = source.parts_left = len(parts)
            for start, size in parts:
                queue.append((source, start, size))
        return cuda

    def _prepare_checks(self, tensors: Mapping[str, torch.Tensor]) -> list[TensorPiece]:
        cuda: list[TensorPiece] = []
        for check in self.plan.checks:
            source = source_of(tensors, check)
            lazy = self._may_wait(source)
            if lazy and source.tensor.is_cuda:
                cuda.append(source)
            else:
                (self._checks if lazy else self._checks_now).append(source)
        return cuda

    def _may_wait(self, source: TensorPiece) -> bool:
        name = source.write.piece.name
        if name not in self._lazy or name in self._aliased:
            return False
        if not (source.tensor.is_cpu or source.tensor.is_cuda):
            return False  # whose queues we know nothing about
        source.take_sample()
        self._trusted.append(source)
        return True

    def take_now(self) -> None:
        """Copy what cannot wait, in the calling thread."""
        head = self.plan.head
        if self.plan.size:
            self._wait_for_room(0)
            ctypes.memmove(self._target, head, len(head))
            self.count(0, len(head))
        for item in self._now:
            self._copy(item)
            self.copied_at_once_bytes += item[2]
        self._now = []
        for source in self._checks_now:
            self._check(source)
        self._checks_now = []
        if not self._trusted:
            self._confirmed.set()

    def help(self) -> None:
        """Copy what is left, as long as there is something to begin with."""
        while self._step():
            pass

    def _step(self) -> bool:
        with self._lock:
            if self._is_unread:
                self._is_unread = False
                self.moved = self._remembered.moved()
                if self.moved:  # nothing of it is looked at any more, and nothing copied
                    self._remembered.forget()
                    self._trusted = []
            if self.error is not None or self.moved:
                self._items.clear()
                self._checks.clear()
            item = self._items.popleft() if self._items else None
            check = self._checks.popleft() if item is None and self._checks else None
            if item is None and check is None:
                return False
            self._under_way += 1
        try:
            if item is not None:
                self._copy(item)
            elif check is not None:
                self._check(check)
        except Exception as error:  # noqa: BLE001 - it is the save's, and never training's
            self.error = self.error or error
        finally:
            with self._lock:
                self._under_way -= 1
                if not self._under_way:
                    self._idle.notify_all()
        return True

    def wait(self) -> None:
        """In the training thread, before anything is changed: copy what is left, and confirm."""
        self.help()
        if self.streams is not None:
            self.streams.hold_back_training()
        self.wait_for_others()
        self.confirm()

    @property
    def is_confirmed(self) -> bool:
        """Whether all copies have ended, or come ahead of what training does next."""
        return self._confirmed.is_set()

    def wait_for_devices(self) -> None:
        """Wait until no device is copying any more, of those that were waited for as above."""
        if self.streams is not None:
            self.streams.over.wait()

    def wait_for_others(self) -> None:
        """Wait until no thread is in the middle of a copy."""
        with self._lock:
            self._idle.wait_for(lambda: not self._under_way and not self._items)

    def settle(self) -> None:
        """In a copier, after the last copy: see that nothing has changed meanwhile."""
        if not self._confirmed.wait(SETTLE_S):
            self.confirm()

    def hold_back(self) -> None:
        """From here on, whoever would go past the version counters waits for the copy."""
        if not self._confirmed.is_set() or self.streams is not None:
            boundary.hold_back(self)

    def storages(self) -> list[torch.UntypedStorage]:
        """The memory of what is left for later."""
        memory = list(self._remembered.memory) if self._is_again else []
        with self._lock:
            return memory + boundary.storages_of([one.tensor for one in self._trusted])

    def let_go(self) -> None:
        """Everything is copied and confirmed: no tensor is held on to, whoever holds this."""
        self._remembered.let_go()
        boundary.let_go(self)

    def confirm(self) -> None:
        """All copies have ended, or are ahead of training: what has not changed, they are of."""
        with self._lock:
            if self._confirmed.is_set():
                return
            self.void += [one.write.piece.name for one in self._trusted if one.has_changed()]
            self._trusted = []
            self._confirmed.set()
        if self.streams is None or self.streams.over.is_set():
            boundary.let_go(self)  # not before: no graph is captured while a device copies

    def _copy(self, item: Item) -> None:
        source, start, size = item
        write = source.write
        assert isinstance(write, Write)  # noqa: S101 - checks are not copied
        self._wait_for_room(start // BLOCK_BYTES)
        place = start % self._ring_bytes if self._ring_bytes else start
        if source.address:
            ctypes.memmove(self._target + place, source.address + start - write.start, size)
        else:
            self._convert(source.tensor, write, start, size, place)
        if self._ring_bytes and write.shared and not source.tensor.is_cuda:
            source.hasher = source.hasher or xxhash.xxh3_64()
            source.hasher.update(_memory(self._target + place, size))
        with self._lock:
            source.parts_left -= 1
            whole = not source.parts_left
        # Before the block is counted: what is void must not be taken for full.
        if whole:
            self._conclude(source, write)
        self.count(start, start + size)

    def _convert(
        self, tensor: torch.Tensor, write: Write, start: int, size: int, place: int
    ) -> None:
        """Bytes that do not lie in memory as they are stored: strided, on a GPU, or narrowed."""
        if not self._ring_bytes:
            target = self._buffer[write.start : write.end].view(write.dtype)
            target.view(write.piece.shape).copy_(tensor)
            return
        width = write.dtype.itemsize
        first = (start - write.start) // width
        flat = tensor.contiguous().view(-1)[first : first + size // width]
        self._buffer[place : place + size].view(write.dtype).copy_(flat)

    def _conclude(self, source: TensorPiece, write: Write) -> None:
        target = self._target + write.start
        if source.sampled is not None and (source.has_changed() or source.was_copied_late(target)):
            with self._lock:
                self.void.append(write.piece.name)
        if not write.shared:
            return
        if source.hasher is not None:
            self.digests[source.key] = source.hasher.hexdigest()
        elif source.tensor.is_cuda:
            self.digests[source.key] = digest_of(source.tensor.to(write.dtype))
        else:
            data = _memory(target, write.end - write.start)
            self.digests[source.key] = xxhash.xxh3_64_hexdigest(data)

    def _check(self, source: TensorPiece) -> None:
        self.digests[source.key] = digest_of(source.tensor.to(source.write.dtype))
        if source.has_changed():
            with self._lock:
                self.void.append(source.write.piece.name)

    def count(self, start: int, end: int) -> None:
        """These bytes of the file are there."""
        while start < end:
            block = start // BLOCK_BYTES
            size = min(end, (block + 1) * BLOCK_BYTES) - start
            with self._lock:
                self._left_in_block[block] -= size
                full = not self._left_in_block[block]
            if full:
                self._on_blocks([block])
            start += size


def digest_of(tensor: torch.Tensor) -> str:
    """Digest of a tensor's bytes: the same for all tensors of one kind of device."""
    if tensor.is_cuda:
        return in_words(sums_of(tensor))
    local = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    size = local.numel() * local.element_size()
    return str(xxhash.xxh3_64_hexdigest(_memory(local.data_ptr(), size) if size else b""))


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address))


def _bytes_of_blocks(size: int) -> list[int]:
    return [min(BLOCK_BYTES, size - start) for start in range(0, size, BLOCK_BYTES)]


class Copiers:
    """The threads that copy; they sleep while there is nothing to do.

    Args:
        on_copied: told of each capture that is whole, in a copier's thread.
    """

    def __init__(self, on_copied: Callable[[Capture], None]) -> None:
        self._on_copied = on_copied
        self._changed = threading.Condition()
        self._current: Capture | None = None
        self._turn = 0  # a capture's number: holding the capture itself would keep its tensors
        self._inside = 0
        self._stopping = False
        self._threads = [
            devices.Thread(target=self._run, name=f"outlast-copy-{index}", daemon=True)
            for index in range(NUM_COPIERS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, capture: Capture) -> None:
        """Copy ``capture``; the one before it must be whole."""
        capture.hold_back()
        with self._changed:
            self._current = capture
            self._turn += 1
            self._inside = NUM_COPIERS
            self._changed.notify_all()

    @property
    def current(self) -> Capture | None:
        """What is being copied."""
        return self._current

    def stop(self) -> None:
        """End the threads."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=5)

    def _run(self) -> None:
        done = 0
        while True:
            with self._changed:
                while not self._stopping and (self._current is None or self._turn == done):
                    self._changed.wait()
                if self._current is None or self._turn == done:
                    return  # not before what was begun is whole: training may wait for it
                capture, done = self._current, self._turn
                assert capture is not None  # noqa: S101 - waited for
                first = self._inside == NUM_COPIERS
                self._inside -= 1
            devices.enter()
            self._work(capture, is_first=first)
            del capture

    def _work(self, capture: Capture, *, is_first: bool) -> None:
        if is_first and capture.streams is not None:
            try:
                capture.streams.run(capture)
            except Exception as error:  # noqa: BLE001 - it is the save's, and never training's
                capture.error = capture.error or error
        capture.help()
        capture.wait_for_others()
        if is_first:
            capture.settle()
            capture.let_go()
            with self._changed:
                self._current = None
            self._on_copied(capture)


# --- copies from GPUs -----------------------------------------------------------------------------

_CHUNK: Final = 1 << 21  # words of 32 bits that are hashed at once
_SEED: Final = 20_261_123
_BASES: Final = (0x9E3779B97F4A7C13, 0xBF58476D1CE4E5BB)  # odd, of the chunks


class CudaCopies:
    """The copies of one snapshot from all devices.

    It does not hold its capture: in a circle both would keep the tensors until garbage is looked
    for, and the next snapshot would take their memory for held by others, and copy it at once.

    Args:
        sources: what is to be copied.
        checks: what is only to be hashed.
        buffer: the arena; its memory should be registered with the driver.

    Attributes:
        over: set once no copy is under way any more.
    """

    def __init__(
        self,
        sources: Sequence[TensorPiece],
        checks: Sequence[TensorPiece],
        buffer: torch.Tensor,
    ) -> None:
        self.over = threading.Event()
        self._buffer = buffer
        self._sources = sources
        self._checks = checks
        self._launched = threading.Event()
        self._last: dict[torch.device, Any] = {}
        self._begun: dict[torch.device, Any] = {}
        for device in {source.tensor.device for source in [*sources, *checks]}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._begun[device] = event

    def run(self, reports: Capture) -> None:
        """Launch everything, then report blocks as they arrive; in a copier's thread.

        Args:
            reports: told of bytes that have arrived.
        """
        try:
            self._run(reports)
        finally:
            try:  # where it failed, too: the arena and the tensors may be used for something else
                for event in self._last.values():
                    event.synchronize()
            finally:
                self.over.set()

    def _run(self, reports: Capture) -> None:
        arrived: list[tuple[Any, TensorPiece]] = []
        hashed: list[tuple[TensorPiece, torch.Tensor]] = []
        try:
            for source in self._sources:
                arrived.append((self._launch(source, hashed), source))  # noqa: PERF401 - in order
            for check in self._checks:
                self._launch_hash(check, hashed)
        finally:
            self._launched.set()
        for event, source in arrived:
            event.synchronize()
            write: Any = source.write
            reports.count(write.start, write.end)
        for source, sums in hashed:
            with torch.cuda.stream(_stream(source.tensor.device)):
                reports.digests[source.key] = in_words(sums)

    def hold_back_training(self) -> None:
        """Before anything is changed: the device finishes the copies first, the host goes on."""
        self._launched.wait()
        for device, event in self._last.items():
            torch.cuda.current_stream(device).wait_event(event)

    def _launch(self, source: TensorPiece, hashed: list[tuple[TensorPiece, torch.Tensor]]) -> Any:
        write: Any = source.write
        device = source.tensor.device
        with torch.cuda.stream(self._behind(device)):
            target = self._buffer[write.start : write.end].view(write.dtype)
            # Here: torch would do it on the host, as soon as the copy is queued.
            plain = source.tensor.resolve_conj().resolve_neg()
            target.view(write.piece.shape).copy_(plain, non_blocking=True)
            if write.shared:
                hashed.append((source, sums_of(source.tensor.to(write.dtype))))
        return self._record(device)

    def _launch_hash(
        self, check: TensorPiece, hashed: list[tuple[TensorPiece, torch.Tensor]]
    ) -> None:
        device = check.tensor.device
        with torch.cuda.stream(self._behind(device)):
            hashed.append((check, sums_of(check.tensor.to(check.write.dtype))))
        self._record(device)

    def _behind(self, device: torch.device) -> Any:
        stream = _stream(device)
        if device not in self._last:
            stream.wait_event(self._begun[device])
        return stream

    def _record(self, device: torch.device) -> Any:
        event = torch.cuda.Event(blocking=True)  # waited for asleep: a core is training's
        event.record(_stream(device))
        self._last[device] = event
        return event


# --- digests -------------------------------------------------------------------------------------


def sums_of(tensor: torch.Tensor) -> torch.Tensor:
    """A digest of a tensor's bits and their order that a device computes.

    Two sums modulo 2^64 of its words of 32 bits, each times an odd number drawn for its place in
    its chunk, and each chunk's sum times a power of another odd number (multilinear hashing; Lemire
    and Kaser, 2014): words that differ, or have changed places, keep one sum with about 2^-31.
    """
    words = _words_of(tensor)
    found = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    numbers = _numbers(tensor.device)
    for chunk, start in enumerate(range(0, len(words), _CHUNK)):
        part = words[start : start + _CHUNK]
        for index, base in enumerate(_BASES):
            power = pow(base, chunk, 1 << 64)
            power -= (power >> 63) << 64  # as torch counts
            found[index] += (part * numbers[index, : len(part)]).sum() * power
    return found


def in_words(sums: torch.Tensor) -> str:
    """The digest as text; waits for the device."""
    return "-".join(str(number) for number in sums.tolist())


def _words_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    raw = flat.view(torch.uint8)
    if raw.numel() % 4 or raw.storage_offset() % 4 or raw.data_ptr() % 4:
        whole = raw.new_zeros(-(-raw.numel() // 4) * 4)
        whole[: raw.numel()] = raw
        raw = whole
    return raw.view(torch.int32)


_drawn: dict[torch.device, torch.Tensor] = {}


def _numbers(device: torch.device) -> torch.Tensor:
    """Those of the places, the same in every process."""
    if device not in _drawn:
        generator = torch.Generator().manual_seed(_SEED)
        least, most = -(1 << 63), (1 << 63) - 1
        drawn = torch.randint(least, most, (2, _CHUNK), generator=generator)
        _drawn[device] = (drawn | 1).to(device)
    return _drawn[device]


_streams: dict[torch.device, Any] = {}


def _stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
