"""This process' process groups: broken where a loss has them wait, and made again without it.

Three things are done to them here, all of them from outside of torch:

**Broken.** A collective on gloo that waits for a rank that is gone ends in ``abort`` as little as
in anything else that torch has for it: only at its time-out. What ends it within a millisecond is
shutting down the connections that it waits on. Those are the connections that were opened while
torch made the groups, and those to the attempt's own store; each is known by its inode, so that
nothing else that has got its number since is touched. NCCL's communicators are aborted, in a
thread: what waits for them on a GPU ends within 0.15 s, and the abort itself within 0.6 s.

At first only their reading ends: gloo's own thread then closes them. Where a write fails before
that thread has noticed, gloo (of torch 2.13) loses the operation that was about to be posted, and
who waits for it waits for the whole time-out. A peer's death can lead to that too, but seldom.

**Made again.** The default group is taken down and asked for again, as the script had asked for it;
what the next attempt's environment says is who is in it. The script's DDP objects stay: each gets
another reducer, by what torch itself does where one is unpickled. A group of NCCL that was aborted
is forgotten and not shut down: that waits for torch's watchdog, which sleeps for a minute where a
peer has closed its connections.

**Rehearsed.** A worker that joins others who live goes through its script's beginning by itself, in
a group that says its rank and the number of workers and carries nothing (torch's ``fake``); it is
made a real one where its session opens. That is right where nothing but the wrappers of models
speaks to other ranks before: what is counted, in each process that had a real one.

A group that waits for a rank to connect to it that is gone has nothing that could be shut down. So
groups are made in a thread of their own, which is left behind where the attempt is over: it ends at
its time-out.

What can go wrong: another thread of the script that connects somewhere in the milliseconds in which
a group is made has that connection taken for the group's.
Rejected: torch 2.15's ``enable_reconfigure``, which keeps the group's object (it is experimental,
holds on to the store of the first attempt, and knows no rehearsal; this does the same on every
torch); a gathering of those who live before anybody may begin (a loss would cost them a vote).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from outlast.attempt.link import STORE_VARIABLE, connect, kept_key
from outlast.attempt.over import STANDBY_VARIABLE, over
from outlast.attempt.subgroups import Subgroups
from outlast.checkpoint import devices
from outlast.reduce import losses

logger = logging.getLogger(__name__)

_DESCRIPTORS: Final = Path("/proc/self/fd")
_HELPER: Final = "_new_process_group_helper"  # what makes each group, in torch's c10d
_DEFAULT: Final = "default_pg"  # what torch calls the default one
_FAKE: Final = "fake"
# Since torch 2.15 "nccl" is the second one, which knows no pieces of several aborts.
_NCCL: Final = ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy")
# What torch is told where groups of NCCL are to be broken and made again: it would end the process
# for what an abort does to pending work, and write down what all ranks have sent and end them where
# one has lost a peer. It reads them where a group is made, and an agent sets the first otherwise in
# what each attempt brings.
_OF_NCCL: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_FR_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
_REGISTER: Final = "_register_pg_in_world"  # which has torch know of a group that was made
# What a DDP object remembers of its reducer: a new one has all of it before itself. Without the
# first, a static graph would never be summed again.
_OF_A_REDUCER: Final = {
    "_static_graph_delay_allreduce_enqueued": False,
    "_has_rebuilt_buckets": False,
    "require_forward_param_sync": True,
}
KEPT_S: Final = 600.0  # until all machines have said how many workers of theirs go on
LOOK_S: Final = 0.005  # from one group to the next, where the attempt is over meanwhile
LEFT: Final = "connection closed: the attempt is over before its groups were made"
_here = threading.local()  # in the threads that make groups: for which joining
_held: list[Any] = []  # groups of a worker that is about to end


class _GroupArguments(NamedTuple):
    """How the script has asked for its default group."""

    backend: str
    options: Any
    timeout: timedelta | None
    device_id: torch.device | None


class Groups:
    """The groups of this process, from before the first one is made to its end.

    Attributes:
        is_rehearsal: whether the default group is one that carries nothing.
        skips_barriers: whether those of the script are left out: others have passed them.
        num_barriers: how many were sent.
    """

    def __init__(self) -> None:
        self.is_rehearsal = self.skips_barriers = False
        self.num_barriers = 0
        self._lock = threading.Lock()
        self._opened: dict[int, int] = {}  # descriptor → inode
        self._before: dict[int, int] | None = None  # while a group is being made
        self._stores: set[tuple[str, int]] = set()
        self._aborted = False
        self._num_joined = 0
        self._is_there = False  # the group that is being joined: torch is about to know of it
        self._made: list[Any] = []  # also those that the script has destroyed itself
        self._asked: _GroupArguments | None = None
        self._others = Subgroups()
        self._num_defaults = 0
        self._wrappers: list[weakref.ref[Any]] = []  # DDP objects, in the order of their making
        self._excused = 0  # collectives that a rehearsal may leave out
        self._is_watched = False
        self._undo: list[Callable[[], None]] = []
        self._states: list[tuple[Any, dict[str, Any]]] = []  # of DDP objects without a reducer

    # --- watching -------------------------------------------------------------------------------

    def watch(self) -> None:
        """From here on groups that are made, and DDP objects, are noted."""
        if self._is_watched or not dist.is_available():
            return
        self._is_watched = True
        c10d: Any = dist.distributed_c10d
        self._replace(c10d, _HELPER, self._making)
        if hasattr(c10d, _REGISTER):
            self._replace(c10d, _REGISTER, self._registering)
        self._replace(torch.nn.parallel.DistributedDataParallel, "__init__", self._wrapping)
        self._replace(c10d, "barrier", self._excusing)
        self._replace(dist, "barrier", lambda _: c10d.barrier)
        losses.beginning.append(self.excused)
        self._undo.append(lambda: losses.beginning.remove(self.excused))

    def unwatch(self) -> None:
        """As before."""
        while self._undo:
            self._undo.pop()()
        self._is_watched = False

    def _replace(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, around(original))
        self._undo.append(lambda: setattr(owner, name, original))

    def _making(self, make: Any) -> Any:
        @functools.wraps(make)
        def making(*args: Any, **options: Any) -> Any:
            os.environ.update(_OF_NCCL)
            joins = hasattr(_here, "number")
            if options.get("group_desc") == _DEFAULT and not joins:
                self._num_defaults += 1
                self._excused, self._others, self._wrappers = 0, Subgroups(), []
                self._asked = _GroupArguments(
                    str(args[3]),
                    options.get("backend_options"),
                    options.get("timeout"),
                    options.get("device_id"),
                )
                if others_live():
                    self.is_rehearsal = True
                    importlib.import_module("torch.testing._internal.distributed.fake_pg")
                    options |= {"backend_options": None, "device_id": None}
                    return make(*args[:3], _FAKE, *args[4:], **options)
            elif not joins:
                return self._making_other(make, args, options)
            return self._noted(lambda: make(*args, **options))

        return making

    def _making_other(self, make: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self.is_rehearsal:
            args = *args[:3], _FAKE, *args[4:]
            made = make(*args, **options | {"backend_options": None, "device_id": None})
        else:
            made = self._noted(lambda: make(*args, **options))
        self._others.note(args, options, made)
        return made

    def _registering(self, register: Any) -> Any:
        """One that was left behind takes no name that the next one will have."""

        @functools.wraps(register)
        def registering(*args: Any, **options: Any) -> Any:
            with self._lock:
                if getattr(_here, "number", self._num_joined) != self._num_joined:
                    raise ConnectionError(LEFT)
                self._is_there = True
            return register(*args, **options)

        return registering

    def _noted(self, make: Callable[[], Any]) -> Any:
        """A group is made, and the connections that are opened for it are noted."""
        number = getattr(_here, "number", self._num_joined)
        with self._lock:
            if number != self._num_joined:
                raise ConnectionError(LEFT)
            self._stores |= _stores()
            self._before = _sockets()
        try:
            made = make()
        finally:
            with self._lock:
                is_wanted = number == self._num_joined
                if is_wanted:
                    self._is_there = True
                    self._opened |= self._new()
                    self._before = None
        if not is_wanted:
            _forget(made)
            raise ConnectionError(LEFT)
        self._made.append(made)
        return made

    def _wrapping(self, make: Any) -> Any:
        @functools.wraps(make)
        def wrapping(ddp: Any, *args: Any, **options: Any) -> None:
            with self.excused():
                make(ddp, *args, **options)
            self._wrappers.append(weakref.ref(ddp))

        return wrapping

    def _excusing(self, call: Any) -> Any:
        @functools.wraps(call)
        def excusing(*args: Any, **options: Any) -> Any:
            is_awaited = not options.get("async_op") and not any(args[1:2])
            if self.skips_barriers and is_awaited:
                return None
            before = num_sent()
            with self.excused():
                made = call(*args, **options)
            self.num_barriers += (num_sent() - before) * is_awaited
            return made

        return excusing

    @contextlib.contextmanager
    def excused(self) -> Iterator[None]:
        """Within, what is sent need not be where a beginning is rehearsed: all have it alike."""
        before = num_sent()
        try:
            yield
        finally:
            self._excused += num_sent() - before

    # --- whether they can be made again ---------------------------------------------------------

    def why_not(self) -> str:
        """Why the groups could not be made again without the script; "" if they can.

        To be asked once, where the session opens.
        """
        if name := lacking():
            return f"torch {torch.__version__} has no {name}"
        c10d: Any = dist.distributed_c10d
        if not self._is_watched:
            return "its process groups were not seen to be made"
        if self._asked is None or not dist.is_initialized():
            return "it has no process group of torch's"
        if c10d._default_pg_init_method != "env://" or self._num_defaults > 1:
            return "its process group is not made from the environment alone"
        if why_not := self._others.why_not(self._made):
            return why_not
        if any(one.process_group is not dist.group.WORLD for one in self._ddp()):
            return "a DDP object has a process group of its own"
        if not self.is_rehearsal and num_sent() > self._excused:
            return "its processes speak to each other before the session opens"
        return ""

    def _ddp(self) -> list[Any]:
        return [one for one in (each() for each in self._wrappers) if one is not None]

    def sent_buffers(self) -> set[int]:
        """Addresses of buffers that DDP objects take from rank 0 before their next forward pass."""
        found = (one.modules_buffers for one in self._ddp() if _sends_buffers(one))
        return {buffer.data_ptr() for buffers in found for buffer in buffers}

    # --- breaking -------------------------------------------------------------------------------

    def break_all(self, *, again: bool) -> None:
        """Let go whatever waits for another rank.

        Args:
            again: it was not enough. What was opened since goes too, and what waits for the
                attempt's store: whoever can leaves it in peace, and torch prints a stack for each
                connection that ends otherwise.
        """
        with self._lock:
            opened = self._opened | self._new()
        for fd, inode in _sockets().items():
            with contextlib.suppress(OSError):
                self._shut_down(fd, inode, is_groups=opened.get(fd) == inode, again=again)
        if not self._aborted:
            self._aborted = True
            if backends := _nccl_backends():
                what = functools.partial(_abort, backends)
                devices.Thread(target=what, name="outlast-abort", daemon=True).start()

    # --- and making again -----------------------------------------------------------------------

    def let_go(self) -> None:
        """Take down the groups of an attempt that is over; DDP objects stay, without a reducer.

        A gloo group that is freed while a reducer holds it too waits for a thread that waits for
        the interpreter's lock: reducers go first. What is still under way in a group that was
        broken ends with it, in a thread that nobody waits for.

        Raises:
            RuntimeError: torch could not.
        """
        for one in self._ddp():
            if "reducer" in vars(one):  # else another loss came before it had one again
                self._states.append((one, _state_of(one)))
                del one.reducer, one.logger, one.process_group
        made, self._made = self._made, []
        if dist.is_initialized():
            is_aborted = self._aborted and bool(_nccl_backends())
            with _nothing_shut_down() if is_aborted else contextlib.nullcontext():
                dist.destroy_process_group()
        # One that was not made to its end has taken a name, under which nobody would be met.
        world: Any = dist.distributed_c10d._world
        world.group_count = 0
        self._others.let_go(made)
        freeing = devices.Thread(target=made.clear, name="outlast-free", daemon=True)
        del made
        freeing.start()

    def join(self) -> None:
        """Make the default group that the environment says, and the reducers of DDP objects.

        Raises:
            OSError, RuntimeError: another rank is gone.
        """
        with self._lock:
            self._opened, self._stores, self._aborted = {}, set(), False
            self._before = None
            self._num_joined, self._is_there = self._num_joined + 1, False
            number = self._num_joined
        hook = sys.excepthook  # torch puts another one around it each time
        try:
            making = _GroupCreation(lambda: self._make_default(number))
            while not making.wait_unless_over():
                if self._leave_behind():
                    raise ConnectionError(LEFT)
                time.sleep(LOOK_S)
            making.wait()
        finally:
            sys.excepthook = hook
        self.is_rehearsal = False
        if gone := self._others.replace():
            devices.Thread(target=gone.clear, name="outlast-free", daemon=True).start()
        del gone
        states, self._states = self._states, []
        for one, state in states:
            _make_reducer(one, state)

    def _leave_behind(self) -> bool:
        """The group that is being made is wanted no more, unless it is there already."""
        with self._lock:
            if not self._is_there:
                self._num_joined += 1
            return not self._is_there

    def _make_default(self, number: int) -> None:
        asked, _here.number = self._asked, number
        assert asked is not None  # noqa: S101 - there was one
        device = asked.device_id
        if device is None and asked.backend != "gloo" and torch.cuda.is_initialized():
            # So NCCL connects here, where it can be left behind, and not in the first sum.
            device = torch.device("cuda", devices.own())
        dist.init_process_group(
            asked.backend, timeout=asked.timeout, pg_options=asked.options, device_id=device
        )
        c10d: Any = dist.distributed_c10d

        def make(*args: Any, **options: Any) -> Any:
            with self._lock:  # it can be left behind like the default one
                if number != self._num_joined:
                    raise ConnectionError(LEFT)
                self._is_there = False
            return getattr(c10d, _HELPER)(*args, **options)

        self._others.make(make, asked.backend)

    def hold(self) -> None:
        """The worker is about to end: the groups are left to that."""
        _held.append(self._made)

    def _new(self) -> dict[int, int]:
        """What was opened since a group began to be made; the lock is held."""
        if self._before is None:
            return {}
        before = set(self._before.items())
        return dict(one for one in _sockets().items() if one not in before)

    def _shut_down(self, fd: int, inode: int, *, is_groups: bool, again: bool) -> None:
        with socket.socket(fileno=os.dup(fd)) as sock:
            if os.fstat(sock.fileno()).st_ino != inode:
                return  # the number is another one's by now
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                return
            host, port, *_ = sock.getpeername()  # an OSError where it only listens
            is_store = (host.removeprefix("::ffff:"), port) in self._stores
            if again if is_store else is_groups:
                sock.shutdown(socket.SHUT_RDWR if again else socket.SHUT_RD)


def _forget(group: tuple[Any, Any]) -> None:
    """Have torch know nothing of one that was made too late."""
    world: Any = dist.distributed_c10d._world
    for known in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        known.pop(group[0], None)


class _GroupCreation:
    """Something that is made in a thread, which can be left behind.

    Args:
        make: does it.
    """

    def __init__(self, make: Callable[[], None]) -> None:
        self._make = make
        self._error: Exception | None = None
        self._is_made, self._has_news = threading.Event(), threading.Event()
        devices.Thread(target=self._run, name="outlast-groups", daemon=True).start()

    def _run(self) -> None:
        try:
            self._make()
        except Exception as error:  # noqa: BLE001 - raised where it was asked for
            self._error = error
        self._is_made.set()
        self._has_news.set()

    def wait_unless_over(self) -> bool:
        """Whether it has come to its end; returns as soon as the attempt is over, too."""
        over.watch(self._has_news.set)
        try:
            self._has_news.wait()
        finally:
            over.unwatch(self._has_news.set)
        return self._is_made.is_set()

    def wait(self) -> None:
        """Wait for its end.

        Raises:
            OSError, RuntimeError: what it has raised.
        """
        self._is_made.wait()
        if self._error is not None:
            raise self._error


def _sockets() -> dict[int, int]:
    found = {}
    for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208 - quick
        with contextlib.suppress(OSError, ValueError):
            target = os.readlink(_DESCRIPTORS / name)  # noqa: PTH115
            if target.startswith("socket:["):
                found[int(name)] = int(target[8:-1])
    return found


def _stores() -> set[tuple[str, int]]:
    """Addresses of the attempt's store: no other attempt, and nothing else, is served there."""
    given = os.environ.get(STORE_VARIABLE, "")
    host, _, port = given.rpartition(":")
    if not port.isdigit():
        return set()
    with contextlib.suppress(OSError):
        kind = socket.SOCK_STREAM
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=kind)
        return {(str(address[0]), int(port)) for *_, address in found}
    return set()


