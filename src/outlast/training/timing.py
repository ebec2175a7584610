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

On the host all of it is some clock readings and sums, written with one pack: in each step this code
runs once, long after it ran last, so that what it costs are the cache lines that it touches.
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
from outlast.training.clock import DeviceClock
from outlast.training.waits import Waits

logger = logging.getLogger(__name__)

MAX_OPEN: Final = 64  # steps that a device has not done yet; older ones are given up
STALL_LEAST_S: Final = 1e-3  # what every boundary takes is none
_LOADING, _STEPPING = int(Phase.LOADING), int(Phase.STEPPING)  # members of an enum cost look-ups
_UPDATING, _SAVING = int(Phase.UPDATING), int(Phase.SAVING)


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
        self._waits: Waits | None = None
        self._device: _Device | None = None
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
        self._device = None
        if waits is not None:
            self._guard(waits.close)

    def loading(self) -> None:
        """The boundary is over, and the next batch is waited for."""
        self._loading_s = now_s = time.monotonic()
        self._beat.phase(_LOADING, now_s)

    def stepping(self) -> None:
        """The batch is there: the loop's body begins."""
        self._begin_s = now_s = time.monotonic()
        self._beat.phase(_STEPPING, now_s)
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
            self._beat.phase(_UPDATING)
            self._stall_s += stalled_s

    def ended(self, step: int) -> None:
        """The body is over, and ``step`` steps are complete."""
        now_s = time.monotonic()
        self._beat.phase(_SAVING, now_s)
        if self._waits is not None:
            try:
                self._ended(step, now_s, self._waits)
            except Exception:  # noqa: BLE001 - nothing that observes may stop training
                self._switch_off()

    # --- inside --------------------------------------------------------------------------------

    def _start(self, models: list[torch.nn.Module]) -> None:
        device = next((p.device for model in models for p in model.parameters()), None)
        on_device = device is not None and device.type == "cuda"
        clock = DeviceClock(device) if on_device else None
        self._device = None if clock is None else _Device(clock)
        self._waits = Waits(clock, self._beat)
        self._end_s = 0.0
        self._waits.open(models)
        self._beat.kind(kind_of(models))

    def _begun(self, waits: Waits) -> None:
        waits.begin_step()
        self._stall_s = 0.0
        if self._device is not None:
            self._device.begun(waits)

    def _ended(self, step: int, now_s: float, waits: Waits) -> None:
        before_s, self._end_s = self._end_s, now_s
        if waits.unsure:
            waits.look()
        # One that began and ended within the step has left its stall.
        was_saving, self._was_saving = self._was_saving, self._is_saving()
        is_saving = was_saving or self._was_saving
        begin_s, loading_s, stall_s = self._begin_s, self._loading_s, self._stall_s
        if self._device is not None:
            self._device.ended(
                _Step(
                    step=step,
                    end_s=now_s,
                    marks=(),
                    waits=waits.take(),
                    data_s=begin_s - loading_s,
                    boundary_s=loading_s - before_s,
                    stall_s=stall_s,
                    is_saving=is_saving,
                ),
                self._beat,
            )
        elif before_s:
            compute_s = now_s - begin_s - waits.spent_s - stall_s
            stall_s += loading_s - before_s
            self._beat.timing(
                step,
                now_s,
                now_s - before_s,
                compute_s if compute_s > 0.0 else 0.0,
                waits.spent_s,
                begin_s - loading_s,
                _stall_said(stall_s, is_saving=is_saving),
            )

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


def _stall_said(stall_s: float, *, is_saving: bool) -> float:
    if is_saving:
        return max(stall_s, UNDER_WAY_S)
    return stall_s if stall_s > STALL_LEAST_S else 0.0


class _Step(msgspec.Struct):
    """A step that is over for the host: its marks, and the host's seconds."""

    step: int
    end_s: float
    marks: tuple[Any, ...]  # the end of the one before, the body's beginning and end
    waits: list[tuple[Any, Any]]
    data_s: float
    boundary_s: float
    stall_s: float  # in the body
    is_saving: bool


class _Device:
    """Steps that the host has left and a device may not have done yet.

    Args:
        clock: the device's.
    """

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._open: deque[_Step] = deque()
        self._end: Any = None
        self._begin: Any = None

    def begun(self, waits: Waits) -> None:
        """A step's body begins."""
        self._clock.anchor()
        self._begin = self._clock.mark()
        outside = waits.take()  # of the loop's body
        if outside:
            self._clock.give_back([mark for pair in outside for mark in pair])

    def ended(self, one: _Step, beat: Beat) -> None:
        """It is over for the host; what the device has done is written."""
        end = self._clock.mark()
        if self._end is not None and self._begin is not None and end is not None:
            one.marks = self._end, self._begin, end
            self._open.append(one)
        self._end = end
        while self._open and self._clock.has_passed(self._open[0].marks[2]):
            beat.timing(*self._timing(self._open.popleft()))
        while len(self._open) > MAX_OPEN:
            self._open.popleft()

    def _timing(self, one: _Step) -> Timing:
        between, (before, begin, end) = self._clock.between, one.marks
        gap_s = between(before, begin)
        data_s = min(one.data_s, gap_s)
        stall_s = min(one.boundary_s, gap_s - data_s) + one.stall_s
        wait_s = sum(between(first, last) for first, last in one.waits)
        body_s = between(begin, end)
        self._clock.give_back([before, begin, *(mark for pair in one.waits for mark in pair)])
        return Timing(
            step=one.step,
            end_s=one.end_s,
            whole_s=gap_s + body_s,
            compute_s=max(body_s - wait_s - one.stall_s, 0.0),
            wait_s=wait_s,
            data_s=data_s,
            stall_s=_stall_said(stall_s, is_saving=one.is_saving),
        )


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
