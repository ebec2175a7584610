"""What a step's time was spent on, on this worker, written where the agent can read it.

A step goes from the end of the one before to its own end: the boundary and its saves (``stall``),
the wait for a batch (``data``), the waits for other workers (``wait``; see :mod:`.waits`), and what
is left, this worker's own work (``compute``). In a synchronous step all workers' wholes are alike;
the slow one is known by the most compute, or data, and the least wait.

Guarantees: nothing here waits, and nothing here stops training: what fails is switched off, once,
with a line in the log. Outside of the loop nothing is hooked. A worker alone, or without our agent,
measures nothing.

On a GPU the device's time counts: ``data`` is the time that it had nothing to do between two steps,
at most what the host waited for its batch. A step is written once the device has done it.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
import torch

from outlast.attempt.beat import UNDER_WAY_S, Beat, Phase, Timing
from outlast.training.clock import Clock, DeviceClock, HostClock
from outlast.training.waits import Waits

logger = logging.getLogger(__name__)

MAX_OPEN: Final = 64  # steps that a device has not done yet; older ones are given up


class _Step(msgspec.Struct):
    """A step that is over for the host: its marks, and the host's seconds."""

    step: int
    end_s: float
    marks: tuple[Any, Any, Any]  # the end of the one before, the body's beginning and end
    waits: list[tuple[Any, Any]]
    data_s: float
    boundary_s: float
    stall_s: float  # in the body
    is_saving: bool


class Meter:
    """Measures the steps of a loop, and says the phases.

    Args:
        beat: what is heard of this worker.
        alone: whether there are no others to wait for.
        is_saving: whether a save is under way.
    """

    def __init__(self, beat: Beat, *, alone: bool, is_saving: Callable[[], bool]) -> None:
        self._beat = beat
        self._is_on = beat.is_heard and not alone
        self._is_saving = is_saving
        self._in_loop = False
        self._clock: Clock = HostClock()
        self._waits: Waits | None = None
        self._open: deque[_Step] = deque()
        self._end: Any = None
        self._begin: Any = None
        self._end_s = self._loading_s = self._begin_s = 0.0
        self._stall_s = 0.0
        self._was_saving = False

    def open(self, models: Iterable[Any]) -> None:
        """A loop begins."""
        self._in_loop = True
        self._beat.phase(Phase.STARTING)
        if self._is_on:
            self._guard(lambda: self._start([one for one in models if _is_model(one)]))

    def close(self) -> None:
        """The loop is over."""
        self._in_loop = False
        self._beat.phase(Phase.OUTSIDE)
        waits, self._waits = self._waits, None
        self._open.clear()
        if waits is not None:
            self._guard(waits.close)

    def loading(self) -> None:
        """The boundary is over, and the next batch is waited for."""
        self._beat.phase(Phase.LOADING)
        self._loading_s = time.monotonic()

    def stepping(self) -> None:
        """The batch is there: the loop's body begins."""
        self._beat.phase(Phase.STEPPING)
        if self._waits is not None:
            try:
                self._begun(self._waits)
            except Exception:  # noqa: BLE001 - nothing that observes may stop training
                self._switch_off()

    def saving(self) -> None:
        """An optimizer waits for a snapshot's rest: state of tens of GB takes its time."""
        if self._in_loop:
            self._beat.phase(Phase.SAVING)

    def updating(self, stalled_s: float) -> None:
        """An optimizer begins to change the weights; a snapshot's rest has held it up."""
        if self._in_loop:
            self._beat.phase(Phase.UPDATING)
            self._stall_s += stalled_s

    def ended(self, step: int) -> None:
        """The body is over, and ``step`` steps are complete."""
        self._beat.phase(Phase.SAVING)
        if self._waits is not None:
            try:
                self._ended(step, self._waits)
            except Exception:  # noqa: BLE001 - nothing that observes may stop training
                self._switch_off()

    # --- inside --------------------------------------------------------------------------------

    def _start(self, models: list[torch.nn.Module]) -> None:
        device = next((p.device for model in models for p in model.parameters()), None)
        on_device = device is not None and device.type == "cuda"
        self._clock = DeviceClock(device) if on_device else HostClock()
        self._waits = Waits(self._clock, self._beat)
        self._end = None
        self._waits.open(models)
        self._beat.kind(kind_of(models))

    def _begun(self, waits: Waits) -> None:
        self._clock.anchor()
        self._begin_s = time.monotonic()
        self._begin = self._clock.mark()
        outside = waits.take()  # of the loop's body
        if outside:
            self._clock.give_back([mark for pair in outside for mark in pair])
        self._stall_s = 0.0
        self._was_saving = self._is_saving()

    def _ended(self, step: int, waits: Waits) -> None:
        end, now_s = self._clock.mark(), time.monotonic()
        waits.look()
        if self._end is not None and self._begin is not None and end is not None:
            self._open.append(
                _Step(
                    step=step,
                    end_s=now_s,
                    marks=(self._end, self._begin, end),
                    waits=waits.take(),
                    data_s=self._begin_s - self._loading_s,
                    boundary_s=self._loading_s - self._end_s,
                    stall_s=self._stall_s,
                    is_saving=self._was_saving or self._is_saving(),
                )
            )
        self._end, self._end_s = end, now_s
        while self._open and self._clock.has_passed(self._open[0].marks[2]):
            self._write(self._open.popleft())
        while len(self._open) > MAX_OPEN:
            self._open.popleft()

    def _write(self, one: _Step) -> None:
        between, (before, begin, end) = self._clock.between, one.marks
        gap_s = between(before, begin)
        data_s = min(one.data_s, gap_s)
        stall_s = min(one.boundary_s, gap_s - data_s) + one.stall_s
        if one.is_saving:
            stall_s = max(stall_s, UNDER_WAY_S)
        wait_s = sum(between(first, last) for first, last in one.waits)
        body_s = between(begin, end)
        self._beat.timing(
            Timing(
                step=one.step,
                end_s=one.end_s,
                whole_s=gap_s + body_s,
                compute_s=max(body_s - wait_s - one.stall_s, 0.0),
                wait_s=wait_s,
                data_s=data_s,
                stall_s=stall_s if one.is_saving or stall_s > STALL_LEAST_S else 0.0,
            )
        )
        self._clock.give_back([before, begin, *(mark for pair in one.waits for mark in pair)])

    def _guard(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:  # noqa: BLE001 - nothing that observes may stop training
            self._switch_off()

    def _switch_off(self) -> None:
        self._is_on = False
        waits, self._waits = self._waits, None
        logger.warning("what steps' time is spent on is measured no more", exc_info=True)
        if waits is not None:
            waits.close()


STALL_LEAST_S: Final = 1e-3  # what every boundary takes is none


def kind_of(models: Iterable[torch.nn.Module]) -> int:
    """A number for what this worker computes: stages of a pipeline have parameters of their own.

    Where parameters are spread over workers, their whole shapes count.
    """
    crc = 1
    for model in models:
        for name, parameter in model.named_parameters():
            crc = zlib.crc32(f"{name} {tuple(parameter.shape)}".encode(), crc)
    return crc


def _is_model(value: Any) -> bool:
    return isinstance(value, torch.nn.Module)
