"""``@outlast.survive``: a loss elsewhere does not end this process.

    @outlast.survive
    def train():
        torch.distributed.init_process_group()
        model = DistributedDataParallel(Model())
        with outlast.session(model=model, …) as session:
            …

    train()

The agent says on a line of its own that the attempt is over. A thread here then breaks what the
training thread waits for; what that raises unwinds to this function, which lets go of everything
that belonged to the attempt, tells the agent, waits for its place in the next attempt, and enters
the function again, with the random numbers that it was first entered with.

Guarantees: an exception is the attempt's end only if the agent says so, soon; any other one goes on
as ever. Nothing of it happens without ``workers.in_process``.

What can go wrong: a training thread that neither waits for others nor ends its step, a script that
swallows exceptions, an object of the old attempt that something outside of the function holds: the
agent has a limit for it, ends the process, and starts another one.
"""

from __future__ import annotations

import functools
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import torch.distributed as dist

from outlast.attempt import trackers
from outlast.attempt.line import Go, Line, Over, Prepared, Stays, Unwound, dial
from outlast.attempt.over import AttemptOver, over
from outlast.checkpoint import devices
from outlast.data import random_state
from outlast.health import pulse
from outlast.ledger.narrator import say
from outlast.training import breaking, living

P = ParamSpec("P")
R = TypeVar("R")

AGAIN_S: Final = 0.25  # until the store's connections, and what was opened since, are broken too
JOIN_S: Final = 5.0


def survive(function: Callable[P, R]) -> Callable[P, R]:
    """A function that is entered again when the attempt is over, in the same process.

    All that belongs to an attempt is to be made in it: process groups, DDP, the session. Where the
    setting ``workers.in_process`` is off, under torchrun and under plain Python it is just called.

    Args:
        function: holds the training loop; called in the main thread. What it is called with, and
            what it finds in global variables, is as the attempt before has left it.

    Returns:
        A function that returns what ``function`` returns in the attempt that gets to its end.
    """

    @functools.wraps(function)
    def surviving(*args: P.args, **kwargs: P.kwargs) -> R:
        line = _line()
        if line is None:
            return function(*args, **kwargs)
        found: R = _Survivor(line).run(functools.partial(function, *args, **kwargs))
        return found

    return surviving


def _line() -> Line | None:
    if over.is_held or threading.current_thread() is not threading.main_thread():
        return None
    line = dial()
    if line is None:
        return None
    if not breaking.is_possible():
        problem = "this torch's process groups are not the ones that outlast knows"
    elif dist.is_initialized():
        problem = (
            "init_process_group() was called outside of the function that outlast.survive holds; "
            "call it inside"
        )
    else:
        return line
    line.close()
    say(f"this process cannot survive a loss: {problem}")
    return None


class _Survivor:
    """A worker's life over several attempts.

    Args:
        line: to the agent.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self._groups = breaking.Groups()
        self._unwound = threading.Event()
        self._next: queue.SimpleQueue[Go | None] = queue.SimpleQueue()
        self._random = random_state.capture()
        self._given: set[str] = set()  # variables
        self._thread = devices.Thread(target=self._listen, name="outlast-line", daemon=True)

    def run(self, call: Callable[[], Any]) -> Any:
        """Call it until it returns, or raises what is its own."""
        # torch would end the process for what an abort does to NCCL's pending work.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        over.is_held = True
        self._thread.start()
        try:
            while True:
                returned, value = self._attempt(call)
                if returned:
                    return value
                self._begin_again()
        finally:
            over.is_held = False
            living.forget()
            self._groups.hold()
            self._unwound.set()
            self._line.close()
            self._thread.join(JOIN_S)

    def _attempt(self, call: Callable[[], Any]) -> tuple[bool, Any]:
        with self._groups.watched():
            try:
                return True, call()
            except AttemptOver:
                pass
            except Exception as error:
                if not over.explains(error):
                    raise
        # Only here, where nothing refers to the exception and its frames any more.
        return False, None

    def _begin_again(self) -> None:
        self._unwound.set()
        self._line.send(Unwound())
        try:
            with pulse.held_back():
                self._groups.take_down()
        except RuntimeError as error:
            self._line.send(Stays(reason=f"its process groups do not go: {error}"))
            raise SystemExit(1) from None
        self._line.send(Prepared(step=living.kept_step()))
        go = self._next.get()
        if go is None:  # the agent has gone, and ends this process
            raise SystemExit(1)
        _redirect(go)
        for name in self._given - set(go.environ):
            os.environ.pop(name, None)
        self._given = set(go.environ)
        os.environ.update(go.environ)
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        trackers.forget_rank()
        trackers.export_here()
        random_state.restore(self._random)

    def _listen(self) -> None:
        """In its own thread: what the agent says."""
        while (message := self._line.receive()) is not None:
            if isinstance(message, Over):
                over.happen()
                devices.enter()
                self._groups.break_all(again=False)
                while not self._unwound.wait(AGAIN_S):
                    self._groups.break_all(again=True)
            elif isinstance(message, Go):
                # Here, in the order of the messages: this attempt's end may be the next one.
                self._unwound.clear()
                over.begin_again()
                self._next.put(message)
        self._next.put(None)


def _redirect(go: Go) -> None:
    for path, number, stream in ((go.stdout, 1, sys.stdout), (go.stderr, 2, sys.stderr)):
        if path:
            if stream is not None:
                stream.flush()
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(fd, number)
            os.close(fd)
