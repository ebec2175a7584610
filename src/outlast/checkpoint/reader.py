"""Open a checkpoint and read of it what is asked for; nothing is believed before it was hashed.

Two things are asked for. A rank that resumes wants all of one rank's state: its small state is read
and checked as the checkpoint is opened, since a save in which it does not verify is passed over.
DCP and exports want any box of any tensor, and the small states of all ranks as one: they open the
manifest alone (``rank=None``), and what else they need is read and checked when they ask for it.

The manifest, a rank's part and its small state say what every tensor is before any of its bytes is
touched. Tensors are then read into memory that the caller names, by several threads; other ranks'
parts are read as far as they have what is asked for.

What is wanted may be cut in another way than what was saved. What a saved chunk and a wanted box
share becomes runs of bytes that follow each other in the file and in memory (``pieces``). Long runs
are copied straight from the verified block. Where they are short (a matrix that was cut by rows and
is wanted by columns), where the destination is on a GPU, strided, of another dtype, or one that
torch negates or conjugates as it reads it, the verified bytes are collected in memory on the side,
about ``STAGE_BYTES`` at a time, and copied on as a tensor. A destination's elements must not share
memory (``FillTargets``).

A save may lie in several places, under one name. The manifest is that of the first place where it
verifies; each file, block by block, comes from the first place where it matches that manifest. What
was wrong elsewhere is told at once, and can be mended from the right copies when there is time.

What can go wrong: a block is right nowhere (CheckpointInvalid, naming the file and every place's
reason), or a place that may have it cannot be read (OSError).
Memory: what the caller names; of tensors that are handed out one after the other,
``READ_AHEAD_BYTES``, or one tensor that is larger; and as much again in blocks on their way.

Rejected: DCP's reading itself: it hashes nothing, and copies each overlap through fresh memory.
Hashing whole files first (a reader of one row would read the file twice); mapping files into memory
(a byte that was right when it was hashed may have been read anew since). Keeping verified blocks
for what is asked for next: tensors that are spread over more files than blocks are kept push each
other's out. Asking for huge pages for new memory: on a virtual machine that gives free memory back
to its host, faulting 1.35 GB in took 2.0 to 3.6 s of CPU with them and 0.7 to 0.9 without;
elsewhere four threads fault pages of 4 KiB in faster than a disk reads.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from outlast.checkpoint import devices, transfer
from outlast.checkpoint.catalog import newest
from outlast.checkpoint.chunks import check_parts
from outlast.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    Chunk,
    FileEntry,
    Place,
    SaveName,
    SmallState,
    TensorEntry,
    as_places,
    own_name,
    read_small_state,
    state_file,
    without_owner,
)
from outlast.checkpoint.mend import Repaired, mend_file, mend_manifest
from outlast.checkpoint.spreads import Box, common
from outlast.checkpoint.tensors import (
    DTYPES,
    FillTargets,
    Parts,
    array_of,
    fresh,
    is_deferred,
    local_chunks,
    put_together,
    raw,
    span,
)
from outlast.checkpoint.transfer import (
    FileCopies,
    Inventory,
    ReadRange,
    by_file,
    in_words,
    job_for,
    look,
    read,
)
from outlast.checkpoint.tree import (
    DTYPE_OF,
    MergedState,
    add_to,
    decode,
    not_understood,
    replace,
    tensor_names,
    without_dtypes,
)
from outlast.errors import CheckpointInvalid
from outlast.storage import Storage

logger = logging.getLogger(__name__)

READ_AHEAD_BYTES: Final = 16 * BLOCK_BYTES

OnDamaged = Callable[[str, Place, str], None]
OnRepaired = Callable[[str, Place], None]


class Leaf(NamedTuple):
    """A tensor that has not been read: its name in the manifest, its shape and its dtype.

    The dtype is the one it had in training; it may have been stored in a narrower one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Wanted(NamedTuple):
    """A box of a tensor, and the memory it is to be copied to.

    Attributes:
        entry: the tensor; its chunks cover the box.
        offsets: where the box begins in the tensor.
        target: of the box's shape, not spread; any device, dtype and strides.
    """

    entry: TensorEntry
    offsets: tuple[int, ...]
    target: torch.Tensor