@contextlib.contextmanager
def _nothing_shut_down() -> Iterator[None]:
    """Within, torch forgets groups that it destroys, and shuts none of them down."""
    kind: Any = dist.ProcessGroup
    original = vars(kind)["shutdown"]
    kind.shutdown = lambda _: None
    try:
        yield
    finally:
        kind.shutdown = original


def _nccl_backends() -> list[Any]:
    """Those of all groups, the newest first."""
    c10d: Any = dist.distributed_c10d
    kinds = tuple(getattr(c10d, name) for name in _NCCL if hasattr(c10d, name))
    found = []
    for group in sorted(c10d._world.pg_names, key=c10d._world.pg_names.get, reverse=True):
        with contextlib.suppress(RuntimeError):  # it has none for GPUs
            backend = group._get_backend(torch.device("cuda"))
            if isinstance(backend, kinds):
                found.append(backend)
    return found


def _abort(backends: list[Any]) -> None:
    """As torch's own ``_abort_process_group``, without forgetting the groups meanwhile."""
    # In one piece, or the communicators' aborts may wait for each other (pytorch#119797).
    first = next((one for one in backends if hasattr(one, "_group_start")), None)
    if first is not None:
        first._group_start()
    for backend in backends:
        backend.abort()
    if first is not None:
        first._group_end()


