"""What the server imports: torch's stack, ours, and of the script's own imports what is safe."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Final

from outlast.launch.warm.foresight import Foresight

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


def import_stack(foresight: Foresight) -> None:
    """Import what every worker needs; what this installation does not have is left out."""
    for name in STACK:
        with contextlib.suppress(ImportError), foresight.noting(after_torch="torch" in sys.modules):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        importlib.import_module("outlast.keeper.wire").version()  # which each worker asks for
