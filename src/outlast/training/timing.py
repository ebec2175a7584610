"""What a step's time was spent on, on this worker, written where the agent can read it.

A step goes from the end of the one before to its own end: the boundary and its saves (``stall``),
the wait for a batch (``data``), the waits for other workers (``wait``), and what
is left, this worker's own work (``compute``). In a synchronous step all workers' wholes are alike;
the slow one is known by the most compute, or data, and the least wait.

Guarantees: nothing here waits, and nothing here stops training: what fails is switched off, once,
with a line in the log. Outside of the loop nothing is hooked. Without our agent nothing is
measured; a worker alone has nobody to wait for, and nothing is hooked for it.

On a GPU the device's time counts: ``data`` is the time that it had nothing to do between two steps,
at most what the host waited for its batch. A step is written once the device has done it.

On the host all of it is some clock readings and sums, written with one pack: in each step this code
runs once, long after it ran last, so that what it costs are the cache lines that it touches.

``DeviceClock``: marks in a device's time, and the seconds between two of them. A mark is an event
on the stream that trains: the host runs ahead, and what it waits for says nothing about what the
device does. An event's time is read when it has passed, and never waited for.

What can go wrong: work on other streams that the training stream does not wait for is not
seen; in a CUDA graph nothing is marked.

``ThreadWaits``: when a worker waits for the others, from the moment its own part is there until
theirs are. Three places are watched, which together are where a step waits:

- backward's end. Under DDP all sums are launched in backward, and waited for in a callback that DDP
  queues when the last gradient is ready. One parameter's hook queues a callback of ours; being
  first in the queue it runs when this worker's own gradients are all there, and it queues another
  one, which runs when DDP has the others'. Which parameter does not matter: if it gets no gradient,
  the next one is tried;
- ``Work.wait``: all-reduces, barriers, broadcasts of a script, FSDP2's gathers, a pipeline's
  messages;
- our own sums (:mod:`outlast.reduce.losses`).

What is waited for inside another wait counts once. Waits in other threads do not count.

What is not seen: collectives that a compiled graph or DTensor waits for by itself (functional
collectives); DDP's broadcast of buffers. These look like computing, on all ranks alike.

Rejected: hooks on all parameters, to find the last one (it changes, and each costs a microsecond);
DDP's own timers (means over a hundred steps, and DDP alone); wrapping ``torch.distributed``'s
functions (a script may have imported them before).

``Samples``: the ledger's ``step`` events, about once a second, and seldomer in a job that has run
for long. What it has of a step: the waits for a checkpoint and for batches, and the time outside of
loops, since the sample before. On a GPU the host's wait for a batch counts, an upper bound: the
device may have work left. Rank 0 writes them. The first step of an attempt always gets one, since
it says when the job is back; so does the last before an end or a drain.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist

from outlast.attempt.beat import UNDER_WAY_S, Beat, Phase, Timing
from outlast.ledger.file import QueuedLedger
from outlast.reduce import losses
from outlast.script.unnamed import in_place


class DeviceClock:
    """Events on the stream that trains.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._free: list[Any] = []

    def anchor(self) -> None:
        """The stream of this moment is the one that trains."""
        self._stream = torch.cuda.current_stream(self._device)

    def mark(self) -> Any:
        """An event behind what was queued so far; None on another stream, or in a CUDA graph."""
        stream = torch.cuda.current_stream(self._device)
        if stream != self._stream or torch.cuda.is_current_stream_capturing():
            return None
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def between(self, first: Any, last: Any) -> float:
        """Seconds between two events that have passed."""
        return float(first.elapsed_time(last)) / 1000

    def has_passed(self, mark: Any) -> bool:
        """Whether the device has come to it."""
        return bool(mark.query())

    def give_back(self, marks: list[Any]) -> None:
        """Events are used again."""
        self._free += [mark for mark in marks if mark is not None]


