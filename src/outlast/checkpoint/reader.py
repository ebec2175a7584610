"""Read parts of a committed checkpoint as they are asked for: DCP and exports draw from it.

A load brings back what one rank saved, whole. Here anything may be asked for: any box of any
tensor, any rank's small state, in memory that does not grow with the checkpoint.

Guarantees: a byte is handed on only after the 16 MiB block it lies in was hashed and found right,
in whichever place it is (see ``transfer``).
What can go wrong: no place has a right copy (CheckpointInvalid, naming file and block), or one of
them cannot be read (OSError).
Memory: ``READ_AHEAD_BYTES`` in flight, as much again in blocks that neighbours share.

Rejected: hashing whole files first (a reader of one row would read the file twice); mapping files
into memory (a byte that was right when it was hashed may have been read anew since).
"""

from __future__ import annotations

import collections
import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from outlast.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    Chunk,
    SmallState,
    TensorEntry,
    own_name,
    read_small_state,
    state_file,
    without_owner,
)
from outlast.checkpoint.names import Place, SaveName, as_places
from outlast.checkpoint.spreads import Box, common
from outlast.checkpoint.tensors import DTYPES, Parts, span
from outlast.checkpoint.transfer import Bounce, FileCopies, inventory_of, read_manifest
from outlast.checkpoint.tree import KIND, tensor_names, unflatten
from outlast.errors import CheckpointInvalid
from outlast.storage import Storage

NUM_THREADS: Final = 4
SLICE_BYTES: Final = 2 * BLOCK_BYTES
READ_AHEAD_BYTES: Final = 2 * NUM_THREADS * SLICE_BYTES
_CACHED_BLOCKS: Final = READ_AHEAD_BYTES // BLOCK_BYTES
_OPEN_FILES: Final = 64


