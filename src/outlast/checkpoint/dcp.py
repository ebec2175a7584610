"""Read and write Outlast's checkpoints with ``torch.distributed.checkpoint``.

    dcp.save(state, storage_writer=outlast.dcp_writer("ckpt", step))
    dcp.load(state, storage_reader=outlast.dcp_reader("ckpt"))

A path is a job's directory (its tiers are used), or any directory or bucket in which steps lie.

**Reading.** DCP's planner asks for boxes of tensors, whatever the model's layout now and when it
was saved; the reader gives it those boxes and nothing that was not hashed first. DCP by itself does
not notice a flipped bit. DCP hands what is no tensor to its planner as ``torch.save``'s bytes.
Those are made here, in memory, from data that was read as JSON: no pickle is read from or written
to a file.
What can go wrong: wrong or missing bytes (CheckpointInvalid, naming file and block; DCP shows it
inside its own CheckpointException); ranks that read different steps (ConfigError, before anything
is loaded).

**Writing.** DCP's planner decides which rank writes which part of which tensor. Each rank writes
those parts and its own small state, hashing as it goes; when all of it is durable, the coordinator
writes the manifest: the commit. What ``outlast.session`` saves and what is written here are read
alike. What is no tensor becomes JSON, each rank's in its own file. DCP would keep one rank's for
all; reading gives each rank its own back.
What can go wrong: a value that is not data, a step that is committed already (ConfigError, in a
line); a storage that fails on any rank (OSError there; DCP raises its CheckpointException on all).
In each case nothing is committed and the older checkpoint stays in force. Each save has a directory
of its own (see ``manifest``): one that replaces a step's checkpoint leaves that alone until its own
manifest is there.

Rejected: DCP's own ``.metadata`` beside ours (pickle, and two truths); letting each rank commit its
part (``use_collectives=False``): there would be no moment at which the whole is complete.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils import _pytree

from outlast.checkpoint.catalog import (
    find_saves,
    is_still_there,
    job_of,
    remove_save,
    saves_at,
    urls_of,
)
from outlast.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    PLAIN,
    Chunk,
    Contents,
    FileEntry,
    Holding,
    Manifest,
    PartEntry,
    Place,
    SaveName,
    Slab,
    TensorEntry,
    check_part,
    decode,
    encode,
    encode_part,
    make_part,
    named,
    new_nonce,
    num_elements,
    own_name,
    part_entry,
    part_file,
    shard_file,
    sign,
    signed_by,
    small_state,
    state_file,
    write_hashed,
)
from outlast.checkpoint.reader import Checkpoint, Wanted, open_checkpoint
from outlast.checkpoint.spreads import Box, Spread
from outlast.checkpoint.tensors import (
    DTYPES,
    NAMES,
    Placed,
    bytes_of,
    header,
    is_spread,
    mesh_spread,
    place,
)
from outlast.checkpoint.transfer import look
from outlast.checkpoint.tree import MergedState, flatten
from outlast.errors import CheckpointInvalid, ConfigError, StorageError
from outlast.storage import Storage, open_storage

# --- by path --------------------------------------------------------------------------------------

__all__ = ["StorageReader", "StorageWriter", "dcp_reader", "dcp_writer"]

logger = logging.getLogger(__name__)


def dcp_reader(
    path: str | os.PathLike[str],
    step: int | None = None,
    tier: str | None = None,
    *,
    rank: int | None = None,
) -> StorageReader:
    """A reader for ``torch.distributed.checkpoint.load``.

    Args:
        path: a job's directory, a directory of steps, or one save's own directory.
        step: which checkpoint; the newest whose manifest verifies unless given. Of a step that
            was saved again, the newest save whose manifest verifies.
        tier: read from this tier of the job only; from all of them, fastest first, unless given.
        rank: whose small state and own tensors; this process's unless given.

    Raises:
        CheckpointInvalid: the step has no manifest that verifies.
        ConfigError: there is no checkpoint, or no such tier.
        OSError: the storage cannot be read.
    """

    def open_source(other: str | None) -> Checkpoint:
        return _open(os.fspath(path) if other is None else other, step, tier)

    return StorageReader(open_source, rank=rank)


def dcp_writer(
    path: str | os.PathLike[str], step: int, *, overwrite: bool = False
) -> StorageWriter:
    """A writer for ``torch.distributed.checkpoint.save`` and ``async_save``.

    Args:
        path: a job's directory, or any directory to put steps into.
        step: the step's number.
        overwrite: replace a committed checkpoint of that step, which stands until the new one does.

    Raises:
        ConfigError: ``step`` is not a step's number.
    """
    (_, url), *_ = urls_of(os.fspath(path))
    return StorageWriter(url, step, job=job_of(os.fspath(path)), overwrite=overwrite)


def _open(path: str, step: int | None, tier: str | None) -> Checkpoint:
    places, saves = saves_at(path, step, tier)
    if step is not None:
        return open_checkpoint(places, step, rank=None)
    failure: CheckpointInvalid | None = None
    for newest in saves:
        try:
            return open_checkpoint(places, newest, rank=None)
        except CheckpointInvalid as error:
            logger.warning("%s; trying an older one", error)
            failure = failure or error
    assert failure is not None  # noqa: S101 - there is a save, or saves_at says that there is none
    raise failure


# --- the reader -----------------------------------------------------------------------------------


class StorageReader(dcp.StorageReader):  # type: ignore[misc]
    """DCP's reader of one step.

    A tensor that each rank saved for itself goes by its plain name, and each rank gets that of the
    rank it stands for, taken in turn when there were fewer.

    Args:
        open_source: finds the checkpoint; called once now, and again when DCP names another path.
        rank: whose small state and own tensors; this process's in the default group unless given.

    Raises:
        CheckpointInvalid, ConfigError, OSError: as ``open_source`` raises them.
    """

    def __init__(
        self, open_source: Callable[[str | None], Checkpoint], *, rank: int | None = None
    ) -> None:
        self._open_source = open_source
        self._rank = rank
        self._open(None)

    @property
    def step(self) -> int:
        """The step that is read."""
        return self._source.manifest.step

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read from another path, where DCP was given one."""
        if checkpoint_id is not None:
            self._open(os.fspath(checkpoint_id))

    def read_metadata(self) -> Metadata:
        """What the checkpoint holds, in DCP's terms."""
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **kwargs: Any
    ) -> None:
        """Nothing is needed: ``read_metadata`` knows it all."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Tell the coordinator which step this rank reads."""
        return dataclasses.replace(plan, storage_data=(self.step, self._source.manifest.checksum))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse ranks that read different checkpoints: a newer one may just have been committed.

        Raises:
            ConfigError: they do.
        """
        steps = sorted({plan.storage_data for plan in plans})
        if len(steps) > 1:
            shown = ", ".join(str(step) for step, _ in steps)
            raise ConfigError(
                f"the ranks found different checkpoints (steps {shown}); give every rank the same "
                "step: outlast.dcp_reader(path, step=…)"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what ``plan`` asks for.

        Raises:
            CheckpointInvalid, OSError: a block that is needed has no right copy.
        """
        asked: list[tuple[ReadItem, str, torch.Tensor]] = []
        boxes: dict[str, list[Box]] = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._as_saved(item.storage_index.fqn))
                continue
            name = self._names[id(self._leaves[item.storage_index.fqn])]
            target = planner.resolve_tensor(item).detach()
            if tuple(target.shape) != tuple(item.lengths):
                raise ConfigError(
                    f"{item.storage_index.fqn}: DCP's planner asks for {tuple(item.lengths)} and "
                    f"has room for {tuple(target.shape)}"
                )
            asked.append((item, name, target))
            boxes.setdefault(name, []).append((tuple(item.storage_offsets), tuple(item.lengths)))
        self._source.locate(self._state, boxes, self._rank_read)
        self._source.fill(
            [
                (name, Wanted(self._state.entries[name], tuple(item.storage_offsets), target))
                for item, name, target in asked
            ]
        )
        for item, _, target in asked:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether DCP may try this reader for a path."""
        return os.path.isdir(checkpoint_id)  # noqa: PTH112

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint is, for DCP's log."""
        return self._source.describe()

    def _open(self, path: str | None) -> None:
        self._source = self._open_source(path)
        rank = self._rank
        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._rank_read = rank
        self._state = self._source.merged(rank)
        self._metadata, self._leaves, self._names = _describe(self._state)

    def _as_saved(self, fqn: str) -> io.BytesIO:
        """A leaf as ``torch.save`` writes it, which is how DCP's planner takes it."""

        def whole(stand_in: torch.Tensor) -> torch.Tensor:
            name = self._names[id(stand_in)]
            shape = self._state.entries[name].shape
            box = (0,) * len(shape), shape
            self._source.locate(self._state, {name: [box]}, self._rank_read)
            (tensor,) = self._source.tensors([self._state.entries[name]])
            return tensor.to(self._state.dtype(name))

        leaf = _pytree.tree_map_only(torch.Tensor, whole, self._leaves[fqn])
        buffer = io.BytesIO()
        torch.save(leaf, buffer)
        buffer.seek(0)
        return buffer


