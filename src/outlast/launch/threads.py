"""How many threads a worker computes with, unless somebody has said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

VARIABLE: Final = "OMP_NUM_THREADS"


def threads_to_set(environ: Mapping[str, str], num_workers: str) -> dict[str, str]:
    """What torchrun sets, without its banner: several workers get one thread each.

    Args:
        environ: the environment; what is set there stands.
        num_workers: the value of --nproc-per-node.
    """
    return {} if VARIABLE in environ or num_workers == "1" else {VARIABLE: "1"}