class MergedState(NamedTuple):
    """SmallState states as one.

    Attributes:
        step: the checkpoint's step.
        data: key → data in which tensors are named; none of them tells a dtype of its own.
        entries: name of a tensor in ``data`` → its dtype and shape, and where its bytes are as far
            as that is known (see ``CheckpointReader.locate``).
        stored: name → the name that the tensor has in the checkpoint.
        dtypes: name → the dtype it had, where it was stored in a narrower one.
    """

    step: int
    data: dict[str, Any]
    entries: dict[str, TensorEntry]
    stored: dict[str, str]
    dtypes: dict[str, torch.dtype]

    def build(self, make: Callable[[str, TensorEntry], torch.Tensor]) -> dict[str, Any]:
        """The states themselves, each tensor made by ``make(name, entry)``.

        Raises:
            CheckpointInvalid: ``data`` is not what ``tree.flatten`` writes.
        """
        tensors = {name: make(name, entry) for name, entry in self.entries.items()}
        try:
            return {key: unflatten(value, tensors, _inner) for key, value in self.data.items()}
        except (ValueError, KeyError, TypeError) as error:
            raise _not_understood(self.step, error) from None

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that the tensor ``name`` had when it was saved."""
        return self.dtypes.get(name, DTYPES[self.entries[name].dtype])


def _inner(parts: Parts) -> dict[str, Any]:
    """A tensor of a subclass, for whoever does not have its class: the tensors inside of it."""
    inner = parts.inner.items()
    return {name: _inner(one) if isinstance(one, Parts) else one for name, one in inner}


class WantedBox(NamedTuple):
    """A box of a stored chunk, and the memory it is to be copied to.

    Attributes:
        entry: the tensor.
        chunk: one of its chunks.
        offsets: where the box begins, in the chunk.
        target: of the box's shape; any device, dtype and strides.
    """

    entry: TensorEntry
    chunk: Chunk
    offsets: tuple[int, ...]
    target: torch.Tensor


class CheckpointReader:
    """One save, wherever a right copy of each of its blocks lies.

    Args:
        where: the places to read from, fastest first; or one storage.
        which: which save; of a step the newest whose manifest verifies.

    Raises:
        CheckpointInvalid: no place has a manifest of it that verifies.
        OSError: no place can be read.
    """

    def __init__(self, where: Storage | Sequence[Place], which: int | SaveName) -> None:
        self.places = as_places(where)
        self.manifest = read_manifest(self.places, which)
        self._inventory = inventory_of(self.manifest, self.places)
        self._small: dict[int, SmallState] = {}
        self._blocks: collections.OrderedDict[tuple[str, int], Future[memoryview]]
        self._blocks = collections.OrderedDict()
        self._files: collections.OrderedDict[str, FileCopies] = collections.OrderedDict()
        self._lock = threading.Lock()

    def describe(self) -> str:
        """Where the checkpoint is, as a person would write it."""
        return self.places[0].storage.describe(str(self.manifest.save))

    def small(self, rank: int) -> SmallState:
        """The small state of ``rank``; beyond the ranks that saved, they are taken in turn.

        Raises:
            CheckpointInvalid: its file is missing, altered or not understood.
        """
        source = rank % self.manifest.world_size
        if source not in self._small:
            name = state_file(source)
            entry = self._inventory.file(name)
            try:
                text = bytes(self.read(name, 0, entry.size))
            finally:
                self._close()
            self._small[source] = read_small_state(text, self.manifest.step, source)
        return self._small[source]

    def state(self, rank: int) -> MergedState:
        """What ``rank`` saved, and where the manifest has more than that, the other ranks' too.

        Ranks that hold different layers (a pipeline) each name their own tensors only.

        Raises:
            CheckpointInvalid: a small state is not understood, or names a tensor that is not there.
        """
        merged = MergedState(self.manifest.step, {}, {}, {}, {})
        try:
            self._merge(merged, rank)
            named = set(map(without_owner, self._inventory.tensors()))
            every = range(self.manifest.world_size)
            # The first ranks of each structure know all that is known to more than one rank.
            for others in (self._inventory.firsts(), every):
                if not named <= set(merged.entries):
                    for other in others:
                        self._merge(merged, other)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, CheckpointInvalid):
                raise
            raise _not_understood(self.manifest.step, error) from None
        return merged

    def _merge(self, merged: MergedState, rank: int) -> None:
        source = rank % self.manifest.world_size
        small = self.small(source)

        def take(data: Any) -> Any:
            plain = without_dtypes(data, merged.dtypes)
            for name in tensor_names(plain):
                stored = own_name(name, source) if name in small.own else name
                try:
                    known = self._inventory.tensor(stored, source)
                except KeyError:
                    raise CheckpointInvalid(
                        self.manifest.step, f"{MANIFEST} does not name the tensor {stored}"
                    ) from None
                merged.entries[name] = TensorEntry(dtype=known.dtype, shape=known.shape, chunks=())
                merged.stored[name] = stored
            return plain

        _add(merged.data, small.data, take)

    def locate(self, state: MergedState, wanted: Mapping[str, Sequence[Box]], rank: int) -> None:
        """Find where regions of tensors lie: ``state.entries`` has chunks for them then.

        Args:
            state: of this source.
            wanted: name → boxes in the whole tensor.
            rank: whose state it is.

        Raises:
            CheckpointInvalid, OSError: see ``Inventory.locate``.
        """
        stored = {state.stored[name]: boxes for name, boxes in wanted.items()}
        found = self._inventory.locate(stored, rank % self.manifest.world_size)
        state.entries.update({name: found[state.stored[name]] for name in wanted})

    def locate_all(self, state: MergedState, rank: int) -> None:
        """As ``locate``, of all tensors and all of each."""
        whole = {
            name: [((0,) * len(entry.shape), entry.shape)] for name, entry in state.entries.items()
        }
        self.locate(state, whole, rank)

    def tensors(self, entries: Iterable[TensorEntry]) -> Iterator[torch.Tensor]:
        """Whole tensors, one after the other, in memory of their own."""
        with self._reading() as pool:
            for entry in entries:
                whole = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
                wants = [
                    WantedBox(entry, chunk, (0,) * len(chunk.shape), _box(whole, chunk))
                    for chunk in entry.chunks
                ]
                for _ in self._filled(wants, pool):
                    pass
                yield whole

    def fill(self, wants: Sequence[WantedBox]) -> Iterator[WantedBox]:
        """Copy each box to its target and hand it back; each file is read from front to back."""
        ordered = sorted(wants, key=lambda want: (want.chunk.file, want.chunk.start, want.offsets))
        with self._reading() as pool:
            yield from self._filled(ordered, pool)

    def read(self, file: str, start: int, end: int) -> memoryview:
        """Bytes [start, end) of ``file``; any thread may ask.

        Raises:
            CheckpointInvalid, OSError: see the top of this file.
        """
        first, last = start // BLOCK_BYTES, max(start, end - 1) // BLOCK_BYTES
        if end <= start:
            return memoryview(b"")
        if first == last:
            return self._block(file, first)[start - first * BLOCK_BYTES :][: end - start]
        memory = np.empty(end - start, dtype=np.uint8).data
        for index in range(first, last + 1):
            origin = index * BLOCK_BYTES
            low, high = max(start, origin), min(end, origin + BLOCK_BYTES)
            block = self._block(file, index)
            memory[low - start : high - start] = block[low - origin : high - origin]
        return memory

    @contextlib.contextmanager
    def _reading(self) -> Iterator[ThreadPoolExecutor]:
        """Threads that read; when they have ended, no file stays open."""
        pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="outlast-read")
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)
            self._close()

    def _close(self) -> None:
        with self._lock:
            files, self._files = self._files, collections.OrderedDict()
        for copies in files.values():
            copies.close()

    def _filled(self, wants: Iterable[WantedBox], pool: ThreadPoolExecutor) -> Iterator[WantedBox]:
        """Readers run ahead of the copying, which stays in the caller's thread."""
        ahead: collections.deque[tuple[_Slice, WantedBox | None, Future[memoryview]]]
        ahead = collections.deque()
        for want in wants:
            for slice_, is_last in _slices(want):
                future = pool.submit(self.read, want.chunk.file, slice_.start, slice_.end)
                ahead.append((slice_, want if is_last else None, future))
                if len(ahead) > 2 * NUM_THREADS:
                    yield from _copied(*ahead.popleft())
        while ahead:
            yield from _copied(*ahead.popleft())

    def _block(self, file: str, index: int) -> memoryview:
        """A verified block: read once for all who want it at about the same time."""
        with self._lock:
            future = self._blocks.get((file, index))
            ours = future is None
            if future is None:
                future = self._blocks[file, index] = Future()
                while len(self._blocks) > _CACHED_BLOCKS:
                    self._blocks.popitem(last=False)
            self._blocks.move_to_end((file, index))
        if ours:
            try:
                copies = self._copies(file)
                block = copies.block(index, Bounce(copies.entry).view)
            except BaseException as error:
                with self._lock:  # what is repaired meanwhile may be asked for again
                    self._blocks.pop((file, index), None)
                future.set_exception(error)
                raise
            future.set_result(block)
        return future.result()

    def _copies(self, file: str) -> FileCopies:
        """A file in all places; a checkpoint of many ranks has more than a process may open."""
        with self._lock:
            copies = self._files.get(file)
            if copies is None:
                path = f"{self.manifest.save}/{file}"
                copies = FileCopies(self.places, path, self._inventory.file(file))
                self._files[file] = copies
                while len(self._files) > _OPEN_FILES:
                    self._files.popitem(last=False)[1].close()
            self._files.move_to_end(file)
        return copies