MAX_MODELS: Final = 4
MAX_WAITS: Final = 64  # in a step; what comes after counts as computing
_FSDP2: Final = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_FSDP2_WAITS: Final = ("wait_for_unshard", "finalize_backward")  # of a stream, for another one
_REDUCING, _STEPPING = int(Phase.REDUCING), int(Phase.STEPPING)
_queue_callback: Final = torch.autograd.Variable._execution_engine.queue_callback


class ThreadWaits:
    """The waits of one thread.

    On the host their seconds are added up, and nothing else: what runs in each step runs with cold
    caches, and costs by its length.

    Args:
        clock: makes marks where a device's time counts; None: the host's does.
        beat: is told the phase.

    Attributes:
        spent_s: on the host, since a step began.
        found: on a device, marks at each wait's beginning and end, since it was emptied last.
        unsure: whether hooks have to be looked after, at a step's end.
    """

    def __init__(self, clock: DeviceClock | None, beat: Beat) -> None:
        self.spent_s = 0.0
        self.found: list[tuple[Any, Any]] = []
        self.unsure: list[_BackwardProbe] = []
        self._clock = clock
        self._beat = beat
        self._thread = 0
        self._depth = 0
        self._since: Any = None
        self._since_s = 0.0
        self._undo = contextlib.ExitStack()

    def open(self, models: Iterable[torch.nn.Module]) -> None:
        """Watch this thread; ``models`` are those whose gradients are summed."""
        self._thread = threading.get_ident()
        self._depth = 0
        losses.listeners.append(self)
        self._undo.callback(losses.listeners.remove, self)
        if dist.is_available():
            self._undo.enter_context(self._patched(torch._C._distributed_c10d.Work, "wait"))
        module = sys.modules.get(_FSDP2)
        if module is not None and self._clock is not None:
            for name in _FSDP2_WAITS:
                self._undo.enter_context(self._patched(module.FSDPParamGroup, name))
        for model in list(models)[:MAX_MODELS]:
            probe = _BackwardProbe(model, self._own_are_there)
            self.unsure.append(probe)
            self._undo.callback(probe.close)

    def close(self) -> None:
        """Leave everything as it was."""
        self._undo.close()
        self.unsure = []

    def begin_step(self) -> None:
        """What was found so far was outside of the step's body."""
        self._depth = 0  # a wait that ended with an error may have left it
        self.spent_s = 0.0

    def take(self) -> list[tuple[Any, Any]]:
        """What was found since the last time, on a device."""
        found, self.found = self.found, []
        return found

    def look(self) -> None:
        """A step is over: see whether the hooks are of use; those that are need no more looks."""
        self.unsure = [probe for probe in self.unsure if not probe.has_fired]
        for probe in self.unsure:
            probe.try_next()

    # --- what is watched -----------------------------------------------------------------------

    def begin(self) -> bool:
        """This thread waits; False when it is not the one that is watched."""
        if threading.get_ident() != self._thread:
            return False
        self._enter()
        return True

    def end(self) -> None:
        """It has what it waited for."""
        self._depth -= 1
        if self._depth == 0:
            now_s = time.monotonic()
            if self._clock is None:
                self.spent_s += now_s - self._since_s
            elif self._since is None:
                return
            else:
                self._found(self._clock)
            self._beat.phase(_STEPPING, now_s)

    def _enter(self) -> None:
        self._depth += 1
        if self._depth == 1:
            if self._clock is not None:
                self._since = self._clock.mark()
                if self._since is None:
                    return
            self._since_s = time.monotonic()
            self._beat.phase(_REDUCING, self._since_s)

    def _found(self, clock: DeviceClock) -> None:
        mark = clock.mark()
        if mark is not None and len(self.found) < MAX_WAITS:
            self.found.append((self._since, mark))
        else:
            clock.give_back([self._since, mark])

    def _own_are_there(self) -> None:
        """Backward has this worker's gradients; DDP's callback comes next."""
        self._enter()
        _queue_callback(self.end)

    def _patched(self, owner: Any, name: str) -> contextlib.AbstractContextManager[None]:
        original = getattr(owner, name)
        begin, end = self.begin, self.end

        def watched(*args: Any, **options: Any) -> Any:
            if not begin():
                return original(*args, **options)
            try:
                return original(*args, **options)
            finally:
                end()

        return in_place(owner, name, watched)


