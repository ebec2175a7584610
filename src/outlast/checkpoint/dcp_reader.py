"""``torch.distributed.checkpoint.load`` from an Outlast checkpoint.

DCP's planner asks for boxes of tensors, whatever the model's layout now and when it was saved; this
reader gives it those boxes and nothing that was not hashed first. DCP by itself does not notice a
flipped bit.

DCP hands what is no tensor to its planner as ``torch.save``'s bytes. Those are made here, in
memory, from data that was read as JSON: no pickle is read from or written to a file.

What can go wrong: wrong or missing bytes (CheckpointInvalid, naming file and block; DCP shows it
inside its own CheckpointException); ranks that read different steps (ConfigError, before anything
is loaded).
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from torch.utils import _pytree

from outlast.checkpoint.manifest import TensorEntry
from outlast.checkpoint.source import Source, State, Want, wanted
from outlast.checkpoint.spreads import Box
from outlast.errors import ConfigError


class StorageReader(dcp.StorageReader):  # type: ignore[misc]
    """Reads one step.

    A tensor that each rank saved for itself goes by its plain name, and each rank gets that of the
    rank it stands for, taken in turn when there were fewer.

    Args:
        open_source: finds the checkpoint; called once now, and again when DCP names another path.
        rank: whose small state and own tensors; this process's in the default group unless given.

    Raises:
        CheckpointInvalid, ConfigError, OSError: as ``open_source`` raises them.
    """

    def __init__(
        self, open_source: Callable[[str | None], Source], *, rank: int | None = None
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
        wants: dict[int, tuple[Want, int]] = {}
        left: list[int] = []
        for number, (item, name, target) in enumerate(asked):
            entry = self._state.entries[name]
            mine = list(wanted(entry, tuple(item.storage_offsets), target))
            wants.update({id(want): (want, number) for want in mine})
            left.append(len(mine))
        for number, (item, _, target) in enumerate(asked):
            if not left[number]:
                planner.commit_tensor(item, target)
        for want in self._source.fill([want for want, _ in wants.values()]):
            number = wants[id(want)][1]
            left[number] -= 1
            if not left[number]:
                planner.commit_tensor(asked[number][0], asked[number][2])
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
        self._state = self._source.state(rank)
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


def _describe(state: State) -> tuple[Metadata, dict[str, Any], dict[int, str]]:
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
