"""``torch.distributed.checkpoint.save`` into an Outlast checkpoint.

DCP's planner decides which rank writes which part of which tensor. Each rank writes those parts and
its own small state, hashing as it goes; when all of it is durable, the coordinator writes the
manifest: the commit. What ``outlast.session`` saves and what is written here are read alike.

What is no tensor becomes JSON, each rank's in its own file. DCP would keep one rank's for all;
reading gives each rank its own back.

What can go wrong: a value that is not data, a step that is committed already (ConfigError, in a
line); a storage that fails on any rank (OSError there; DCP raises its CheckpointException on all).
In each case nothing is committed and the older checkpoint stays in force. Each save has a directory
of its own (see ``names``): one that replaces a step's checkpoint leaves that alone until its own
manifest is there.

Rejected: DCP's own ``.metadata`` beside ours (pickle, and two truths); letting each rank commit its
part (``use_collectives=False``): there would be no moment at which the whole is complete.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from outlast.checkpoint.blocks import write_hashed
from outlast.checkpoint.catalog import find_saves, remove_save
from outlast.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Chunk,
    FileEntry,
    Manifest,
    PartEntry,
    TensorEntry,
    decode,
    encode,
    own_name,
    part_file,
    shard_file,
    small_state,
    state_file,
)
from outlast.checkpoint.names import NOTE, SaveName, named, new_nonce, sign, signed_by
from outlast.checkpoint.parts import (
    PLAIN,
    Contents,
    Holding,
    Slab,
    check_part,
    encode_part,
    make_part,
    num_elements,
    part_entry,
)
from outlast.checkpoint.places import Place
from outlast.checkpoint.reshard import is_spread, mesh_spread
from outlast.checkpoint.shard import DTYPES, NAMES, Placed, bytes_of, header, place
from outlast.checkpoint.spreads import Spread
from outlast.checkpoint.transfer import look
from outlast.checkpoint.tree import flatten
from outlast.errors import CheckpointInvalid, ConfigError, StorageError
from outlast.storage import Storage
from outlast.storage.places import open_storage

logger = logging.getLogger(__name__)

_OWN_NAME: Final = re.compile(r"@rank-\d{5}\Z")


class _Wrote(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote, in few words; it travels to the coordinator with DCP's results.

    Attributes:
        rank: who.
        entry: of its part; None where there is one rank, whose manifest says it all.
        structure: digest of what it holds.
        num_elements: how many elements it wrote of tensors that are nobody's own.
        files: where there is one rank, size and hashes of its files.
        tensors: where there is one rank, what they hold.
    """

    rank: int
    entry: PartEntry | None
    structure: str
    num_elements: int
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}


