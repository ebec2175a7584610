"""What is simulated: a job, where its checkpoints go, how it recovers; and what came of it."""

from __future__ import annotations

import math
from typing import Final, Literal, get_args

import msgspec

from outlast.ledger.goodput import Part

Mode = Literal["rigid", "restart", "elastic", "peer", "local"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
MODE_WORDS: Final[dict[Mode, str]] = {
    "rigid": "waits for all its machines, and goes on from a checkpoint",
    "restart": "goes on with the machines that are left, from a checkpoint",
    "peer": "goes on with those that are left, from snapshots in other machines' memory",
    "elastic": "goes on with what survivors have, at the step that was lost",
    "local": "trains in islands between syncs; one that goes loses its own work alone",
}


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """A place for checkpoints.

    Attributes:
        name: of the tier.
        cost_s: training is blocked for so long by one.
        lag_s: from then until it is durable there.
        restore_s: from the new start to the first step, when it is read from there.
        every: it takes every Nth checkpoint; None where that is decided as the runtime does.
        keep: how many stay.
        survives: a worker's process only; machines, as long as another that keeps a copy is
            there ("holders"); everything.
    """

    name: str = "shared"
    cost_s: float = 0.0
    lag_s: float = 0.0
    restore_s: float = 0.0
    every: int | None = 1
    keep: int = 3
    survives: Literal["process", "holders", "all"] = "all"


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One job.

    Attributes:
        machines: that it is made for; fewer make it proportionally slower.
        levels: where checkpoints go, the fastest first.
        mode: how it recovers, see ``MODE_WORDS``.
        work_s: useful time on all machines, to be done.
        horizon_s: wall time after which it is looked at.
        step_s: of a step on all machines; 0 where nothing waits for a step's end.
        detect_s: from a loss to the new start.
        rejoin_s: what survivors need to go on, or to take somebody in.
        spares: machines that stand by and take the place of lost ones.
        least: machines without which nothing goes on.
        notice_s: how long before its end a machine is told.
        flush_probability: share of notices that come at all, and in time.
        max_restarts: None for any number.
        damaged_probability: of a checkpoint that it cannot be read when it is needed.
        sync_steps: of local updates: steps between two syncs.
        price_per_h: of a machine.
    """

    machines: int = 1
    levels: tuple[Level, ...] = (Level(),)
    mode: Mode = "rigid"
    work_s: float = math.inf
    horizon_s: float = math.inf
    step_s: float = 0.0
    detect_s: float = 0.0
    rejoin_s: float = 0.0
    spares: int = 0
    least: int = 1
    notice_s: float = 0.0
    flush_probability: float = 0.0
    max_restarts: int | None = None
    damaged_probability: float = 0.0
    sync_steps: int = 500
    price_per_h: float | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one run; the parts are wall time, named as in the ledger, and add up to it.

    Attributes:
        useful_s: training on all machines that was not lost, in the end.
        parts: part → seconds.
        failures: losses that stopped it, or that took work.
        saves: checkpoints taken.
        machine_s: machine-seconds that were held.
        finished: whether the work is done.
        ended: why it ended otherwise, in words.
    """

    useful_s: float
    parts: dict[Part, float]
    failures: int
    saves: int
    machine_s: float
    finished: bool
    ended: str = ""

    @property
    def wall_s(self) -> float:
        """All of it."""
        return math.fsum(self.parts.values())
