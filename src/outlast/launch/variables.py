"""Environment variables of NCCL's and torch's that nobody reads, and the ones that were meant.

The names are those that torch 2.13's ``ProcessGroupNCCL.hpp``, ``NCCLUtils.hpp`` and
``FlightRecorder.hpp`` read; what torch still reads under an old name is not warned about.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_INIT: Final = "torch.distributed.init_process_group(timeout=...)"
_READ: Final = frozenset(
    (
        *("ASYNC_ERROR_HANDLING", "AVOID_RECORD_STREAMS", "BCAST_UNIQUEID", "BLOCKING_WAIT"),
        *("COORD_CHECK_MILSEC", "CUDA_EVENT_CACHE", "DESYNC_DEBUG", "DUMP_ON_TIMEOUT"),
        *("ENABLE_MONITORING", "ENABLE_TIMING", "EXTRA_DUMP_ON_EXEC", "HEARTBEAT_TIMEOUT_SEC"),
        *("HIGH_PRIORITY", "LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN", "NAN_CHECK", "PROPAGATE_ERROR"),
        *("RANKS_PER_ROOT", "RETHROW_CUDA_ERRORS", "TRACE_BUFFER_SIZE", "TRACE_CPP_STACK"),
        *("USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "WAIT_TIMEOUT_DUMP_MILSEC"),
        *("DEBUG_INFO_TEMP_FILE", "USE_COMM_NONBLOCKING", "NONBLOCKING_TIMEOUT"),
    )
)
_OLD: Final = frozenset(  # read as NCCL_… too, with torch's own warning
    (
        *("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG", "ENABLE_TIMING"),
        "USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    )
)
_NOTHING: Final = {
    "NCCL_TIMEOUT": _INIT,
    "NCCL_SOCKET_TIMEOUT": _INIT,
    "TORCH_NCCL_TIMEOUT": _INIT,
    "TORCH_NCCL_SOCKET_TIMEOUT": _INIT,
    "NCCL_TIMEOUT_SEC": _INIT,
}


def unread(environ: Mapping[str, str]) -> list[str]:
    """One sentence for each variable that is set and does nothing.

    Args:
        environ: the environment.
    """
    found = []
    for name in sorted(environ):
        meant = _NOTHING.get(name)
        if name.startswith("NCCL_"):
            short = name.removeprefix("NCCL_")
            if short in _READ - _OLD:
                meant = f"TORCH_{name}"
        if meant is not None:
            found.append(f"{name} is set, and nobody reads it; what works is {meant}")
    return found