def _describe(state: MergedState) -> tuple[Metadata, dict[str, Any], dict[int, str]]:
    """DCP's metadata, its leaves with stand-ins for tensors, and id of a stand-in → name."""
    names: dict[int, str] = {}

    def stand_in(name: str, entry: TensorEntry) -> torch.Tensor:
        tensor = torch.empty(entry.shape, dtype=state.dtype(name), device="meta")
        names[id(tensor)] = name
        return tensor

    tree = state.build(stand_in)
    try:
        leaves, paths = flatten_state_dict(tree)  # as the planner will do it with what it is given
    except ValueError as error:
        raise ConfigError(
            f"step {state.step} cannot be described to DCP ({error}); load it with outlast"
        ) from None
    described: dict[str, Any] = {}
    for fqn, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor):
            described[fqn] = _tensor_metadata(leaf, state.entries[names[id(leaf)]])
        else:
            described[fqn] = BytesStorageMetadata()
    return Metadata(state_dict_metadata=described, planner_data=paths), leaves, names


def _tensor_metadata(stand_in: torch.Tensor, entry: TensorEntry) -> TensorStorageMetadata:
    """A tensor as one chunk: in which pieces it was saved is looked up when a box is asked for."""
    whole = ChunkStorageMetadata(
        offsets=torch.Size([0] * len(entry.shape)), sizes=torch.Size(entry.shape)
    )
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=stand_in.dtype),
        size=torch.Size(entry.shape),
        chunks=[whole],
    )


# --- the writer -----------------------------------------------------------------------------------

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
    """DCP's writer of one step.

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
        is_new = self._storage.put_new(f"{self._save}/{MANIFEST}", text)
        if not is_new or not is_still_there(self._storage, self._save):
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
