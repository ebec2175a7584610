"""Open a checkpoint and read one rank's state: nothing is believed before its hash was computed.

The manifest, one rank's part and its small state are read first; they say what every tensor is
before any of its bytes is touched. Tensors are then read into memory that the caller names, by
several threads; other ranks' parts are read as far as they have what is asked for.

A save may lie in several places, under one name. The manifest is that of the first place where it
verifies; each file, block by block, comes from the first place where it matches that manifest. What
was wrong elsewhere is told at once, and can be mended from the right copies when there is time.

What is wanted may be cut in another way than what was saved. DCP's planner says where the two
overlap; each overlap then becomes runs of bytes that follow each other in the file and in memory.
Long runs are copied straight from the verified block. Where they are short (a matrix that was cut
by rows and is wanted by columns), where the destination is on a GPU, strided, of another dtype, or
one that torch negates or conjugates as it reads it, the verified bytes are collected in memory on
the side and copied on as a tensor. A destination's elements must not share memory
(``FillTargets``).

What can go wrong: a block is right nowhere (CheckpointInvalid, naming the file and every place's
reason), or a place that may have it cannot be read (OSError).

Rejected: DCP's reading itself: it hashes nothing, and copies each overlap through fresh memory.
Asking for huge pages for new memory: on a virtual machine that gives free memory back to its host,
faulting 1.35 GB in took 2.0 to 3.6 s of CPU with them and 0.7 to 0.9 without; elsewhere four
threads fault pages of 4 KiB in faster than a disk reads.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from outlast.checkpoint import devices, transfer
from outlast.checkpoint.boundary import array_of
from outlast.checkpoint.catalog import newest
from outlast.checkpoint.inventory import Inventory, check_parts
from outlast.checkpoint.manifest import (
    MANIFEST,
    Chunk,
    FileEntry,
    Manifest,
    SmallState,
    TensorEntry,
    own_name,
    read_small_state,
    state_file,
)
from outlast.checkpoint.names import Place, SaveName, as_places
from outlast.checkpoint.spreads import Box
from outlast.checkpoint.tensors import (
    DTYPES,
    Parts,
    is_deferred,
    is_spread,
    lay,
    local_chunks,
    local_of,
    overlaps,
    put_together,
    raw,
    span,
    spread_as,
)
from outlast.checkpoint.transfer import (
    FileCopies,
    FoundManifest,
    ReadRange,
    Repaired,
    by_file,
    in_words,
    job_for,
    look,
    read,
)
from outlast.checkpoint.tree import DTYPE_OF, decode, replace, tensor_names
from outlast.errors import CheckpointInvalid, StateMismatch
from outlast.storage import Storage

logger = logging.getLogger(__name__)

OnDamaged = Callable[[str, Place, str], None]
OnRepaired = Callable[[str, Place], None]


class Leaf(NamedTuple):
    """A tensor that has not been read: its name in the manifest, its shape and its dtype.

    The dtype is the one it had in training; it may have been stored in a narrower one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


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
    rank: int = 0,
    on_damaged: OnDamaged = ignore,
) -> Checkpoint:
    """Open a save: its manifest and the small state of ``rank``, verified.

    Args:
        where: the places it may lie in, the fastest first, or one storage.
        which: which save; of a step the newest that can be opened.
        rank: whose state; beyond the ranks that saved, they are taken in turn.
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
        data: key → small state of ``source_rank``, in which tensors are named.
        source_rank: the rank whose small state this is.
        sources: file → the name of the place it was read from.
        damage: what was found wrong so far.
    """

    def __init__(
        self, places: Sequence[Place], save: SaveName, rank: int, on_damaged: OnDamaged
    ) -> None:
        self.sources: dict[str, str] = {}
        self.damage: list[Damage] = []
        self.save = save
        self._on_damaged = on_damaged
        self._places = places
        self._found: dict[str, FoundManifest] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._smalls: dict[int, SmallState] = {}
        self._verified: set[str] = set()
        self.manifest = self._choose()
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
        self.source_rank = rank % self.manifest.world_size
        self.data = self.small(self.source_rank).data

    # --- what there is -----------------------------------------------------------------------

    def small(self, rank: int) -> SmallState:
        """The small state of one of the ranks that saved.

        Raises:
            CheckpointInvalid, OSError: no place has it.
        """
        if rank not in self._smalls:
            self._smalls[rank] = self._read_small(rank)
        return self._smalls[rank]

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
        targets = apart.targets
        entries = self._located(targets)
        parts = by_file(
            part for name, tensor in targets for part in pieces(name, entries[name], tensor)
        )
        mine = self._share(*share, progress) if share else {}
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
        apart.lay(f"step {self.save.step}")
        self._tensors |= dict(asked)

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
        for file, place, reason in filter(only, self.damage):
            try:
                if file == MANIFEST:
                    source = self._manifest_source
                    transfer.mend_manifest(place, self.manifest, self._found[source].data)
                else:
                    entry = self.inventory.file(file)
                    source = transfer.mend_file(self._in_order, place, self._path(file), entry)
            except (OSError, CheckpointInvalid) as error:
                why = in_words(error) if isinstance(error, OSError) else error.reason
                logger.warning("%s in %s (%s) was not mended: %s", file, place.name, reason, why)
                continue
            repaired.append(Repaired(file, place.name, source))
            on_repaired(file, place)
        self.damage = []
        return repaired

    # --- inside ------------------------------------------------------------------------------

    def _choose(self) -> Manifest:
        for place in self._places:
            found = self._found[place.name] = look(place, self.save)
            if found.manifest is not None:
                self._manifest_source = place.name
                for other in self._places:
                    if self._is_torn(other):
                        self._tell(Damage(MANIFEST, other, self._found[other.name].problem))
                return found.manifest
        raise transfer.none_valid(self._found, self.save.step)

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

    def _read_small(self, rank: int) -> SmallState:
        name = state_file(rank)
        raw = self._read_file(name, self.inventory.file(name))
        found = read_small_state(raw, self.save.step, rank)
        try:
            for tensor in tensor_names(found.data):
                self._leaf({"name": tensor}, found)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointInvalid(self.save.step, f"{name} is not understood: {error}") from None
        return found

    def _leaf(self, leaf: Any, small: SmallState) -> Leaf:
        name = leaf["name"]
        stored = own_name(name, small.rank) if name in small.own else name
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


