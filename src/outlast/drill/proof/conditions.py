"""What a run of ``outlast drill resume`` is to differ in: told by its file, done in its workers.

The proof's runs are all of one script. They differ in when they are asked to leave, and a try of a
cause in one thing that is held still: the clock, a seed, the loaders' processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

CONDITIONS: Final = "conditions.json"  # in the run's directory
CARRIED: Final = "carried.bin"
FROZEN: Final = "requires_grad"  # last word of a path: whether a parameter is trained

SEED_TORCH: Final = "seed torch"
SEED_NUMPY: Final = "seed numpy"
SEED_PYTHON: Final = "seed python"
CLOCK: Final = "clock"
IDENTITY: Final = "identity"
ENTROPY: Final = "entropy"
NO_LOADER_WORKERS: Final = "no loader workers"
DETERMINISTIC: Final = "deterministic"
ONE_THREAD: Final = "one thread"
COUNT_ON: Final = "count on"
HASH_SEED: Final = "hash seed"  # in the environment
SEED: Final = 1234


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """Of one start of a job.

    Attributes:
        notice_after: the step behind which the job is given notice; 0 for never.
        hold_after: the step behind which it does not go on; 0 for none.
        changes: what is held still.
        look_at: steps ahead of which all that the script's names reach is looked at.
        keep_at: the step behind which that is written to ``CARRIED``; 0 for none.
        carry: paths of what is taken from there, ahead of the process' first step.
        kernels_at: the step whose operations are noted one by one; 0 for none.
        find_draws: whether lines that draw random numbers are looked for.
    """

    notice_after: int = 0
    hold_after: int = 0
    changes: list[str] = []
    look_at: list[int] = []
    keep_at: int = 0
    carry: list[str] = []
    kernels_at: int = 0
    find_draws: bool = False


def write_conditions(run: Path, conditions: Conditions) -> None:
    """For the next start."""
    (run / CONDITIONS).write_bytes(msgspec.json.encode(conditions))


def read_conditions(run: Path) -> Conditions:
    """Those of this start; nothing is asked for where there is no file."""
    try:
        return msgspec.json.decode((run / CONDITIONS).read_bytes(), type=Conditions)
    except FileNotFoundError:
        return Conditions()
