"""``torch.distributed.checkpoint.save`` into an Outlast checkpoint.

DCP's planner decides which rank writes which part of which tensor. Each rank writes those parts and
its own small state, hashing as it goes; when all of it is durable, the coordinator writes the
manifest: the commit. What ``outlast.session`` saves and what is written here are read alike.

What is no tensor becomes JSON, each rank's in its own file. DCP would keep one rank's for all;
reading gives each rank its own back.

What can go wrong: a value that is not data, a step that is committed already (ConfigError, in a
line); a storage that fails on any rank (OSError there; DCP raises its CheckpointException on all).
In each case nothing is committed and the older checkpoint stays in force.

Rejected: DCP's own ``.metadata`` beside ours (pickle, and two truths); letting each rank commit its
part (``use_collectives=False``): there would be no moment at which the whole is complete.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from outlast.checkpoint.blocks import write_hashed
from outlast.checkpoint.catalog import remove_step
from outlast.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Chunk,
    FileEntry,
    Manifest,
    TensorEntry,
    decode,
    encode,
    own_name,
    shard_file,
    small_state,
    state_file,
    step_name,
)
from outlast.checkpoint.shard import DTYPES, Placed, header, place
from outlast.checkpoint.tree import flatten
from outlast.errors import CheckpointInvalid, ConfigError, StorageError
from outlast.storage import Storage
from outlast.storage.places import open_storage

_OWN_NAME: Final = re.compile(r"@rank-\d{5}\Z")


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote; it travels to the coordinator with DCP's results."""

    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]


class StorageWriter(dcp.StorageWriter):  # type: ignore[misc]
    """Writes one step.

    Args:
        where: where checkpoints lie: a storage, or its url, with which the writer can be sent to
            the process that ``async_save`` may use.
        step: the step's number.
        job: id of the job, for the manifest.
        overwrite: replace a committed checkpoint of that step; its commit is taken back, durably,
            before the first byte is written.
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
                f"{self._storage.describe(step_name(self.step))} is committed already; save "
                "another step, or replace it with outlast.dcp_writer(path, step, overwrite=True)"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As the planner has it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Clear the step's place; every rank writes only after this.

        Raises:
            OSError: what lies there cannot be removed.
        """
        if self._storage.children(step_name(self.step)):
            remove_step(self._storage, self.step)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; when it returns, all of it is durable.

        Raises:
            ConfigError: a value cannot be saved as data.
            OSError: as the storage gave it.
        """
        part = self._write(plan, planner)
        size = sum(file.size for file in part.files.values())
        index = MetadataIndex(state_file(self._rank))
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(index=index, size_in_bytes=size, storage_data=part)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit.

        Raises:
            StorageError: another writer committed this step meanwhile.
            OSError: as the storage gave it.
            ConfigError: the parts do not make up what the planner described.
        """
        parts: list[_Part] = [result.storage_data for one in results for result in one]
        manifest = Manifest(
            format=FORMAT,
            job=self._job,
            step=self.step,
            attempt=0,
            world_size=len(parts),
            layout={"dcp": len(parts)},
            created_t=time.time(),
            files={name: entry for part in parts for name, entry in part.files.items()},
            tensors=_joined(parts),
        )
        text = encode(manifest)
        _check(text, manifest, metadata)
        if not self._storage.put_new(f"{step_name(self.step)}/{MANIFEST}", text):
            raise StorageError(
                f"{self._storage.describe(step_name(self.step))} was committed by somebody else "
                "while it was written; its manifest was left alone"
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never by itself: a path alone does not say which step."""
        return False

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint goes, for DCP's log."""
        return self._storage.describe(step_name(self.step))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    @property
    def _storage(self) -> Storage:
        if self._opened is None:
            opened = open_storage(self._where) if isinstance(self._where, str) else self._where
            self._opened = opened
        return self._opened

    def _is_committed(self) -> bool:
        return self._storage.exists(f"{step_name(self.step)}/{MANIFEST}")

    def _write(self, plan: SavePlan, planner: SavePlanner) -> _Part:
        data, private = _small_state(planner)
        items = {name: item for name, item in _named(plan) if item.tensor_data is not None}
        own = {own_name(name, self._rank): tensor for name, tensor in private.items()}
        placed = _place(items, own)
        files: dict[str, FileEntry] = {}
        tensors: dict[str, TensorEntry] = {}
        directory = step_name(self.step)
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
        return _Part(files=files, tensors=tensors)


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
        yield _bytes_of(tensor)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return memoryview(dense.reshape(-1).view(torch.uint8).numpy())


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


def _joined(parts: list[_Part]) -> dict[str, TensorEntry]:
    tensors: dict[str, TensorEntry] = {}
    for part in parts:
        for name, entry in part.tensors.items():
            before = tensors.get(name)
            if before and (before.dtype, before.shape) != (entry.dtype, entry.shape):
                raise ConfigError(f"{name} has another shape or dtype on another rank")
            chunks = (before.chunks if before else ()) + entry.chunks
            tensors[name] = msgspec.structs.replace(entry, chunks=chunks)
    return tensors


def _check(text: bytes, manifest: Manifest, metadata: Metadata) -> None:
    """What was planned is what was written, and a reader will accept it."""
    for fqn, planned in metadata.state_dict_metadata.items():
        if hasattr(planned, "chunks") and fqn not in manifest.tensors:
            raise ConfigError(f"no rank wrote {fqn}; nothing was committed")
    try:
        decode(text, manifest.step)
    except CheckpointInvalid as error:
        raise ConfigError(f"nothing was committed: {error.reason}") from None
