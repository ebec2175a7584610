"""Take a snapshot: copy tensors into the arena behind the next forward and backward.

At a step boundary only what may change outside the optimizer is copied at once. The rest (what the
optimizers change, and nothing else does) is copied by two threads that share a queue, while the
loop computes; a hook that runs before each optimizer's step copies what is left and waits for what
is under way. GPUs copy on streams of their own (``devices.CudaCopies``).

Most pieces are the same tensors in the same place from one capture to the next (``Remembered``).
Then only what can differ is taken anew, their versions and some of their bytes; with hundreds of
tensors that is what a step boundary costs. What else they are (dtype, shape) is looked at behind
the loop's back, before anything is copied.

Should a tensor change under the copy all the same, the snapshot is void. Its version counters tell;
they are looked at when its copy ends and once more when the training thread is known to be in no
operation: a counter moves only after the bytes have. Memory that others hold too, or that is not
torch's own, is copied at once (``held_by_others``); other writers that go past the counters are
held back (``writers``). A tensor's first and last bytes are compared besides.

What can go wrong unseen: what ``writers`` names, where it leaves those bytes as they were.

Prior art: CheckFreq, DataStates-LLM. Rejected: os.fork (1.4 s of page faults per 2 GB); a team of
OpenMP threads (a descheduled one holds up all the others); hashing at the boundary (100 ms for each
GiB).
"""

from __future__ import annotations

import collections
import ctypes
import functools
import logging
import operator
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
import xxhash

from outlast.checkpoint import devices, writers
from outlast.checkpoint.devices import CudaCopies, in_words, sums_of
from outlast.checkpoint.manifest import BLOCK_BYTES
from outlast.checkpoint.plan import KIND, DigestCheck, Write, WritePlan
from outlast.checkpoint.tensors import PLAIN, is_spread, span, view
from outlast.errors import ConfigError

# --- pieces at the boundary -----------------------------------------------------------------------

_SAMPLE_BYTES: Final = 32
_NUM_BYTES: Final = operator.attrgetter("nbytes")
_VERSION: Final = operator.attrgetter("_version")

# A piece of work: where some bytes of one source start in the file, all within one block of it, and
# how many they are.
Item = tuple["TensorPiece", int, int]


class TensorPiece:
    """One piece as it was at the boundary, and what has become of its copy."""

    __slots__ = (
        *("address", "at", "hasher", "num_parts", "parts_left", "sampled"),
        *("outer", "outer_version", "tensor", "version", "windows", "write"),
    )

    def __init__(
        self, write: Write | DigestCheck, tensor: torch.Tensor, outer: torch.Tensor | None = None
    ) -> None:
        self.write = write
        self.tensor = tensor
        # A spread tensor counts for itself: what goes through it moves no counter of its part.
        self.outer = outer
        self.outer_version = 0 if outer is None else outer._version
        self.version = 0 if tensor.is_inference() else tensor._version
        self.num_parts = self.parts_left = 1
        self.windows: list[Any] = []  # its first and last bytes, where they lie
        self.sampled: bytes | None = None  # what was there at the boundary, from ``at`` on
        self.at = 0
        self.hasher: Any = None  # of what goes through a ring, where it does not stay
        # Where the bytes lie as they are stored; 0 where they do not.
        self.address = 0
        if (
            tensor.is_cpu
            and tensor.dtype == write.dtype
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
        ):
            self.address = tensor.data_ptr()

    @property
    def key(self) -> str:
        """One word for the piece."""
        return self.write.piece.key

    def take_sample(self) -> None:
        """Remember some bytes, to see whether they are those that were copied."""
        tensor = self.tensor
        size = tensor.nbytes
        if not size or not tensor.is_cpu:
            return
        if self.address:
            count = size if size < _SAMPLE_BYTES else _SAMPLE_BYTES
            first, last = self.address, self.address + size - count
        else:  # strided: the first and the last element
            count = tensor.element_size()
            first = tensor.data_ptr()
            last = first + count * (span(tensor.shape, tensor.stride()) - 1)
        at = _array(count).from_address  # ctypes.string_at takes ten times as long
        self.windows = [at(first), at(last)]
        self.sampled = b"".join(self.windows)

    def has_changed(self) -> bool:
        """Whether the tensor is not what it was at the boundary, as far as can be told."""
        tensor = self.tensor
        if not tensor.is_inference() and tensor._version != self.version:
            return True
        if self.outer is not None and self.outer._version != self.outer_version:
            return True
        return self.sampled is not None and b"".join(self.windows) != self._sample()

    def was_copied_late(self, target: int) -> bool:
        """Whether what lies at ``target`` is not the piece as it was at the boundary."""
        if self.sampled is None or not self.address:
            return False
        first, last = self.windows
        count, last_at = len(first), ctypes.addressof(last) - ctypes.addressof(first)
        at = _array(count).from_address
        return at(target).raw + at(target + last_at).raw != self._sample()

    def _sample(self) -> bytes:
        assert self.sampled is not None  # noqa: S101 - whoever asks has looked
        return self.sampled[self.at : self.at + 2 * len(self.windows[0])]


