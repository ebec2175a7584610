"""Lets data-loader worker processes live through the signals that announce an end.

A scheduler that takes a machine back signals the whole process group. torch's loader workers die
of SIGTERM at once, and the training process then raises "DataLoader worker killed by signal"
before it can finish the step and save. Here workers leave those signals to the training process.

Guarantees: a worker does not die of SIGTERM or SIGUSR1, from its first instruction on: they are
blocked (it inherits the mask of the thread that starts it) until handlers are there that do
nothing. What a data set starts in its turn has neither: a handler ends with exec, and after a fork
it is taken off, so a helper process dies of SIGTERM as anywhere. torch and multiprocessing end a
stuck worker as before: their ``terminate()`` sends it a signal that nobody else sends. A worker
does not outlive its training process (by the kernel's hand; within a second, by its own, if the
processes were started from a thread other than the main one). SIGINT is the training process's
alone to answer.

What can go wrong: a worker stuck in C code that holds the interpreter's lock cannot hear its
training process; :func:`shut_down` ends it with SIGKILL, and so does the kernel when the training
process is killed; but one that leaves without closing its feed waits for such a worker. A signal to
the group reaches a data set's helper processes too, and they die of it; a C library of a data set
may see EINTR where a call is not restarted (``poll``, ``nanosleep``). A thread that a data set
starts while it is unpickled, and what that thread starts, keep the mask. A ``worker_init_fn`` that
sets a handler of its own for these signals has the last word.

Rejected: ignoring the signals (exec hands that on: no helper could be ended); blocking them for
good (so does that), and telling by the sender who means it (which needs them blocked); SIGKILL in
place of torch's SIGTERM (torch would take it for a crash).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any, Final

import torch

from outlast.checkpoint import devices
from outlast.data import generators

logger = logging.getLogger(__name__)

_LEFT: Final = frozenset({signal.SIGTERM, signal.SIGUSR1})  # to the training process
_END: Final = signal.SIGRTMIN + 11  # its training process ends a worker; ``Process.terminate``
_HELD: Final = _LEFT | {_END}
_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 1.0


@contextlib.contextmanager
def signals_held(context: Any = None) -> Iterator[None]:
    """Processes started in this block, by this thread, have SIGTERM, SIGUSR1 and our own blocked.

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
        signal.set_wakeup_fd(-1)  # the training process's, if it has one
        for number in _LEFT:
            # After torch, which set its own as the worker began, to die of SIGTERM.
            signal.signal(number, _leave)
            signal.siginterrupt(number, False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        starter_pid = os.getppid()  # the training process, or the fork server
        if self._parent_is_main_thread:
            _die_with_parent()
        if os.getppid() != starter_pid or not _exists(self._parent_pid):
            os._exit(1)
        devices.Thread(
            target=_answer_end,
            args=(self._parent_pid, starter_pid),
            name="outlast-worker-shield",
            daemon=True,
        ).start()
        _spare_forks()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT)
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


def _leave(number: int, frame: FrameType | None) -> None:
    """A handler: the signal is left to the training process."""


def _spare_forks() -> None:
    """What this process forks without exec dies of the signals too, from its beginning."""
    mine = threading.local()

    def before() -> None:
        mine.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT)

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mine.mask)

    def in_child() -> None:
        for number in _LEFT:
            if signal.getsignal(number) is _leave:
                signal.signal(number, signal.SIG_DFL)
        in_parent()

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


def _answer_end(parent_pid: int, starter_pid: int) -> None:
    while os.getppid() == starter_pid:  # a fork server ends with the process that it serves
        received = signal.sigtimedwait({_END}, _PARENT_CHECK_S)
        if received and received.si_pid == parent_pid:
            os._exit(0)
    os._exit(1)


def start(loader: Any) -> Iterator[Any]:
    """``iter(loader)``; if it is a torch DataLoader that starts processes, they are shielded."""
    if not isinstance(loader, torch.utils.data.DataLoader) or not loader.num_workers:
        return iter(loader)
    iterator: Iterator[Any] = _shielded(loader, lambda: iter(loader))
    return iterator


def _shielded(loader: Any, begin: Callable[[], Any]) -> Any:
    """What ``begin`` gives, an iterator of ``loader`` that starts its processes."""
    user_init = loader.worker_init_fn
    loader.worker_init_fn = ShieldedInit(user_init)
    try:
        with signals_held(loader.multiprocessing_context):
            iterator = begin()
    finally:
        loader.worker_init_fn = user_init
    for worker in getattr(iterator, "_workers", ()):
        # A worker does not die of the SIGTERM that torch and multiprocessing would send.
        worker._popen.terminate = functools.partial(_end, weakref.ref(worker._popen))
    return iterator


def _end(process: Callable[[], Any]) -> None:
    started = process()
    if started is not None:
        started._send_signal(_END)


class Cover:
    """While open, the processes of each torch DataLoader that begins to be iterated are shielded.

    It is noted from which random numbers it begins (``generators.py``).

    Those that a script iterates itself, for an evaluation, and those of loaders that are made on
    top of torch's. Iterators that are there already stay as they are.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._put: list[tuple[Any, Any, Any]] = []  # class, its own method, ours

    def open(self) -> None:
        """From now on."""
        self._is_open = True
        for kind in _kinds(torch.utils.data.DataLoader):
            own = vars(kind)["_get_iterator"]
            ours = self._covering(own)
            kind._get_iterator = ours
            self._put.append((kind, own, ours))

    def close(self) -> None:
        """No more; iterators that were made meanwhile stay shielded."""
        self._is_open = False
        while self._put:
            kind, own, ours = self._put.pop()
            if vars(kind).get("_get_iterator") is ours:  # else somebody put theirs on top: it stays
                kind._get_iterator = own

    def _covering(self, own: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(own)
        def _get_iterator(loader: Any) -> Any:
            is_done = isinstance(loader.worker_init_fn, ShieldedInit)
            begin = functools.partial(own, loader)
            if not self._is_open:
                return begin()
            if is_done or not loader.num_workers:
                return generators.noted(loader, begin)
            return generators.noted(loader, lambda: _shielded(loader, begin))

        return _get_iterator


def _kinds(kind: Any) -> list[Any]:
    """The class and those derived from it that make their iterators themselves."""
    found = [kind] if "_get_iterator" in vars(kind) else []
    for derived in kind.__subclasses__():
        found += [one for one in _kinds(derived) if one not in found]
    return found


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
