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
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist

from outlast.attempt.beat import Beat, Phase
from outlast.reduce import waiting
from outlast.training.clock import Clock, DeviceClock

MAX_MODELS: Final = 4
MAX_WAITS: Final = 64  # in a step; what comes after counts as computing
_FSDP2: Final = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_FSDP2_WAITS: Final = ("wait_for_unshard", "finalize_backward")  # of a stream, for another one


class Waits:
    """The waits of one thread.

    Args:
        clock: makes marks.
        beat: is told the phase.

    Attributes:
        found: marks at the beginning and the end of each wait, since it was emptied last.
    """

    def __init__(self, clock: Clock, beat: Beat) -> None:
        self.found: list[tuple[Any, Any]] = []
        self._clock = clock
        self._beat = beat
        self._thread = 0
        self._depth = 0
        self._since: Any = None
        self._undo = contextlib.ExitStack()
        self._probes: list[_Probe] = []

    def open(self, models: Iterable[torch.nn.Module]) -> None:
        """Watch this thread; ``models`` are those whose gradients are summed."""
        self._thread = threading.get_ident()
        self._depth = 0
        waiting.listeners.append(self)
        self._undo.callback(waiting.listeners.remove, self)
        if dist.is_available():
            self._undo.enter_context(self._patched(torch._C._distributed_c10d.Work, "wait"))
        module = sys.modules.get(_FSDP2)
        if module is not None and isinstance(self._clock, DeviceClock):
            for name in _FSDP2_WAITS:
                self._undo.enter_context(self._patched(module.FSDPParamGroup, name))
        for model in list(models)[:MAX_MODELS]:
            probe = _Probe(model, self._own_are_there)
            self._probes.append(probe)
            self._undo.callback(probe.close)

    def close(self) -> None:
        """Leave everything as it was."""
        self._undo.close()
        self._probes = []

    def take(self) -> list[tuple[Any, Any]]:
        """What was found since the last time."""
        self._depth = 0  # a wait that ended with an error may have left it
        found, self.found = self.found, []
        return found

    def look(self) -> None:
        """A step is over: see whether the hooks are of use."""
        for probe in self._probes:
            probe.look()

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
        if self._depth == 0 and self._since is not None:
            mark = self._clock.mark()
            if mark is not None and len(self.found) < MAX_WAITS:
                self.found.append((self._since, mark))
            else:
                self._clock.give_back([self._since, mark])
            self._beat.phase(Phase.STEPPING)

    def _enter(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._since = self._clock.mark()
            if self._since is not None:
                self._beat.phase(Phase.REDUCING)

    def _own_are_there(self) -> None:
        """Backward has this worker's gradients; DDP's callback comes next."""
        self._enter()
        torch.autograd.Variable._execution_engine.queue_callback(self.end)

    @contextlib.contextmanager
    def _patched(self, owner: Any, name: str) -> Iterator[None]:
        original = getattr(owner, name)
        begin, end = self.begin, self.end

        def watched(*args: Any, **options: Any) -> Any:
            if not begin():
                return original(*args, **options)
            try:
                return original(*args, **options)
            finally:
                end()

        setattr(owner, name, watched)
        try:
            yield
        finally:
            if getattr(owner, name) is watched:  # else somebody wrapped it since
                setattr(owner, name, original)


class _Probe:
    """A hook on one parameter of a model, that says when its backward comes to an end."""

    def __init__(self, model: torch.nn.Module, ready: Callable[[], None]) -> None:
        self._ready = ready
        # The last ones mostly belong to the head, whose gradients come first and always. FSDP2's
        # are not leaves of the graph, and their hooks cost it a synchronisation.
        self._left = [p for p in model.parameters() if p.requires_grad and type(p) in _PLAIN]
        self._hook: Any = None
        self._has_fired = self._has_ever_fired = False
        self._next()

    def _next(self) -> None:
        self.close()
        if self._left:
            parameter = self._left.pop()
            self._hook = parameter.register_post_accumulate_grad_hook(self._called)

    def _called(self, _: torch.Tensor) -> None:
        self._has_fired = True
        torch.autograd.Variable._execution_engine.queue_callback(self._ready)

    def look(self) -> None:
        """A step is over: a parameter that never gets a gradient is given up for another."""
        if self._has_fired:
            self._has_ever_fired = True
        elif not self._has_ever_fired and self._hook is not None:
            self._next()
        self._has_fired = False

    def close(self) -> None:
        """Take it away."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


_PLAIN: Final = (torch.nn.Parameter, torch.Tensor)