class Remembered:
    """The sources of the capture before, to be used again where nothing has moved.

    Only one capture at a time may hold them.
    """

    def __init__(self) -> None:
        self.sources: list[TensorPiece] = []
        self.items: list[Item] = []
        self._plan: WritePlan | None = None
        self._lazy: Collection[str] = ()
        self._get: Any = None
        self.rest: list[Write] = []  # what is copied at once
        self._names: list[str] = []  # of all tensors
        self._kinds: list[Any] = []  # of the sources' tensors
        self._others: list[tuple[str, Any]] = []  # name and kind of those that are no sources
        self._addresses: list[int] = []
        self._sizes: list[int] = []
        self._windows: list[list[Any]] = []
        self._held: tuple[torch.Tensor, ...] = ()
        self._memory: list[torch.UntypedStorage] = []
        self._counts: list[int] = []  # how many hold each memory, if nobody else does
        self._versions: list[int] = []
        self._sampled = b""

    def keep(
        self,
        plan: WritePlan,
        lazy: Collection[str],
        tensors: Mapping[str, torch.Tensor],
        sources: list[TensorPiece],
        items: list[Item],
    ) -> None:
        """Remember a capture's sources, if they are plain tensors in this memory, and no others."""
        self._plan, self._held, self._memory = None, (), []
        names = [source.write.piece.name for source in sources]
        meant = [write.piece.name for write in plan.writes if write.piece.name in lazy]
        usable = (
            len(set(names)) == len(names) > 1
            and names == meant
            and set(map(type, tensors.values())) <= PLAIN
            and all(
                source.address
                and source.sampled is not None
                and not source.write.where.cuts
                and not source.tensor.is_complex()
                and not source.tensor.is_inference()
                for source in sources
            )
        )
        if not usable:
            return
        self._plan, self._lazy = plan, lazy
        self.sources, self.items = sources, items
        self.rest = [write for write in plan.writes if write.piece.name not in lazy]
        self._get = operator.itemgetter(*names)
        held = self._get(tensors)
        self._names = list(tensors)
        self._kinds = list(map(KIND, held))
        own = set(names)
        self._others = [(name, KIND(value)) for name, value in tensors.items() if name not in own]
        self._addresses = [source.address for source in sources]
        self._counts = list(expected(tensors, names).values())
        self._sizes = list(map(_NUM_BYTES, held))
        windows = [window for source in sources for window in source.windows]
        # In groups: to join a thousand at once takes memory for a moment that is given back to the
        # system, and then milliseconds in some runs.
        self._windows = [windows[at : at + 100] for at in range(0, len(windows), 100)]
        sampled = b"".join(source.sampled or b"" for source in sources)
        at = 0
        for source in sources:
            source.sampled, source.at = sampled, at
            at += 2 * len(source.windows[0])

    def forget(self) -> None:
        """Nothing is used again; what is held on to stays so until ``let_go``."""
        self._plan = None

    def again(
        self, plan: WritePlan, lazy: Collection[str], tensors: Mapping[str, torch.Tensor]
    ) -> bool:
        """Whether ``plan`` fits ``tensors`` and the sources' bytes lie where they lay.

        Then their versions and samples are noted; ``moved`` makes the sources those of ``tensors``.
        """
        if (
            plan is not self._plan
            or (lazy is not self._lazy and lazy != self._lazy)
            or list(tensors) != self._names
            or not set(map(type, tensors.values())) <= PLAIN
            or [(name, KIND(tensors[name])) for name, _ in self._others] != self._others
        ):
            return False
        held = self._get(tensors)
        try:  # what has no memory of its own, as a sparse tensor, says so
            if (
                list(map(torch.Tensor.data_ptr, held)) != self._addresses
                or list(map(_NUM_BYTES, held)) != self._sizes
                or not all(map(torch.Tensor.is_contiguous, held))
            ):
                return False
            self._versions = list(map(_VERSION, held))
            # It is this memory that is copied, whatever is assigned to the tensor's data meanwhile.
            self._memory = storages_of(held)
            if counts(self._memory) != self._counts:
                return False
        except RuntimeError:
            return False
        self._sampled = b"".join(map(b"".join, self._windows))
        self._held = held
        return True

    def moved(self) -> list[str]:
        """Make the sources those of the tensors that were noted; names of those that do not fit.

        These have the same bytes in the same place, and are something else all the same.
        """
        held, self._held = self._held, ()
        for source, tensor, version in zip(self.sources, held, self._versions, strict=True):
            source.tensor = tensor
            source.version = version
            source.sampled = self._sampled
            source.parts_left = source.num_parts
        found = zip(self.sources, held, self._kinds, strict=True)
        return [
            source.write.piece.name
            for source, tensor, kind in found
            if KIND(tensor) != kind or tensor.is_neg()
        ]

    @property
    def memory(self) -> list[torch.UntypedStorage]:
        """What the sources lie in, while they are used again."""
        return self._memory

    def let_go(self) -> None:
        """Nothing is captured any more: the tensors are not held on to."""
        self._held, self._memory = (), []
        for source in self.sources:
            source.tensor, source.outer = _NOTHING, None


