"""Which variables are another worker's, or another attempt's, and which are the job's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# What torch's agent and ours give each worker, anew at each attempt.
_NAMES: Final = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "CUDA_VISIBLE_DEVICES"),
        "TORCH_ELASTIC_WORKER_IDENTICAL",  # for the agent alone
    )
)
_PREFIXES: Final = ("TORCHELASTIC_", "OUTLAST_")


def is_per_worker(name: str) -> bool:
    """Whether a variable may differ between workers, or between attempts."""
    return name in _NAMES or name.startswith(_PREFIXES)


def lasting(environ: Mapping[str, str]) -> dict[str, str]:
    """Those that are the same for all: what a process may have read for good when it started."""
    return {name: value for name, value in environ.items() if not is_per_worker(name)}
