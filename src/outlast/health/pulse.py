"""Say five times a second that Python runs, and have the stack shown to those who ask for it.

The pulse is a thread beside the training. It runs in each worker of our agent, also of scripts that
know nothing of outlast, and says what the training thread does not: how many collectives were
begun, how many times an optimizer has updated weights, whether the session's model is in evaluation
mode. A pulse that does not come from a living process is evidence in itself: it is stopped, or one
thread keeps the interpreter for itself.

It never imports anything that the script has not imported, and never keeps a process alive. Where
the agent asks for it, it writes down what torch's flight recorder has (as JSON, never as a pickle).

What can go wrong: for the microseconds of a look it holds a process group that is just being
destroyed. Whoever takes groups down in a running process does so ``held_back``.

``be_ready`` is called once, before the script. From then on a signal is answered by
``faulthandler``, from C: also while another thread keeps the interpreter. Where the kernel only
lets a process be looked into by those that it has named (Yama), the agent is named, and with it
what the agent starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from outlast.attempt.beat import BEATS_VARIABLE, Beat, beat_path

SIGNAL: Final = signal.SIGRTMAX - 3  # nobody else is known to use it
TRACER_VARIABLE: Final = "OUTLAST_TRACER"  # process id of the agent, set by it
_PR_SET_PTRACER: Final = 0x59616D61


def stacks_path(directory: Path, local_rank: int) -> Path:
    """Where faulthandler answers."""
    return directory / f"stacks-{local_rank}"


def be_ready() -> None:
    """Answer from now on, where an agent listens."""
    directory = os.environ.get(BEATS_VARIABLE)
    if not directory:
        return
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # it is then not answered
        path = stacks_path(Path(directory), int(os.environ.get("LOCAL_RANK", "0")))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        tracer = int(os.environ.get(TRACER_VARIABLE, "0"))
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(tracer), 0, 0, 0)


EVERY_S: Final = 0.2
TIMEOUT_VARIABLE: Final = "OUTLAST_COLLECTIVE_TIMEOUT_S"  # set by our agent
RECORDER_VARIABLE: Final = "TORCH_FR_BUFFER_SIZE"
RECORDED: Final = "64"  # collectives; a recorder is there to say what the last ones were
_ASK: Final = "recorder-ask"
_model: list[weakref.ref[Any]] = []  # at most one
_trains = threading.Event()  # that model was seen in training mode
_looking = threading.Lock()


def ask_path(directory: Path) -> Path:
    """A file that is touched when flight recorders are to be written down."""
    return directory / _ASK


def recorder_path(directory: Path, local_rank: int) -> Path:
    """Where a worker writes what its flight recorder has."""
    return directory / f"recorder-{local_rank}"


def watch_model(model: Any) -> None:
    """Take this for the training's model: in evaluation mode, what is done with it takes its time.

    One, and not all that a session has: a teacher is in evaluation mode for good. Should it be just
    the one that was taken, it says nothing: only a model that was seen to train can evaluate.
    """
    _trains.clear()
    with contextlib.suppress(TypeError):
        _model[:] = [] if model is None else [weakref.ref(model)]
    _evaluates()


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Within, no process group is looked at."""
    with _looking:
        yield


def start() -> None:
    """Begin, where an agent listens; in a worker, before its script."""
    directory = os.environ.get(BEATS_VARIABLE)
    if directory:
        os.environ.setdefault(RECORDER_VARIABLE, RECORDED)
        _give_torch_our_timeout()
        pulse = _Pulse(Path(directory))
        pulse.first()
        threading.Thread(target=pulse.run, name="outlast-pulse", daemon=True).start()


class _Pulse:
    def __init__(self, directory: Path) -> None:
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._recorder = recorder_path(directory, rank)
        # As text: looked at five times a second.
        self._ask = str(ask_path(directory))
        self._place = str(beat_path(directory, rank))
        self._beat = Beat()
        self._seen = _identity(self._place)
        self._updates = 0
        self._is_hooked = self._has_timeout = False
        self._asked = 0.0

    def first(self) -> None:
        """At once: a warm worker may be in its first steps, and end in them, before the next."""
        self._beat.pulse()
        self._is_hooked = self._hook()

    def run(self) -> None:
        while True:  # a daemon: it ends with its process
            time.sleep(EVERY_S)
            try:
                self._once()
            except Exception:  # noqa: BLE001 - what observes never stops training
                time.sleep(10 * EVERY_S)

    def _once(self) -> None:
        if _identity(self._place) != self._seen:  # another attempt, in the same process
            self._beat = Beat()
            self._seen = _identity(self._place)
        with _looking:
            begun = _begun()
        self._beat.pulse(begun, is_evaluating=_evaluates())
        if not self._is_hooked:
            self._is_hooked = self._hook()
        if not self._has_timeout:
            self._has_timeout = _give_torch_our_timeout()
        self._record()

    def _hook(self) -> bool:
        torchs = sys.modules.get("torch.optim.optimizer")
        register = getattr(torchs, "register_optimizer_step_post_hook", None)
        if register is None:
            return False
        register(self._updated)
        return True

    def _updated(self, *_: Any) -> None:
        """In the training thread, after an optimizer's step."""
        self._updates += 1
        self._beat.updates(self._updates)

    def _record(self) -> None:
        try:
            asked = os.stat(self._ask).st_mtime  # noqa: PTH116 - see there
        except OSError:
            return
        if asked == self._asked:
            return
        self._asked = asked
        torchs = sys.modules.get("torch._C._distributed_c10d")
        dump = getattr(torchs, "_dump_fr_trace_json", None)
        if dump is not None:
            unfinished = self._recorder.with_suffix(".tmp")
            unfinished.write_bytes(dump(includeCollectives=True, onlyActive=False))
            unfinished.replace(self._recorder)


def _begun() -> int:
    """Collectives begun in all groups of this process; -1 without groups."""
    torchs = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(torchs, "_world", None)
    if world is None or not world.pg_map:
        return -1
    total = 0
    for group in list(world.pg_map):
        with contextlib.suppress(Exception):  # its backend does not count
            total += group._get_sequence_number_for_group()
    return total


def _evaluates() -> bool:
    modes = [getattr(ref(), "training", None) for ref in list(_model)]
    if True in modes:
        _trains.set()
    return _trains.is_set() and False in modes


def _give_torch_our_timeout() -> bool:
    """Have groups that are made without a time-out of their own end theirs behind our limits."""
    given = os.environ.get(TIMEOUT_VARIABLE)
    torchs = sys.modules.get("torch.distributed.distributed_c10d")
    if given is None or not hasattr(torchs, "_get_default_timeout"):
        return given is None
    ours = timedelta(seconds=float(given))
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        theirs = getattr(torchs, name, None)
        # Never a shorter one: others may wait for a rank that downloads before the loop.
        if isinstance(theirs, timedelta) and theirs < ours:
            setattr(torchs, name, ours)
    return True


def _identity(place: str) -> int:
    try:
        return os.stat(place).st_ino  # noqa: PTH116 - five times a second
    except OSError:
        return 0