_NOTHING: Final = torch.empty(0)


def source_of(tensors: Mapping[str, torch.Tensor], one: Write | DigestCheck) -> TensorPiece:
    """A piece as it is now."""
    tensor = tensors[one.piece.name]
    return TensorPiece(one, local_of(tensors, one), tensor if is_spread(tensor) else None)


def local_of(tensors: Mapping[str, torch.Tensor], one: Write | DigestCheck) -> torch.Tensor:
    """This process's memory of a piece, under a name of its own: it stays what it was."""
    piece = one.piece
    tensor: Any = tensors[piece.name]
    local = tensor._local_tensor if is_spread(tensor) else tensor
    # An alias: it stays what it was, whatever is assigned to the tensor's data meanwhile.
    local = view(local, one.where.cuts) if one.where.cuts else local.detach()
    if local.shape != piece.shape and local.numel():
        raise ConfigError(f"{piece.name} has shape {tuple(local.shape)}, planned as {piece.shape}")
    return local


@functools.cache
def _array(count: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * count


# --- who holds their memory -----------------------------------------------------------------------

_STORAGE: Final = torch.Tensor.untyped_storage
_RESIZABLE: Final = torch.UntypedStorage.resizable
_ADDRESS: Final = operator.attrgetter("_cdata")
_COUNT: Final[Callable[[int], int]] = torch._C._storage_Use_Count


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The memory of plain tensors."""
    return list(map(_STORAGE, tensors))


def counts(storages: Iterable[torch.UntypedStorage]) -> list[int]:
    """How many hold each memory, ``storages`` themselves as one; -1 if it is not torch's own.

    Once there was a NumPy view of some memory, torch counts it as not its own.
    """
    storages = list(storages)
    found = map(_COUNT, map(_ADDRESS, storages))  # without a line of Python for each: in each save
    own = map(_RESIZABLE, storages)
    return [count if is_own else -1 for count, is_own in zip(found, own, strict=True)]


def expected(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, int]:
    """What ``counts`` says of each name's memory if nobody holds it but ``tensors``."""
    holders: dict[int, set[int]] = {}
    at: dict[str, int] = {}
    for name, tensor in tensors.items():
        if type(tensor) in PLAIN and tensor.layout == torch.strided and not tensor.is_meta:
            storage = _STORAGE(tensor)
            at[name] = storage._cdata
            own = holders.setdefault(storage._cdata, set())
            own.add(tensor._cdata)
            if not tensor.is_inference() and tensor._is_view():
                own.add(tensor._base._cdata)  # it shares the view's counter
    return {name: len(holders[at[name]]) + 1 for name in names if name in at}


def held_by_others(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> set[str]:
    """Which of these plain tensors lie in memory that others hold too, or that is not torch's."""
    wanted = expected(tensors, [name for name in names if name in tensors])
    found = counts(storages_of(map(tensors.__getitem__, wanted)))
    return {name for (name, want), is_ in zip(wanted.items(), found, strict=True) if want != is_}


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
            self._aliased = held_by_others(tensors, self._lazy)
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
            writers.hold_back(self)

    def storages(self) -> list[torch.UntypedStorage]:
        """The memory of what is left for later."""
        memory = list(self._remembered.memory) if self._is_again else []
        with self._lock:
            return memory + storages_of([one.tensor for one in self._trusted])

    def let_go(self) -> None:
        """Everything is copied and confirmed: no tensor is held on to, whoever holds this."""
        self._remembered.let_go()
        writers.let_go(self)

    def confirm(self) -> None:
        """All copies have ended, or are ahead of training: what has not changed, they are of."""
        with self._lock:
            if self._confirmed.is_set():
                return
            self.void += [one.write.piece.name for one in self._trusted if one.has_changed()]
            self._trusted = []
            self._confirmed.set()
        if self.streams is None or self.streams.over.is_set():
            writers.let_go(self)  # not before: no graph is captured while a device copies

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
