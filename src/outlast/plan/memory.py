"""Bytes of a training state, and of its copies in a machine's memory.

What must be saved is weights and optimizer; gradients are not. Adam in mixed precision holds 14
bytes per parameter (bf16 weights 2, fp32 master weights 4, two fp32 moments 8): seven times the
"2 bytes" of the weights alone.
"""

from __future__ import annotations

from typing import Final

BYTES_PER_PARAMETER: Final = {
    "adam-mixed": 14.0,  # bf16 weights, fp32 master, m, v
    "adam-fp32": 12.0,  # fp32 weights, m, v
    "adam-bf16": 6.0,  # weights, m, v, all bf16
    "sgd-momentum": 8.0,  # fp32 weights and momentum
    "weights-bf16": 2.0,  # cannot restart Adam exactly
}


def state_bytes(num_parameters: float, bytes_per_parameter: float = 14.0) -> float:
    """Bytes of the whole job's state."""
    return num_parameters * bytes_per_parameter


def staged_bytes(state_bytes: float, *, num_nodes: int = 1, num_buffers: int = 1) -> float:
    """Bytes of memory that each machine needs for snapshots: buffers · state / machines."""
    return num_buffers * state_bytes / num_nodes