class _BackwardProbe:
    """A hook on one parameter of a model, that says when its backward comes to an end."""

    def __init__(self, model: torch.nn.Module, ready: Callable[[], None]) -> None:
        self._ready = ready
        # The last ones mostly belong to the head, whose gradients come first and always. FSDP2's
        # are not leaves of the graph, and their hooks cost it a synchronisation.
        self._left = [p for p in model.parameters() if p.requires_grad and type(p) in _PLAIN]
        self._hook: Any = None
        self.has_fired = False
        self.try_next()

    def try_next(self) -> None:
        """Another parameter: the one before gets no gradient."""
        self.close()
        if self._left:
            parameter = self._left.pop()
            self._hook = parameter.register_post_accumulate_grad_hook(self._called)

    def _called(self, _: torch.Tensor) -> None:
        self.has_fired = True
        _queue_callback(self._ready)

    def close(self) -> None:
        """Take it away."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


_PLAIN: Final = (torch.nn.Parameter, torch.Tensor)


logger = logging.getLogger(__name__)

MAX_OPEN: Final = 64  # steps that a device has not done yet; older ones are given up
STALL_LEAST_S: Final = 1e-3  # what every boundary takes is none
_LOADING = int(Phase.LOADING)  # members of an enum cost look-ups
_UPDATING, _SAVING = int(Phase.UPDATING), int(Phase.SAVING)


class Meter:
    """Measures the steps of a loop, and says the phases.

    Args:
        beat: what is heard of this worker.
        samples: are told of waits for batches, and of the time outside of loops.
        alone: whether there are no others to wait for.
        is_saving: whether a save is under way.
    """

    def __init__(
        self, beat: Beat, samples: Samples, *, alone: bool, is_saving: Callable[[], bool]
    ) -> None:
        self._beat = beat
        self._samples = samples
        self._is_on, self._alone = beat.is_heard, alone
        self._is_saving = is_saving
        self._in_loop = False
        self._waits: ThreadWaits | None = None
        self._device: _Device | None = None
        self._end_s = self._loading_s = self._begin_s = 0.0
        self._stall_s = 0.0
        self._was_saving = False

    def open(self, models: Iterable[Any]) -> None:
        """A loop begins."""
        self._in_loop = True
        self._samples.enter_loop()
        self._beat.phase(Phase.STARTING)
        if self._is_on:
            self._guard(lambda: self._start([one for one in models if _is_model(one)]))

    def close(self) -> None:
        """The loop is over."""
        if self._in_loop:
            self._samples.leave_loop()
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
        now_s = time.monotonic()
        if self._loading_s > self._begin_s:  # else it is a batch in hand, once more
            self._samples.data_s += now_s - self._loading_s
        self._begin_s = now_s
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
        self._waits = ThreadWaits(clock, self._beat)
        self._end_s = 0.0
        if not self._alone:
            self._waits.open(models)
        self._beat.kind(kind_of(models))

    def _begun(self, waits: ThreadWaits) -> None:
        waits.begin_step()
        self._stall_s = 0.0
        if self._device is not None:
            self._device.begun(waits)

    def _ended(self, step: int, now_s: float, waits: ThreadWaits) -> None:
        before_s, self._end_s = self._end_s, now_s
        if waits.unsure:
            waits.look()
        # One that began and ended within the step has left its stall.
        was_saving, self._was_saving = self._was_saving, self._is_saving()
        is_saving = was_saving or self._was_saving
        begin_s, loading_s, stall_s = self._begin_s, self._loading_s, self._stall_s
        if self._device is not None:
            self._device.ended(
                _StepMarks(
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


class _StepMarks(msgspec.Struct):
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
        self._open: deque[_StepMarks] = deque()
        self._end: Any = None
        self._begin: Any = None

    def begun(self, waits: ThreadWaits) -> None:
        """A step's body begins."""
        self._clock.anchor()
        self._begin = self._clock.mark()
        outside = waits.take()  # of the loop's body
        if outside:
            self._clock.give_back([mark for pair in outside for mark in pair])

    def ended(self, one: _StepMarks, beat: Beat) -> None:
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

    def _timing(self, one: _StepMarks) -> Timing:
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