class Damage(NamedTuple):
    """A file that is not what the manifest says, in a place that holds the step."""

    file: str
    place: Place
    reason: str


def ignore(*_: Any) -> None:
    """Nobody is told."""


def open_checkpoint(
    where: Storage | Sequence[Place],
    which: int | SaveName,
    *,
    rank: int | None = 0,
    on_damaged: OnDamaged = ignore,
) -> Checkpoint:
    """Open a save: its manifest and the small state of ``rank``, verified.

    Args:
        where: the places it may lie in, the fastest first, or one storage.
        which: which save; of a step the newest that can be opened.
        rank: whose state; beyond the ranks that saved, they are taken in turn. None: the manifest
            alone is looked at, and each small state when it is asked for.
        on_damaged: told (file, place, reason) of what is wrong in a place that holds the step.

    Raises:
        CheckpointInvalid: no place has a manifest or small state that verifies.
        OSError: and one of them cannot be read.
    """
    places = as_places(where)
    return newest(places, which, lambda save: Checkpoint(places, save, rank, on_damaged))


class Checkpoint:
    """A save that is open for reading, as one rank sees it.

    Attributes:
        save: its name.
        manifest: says what it consists of, or where that is said.
        inventory: its files and tensors.
        source_rank: of the ranks that saved, the one whose state is read; 0 if none was named.
        sources: file → the name of the place it was read from.
        damage: what was found wrong so far.
    """

    def __init__(
        self, places: Sequence[Place], save: SaveName, rank: int | None, on_damaged: OnDamaged
    ) -> None:
        self.sources: dict[str, str] = {}
        self.damage: list[Damage] = []
        self.save = save
        self._on_damaged = on_damaged
        self._places = places
        self._tensors: dict[str, torch.Tensor] = {}
        self._smalls: dict[int, SmallState] = {}
        self._understood: set[int] = set()
        self._verified: set[str] = set()
        self.manifest, self._found = transfer.find_manifest(places, save)
        self._manifest_source = next(reversed(self._found))
        for place in places:
            if self._is_torn(place):
                self._tell(Damage(MANIFEST, place, self._found[place.name].problem))
        # No cycle: what was loaded is let go with the last reference to this, not some time later.
        weak = weakref.WeakMethod(self._read_file)

        def read_file(name: str, entry: FileEntry) -> bytes:
            method = weak()
            assert method is not None  # noqa: S101 - only this looks things up in the inventory
            return method(name, entry)

        self.inventory = Inventory(self.manifest, read_file)
        # A place with another manifest or none may still have the right bytes: it is asked last.
        usable = {name for name, found in self._found.items() if found.manifest is not None}
        passed = set(self._found) - usable - {p.name for p in places if self._is_torn(p)}
        self._in_order = sorted(places, key=lambda place: place.name in passed)
        self.source_rank = (rank or 0) % self.manifest.world_size
        if rank is not None:
            self.small(self.source_rank)

    # --- what there is -----------------------------------------------------------------------

    def describe(self) -> str:
        """Where the checkpoint is, as a person would write it."""
        return self._places[0].storage.describe(str(self.save))

    @property
    def data(self) -> dict[str, Any]:
        """Key → small state of ``source_rank``, in which tensors are named."""
        return self.small(self.source_rank).data

    def small(self, rank: int) -> SmallState:
        """The small state of ``rank``; beyond the ranks that saved, they are taken in turn.

        Raises:
            CheckpointInvalid, OSError: no place has it, or it names a tensor that is not there.
        """
        small = self._small(rank)
        if small.rank not in self._understood:
            try:
                for name in tensor_names(small.data):
                    self._leaf({"name": name}, small)
            except CheckpointInvalid:  # of another file
                raise
            except (ValueError, KeyError, TypeError) as error:
                reason = f"{state_file(small.rank)} is not understood: {error}"
                raise CheckpointInvalid(self.save.step, reason) from None
            self._understood.add(small.rank)
        return small

    def outline(self, key: str, rank: int | None = None) -> Any:
        """The state saved under ``key`` by ``rank``, with a Leaf in place of each tensor.

        Raises:
            KeyError: nothing was saved under ``key``.
        """
        small = self.small(self.source_rank if rank is None else rank)
        return decode(small.data[key], lambda leaf: self._leaf(leaf, small))

    def leaves(self) -> Iterator[Leaf]:
        """Every tensor that the source rank's small state names."""
        small = self.small(self.source_rank)
        found: list[Leaf] = []
        for data in small.data.values():
            decode(data, lambda leaf: found.append(self._leaf(leaf, small)))
        yield from found

    def leaf(self, name: str, rank: int | None = None) -> Leaf:
        """The tensor that a rank's small state calls ``name``.

        Raises:
            KeyError: the checkpoint has no such tensor.
        """
        return self._leaf({"name": name}, self.small(self.source_rank if rank is None else rank))

    def merged(self, rank: int) -> MergedState:
        """What ``rank`` saved, and where the manifest has more than that, the other ranks' too.

        Ranks that hold different layers (a pipeline) each name their own tensors only.

        Raises:
            CheckpointInvalid: a small state is not understood, or names a tensor that is not there.
            OSError: a place cannot be read.
        """
        merged = MergedState(self.manifest.step, {}, {}, {}, {})
        try:
            self._merge(merged, rank)
            named = set(map(without_owner, self.inventory.tensors()))
            every = range(self.manifest.world_size)
            # The first ranks of each structure know all that is known to more than one rank.
            for others in (self.inventory.firsts(), every):
                if not named <= set(merged.entries):
                    for other in others:
                        self._merge(merged, other)
        except CheckpointInvalid:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise not_understood(self.manifest.step, error) from None
        return merged

    def locate(self, state: MergedState, wanted: Mapping[str, Sequence[Box]], rank: int) -> None:
        """Find where regions of tensors lie: ``state.entries`` has chunks for them then.

        Args:
            state: of this checkpoint.
            wanted: name → boxes in the whole tensor.
            rank: whose state it is.

        Raises:
            CheckpointInvalid, OSError: see ``Inventory.locate``.
        """
        stored = {state.stored[name]: boxes for name, boxes in wanted.items()}
        found = self.inventory.locate(stored, rank % self.manifest.world_size)
        state.entries.update({name: found[state.stored[name]] for name in wanted})

    def locate_all(self, state: MergedState, rank: int) -> None:
        """As ``locate``, of all tensors and all of each."""
        whole = {
            name: [((0,) * len(entry.shape), entry.shape)] for name, entry in state.entries.items()
        }
        self.locate(state, whole, rank)

    # --- reading -----------------------------------------------------------------------------

    def read(
        self,
        wanted: Iterable[tuple[str, torch.Tensor]],
        *,
        share: tuple[int, int] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Fill tensors, and verify a share of all files on the way.

        Args:
            wanted: (name in the checkpoint, tensor to be filled: plain or a DTensor, of the shape
                that was saved). Its elements may share memory.
            share: (n, of how many): besides what is wanted, the n-th of so many parts of all ranks'
                files is verified in full, so that ``of how many`` readers see every byte. A single
                one also sees that the ranks' parts cover every tensor.
            progress: told the bytes of each block.

        Raises:
            CheckpointInvalid, OSError: a block is right in no place. Tensors may have been filled
                in part, with verified bytes only.
            StateMismatch: elements of a tensor share memory and were saved with several values.
        """
        asked = list(wanted)
        apart = FillTargets(asked)
        entries = self._located(apart.targets)
        parts = by_file(
            part for name, tensor in apart.targets for part in pieces(entries[name], tensor)
        )
        self._read(parts, self._share(*share, progress) if share else {}, progress)
        apart.lay(f"step {self.save.step}")
        self._tensors |= dict(asked)

    def fill(self, wanted: Sequence[tuple[str, Wanted]]) -> None:
        """Fill memory with boxes of tensors; it is not kept.

        Args:
            wanted: the tensor's name, for errors, and what is wanted of it.

        Raises:
            CheckpointInvalid, OSError, StateMismatch: see ``read``.
        """
        apart = FillTargets((name, one.target) for name, one in wanted)
        targets = (target for _, target in apart.targets)
        self._read(
            by_file(
                part
                for (_, one), target in zip(wanted, targets, strict=True)
                for part in pieces_at(one.entry, one.offsets, target)
            )
        )
        apart.lay(f"step {self.save.step}")

    def tensors(self, entries: Iterable[TensorEntry]) -> Iterator[torch.Tensor]:
        """Whole tensors, one after the other, in memory of their own.

        Neighbours are read together, since they share blocks.

        Raises:
            CheckpointInvalid, OSError: see ``read``.
        """
        for batch in _batches(entries):
            wholes = [fresh(entry.shape, DTYPES[entry.dtype]) for entry in batch]
            together = zip(batch, wholes, strict=True)
            self._read(by_file(part for entry, whole in together for part in pieces(entry, whole)))
            wholes.reverse()
            while wholes:
                yield wholes.pop()

    def state(self, key: str, rank: int | None = None) -> Any:
        """The state that ``rank`` saved under ``key``; what was not read before is read now.

        Whoever keeps a tensor gets one in memory of its own, aligned as torch aligns: at another
        alignment a sum takes another path through the vector unit, and other last bits.

        Raises:
            KeyError: nothing was saved under ``key``.
            ValueError: a tensor was of a subclass that is not loaded.
        """
        outline = self.outline(key, rank)
        missing: list[tuple[str, torch.Tensor]] = []

        def want(leaf: Leaf) -> Leaf:
            if leaf.name not in self._tensors:
                missing.append((leaf.name, fresh(leaf.shape, leaf.dtype)))
            return leaf

        replace(outline, Leaf, want)
        if missing:
            self.read(missing)
        state = replace(outline, Leaf, lambda leaf: self._tensors[leaf.name])
        return replace(state, Parts, put_together)

    def tensor(self, name: str) -> torch.Tensor:
        """One whole tensor, by the name that the small state uses."""
        leaf = self.leaf(name)
        if leaf.name not in self._tensors:
            self.read([(leaf.name, fresh(leaf.shape, leaf.dtype))])
        return self._tensors[leaf.name]

    # --- mending -----------------------------------------------------------------------------

    def repair(
        self,
        on_repaired: OnRepaired = ignore,
        only: Callable[[Damage], bool] = lambda _: True,
    ) -> list[Repaired]:
        """Mend what was found damaged, from the places where it is right; never raises OSError.

        Args:
            on_repaired: told (file, place) of each.
            only: what to mend; the rest is left to others who found it too.
        """
        repaired: list[Repaired] = []
        # A manifest comes after the files that it counts on.
        in_order = sorted(self.damage, key=lambda one: one.file == MANIFEST)
        for file, place, reason in filter(only, in_order):
            try:
                if file == MANIFEST:
                    source = self._manifest_source
                    mend_manifest(place, self.manifest, self._found[source].data)
                else:
                    entry = self.inventory.file(file)
                    source = mend_file(self._in_order, place, self._path(file), entry)
            except (OSError, CheckpointInvalid) as error:
                why = in_words(error) if isinstance(error, OSError) else error.reason
                logger.warning("%s in %s (%s) was not mended: %s", file, place.name, reason, why)
                continue
            repaired.append(Repaired(file, place.name, source))
            on_repaired(file, place)
        self.damage = []
        return repaired

    # --- inside ------------------------------------------------------------------------------

    def _read(
        self,
        parts: Mapping[str, Sequence[ReadRange]],
        mine: Mapping[str, FileEntry] = MappingProxyType({}),
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Read ranges of files, and verify in full those of ``mine`` that were not verified yet."""
        unread = mine.keys() - self._verified
        jobs = {
            name: job_for(
                self._copies_of(name, mine.get(name)),
                parts.get(name, ()),
                everything=name in unread,
            )
            for name in sorted({*parts, *unread})
        }
        try:
            read(list(jobs.values()), progress)
            self._verified |= mine.keys()
        finally:
            for name, job in jobs.items():
                self._note(name, job.copies)

    def _is_torn(self, place: Place) -> bool:
        found = self._found.get(place.name)
        return found is not None and transfer.is_torn(found)

    def _holds(self, place: Place) -> bool:
        """Whether this place is one that should have this checkpoint's files."""
        found = self._found.get(place.name)
        if found is None:
            found = self._found[place.name] = look(place, self.save)
            if self._is_torn(place):
                self._tell(Damage(MANIFEST, place, found.problem))
        return transfer.is_torn(found) or found.data == self._found[self._manifest_source].data

    def _located(self, targets: Sequence[tuple[str, torch.Tensor]]) -> dict[str, TensorEntry]:
        """Where the bytes of tensors are that are to be filled."""
        boxes: dict[str, list[Box]] = {}
        for name, tensor in targets:
            found = boxes.setdefault(name, [])
            if self.manifest.parts:
                found += [(offsets, shape) for offsets, shape, _ in local_chunks(tensor)]
        return self.inventory.locate(boxes, self.source_rank)

    def _share(
        self, number: int, of: int, progress: Callable[[int], None] | None
    ) -> dict[str, FileEntry]:
        """The files of neighbouring ranks that fall to one of several readers.

        With as many readers as ranks each gets its own.
        """
        if of == 1:
            return check_parts(self.inventory, progress)
        world_size, parts = self.manifest.world_size, self.manifest.parts
        found: dict[str, FileEntry] = {}
        for rank in range(world_size * number // of, world_size * (number + 1) // of):
            found.update(self.inventory.files(rank))
            if parts and progress is not None:
                progress(parts[rank].size)
        return found

    def _read_file(self, name: str, entry: FileEntry) -> bytes:
        """A whole small file, verified."""
        copies = self._copies_of(name, entry)
        try:
            raw = copies.whole()
        finally:
            copies.close()
            self._note(name, copies)
        self._verified.add(name)
        return raw

    def _small(self, rank: int) -> SmallState:
        """The small state of ``rank``, whatever tensors it names."""
        source = rank % self.manifest.world_size
        if source not in self._smalls:
            name = state_file(source)
            data = self._read_file(name, self.inventory.file(name))
            self._smalls[source] = read_small_state(data, self.save.step, source)
        return self._smalls[source]

    def _merge(self, merged: MergedState, rank: int) -> None:
        """Add what a rank's small state has and those before it do not."""
        small = self._small(rank)

        def take(data: Any) -> Any:
            plain = without_dtypes(data, merged.dtypes)
            for name in tensor_names(plain):
                stored = _stored_name(name, small)
                try:
                    known = self.inventory.tensor(stored, small.rank)
                except KeyError:
                    raise CheckpointInvalid(
                        self.manifest.step, f"{MANIFEST} does not name the tensor {stored}"
                    ) from None
                merged.entries[name] = TensorEntry(dtype=known.dtype, shape=known.shape, chunks=())
                merged.stored[name] = stored
            return plain

        add_to(merged.data, small.data, take)

    def _leaf(self, leaf: Any, small: SmallState) -> Leaf:
        stored = _stored_name(leaf["name"], small)
        known = self.inventory.tensor(stored, small.rank)
        dtype = DTYPE_OF[leaf["dtype"]] if "dtype" in leaf else DTYPES[known.dtype]
        return Leaf(stored, known.shape, dtype)

    def _copies_of(self, name: str, entry: FileEntry | None = None) -> FileCopies:
        entry = self.inventory.file(name) if entry is None else entry
        return FileCopies(self._in_order, self._path(name), entry)

    def _path(self, name: str) -> str:
        return f"{self.save}/{name}"

    def _note(self, name: str, copies: FileCopies) -> None:
        """Where a file came from, and where it is damaged."""
        if copies.used:
            self.sources[name] = " and ".join(sorted(copies.used))
        for place in self._places:
            problem = copies.problems.get(place.name)
            if place.in_memory and place.name in copies.missing:
                continue  # each machine's memory holds its own ranks' files
            if problem and self._holds(place):
                self._tell(Damage(name, place, problem))

    def _tell(self, damage: Damage) -> None:
        if all((one.file, one.place) != (damage.file, damage.place) for one in self.damage):
            self.damage.append(damage)
            self._on_damaged(*damage)


def _stored_name(name: str, small: SmallState) -> str:
    """The name in the checkpoint of a tensor that a small state names."""
    return own_name(name, small.rank) if name in small.own else name


def _batches(entries: Iterable[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Tensors that are read together: ``READ_AHEAD_BYTES`` of them, or one that is larger."""
    batch: list[TensorEntry] = []
    room = 0
    for entry in entries:
        size = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
        if batch and size > room:
            yield batch
            batch = []
        room = (room if batch else READ_AHEAD_BYTES) - size
        batch.append(entry)
    if batch:
        yield batch


# --- where the bytes lie, and where they go -------------------------------------------------------

SHORT_BYTES: Final = 64 << 10  # below this a call for each run costs more than a second copy
STAGE_BYTES: Final = BLOCK_BYTES

Extents = tuple[int, ...]


def pieces(entry: TensorEntry, target: torch.Tensor) -> Iterator[tuple[str, ReadRange]]:
    """What to read of which file so that ``target`` holds the tensor that was saved.

    Args:
        entry: its shape, dtype and chunks.
        target: a tensor of that shape: plain, or a DTensor, whose local part is filled. With
            another dtype the values are cast. Whoever reads must keep it until all is read.

    Raises:
        ConfigError: ``target`` is spread in a way that cannot be read into.
    """
    for offsets, _, view in local_chunks(target):
        yield from pieces_at(entry, offsets, view)


def pieces_at(
    entry: TensorEntry, offsets: Extents, target: torch.Tensor
) -> Iterator[tuple[str, ReadRange]]:
    """As ``pieces``, where ``target`` is a plain tensor, for the tensor's box at ``offsets``."""
    for chunk in entry.chunks:
        low, extent = common((chunk.offsets, chunk.shape), (offsets, tuple(target.shape)))
        if not math.prod(extent):
            continue
        region = target
        for axis, (start, length) in enumerate(zip(low, extent, strict=True)):
            region = region.narrow(axis, start - offsets[axis], length)
        inner = tuple(a - b for a, b in zip(low, chunk.offsets, strict=True))
        for piece in _pieces_of(chunk, inner, DTYPES[entry.dtype], region):
            yield chunk.file, piece


def _pieces_of(
    chunk: Chunk, offsets: Extents, dtype: torch.dtype, region: torch.Tensor
) -> Iterator[ReadRange]:
    """What to read of a chunk so that ``region`` holds the chunk's box at ``offsets``."""
    item, extent, strides = dtype.itemsize, tuple(region.shape), _strides(chunk.shape)
    start = chunk.start + _distance(offsets, strides) * item
    axis, run = _run(extent, chunk.shape, region)
    outer = extent[:axis]
    is_here = region.device.type == "cpu" and region.dtype == dtype
    direct = is_here and run > 0 and not is_deferred(region)
    if direct and (math.prod(outer) == 1 or run * item >= SHORT_BYTES):
        for index in itertools.product(*(range(length) for length in outer)):
            here = start + _distance(index, strides) * item
            there = _distance(index, region.stride()) * item
            yield ReadRange(here, here + run * item, region.data_ptr() + there)
        return
    stream = devices.stream_for(region)  # of whoever asks: behind what made the tensor
    for begin, target in _cut(region, strides, item):
        here, size = start + begin * item, span(target.shape, strides) * item
        yield ReadRange(here, here + size, 0, OverlapStage(size, dtype, strides, target, stream))


def _distance(index: Sequence[int], strides: Sequence[int]) -> int:
    """From a tensor's first element to the one at ``index``, in elements."""
    return sum(i * s for i, s in zip(index, strides, strict=False))


def _cut(region: torch.Tensor, strides: Extents, item: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Cut a box into parts of about ``STAGE_BYTES``, along the axes that vary slowest.

    Args:
        region: the memory it goes to.
        strides: of the chunk that it is a box of, in elements.
        item: bytes of an element of the chunk.

    Yields:
        How many elements behind the first one of the box the part begins in the chunk, and its own
        part of the memory.
    """
    axis = next((axis for axis, extent in enumerate(region.shape) if extent > 1), None)
    if axis is None or span(region.shape, strides) * item <= STAGE_BYTES:
        yield 0, region
        return
    rows = max(1, STAGE_BYTES // (strides[axis] * item))
    for row in range(0, region.shape[axis], rows):
        part = region.narrow(axis, row, min(rows, region.shape[axis] - row))
        for begin, target in [(0, part)] if rows > 1 else _cut(part, strides, item):
            yield row * strides[axis] + begin, target


def _strides(shape: Extents) -> Extents:
    """Strides of a contiguous tensor, in elements."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * max(extent, 1))
    return tuple(reversed(strides))[: len(shape)]


def _run(extent: Extents, saved: Extents, region: torch.Tensor) -> tuple[int, int]:
    """Elements that follow each other in the chunk and in memory, and the axis they start at."""
    run, axis = 1, len(extent)
    while axis:
        axis -= 1
        if extent[axis] > 1 and region.stride(axis) != run:
            return axis + 1, run if axis + 1 < len(extent) else 0
        run *= extent[axis]
        if extent[axis] != saved[axis]:
            break  # the next row of the chunk begins further on
    return axis, run


class OverlapStage:
    """Memory on the side for a box, made when its first bytes come, gone after its last.

    Args:
        num_bytes: from the first byte of the box in its chunk to its last.
        dtype: the chunk's.
        strides: the chunk's, in elements.
        target: the memory that the box goes to.
        stream: of the GPU that ``target`` is on.
    """

    def __init__(
        self,
        num_bytes: int,
        dtype: torch.dtype,
        strides: Extents,
        target: torch.Tensor,
        stream: Any,
    ) -> None:
        self._num_bytes = self._left = num_bytes
        self._dtype = dtype
        self._strides = strides
        self._target = target
        self._stream = stream
        self._memory: torch.Tensor | None = None
        self._lock = threading.Lock()

    def address(self) -> int:
        """Where the bytes go."""
        with self._lock:
            if self._memory is None:
                self._memory = torch.empty(self._num_bytes, dtype=torch.uint8)
            return int(self._memory.data_ptr())

    def arrived(self, num_bytes: int) -> None:
        """So many more bytes are there; after the last they are brought on."""
        with self._lock:
            self._left -= num_bytes
            if self._left:
                return
            memory, self._memory = self._memory, None
        if memory is not None:
            self._bring(memory.view(self._dtype).as_strided(self._target.shape, self._strides))

    def _bring(self, source: torch.Tensor) -> None:
        """Copy to the target, in this thread alone if that is in this memory."""
        target = self._target
        with torch.no_grad(), devices.on(self._stream):
            if target.device.type != "cpu" or target.dtype != source.dtype or is_deferred(target):
                target.copy_(source)
            else:
                np.copyto(array_of(raw(target)), array_of(raw(source)))
