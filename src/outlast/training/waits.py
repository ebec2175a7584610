"""When a worker waits for the others: from the moment its own part is there until theirs are.

Three places are watched, which together are where a step waits:

- backward's end. Under DDP all sums are launched in backward, and waited for in a callback that DDP
  queues when the last gradient is ready. One parameter's hook queues a callback of ours; being
  first in the queue it runs when this worker's own gradients are all there, and it queues another
  one, which runs when DDP has the others'. Which parameter does not matter: if it gets no gradient,
  the next one is tried;
- ``Work.wait``: all-reduces, barriers, broadcasts of a script, FSDP2's gathers, a pipeline's
  messages;
- our own sums (:mod:`outlast.reduce.waiting`).

What is waited for inside another wait counts once. Waits in other threads do not count.

What is not seen: collectives that a compiled graph or DTensor waits for by itself (functional
collectives); DDP's broadcast of buffers. These look like computing, on all ranks alike.

Rejected: hooks on all parameters, to find the last one (it changes, and each costs a microsecond);
DDP's own timers (means over a hundred steps, and DDP alone); wrapping ``torch.distributed``'s
functions (a script may have imported them before).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist

from outlast.attempt.beat import Beat, Phase
from outlast.reduce import waiting
from outlast.training.clock import DeviceClock

MAX_MODELS: Final = 4
MAX_WAITS: Final = 64  # in a step; what comes after counts as computing
_FSDP2: Final = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_FSDP2_WAITS: Final = ("wait_for_unshard", "finalize_backward")  # of a stream, for another one
_REDUCING, _STEPPING = int(Phase.REDUCING), int(Phase.STEPPING)
_queue_callback: Final = torch.autograd.Variable._execution_engine.queue_callback


class Waits:
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
        self.unsure: list[_Probe] = []
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
        waiting.listeners.append(self)
        self._undo.callback(waiting.listeners.remove, self)
        if dist.is_available():
            self._undo.enter_context(self._patched(torch._C._distributed_c10d.Work, "wait"))
        module = sys.modules.get(_FSDP2)
        if module is not None and self._clock is not None:
            for name in _FSDP2_WAITS:
                self._undo.enter_context(self._patched(module.FSDPParamGroup, name))
        for model in list(models)[:MAX_MODELS]:
            probe = _Probe(model, self._own_are_there)
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


@contextlib.contextmanager
def in_place(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Have ``new`` in place of a class's or module's function inside."""
    original = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if getattr(owner, name) is new:  # else somebody wrapped it since
            setattr(owner, name, original)


class _Probe:
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
