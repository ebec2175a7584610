"""What is saved of a session's objects at a boundary: plain data, tensors, and how to treat each.

Whatever is told of tensors (which may be copied later, in which order, which may lose bits) is
worked out once and kept: it costs more than a save may block, and it does not change until the
tensors do, as when an optimizer makes its state in its first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outlast.checkpoint.manifest import FULL
from outlast.checkpoint.tree import Flattener, mark_narrow, names_in_parts
from outlast.config import Settings
from outlast.training.flight import State
from outlast.training.lazy import Lazy


class States:
    """Makes them, one after the other.

    Args:
        settings: the job's.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._flatten = Flattener()
        self._lazy: Lazy | None = None

    def of(
        self, step: int, objects: Mapping[str, Any], state: dict[str, Any], kind: str = FULL
    ) -> State:
        """What is saved of ``state``, which ``objects`` gave, after ``step``."""
        data: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        optimizers = self._lazy.optimizers if self._lazy is not None else ()
        for key, value in state.items():
            if kind == FULL or key not in optimizers:
                data[key], found = self._flatten(value, key)
                tensors |= found
        if self._lazy is None or (kind == FULL and self._lazy.tensors != list(tensors)):
            self._lazy = Lazy(objects, tensors, set(names_in_parts(data)))
        narrow: frozenset[str] = frozenset()
        if self._settings.checkpoint_moments == "bf16" and kind == FULL:
            narrow = frozenset(self._lazy.moments)
            mark_narrow(data, narrow, "float32")
        return State(
            step=step,
            data=data,
            tensors=tensors,
            lazy=self._lazy.names,
            order=self._lazy.order,
            narrow=narrow,
            kind=kind,
        )
