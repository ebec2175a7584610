"""The ledger's ``step`` events: about once a second, and seldomer in a job that has run for long.

Rank 0 writes them. The first step of an attempt always gets one, since it says when the job is
back; so does the last before an end or a drain.
"""

from __future__ import annotations

import time
from typing import Any, Final

import torch

from outlast.ledger.queued import QueuedLedger

FIRST_S: Final = 1.0
MAX_S: Final = 30.0


class Samples:
    """What was since the last one.

    Args:
        ledger: where they go.
        rank: whose they are; those of others than 0 are not written.
    """

    def __init__(self, ledger: QueuedLedger, rank: int) -> None:
        self._ledger = ledger
        self._rank = rank
        self._scalars: dict[str, Any] = {}
        self._stalled_s = 0.0
        self.start(0)

    def start(self, step: int) -> None:
        """Training begins, after ``step``."""
        self._sampled_s = self._started_s = time.monotonic()
        self._step = self._sampled_step = self._resumed_step = step

    def completed(self, step: int) -> None:
        """A step is done."""
        self._step = step
        if self._rank == 0:
            self.write(force=self._sampled_step == self._resumed_step)

    def log(self, scalars: dict[str, Any]) -> None:
        """Keep the newest numbers of the loop."""
        for name, value in scalars.items():
            self._scalars[name] = value.detach() if isinstance(value, torch.Tensor) else value

    def stalled(self, seconds: float) -> None:
        """The loop has waited for a checkpoint."""
        self._stalled_s += seconds

    def write(self, *, force: bool = False) -> None:
        """Write one, if it is time or if ``force``; nothing where no step was done since."""
        now = time.monotonic()
        elapsed = now - self._sampled_s
        interval = min(max((now - self._started_s) / 60, FIRST_S), MAX_S)
        step = self._step
        if self._rank or step == self._sampled_step or (elapsed < interval and not force):
            return
        self._ledger.append(
            "step",
            durable=False,
            step=step,
            seconds=round(elapsed, 6),
            stalled_s=round(self._stalled_s, 6),
            scalars={name: _number(value) for name, value in self._scalars.items()},
        )
        self._sampled_s, self._sampled_step, self._stalled_s = now, step, 0.0


def _number(value: Any) -> float | str:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)[:100]
