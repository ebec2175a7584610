"""One save in a running loop, and what it cost.

The parts of a measurement, all in one process and in this order: steps that are thrown away, then
``undisturbed`` steps whose median is the measure of a step, then one in which the save may be asked
for, then all steps until the save is durable, and one more.

What the numbers are made of:

- ``blocked_s``: what the call took, plus what every boundary and every wait before the optimizer
  took from then until the save was durable, less their undisturbed medians.
- ``durable_s``: from the begin of the boundary at which the state is taken until data and metadata
  are on disk.
- ``lost_s``: the time of all those steps less as many undisturbed medians; it holds ``blocked_s``
  and all that the save took from the steps by using cores and memory. It may come out negative: the
  mode ``nothing`` shows how far it is off by noise.
- ``step_x``: the mean of the steps that overlap with the save, without their boundaries, over the
  undisturbed median of the same.

The limits: nothing can be durable sooner than the disk writes the bytes, ``limits.py`` measures how
fast that is; ``blocked_s`` has no limit but the interpreter.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from bench.modes import Mode, Wait
from bench.training import Loop, Step

SETTLE: Final = 2
GIVE_UP_S: Final = 300.0


@dataclass
class Flight:
    """A save from the boundary at which its state was taken."""

    start: float
    durable: float = 0.0
    error: str = ""
    done: threading.Event = field(default_factory=threading.Event)

    def follow(self, wait: Wait) -> None:
        """Wait in a thread of its own, so that the loop goes on."""

        def watch() -> None:
            try:
                self.durable = wait()
            except Exception as error:  # noqa: BLE001 - whatever it is, the measurement failed
                self.error = f"{type(error).__name__}: {error}"
            self.done.set()

        threading.Thread(target=watch, name="durable", daemon=True).start()


class Measurement:
    """A loop whose saves are measured one at a time.

    Args:
        loop: the training.
        mode: how to save.
        undisturbed: steps that tell how long a step takes.
        everywhere: in a job of several ranks, whether a condition holds on all of them; the ranks
            must take the same number of steps.
    """

    def __init__(
        self,
        loop: Loop,
        mode: Mode,
        undisturbed: int,
        everywhere: Callable[[bool], bool] = bool,
    ) -> None:
        self._loop, self._mode = loop, mode
        self._undisturbed, self._everywhere = undisturbed, everywhere
        self._wait: Wait | None = None

    def save(self) -> dict[str, Any]:
        """One save, measured.

        Raises:
            RuntimeError: it failed or did not end.
        """
        self._mode.tidy()
        os.sync()
        for _ in range(SETTLE):
            self._step()
        base = [self._step() for _ in range(self._undisturbed)]
        start = time.perf_counter()
        asking = self._step(ask=True)
        steps, flight = [asking], None
        after = 0
        while after < 2:
            steps.append(self._step(wanted=flight is None))
            if flight is None and self._wait is not None:
                flight = Flight(steps[-1].start)
                flight.follow(self._wait)
            if self._everywhere(flight is not None and flight.done.is_set()):
                after += 1
            if time.perf_counter() - start > GIVE_UP_S:
                raise RuntimeError(f"not durable within {GIVE_UP_S:.0f} s")
        assert flight is not None
        if flight.error:
            raise RuntimeError(flight.error)
        end = steps[-1].end
        return self._result(base, steps, flight, end - start) | {"details": self._mode.details()}

    def _result(
        self, base: list[Step], steps: list[Step], flight: Flight, elapsed: float
    ) -> dict[str, Any]:
        usual = statistics.median(step.total for step in base)
        usual_work = statistics.median(step.work for step in base)
        usual_boundary = statistics.median(step.boundary for step in base)
        usual_hook = statistics.median(step.hook for step in base)
        begun = [step for step in steps if step.start >= flight.start]
        during = [step for step in begun if step.start < flight.durable] or begun[:1]
        asked = steps[0].boundary - usual_boundary
        boundaries = sum(step.boundary - usual_boundary for step in during)
        hooks = sum(step.hook - usual_hook for step in during)
        return {
            "step_s": usual,
            "blocked_s": max(asked, 0.0) + max(boundaries, 0.0) + max(hooks, 0.0),
            "blocked_call_s": max(asked, 0.0) + max(boundaries, 0.0),
            "blocked_optimizer_s": max(hooks, 0.0),
            "durable_s": flight.durable - flight.start,
            "lost_s": elapsed - len(steps) * usual,
            "steps": len(steps),
            "step_x": statistics.mean(step.work for step in during) / usual_work,
            "step_x_most": max(step.work for step in during) / usual_work,
        }

    def _step(self, *, ask: bool = False, wanted: bool = False) -> Step:
        start = time.perf_counter()
        self._wait = self._mode.boundary(wanted) if not ask else self._ask()
        return self._loop.finish(start, self._mode.updating())

    def _ask(self) -> Wait | None:
        wait = self._mode.boundary(False)
        self._mode.ask()
        return wait