def load(
    where: Storage | Sequence[Place],
    which: int | SaveName,
    *,
    rank: int = 0,
    everything: bool = True,
) -> Checkpoint:
    """Open a save and read all tensors of one rank's state.

    Args:
        where: the places it may lie in, or one storage.
        which: which save; of a step the newest that can be opened.
        rank: whose state; beyond the ranks that saved, they are taken in turn.
        everything: verify all other files too.

    Raises:
        CheckpointInvalid: a file is right in no place; names it.
        OSError: a place failed in another way.
    """
    checkpoint = open_checkpoint(where, which, rank=rank)
    wanted = {leaf.name: fresh(leaf.shape, leaf.dtype) for leaf in checkpoint.leaves()}
    checkpoint.read(wanted.items(), share=(0, 1) if everything else None)
    return checkpoint


def verify(
    where: Storage | Sequence[Place],
    which: int | SaveName,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Verify every byte of a save; ``progress`` is told (bytes done, bytes in all).

    Raises:
        CheckpointInvalid: names the first file that does not verify.
        OSError: a place failed in another way.
    """
    checkpoint = open_checkpoint(where, which)
    total = checkpoint.inventory.num_bytes
    done = 0

    def more(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, total)

    more(checkpoint.inventory.file(state_file(0)).size)
    checkpoint.read((), share=(0, 1), progress=more)
    return checkpoint.manifest


# --- where bytes go: from a wanted tensor to ranges of files -------------------------------------

SHORT_BYTES: Final = 64 << 10  # below this a call for each run costs more than a second copy

Extents = tuple[int, ...]


class Overlap(NamedTuple):
    """What a saved chunk and a wanted one share: offsets in each, and the extent."""

    saved: Chunk
    saved_offsets: Extents
    wanted_offsets: Extents
    extent: Extents


class FillTargets:
    """Tensors that are to be filled: those whose elements share memory first as whole ones.

    Args:
        wanted: name and tensor of each.

    Attributes:
        targets: the same, with new memory in place of such a tensor.
    """

    def __init__(self, wanted: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.targets: list[tuple[str, torch.Tensor]] = []
        self._apart: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for name, tensor in wanted:
            whole = tensor
            if overlaps(local_of(tensor)):
                whole = fresh(tensor.shape, tensor.dtype, tensor)
                self._apart.append((name, whole, tensor))
            self.targets.append((name, whole))

    def lay(self, where: str) -> None:
        """All are filled, from ``where``: bring what was set apart to where it belongs.

        Raises:
            StateMismatch: elements that share memory were saved with several values.
        """
        for name, whole, tensor in self._apart:
            if not lay(local_of(whole), local_of(tensor)):
                raise StateMismatch(
                    f"{name} has several values in {where} where its elements share memory now (by "
                    "expand or as_strided); build it as it was"
                )


def fresh(
    shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor | None = None
) -> torch.Tensor:
    """New memory for a tensor, aligned as torch aligns.

    Args:
        shape: of the whole tensor.
        dtype: its dtype.
        like: a DTensor of this shape: the new tensor is spread as it is, and this process gets
            memory for its own part.
    """
    if like is None or not is_spread(like):
        return torch.empty(tuple(shape), dtype=dtype)
    spread: Any = like
    local = spread.to_local()
    return spread_as(like, torch.empty(local.shape, dtype=dtype, device=local.device))


def pieces(name: str, entry: TensorEntry, target: torch.Tensor) -> Iterator[tuple[str, ReadRange]]:
    """What to read of which file so that ``target`` holds the tensor that was saved.

    Args:
        name: the tensor's, for the planner.
        entry: its shape, dtype and chunks.
        target: a tensor of that shape: plain, or a DTensor, whose local part is filled. With
            another dtype the values are cast. Whoever reads must keep it until all is read.

    Raises:
        ConfigError: ``target`` is spread in a way that cannot be read into.
    """
    dtype = DTYPES[entry.dtype]
    for offsets, shape, view in local_chunks(target):
        for overlap in _overlaps(name, entry, offsets, shape):
            yield from _pieces_of(overlap, dtype, view)


def _overlaps(name: str, entry: TensorEntry, offsets: Extents, shape: Extents) -> Iterator[Overlap]:
    if not math.prod(shape):
        return
    if entry.chunks and entry.chunks[0].shape == entry.shape:
        # The whole tensor: no planner is needed, nor imported.
        yield Overlap(entry.chunks[0], offsets, (0,) * len(shape), shape)
        return
    same = next((c for c in entry.chunks if (c.offsets, c.shape) == (offsets, shape)), None)
    if same is not None:  # cut as it was saved
        yield Overlap(same, (0,) * len(shape), (0,) * len(shape), shape)
        return
    yield from _as_dcp_plans(name, entry, offsets, shape)


def _as_dcp_plans(
    name: str, entry: TensorEntry, offsets: Extents, shape: Extents
) -> Iterator[Overlap]:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    saved = [chunk for chunk in entry.chunks if math.prod(chunk.shape)]
    stored = TensorStorageMetadata(
        properties=TensorProperties(dtype=DTYPES[entry.dtype]),
        size=torch.Size(entry.shape),
        chunks=[ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.shape)) for c in saved],
    )
    wanted = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))]
    for item in create_read_items_for_chunk_list(name, stored, wanted):
        yield Overlap(
            saved[item.storage_index.index],
            tuple(item.storage_offsets),
            tuple(item.dest_offsets),
            tuple(item.lengths),
        )


def _pieces_of(
    overlap: Overlap, dtype: torch.dtype, view: torch.Tensor
) -> Iterator[tuple[str, ReadRange]]:
    chunk, item = overlap.saved, dtype.itemsize
    region = view
    for axis, (start, length) in enumerate(
        zip(overlap.wanted_offsets, overlap.extent, strict=True)
    ):
        region = region.narrow(axis, start, length)
    saved_strides = _strides(chunk.shape)
    first = sum(o * s for o, s in zip(overlap.saved_offsets, saved_strides, strict=True))
    start = chunk.start + first * item
    axis, run = _run(overlap.extent, chunk.shape, region)
    outer = overlap.extent[:axis]
    is_here = region.device.type == "cpu" and region.dtype == dtype
    direct = is_here and run > 0 and not is_deferred(region)
    if direct and (math.prod(outer) == 1 or run * item >= SHORT_BYTES):
        for index in itertools.product(*(range(extent) for extent in outer)):
            here = start + sum(i * s for i, s in zip(index, saved_strides, strict=False)) * item
            there = sum(i * s for i, s in zip(index, region.stride(), strict=False)) * item
            address = region.data_ptr() + there
            yield chunk.file, ReadRange(here, here + run * item, address)
        return
    last = span(overlap.extent, saved_strides)
    stream = devices.stream_for(region)  # of whoever asks: behind what made the tensor
    stage = OverlapStage(
        last * item,
        lambda memory: _bring(
            memory.view(dtype).as_strided(overlap.extent, saved_strides), region, stream
        ),
    )
    yield chunk.file, ReadRange(start, start + last * item, 0, stage)


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
    """Memory on the side for one overlap, made when its first bytes come, gone after its last."""

    def __init__(self, num_bytes: int, bring: Callable[[torch.Tensor], None]) -> None:
        self._num_bytes = self._left = num_bytes
        self._bring = bring
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
            self._bring(memory)


def _bring(source: torch.Tensor, target: torch.Tensor, stream: Any) -> None:
    """Copy a tensor to where it belongs, in this thread alone if that is in this memory."""
    with torch.no_grad(), devices.on(stream):
        if target.device.type != "cpu" or target.dtype != source.dtype or is_deferred(target):
            target.copy_(source)
            return
        np.copyto(array_of(raw(target)), array_of(raw(source)))
