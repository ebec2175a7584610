"""Open a checkpoint and read of it what is asked for; nothing is believed before it was hashed.

Two things are asked for. A rank that resumes wants all of one rank's state: its small state is read
and checked as the checkpoint is opened, since a save in which it does not verify is passed over.
DCP and exports want any box of any tensor, and the small states of all ranks as one: they open the
manifest alone (``rank=None``), and what else they need is read and checked when they ask for it.

The manifest, a rank's part and its small state say what every tensor is before any of its bytes is
touched. Tensors are then read into memory that the caller names (``destinations``), by several
threads; other ranks' parts are read as far as they have what is asked for.

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

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from outlast.checkpoint import transfer
from outlast.checkpoint.catalog import newest
from outlast.checkpoint.destinations import FillTargets, fresh, pieces, pieces_at
from outlast.checkpoint.inventory import Inventory, check_parts
from outlast.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    FileEntry,
    Manifest,
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
from outlast.checkpoint.spreads import Box
from outlast.checkpoint.tensors import DTYPES, Parts, local_chunks, put_together
from outlast.checkpoint.transfer import (
    FileCopies,
    ReadRange,
    Repaired,
    by_file,
    in_words,
    job_for,
    look,
    read,
)
from outlast.checkpoint.tree import DTYPE_OF, KIND, decode, replace, tensor_names, unflatten
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
            raise _not_understood(self.manifest.step, error) from None
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

        _add(merged.data, small.data, take)

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


# --- several ranks' small states as one ----------------------------------------------------------


class MergedState(NamedTuple):
    """Several ranks' small states as one.

    Attributes:
        step: the checkpoint's step.
        data: key → data in which tensors are named; none of them tells a dtype of its own.
        entries: name of a tensor in ``data`` → its dtype and shape, and where its bytes are as far
            as that is known (see ``Checkpoint.locate``).
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