def num_sent() -> int:
    """Collectives that this process has had a part in, of all of its groups."""
    if not dist.is_initialized():
        return 0
    c10d: Any = dist.distributed_c10d
    found = 0
    for group in c10d._world.pg_names:
        try:  # twice a step: a context would take twice the time  # noqa: SIM105
            found += group._get_sequence_number_for_group()
        except RuntimeError:  # a backend that does not count
            pass
    return found


def others_live() -> bool:
    """Whether workers of the attempt before go on in this one, on any machine."""
    if os.environ.get(STANDBY_VARIABLE):
        return True
    address = os.environ.get(STORE_VARIABLE, "")
    host, _, port = address.rpartition(":")
    machines = range(int(os.environ.get("GROUP_WORLD_SIZE", "0")))
    if not port.isdigit() or not machines:
        return False
    keys = [kept_key(machine) for machine in machines]
    store = connect(host, int(port), timedelta(seconds=KEPT_S))
    return any(int(value) for value in store.multi_get(keys))


def lacking() -> str:
    """What this torch does not have of what groups are made again with; "" for nothing."""
    if not dist.is_available():
        return "torch.distributed"
    c10d: Any = dist.distributed_c10d
    ddp = torch.nn.parallel.DistributedDataParallel
    wanted = [
        *((c10d, name) for name in (_HELPER, "_world", "_default_pg_init_method")),
        *((ddp, name) for name in ("_pre_forward", "_post_forward", "__getstate__")),
        *((dist.ProcessGroup, name) for name in ("_get_sequence_number_for_group", "shutdown")),
    ]
    return next((name for owner, name in wanted if not hasattr(owner, name)), "")


def _state_of(ddp: Any) -> dict[str, Any]:
    state: dict[str, Any] = ddp.__getstate__()
    return state


def _sends_buffers(ddp: Any) -> bool:
    """As torch decides it, for rank 0's buffers alone and with nothing of the script's between."""
    is_other = hasattr(ddp, "buffer_hook") or ddp._join_config.enable
    names = "_use_python_reducer", "_delay_all_reduce_all_params"  # then a forward pass sends none
    is_other |= any(getattr(ddp, name, False) for name in names)
    return bool("reducer" in vars(ddp) and not is_other and ddp.will_sync_module_buffers())


def _make_reducer(ddp: Any, state: dict[str, Any]) -> None:
    """As where one is unpickled, with the communication hooks that it had."""
    hooks = [*state.get("_comm_hooks", ())]
    ddp.__setstate__(state)
    for name, value in _OF_A_REDUCER.items():
        if hasattr(ddp, name):
            setattr(ddp, name, value)
    ddp._comm_hooks = []
    for hook, about in hooks:
        ddp.register_comm_hook(about, hook)


groups = Groups()  # of this process
