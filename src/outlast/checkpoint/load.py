"""Opening a checkpoint and reading from it: nothing is believed before its hash was computed.

The manifest, one rank's part and its small state are read first; they say what every tensor is
before any of its bytes is touched. Tensors are then read into memory that the caller names, by
several threads; other ranks' parts are read as far as they have what is asked for.

A save may lie in several places, under one name. The manifest is that of the first place where it
verifies; each file, block by block, comes from the first place where it matches that manifest. What
was wrong elsewhere is told at once, and can be mended from the right copies when there is time.

What can go wrong: a block is right nowhere (CheckpointInvalid, naming the file and every place's
reason), or a place that may have it cannot be read (OSError).
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from outlast.checkpoint import transfer
from outlast.checkpoint.catalog import newest
from outlast.checkpoint.copies import FileCopies, in_words
from outlast.checkpoint.coverage import check_parts
from outlast.checkpoint.destinations import Apart, fresh, pieces
from outlast.checkpoint.inventory import Inventory
from outlast.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    TensorEntry,
    own_name,
    state_file,
)
from outlast.checkpoint.names import SaveName
from outlast.checkpoint.places import Place, as_places
from outlast.checkpoint.read import by_file, job_for, read
from outlast.checkpoint.reshard import local_chunks
from outlast.checkpoint.shard import DTYPES
from outlast.checkpoint.spreads import Box
from outlast.checkpoint.subclasses import Parts, put_together
from outlast.checkpoint.transfer import Found, Repaired, look
from outlast.checkpoint.tree import DTYPE_OF, decode, replace, tensor_names
from outlast.errors import CheckpointInvalid
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


class Small(NamedTuple):
    """One rank's small state: key → data in which tensors are named, and which are its own."""

    rank: int
    data: dict[str, Any]
    own: frozenset[str]


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
        self._found: dict[str, Found] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._smalls: dict[int, Small] = {}
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

    def small(self, rank: int) -> Small:
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
        apart = Apart(asked)
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

    def _read_small(self, rank: int) -> Small:
        name = state_file(rank)
        raw = self._read_file(name, self.inventory.file(name))
        try:
            small = json.loads(raw)
            found = Small(rank, dict(small["state"]), frozenset(small["own"]))
            for tensor in tensor_names(found.data):
                self._leaf({"name": tensor}, found)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointInvalid(self.save.step, f"{name} is not understood: {error}") from None
        return found

    def _leaf(self, leaf: Any, small: Small) -> Leaf:
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