def wanted(
    entry: TensorEntry, offsets: tuple[int, ...], target: torch.Tensor
) -> Iterator[WantedBox]:
    """What to read of each chunk so that ``target`` holds the box of a tensor at ``offsets``."""
    for chunk in entry.chunks:
        low, extents = common((chunk.offsets, chunk.shape), (offsets, tuple(target.shape)))
        if not math.prod(extents):
            continue
        region = target
        for axis, (start, extent) in enumerate(zip(low, extents, strict=True)):
            region = region.narrow(axis, start - offsets[axis], extent)
        inner = tuple(a - b for a, b in zip(low, chunk.offsets, strict=True))
        yield WantedBox(entry, chunk, inner, region)


class _Slice(NamedTuple):
    """Part of a box that is read at once: bytes of a file, and what they are."""

    start: int
    end: int
    dtype: torch.dtype
    strides: tuple[int, ...]
    target: torch.Tensor


def bounds(chunk: Chunk) -> tuple[slice, ...]:
    """Where a chunk lies in its tensor."""
    return tuple(
        slice(offset, offset + extent)
        for offset, extent in zip(chunk.offsets, chunk.shape, strict=True)
    )


def _box(whole: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    return whole[bounds(chunk)] if chunk.shape else whole


def _slices(want: WantedBox) -> Iterator[tuple[_Slice, bool]]:
    """Cut a box into parts of about ``SLICE_BYTES``, along the axes that vary slowest."""
    shape = tuple(want.target.shape)
    dtype = DTYPES[want.entry.dtype]
    strides = tuple(math.prod(want.chunk.shape[axis + 1 :]) for axis in range(len(shape)))
    boxes = list(_cut(want.offsets, shape, strides, dtype.itemsize))
    for number, (offsets, extents) in enumerate(boxes, 1):
        first = sum(o * s for o, s in zip(offsets, strides, strict=True))
        start = want.chunk.start + first * dtype.itemsize
        target = want.target
        for axis, (offset, extent) in enumerate(zip(offsets, extents, strict=True)):
            target = target.narrow(axis, offset - want.offsets[axis], extent)
        end = start + span(extents, strides) * dtype.itemsize
        yield _Slice(start, end, dtype, strides, target), number == len(boxes)


def _cut(
    offsets: tuple[int, ...], extents: tuple[int, ...], strides: tuple[int, ...], item: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    axis = next((axis for axis, extent in enumerate(extents) if extent > 1), None)
    if axis is None or span(extents, strides) * item <= SLICE_BYTES:
        yield offsets, extents
        return
    rows = max(1, SLICE_BYTES // (strides[axis] * item))
    for row in range(0, extents[axis], rows):
        taken = min(rows, extents[axis] - row)
        inner = (*extents[:axis], taken, *extents[axis + 1 :])
        begin = (*offsets[:axis], offsets[axis] + row, *offsets[axis + 1 :])
        if taken > 1:
            yield begin, inner
        else:
            yield from _cut(begin, inner, strides, item)


def _copied(
    slice_: _Slice, done: WantedBox | None, future: Future[memoryview]
) -> Iterator[WantedBox]:
    data = future.result()
    if len(data):
        flat = torch.frombuffer(data, dtype=slice_.dtype)
        slice_.target.copy_(flat.as_strided(slice_.target.shape, slice_.strides))
    if done is not None:
        yield done


def _not_understood(step: int, error: Exception) -> CheckpointInvalid:
    return CheckpointInvalid(step, f"a small state is not understood: {error!r}")


def without_dtypes(data: Any, found: dict[str, torch.dtype]) -> Any:
    """``data`` as if each tensor had been stored in the dtype it had; those go to ``found``."""
    if isinstance(data, list):
        return [without_dtypes(value, found) for value in data]
    if not isinstance(data, dict):
        return data
    if data.get(KIND) == "tensor" and "dtype" in data:
        dtype = getattr(torch, str(data["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{data['dtype']!r} is not a dtype")
        found[str(data["name"])] = dtype
        return {key: value for key, value in data.items() if key != "dtype"}
    return {key: without_dtypes(value, found) for key, value in data.items()}


def _add(base: dict[str, Any], more: dict[str, Any], take: Callable[[Any], Any]) -> None:
    """Add to ``base`` what only ``more`` has; what both have stays as it is in ``base``."""
    for key, value in more.items():
        if key not in base:
            base[key] = take(value)
        elif isinstance(value, dict) and isinstance(base[key], dict) and KIND not in value:
            _add(base[key], value, take)
        elif key == "param_groups" and isinstance(value, list) and len(value) == len(base[key]):
            for ours, theirs in zip(base[key], value, strict=True):
                ours["params"] += [name for name in theirs["params"] if name not in ours["params"]]
