"""What the server imports: torch's stack, ours, and of the script's own imports what is safe.

Which variables the imports have read: a script that sets one of them has to start cold.

``os.environ["TORCH_LOGS"] = …`` above ``import torch`` works in a fresh interpreter. In a fork
torch has been imported long before. What Python code reads is noticed while it is imported; what
native libraries read when they are loaded is known by the beginnings of the names.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

from outlast.launch.warm.imports import Reading, VariableAssignment

# Read by the loader, the allocator, OpenMP, BLAS and torch's own libraries.
_NATIVE: Final = (
    *("LD_", "MALLOC_", "GLIBC_", "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_"),
    *("DNNL_", "ONEDNN_", "ATEN_", "C10_", "TORCH_", "PYTORCH_"),
)
# Of these, what is read when a process group or a device begins.
_LATE: Final = ("TORCH_NCCL_", "TORCH_GLOO_", "TORCH_FR_")


class EnvReads:
    """What has been read so far: by torch itself, and by what is imported after it."""

    def __init__(self) -> None:
        self.by_torch: set[str] = set()
        self.after_torch: set[str] = set()

    @contextlib.contextmanager
    def noting(self, *, after_torch: bool) -> Iterator[None]:
        """Notes what Python code asks the environment for."""
        environ = type(os.environ)
        before = environ.__getitem__
        noted = self.after_torch if after_torch else self.by_torch

        def read(self: Any, key: Any) -> Any:
            noted.add(os.fsdecode(key))
            return before(self, key)

        environ.__getitem__ = read  # type: ignore[method-assign]
        try:
            yield
        finally:
            environ.__getitem__ = before  # type: ignore[method-assign]

    def objection(self, reading: Reading) -> str:
        """Why a script has to start cold; empty if it need not."""
        for one in reading.settings:
            if self._matters(one):
                name = one.name or "variables"
                return f"{one.place} sets {name}, which imports that are done already have read"
        return ""

    def _matters(self, one: VariableAssignment) -> bool:
        if one.is_after_torch:
            return one.name in self.after_torch
        return one.name is None or self._is_read(one.name)

    def _is_read(self, name: str) -> bool:
        if name in self.by_torch or name in self.after_torch:
            return True
        return name.startswith(_NATIVE) and not name.startswith(_LATE)


# What a training script imports sooner or later: any optimizer imports torch._dynamo.
STACK: Final = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "torch.utils.serialization.config",  # torch.save and torch.load
    "outlast.training.opening",
)


def import_stack(env_reads: EnvReads) -> None:
    """Import what every worker needs; what this installation does not have is left out."""
    for name in STACK:
        with contextlib.suppress(ImportError), env_reads.noting(after_torch="torch" in sys.modules):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        importlib.import_module("outlast.keeper.wire").version()  # which each worker asks for