class StorageWriter(dcp.StorageWriter):  # type: ignore[misc]
    """Writes one step.

    Args:
        where: where checkpoints lie: a storage, or its url, with which the writer can be sent to
            the process that ``async_save`` may use.
        step: the step's number.
        job: id of the job, for the manifest.
        overwrite: replace a committed checkpoint of that step; it stands until the new one does.
    """

    def __init__(
        self, where: Storage | str, step: int, *, job: str = "", overwrite: bool = False
    ) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**12:
            raise ConfigError(f"{step!r} is not the number of a step; give a whole number from 0")
        self.step = step
        self._where = where
        self._opened: Storage | None = None
        self._job = job
        self._overwrite = overwrite
        self._rank = 0
        self._save = SaveName(step)  # its own name once the plans are made

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew.

        Raises:
            ConfigError: DCP was given a checkpoint_id; the step is the writer's.
        """
        if checkpoint_id is not None:
            raise ConfigError(
                "leave checkpoint_id out: where to write is given to outlast.dcp_writer(path, step)"
            )

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:
        """Learn this process's rank, and refuse a step that is there.

        Raises:
            ConfigError: it is committed already, or the ranks would not commit together.
        """
        self._rank = int(kwargs["rank"])
        if not kwargs.get("use_collectives", True):
            raise ConfigError("use_collectives=False cannot commit the parts of all ranks at once")
        if is_coordinator and not self._overwrite and self._is_committed():
            raise ConfigError(
                f"step {self.step} is committed already in {self._storage.describe()}; save "
                "another step, or replace it with outlast.dcp_writer(path, step, overwrite=True)"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As the planner has it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name this save and mark its place; every rank writes only after this.

        What a save of this step left unfinished goes: it may have filled the disk. In a job's
        directory retention sees to that, which knows what the job's own sessions are writing.

        Raises:
            OSError: the storage cannot be listed or written.
        """
        found = find_saves(self._storage)
        saves = [*found.committed, *found.unfinished]
        attempt = max((save.attempt for save in saves), default=0)
        there = [save.serial for save in saves if save[:2] == (self.step, attempt)]
        serial = max(there, default=0) + 1
        self._save = SaveName(self.step, max(attempt, 0), serial, new_nonce())
        for save in found.unfinished:
            if not self._job and save.step == self.step and signed_by(self._storage, save) == "":
                remove_save(self._storage, save, is_unfinished=True)
        sign(self._storage, self._save, self._job)
        told = str(self._save), len(plans)
        return [dataclasses.replace(plan, storage_data=told) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; when it returns, all of it is durable.

        Raises:
            ConfigError: a value cannot be saved as data.
            OSError: as the storage gave it.
        """
        name, world_size = plan.storage_data
        self._save = named(name)
        files, tensors = self._write(plan, planner)
        size = sum(file.size for file in files.values())
        wrote = self._told(planner, files, tensors, world_size)
        index = MetadataIndex(state_file(self._rank))
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(index=index, size_in_bytes=size, storage_data=wrote)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit.

        Raises:
            StorageError: another writer took this save for one that was left unfinished.
            OSError: as the storage gave it.
            ConfigError: the parts do not make up what the planner described.
        """
        every: list[_Wrote] = [result.storage_data for one in results for result in one]
        every.sort(key=lambda one: one.rank)
        structures: dict[str, int] = {}
        parts = tuple(
            msgspec.structs.replace(
                one.entry, structure=structures.setdefault(one.structure, len(structures))
            )
            for one in every
            if one.entry is not None
        )
        manifest = Manifest(
            format=FORMAT,
            job=self._job,
            step=self.step,
            attempt=self._save.attempt,
            serial=self._save.serial,
            nonce=self._save.nonce,
            world_size=len(every),
            layout={"dcp": len(every)},
            created_t=time.time(),
            files={} if parts else every[0].files,
            tensors={} if parts else every[0].tensors,
            parts=parts,
        )
        text = encode(manifest)
        _check(text, manifest, metadata, sum(one.num_elements for one in every))
        is_there = self._storage.exists(f"{self._save}/{NOTE}")
        if not is_there or not self._storage.put_new(f"{self._save}/{MANIFEST}", text):
            raise StorageError(
                f"{self._storage.describe(str(self._save))} was taken for an unfinished save and "
                "removed while it was written; save again, with one writer at a time"
            )
        if self._overwrite:
            self._remove_superseded()

    def _remove_superseded(self) -> None:
        """What this save replaces is of no use; one that cannot be removed does no harm."""
        try:
            for save in find_saves(self._storage).committed:
                if save.step == self.step and save < self._save and self._is_ours(save):
                    remove_save(self._storage, save)
        except OSError as error:
            logger.warning("an older save of step %d stays: %s", self.step, error)

    def _is_ours(self, save: SaveName) -> bool:
        found = look(Place("", self._storage), save)
        return found.manifest is not None and found.manifest.job == self._job

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never by itself: a path alone does not say which step."""
        return False

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint goes, for DCP's log."""
        return self._storage.describe(str(self._save))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    @property
    def _storage(self) -> Storage:
        if self._opened is None:
            opened = open_storage(self._where) if isinstance(self._where, str) else self._where
            self._opened = opened
        return self._opened

    def _is_committed(self) -> bool:
        return any(save.step == self.step for save in find_saves(self._storage).committed)

    def _told(
        self,
        planner: SavePlanner,
        files: dict[str, FileEntry],
        tensors: dict[str, TensorEntry],
        world_size: int,
    ) -> _Wrote:
        """What the coordinator hears of this rank; of several ranks each writes its part."""
        contents = _contents(planner, tensors)
        told = _Wrote(
            rank=self._rank,
            entry=None,
            structure=contents.structure,
            num_elements=contents.num_elements,
        )
        if world_size == 1:
            return msgspec.structs.replace(told, files=files, tensors=tensors)
        part = make_part(self.step, self._rank, files, contents)
        try:
            check_part(part, self.step, self._rank, world_size)
        except CheckpointInvalid as error:
            raise ConfigError(f"nothing is committed: {error.reason}") from None
        data = encode_part(part)
        write_hashed(self._storage, f"{self._save}/{part_file(self._rank)}", [data])
        return msgspec.structs.replace(told, entry=part_entry(data, 0, files.values()))

    def _write(
        self, plan: SavePlan, planner: SavePlanner
    ) -> tuple[dict[str, FileEntry], dict[str, TensorEntry]]:
        data, private = _small_state(planner)
        items = {name: item for name, item in _named(plan) if item.tensor_data is not None}
        own = {own_name(name, self._rank): tensor for name, tensor in private.items()}
        placed = _place(items, own)
        files: dict[str, FileEntry] = {}
        tensors: dict[str, TensorEntry] = {}
        directory = str(self._save)
        if placed:
            first, file = header(placed), shard_file(self._rank)
            pieces = _pieces(first, placed, items, own, planner)
            files[file] = write_hashed(self._storage, f"{directory}/{file}", pieces)
            for name, where in placed.items():
                entry = _entry(where, items.get(name), file, len(first))
                fqn = items[name].index.fqn if name in items else name
                before = tensors[fqn].chunks if fqn in tensors else ()
                tensors[fqn] = msgspec.structs.replace(entry, chunks=before + entry.chunks)
        text = small_state(self.step, self._rank, sorted(private), data)
        name = state_file(self._rank)
        files[name] = write_hashed(self._storage, f"{directory}/{name}", [text])
        return files, tensors


def _small_state(planner: SavePlanner) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """This rank's state as data, and the tensors that are inside values DCP takes as a whole."""
    leaves = getattr(planner, "state_dict", None)
    look_up = getattr(planner, "lookup_object", None)
    if not isinstance(leaves, Mapping) or look_up is None:
        raise ConfigError(
            f"{type(planner).__name__} does not tell what it saves; derive the planner from "
            "torch.distributed.checkpoint.DefaultSavePlanner"
        )
    paths = getattr(planner, "mappings", None) or {}
    stand_in = torch.empty(1)
    nested: dict[str, Any] = {}
    planned = set()
    for fqn, value in leaves.items():
        if isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
            planned.add(fqn)
            leaf = stand_in
            if _OWN_NAME.search(fqn):
                raise ConfigError(f"{fqn}: a name ending in @rank-NNNNN is kept for a rank's own")
        else:
            leaf = look_up(MetadataIndex(fqn))
        set_element(nested, paths.get(fqn, (fqn,)), leaf)
    data: dict[str, Any] = {}
    private: dict[str, torch.Tensor] = {}
    for key, value in nested.items():
        data[key], tensors = flatten(value, key)
        for name, tensor in tensors.items():
            if tensor.untyped_storage().data_ptr() == stand_in.untyped_storage().data_ptr():
                if name not in planned:
                    raise ConfigError(f"{name}: another value in the state has the same name")
            else:
                private[name] = tensor
    for name, tensor in private.items():
        if type(tensor).__name__ == "DTensor":
            raise ConfigError(
                f"{name} is sharded over several workers inside a value that DCP does not look "
                "into; keep it in a dict or a list"
            )
    return data, private


def _named(plan: SavePlan) -> Iterator[tuple[str, WriteItem]]:
    """The plan's tensors, each with a name that is unique in this rank's file."""
    seen: dict[str, int] = {}
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            continue
        count = seen.setdefault(item.index.fqn, 0)
        seen[item.index.fqn] += 1
        size, chunk = item.tensor_data.size, item.tensor_data.chunk
        if math.prod(chunk.sizes) or not math.prod(size):  # a rank may hold no row of a tensor
            yield f"{item.index.fqn}~chunk-{count}" if count else item.index.fqn, item


def _place(items: Mapping[str, WriteItem], own: Mapping[str, torch.Tensor]) -> dict[str, Placed]:
    shapes: dict[str, torch.Tensor] = {}
    for name, item in items.items():
        found = item.tensor_data.properties
        if found.layout != torch.strided:
            raise ConfigError(f"{name} is a {found.layout} tensor; only dense ones can be saved")
        shapes[name] = torch.empty(item.tensor_data.chunk.sizes, dtype=found.dtype, device="meta")
    return place({**shapes, **own})


def _pieces(
    first: bytes,
    placed: Mapping[str, Placed],
    items: Mapping[str, WriteItem],
    own: Mapping[str, torch.Tensor],
    planner: SavePlanner,
) -> Iterator[memoryview | bytes]:
    """The file's bytes; a tensor is taken from the planner only when its turn comes."""
    yield first
    for name, where in placed.items():
        tensor = own[name] if name in own else planner.resolve_data(items[name])
        if tuple(tensor.shape) != where.shape or tensor.dtype != DTYPES[where.dtype]:
            raise ConfigError(
                f"{name} was planned as {DTYPES[where.dtype]} of shape {where.shape} and is "
                f"{tensor.dtype} of shape {tuple(tensor.shape)} now"
            )
        yield bytes_of(tensor)


def _entry(where: Placed, item: WriteItem | None, file: str, data_start: int) -> TensorEntry:
    whole, offsets = where.shape, (0,) * len(where.shape)
    if item is not None:
        whole = tuple(item.tensor_data.size)
        offsets = tuple(item.tensor_data.chunk.offsets)
    chunk = Chunk(
        offsets=offsets,
        shape=where.shape,
        file=file,
        start=data_start + where.start,
        end=data_start + where.end,
    )
    return TensorEntry(dtype=where.dtype, shape=whole, chunks=(chunk,))


def _contents(planner: SavePlanner, written: Mapping[str, TensorEntry]) -> Contents:
    """What this rank's part says: besides what it wrote, how the tensors that it holds are spread.

    Who wrote what others hold too is the coordinator's plan, which no rank sees.
    """
    numbers: dict[Spread, int] = {}
    held: dict[str, Holding] = {}
    leaves: Mapping[str, Any] = getattr(planner, "state_dict", {})
    for name, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor) and leaf.dtype in NAMES:
            number = PLAIN
            if is_spread(leaf) and leaf.numel():
                spread = mesh_spread(leaf.device_mesh, leaf.placements)
                if not spread.problem():
                    number = numbers.setdefault(spread, len(numbers))
            held[name] = Holding(NAMES[leaf.dtype], tuple(leaf.shape), number)
    structure = xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((held, tuple(numbers))))
    for name, entry in written.items():
        slabs = tuple(Slab(chunk.offsets, chunk.shape, chunk.start) for chunk in entry.chunks)
        known = held.get(name)
        number = known.spread if known is not None and known.shape == entry.shape else PLAIN
        held[name] = Holding(entry.dtype, entry.shape, number, slabs)
    return Contents(
        structure=structure,
        spreads=tuple(numbers),
        tensors=held,
        num_elements=num_elements(held),
    )


def _check(text: bytes, manifest: Manifest, metadata: Metadata, written: int) -> None:
    """What was planned is what was written, and a reader will accept it."""
    planned = 0
    for fqn, one in metadata.state_dict_metadata.items():
        if hasattr(one, "chunks"):
            planned += math.prod(one.size)
            if not manifest.parts and fqn not in manifest.tensors:
                raise ConfigError(f"no rank wrote {fqn}; nothing was committed")
    if planned != written:
        raise ConfigError(
            f"{planned} elements were planned and {written} written; nothing was committed"
        )
    try:
        decode(text, manifest.save)
    except CheckpointInvalid as error:
        raise ConfigError(f"nothing was committed: {error.reason}") from None
