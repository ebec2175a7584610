"""Lets data-loader worker processes live through the signals that announce an end.

A scheduler that takes a machine back signals the whole process group. torch's loader workers die
of SIGTERM at once, and the training process then raises "DataLoader worker killed by signal"
before it can finish the step and save. Here workers leave those signals to the training process.

Guarantees: from its first instruction a worker has SIGTERM and SIGUSR1 blocked (it inherits the
mask of the thread that starts it); a SIGTERM from its own training process still ends it, which
is how torch and multiprocessing end a stuck worker; a worker does not outlive its training
process (by the kernel's hand; within a second, by its own, if the processes were started from a
thread other than the main one). SIGINT is the training process's alone to answer.

What can go wrong: a worker stuck in C code that holds the interpreter's lock cannot hear its
training process; :func:`shut_down` ends it with SIGKILL, and so does the kernel when the training
process is killed; but one that leaves without closing its feed waits for such a worker. A
training process that signals its own group (``os.killpg(0, …)``) looks to its workers like torch
ending them.

Rejected: ignoring the signals (torch's end of a stuck worker would wait for ever); a handler in
Python (torch installs its C handler later, and handlers run only between bytecodes).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

import torch

logger = logging.getLogger(__name__)

_HELD = frozenset({signal.SIGTERM, signal.SIGUSR1})
_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 1.0


@contextlib.contextmanager
def signals_held(context: Any = None) -> Iterator[None]:
    """Processes started in this block, by this thread, have SIGTERM and SIGUSR1 blocked.

    Signals sent to this thread meanwhile are delivered when the block ends; those sent to the
    process may reach it through another thread.

    Args:
        context: the multiprocessing context that will start them; None means torch's default.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        method = (context or torch.multiprocessing).get_start_method()
        if method != "fork":
            # Starting the tracker *unblocks* SIGTERM (CPython 3.11); were it to happen between
            # here and the first worker, that worker would be born without its mask.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ShieldedInit:
    """A ``worker_init_fn`` that shields the worker, then calls the user's own.

    Make it in the process and thread that is about to start the workers, under
    :func:`signals_held`; it is picklable if ``user_init`` is.
    """

    def __init__(self, user_init: Callable[[int], Any] | None = None) -> None:
        self.user_init = user_init
        self._parent_pid = os.getpid()
        # The kernel ties the death signal to the parent *thread*: a thread that merely ends
        # must not take its workers with it.
        self._parent_is_main_thread = threading.current_thread() is threading.main_thread()

    def __call__(self, worker_id: int) -> None:
        """Runs in the worker, on its main thread."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        starter_pid = os.getppid()  # the training process, or the fork server
        if self._parent_is_main_thread:
            _die_with_parent()
        if os.getppid() != starter_pid or not _exists(self._parent_pid):
            os._exit(1)
        threading.Thread(
            target=_answer_signals,
            args=(self._parent_pid, starter_pid),
            name="outlast-worker-shield",
            daemon=True,
        ).start()
        if self.user_init is not None:
            self.user_init(worker_id)


def _die_with_parent() -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # Linux; elsewhere the thread below looks after it
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _answer_signals(parent_pid: int, starter_pid: int) -> None:
    while os.getppid() == starter_pid:  # a fork server ends with the process that it serves
        received = signal.sigtimedwait(_HELD, _PARENT_CHECK_S)
        if received and received.si_signo == signal.SIGTERM and received.si_pid == parent_pid:
            os._exit(0)
    os._exit(1)


def start(loader: Any) -> Iterator[Any]:
    """``iter(loader)``; if it is a torch DataLoader that starts processes, they are shielded."""
    if not isinstance(loader, torch.utils.data.DataLoader) or not loader.num_workers:
        return iter(loader)
    user_init = loader.worker_init_fn
    loader.worker_init_fn = ShieldedInit(user_init)
    try:
        with signals_held(loader.multiprocessing_context):
            return iter(loader)
    finally:
        loader.worker_init_fn = user_init


def shut_down(iterator: Any) -> None:
    """End the processes of a DataLoader's iterator; anything else is left as it is."""
    shutdown = getattr(iterator, "_shutdown_workers", None)
    if shutdown is None:
        return
    try:
        shutdown()  # joins for 5 s, sends SIGTERM, joins for 5 s more
    except RuntimeError as error:  # by torch's handler of SIGCHLD, for a worker that crashes as it
        logger.warning("a loader's process did not end as it should: %s", error)  # leaves
    for worker in getattr(iterator, "_workers", ()):
        if worker.is_alive():
            worker.kill()
            worker.join()
