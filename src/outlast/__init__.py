"""Outlast keeps PyTorch training going on machines that fail, hang, slow down or are taken back.

    import outlast

    with outlast.session(model=model, optimizer=optimizer, loader=loader) as session:
        for batch in session.steps(loader, until=10_000):
            loss = train_step(batch)
            session.log(loss=loss)

Importing this package starts nothing, logs nothing and does not import torch; each name below is
loaded when it is first used. On a system that is not Linux one line says what works there.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from outlast._version import __version__

if TYPE_CHECKING:
    from outlast import data
    from outlast.checkpoint.dcp import dcp_reader, dcp_writer
    from outlast.errors import (
        CheckpointInvalid,
        ConfigError,
        OutlastError,
        ResumeRefused,
        StateMismatch,
        StorageError,
    )
    from outlast.fleet import LocalUpdates
    from outlast.reduce import SameBits
    from outlast.training.session import Session, session

__all__ = [
    "CheckpointInvalid",
    "ConfigError",
    "LocalUpdates",
    "OutlastError",
    "ResumeRefused",
    "SameBits",
    "Session",
    "StateMismatch",
    "StorageError",
    "__version__",
    "data",
    "dcp_reader",
    "dcp_writer",
    "session",
]

_HOME = {
    "dcp_reader": "outlast.checkpoint.dcp",
    "dcp_writer": "outlast.checkpoint.dcp",
    "LocalUpdates": "outlast.fleet",
    "SameBits": "outlast.reduce",
    "Session": "outlast.training.session",
    "session": "outlast.training.session",
    **dict.fromkeys(
        (
            "CheckpointInvalid",
            "ConfigError",
            "OutlastError",
            "ResumeRefused",
            "StateMismatch",
            "StorageError",
        ),
        "outlast.errors",
    ),
}


if not TYPE_CHECKING:  # else a misspelt name would have a type: Any

    def __getattr__(name: str) -> Any:
        if name == "data":
            return importlib.import_module("outlast.data")
        if name in _HOME:
            if sys.platform != "linux" and _HOME[name] != "outlast.errors":
                require_linux(name)
            return getattr(importlib.import_module(_HOME[name]), name)
        raise AttributeError(f"module 'outlast' has no attribute {name!r}")


if sys.platform != "linux":
    from outlast.errors import elsewhere, require_linux

    sys.stderr.write(f"outlast: {elsewhere()}\n")


def __dir__() -> list[str]:
    return __all__