FIRST_S: Final = 1.0
MAX_S: Final = 30.0


class Samples:
    """Writes the ledger's ``step`` events: what was since the last one.

    Args:
        ledger: where they go.
        rank: whose they are; those of others than 0 are not written.

    Attributes:
        data_s: waits for batches since the sample before; added to at each step.
        until: the step at which the loop ends, or None where that is not known.
    """

    def __init__(self, ledger: QueuedLedger, rank: int) -> None:
        self._ledger = ledger
        self._rank = rank
        self._scalars: dict[str, Any] = {}
        self.data_s = self._stalled_s = self._script_s = self._catch_up_s = 0.0
        self.until: int | None = None
        self.start(0)

    def start(self, step: int) -> None:
        """Training begins, after ``step``: the session has its state, and no loop has begun."""
        self._sampled_s = self._started_s = time.monotonic()
        self._outside_s: float | None = self._sampled_s
        self._stalled_before_s = self._stalled_s
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

    def enter_loop(self) -> None:
        """A loop begins: from here on the time is its steps'."""
        self._count_outside()
        self._outside_s = None

    def leave_loop(self) -> None:
        """A loop is over: from here on the time is the script's own."""
        self._outside_s = time.monotonic()
        self._stalled_before_s = self._stalled_s

    def _count_outside(self) -> None:
        """Without what is counted as waits for checkpoints anyway."""
        if self._outside_s is not None:
            now_s = time.monotonic()
            stalled_s = self._stalled_s - self._stalled_before_s
            self._script_s += max(now_s - self._outside_s - stalled_s, 0.0)
            self._outside_s, self._stalled_before_s = now_s, self._stalled_s

    @contextlib.contextmanager
    def catching_up(self) -> Iterator[None]:
        """Within, ahead of a loop, its data is brought to where it was when the state was saved."""
        self._count_outside()
        yield
        if self._outside_s is not None:
            now_s = time.monotonic()
            self._catch_up_s += now_s - self._outside_s
            self._outside_s = now_s

    @contextlib.contextmanager
    def all_stalled(self) -> Iterator[None]:
        """Within, the time is a checkpoint's, whatever else is counted in it."""
        before_s, since_s = self._stalled_s, time.monotonic()
        try:
            yield
        finally:
            self._stalled_s = before_s + time.monotonic() - since_s

    def end(self) -> None:
        """The session has ended well: what comes is the script's own code."""
        self.write(force=True)
        if self._rank == 0:
            stalled_s = round(self._stalled_s, 6)
            self._ledger.append("session_ended", step=self._step, stalled_s=stalled_s)

    def write(self, *, force: bool = False) -> None:
        """Write one, if it is time or if ``force``; nothing where no step was done since."""
        now = time.monotonic()
        elapsed = now - self._sampled_s
        interval = min(max((now - self._started_s) / 60, FIRST_S), MAX_S)
        step = self._step
        if self._rank or step == self._sampled_step or (elapsed < interval and not force):
            return
        self._count_outside()
        self._ledger.append(
            "step",
            durable=False,
            step=step,
            seconds=round(elapsed, 6),
            stalled_s=round(self._stalled_s, 6),
            data_s=round(self.data_s, 6),
            script_s=round(self._script_s, 6),
            catch_up_s=round(self._catch_up_s, 6),
            scalars={name: _number(value) for name, value in self._scalars.items()},
            until=self.until,
        )
        self._sampled_s, self._sampled_step = now, step
        self.data_s = self._stalled_s = self._stalled_before_s = self._script_s = 0.0
        self._catch_up_s = 0.0


def _number(value: Any) -> float | str:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)[:100]
