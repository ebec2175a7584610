"""Hold back writers that go past the version counters, until what they would change is copied.

A tensor's version counter tells of a change, unless the writer goes past it: through ``.data``, a
NumPy or DLPack view, torch's fused kernels, its foreach kernels on spread tensors, a CUDA graph.
All of them need either another tensor or array over the same memory, or one of a few functions of
torch. A capture looks for the former at the boundary (``held_by_others``). For the latter, until
the copy is whole, a thread that asks for a new way in, or calls one of those functions on memory
that is being copied, has to wait (``hold_back``), as the optimizer's step does.

Graphs are looked after as long as somebody watches them, not only while something is copied: an
optimizer's step inside of one moves no counter and calls no hook. No graph is captured while a
device still copies: what a capture waits for, or what comes onto its stream, would become part of
it.

What can go wrong: native code that has kept an address from before (``data_ptr()``), an alias of a
spread tensor that is written past the counter, and compiled code that writes through ``.data``:
torch puts the counter back behind it.
Rejected: a TorchDispatchMode for that time (microseconds for each operation, and compiled code is
compiled anew); write-protected pages (userfaultfd: 28 ms for each GiB at the boundary, and not in
most containers); torch's copy-on-write storage (reading through ``data_ptr()`` moves the memory).
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch

from outlast.checkpoint.devices import Thread
from outlast.checkpoint.tensors import is_spread, is_subclass, memories

if TYPE_CHECKING:
    from outlast.checkpoint.capture import Capture

OWN_THREADS: Final = "outlast-"
_ALL: Final = 1 << 10  # of a function's arguments


class _HeldBack:
    """The capture that is waited for: one at a time, as there is one torch."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.copying: weakref.ref[Capture] | None = None
        self.pid = 0  # a process that is forked meanwhile has the functions, and no copiers
        self.addresses: frozenset[int] | None = None  # of its memory, once somebody has asked
        self.watchers: list[Callable[[], None]] = []  # told of each graph that is replayed
        self.graphs: list[tuple[Any, str, Any]] = []  # what was of CUDAGraph's before

    def now(self) -> Capture | None:
        """The capture, if there is one."""
        reference = self.copying
        return None if reference is None or self.pid != os.getpid() else reference()


_held: Final = _HeldBack()


def hold_back(copying: Capture) -> None:
    """From here on, whoever finds a way past the counters waits until ``copying`` is over."""
    with _held.lock:
        _held.copying, _held.addresses = weakref.ref(copying), None
        _held.pid = os.getpid()
        for owner, name, patched in _patched():
            setattr(owner, name, patched)
        _look_after_graphs()


def let_go(copying: Capture) -> None:
    """``copying`` is over: torch's functions are its own again."""
    with _held.lock:
        if _held.now() is not copying:
            return
        _held.copying = _held.addresses = None
        for owner, name, original, is_own in _originals():
            if is_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
        _look_after_graphs()


def watch_graphs(on_replay: Callable[[], None]) -> Callable[[], None]:
    """Have ``on_replay`` called ahead of each replay of a CUDA graph, until what is returned is."""
    with _held.lock:
        _held.watchers = [*_held.watchers, on_replay]
        _look_after_graphs()

    def leave() -> None:
        with _held.lock:
            _held.watchers = [one for one in _held.watchers if one is not on_replay]
            _look_after_graphs()

    return leave


def _look_after_graphs() -> None:
    """Put our functions into CUDAGraph while somebody needs them; the lock is held."""
    is_needed = bool(_held.watchers) or _held.copying is not None
    if is_needed and not _held.graphs:
        for name, make in (("replay", _replay), ("capture_begin", _capture_begin)):
            # At the root: a method that was bound before calls what is there now.
            kinds = [kind for kind in torch.cuda.CUDAGraph.__mro__ if name in vars(kind)]
            if kinds:
                owner = kinds[-1]
                _held.graphs.append((owner, name, vars(owner)[name]))
                setattr(owner, name, make(getattr(owner, name)))
    elif not is_needed:
        graphs, _held.graphs = _held.graphs, []
        for owner, name, original in graphs:
            setattr(owner, name, original)


def wait_for_copies() -> None:
    """Whoever will change what is copied, other than by an optimizer's step, waits until it is."""
    copying = _held.now()
    if copying is not None:
        _wait_for(copying)


def _pass(values: Iterable[Any]) -> None:
    """Before anything is done with these: the copy of what they lie in comes first."""
    copying = _held.now()
    if copying is None or copying.is_confirmed:
        return
    if threading.current_thread().name.startswith(OWN_THREADS):
        return
    if any(_is_copied(value, copying) for value in values):
        _wait_for(copying)


def _wait_for(copying: Capture) -> None:
    """Have it copied in a thread of its own, where none of this thread's modes is on.

    While torch compiles, it runs the script's lines under modes in which a copy copies nothing, and
    ``torch.func``'s transforms take no copy to what was there before them.
    """
    if not copying.is_confirmed:
        thread = Thread(target=copying.help, name=f"{OWN_THREADS}copy-ahead", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: this save is lost, and training goes on
            copying.error = error
        else:
            thread.join()
    copying.wait()


def _is_copied(value: Any, copying: Capture) -> bool:
    if isinstance(value, list | tuple):
        return any(_is_copied(one, copying) for one in value)
    try:
        found = list(_memory_of(value))
        known = _held.addresses
        if found and known is None:
            known = frozenset(one.data_ptr() for one in copying.storages())
            _held.addresses = known
        return any(one.data_ptr() in (known or ()) for one in found)
    except (RuntimeError, NotImplementedError):  # it does not say
        return True


def _memory_of(value: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(value, torch.UntypedStorage):
        yield value
    elif isinstance(value, torch.storage.TypedStorage):
        yield value._untyped_storage
    elif isinstance(value, torch.Tensor) and not _is_elsewhere(value):
        if is_spread(value) or is_subclass(value):
            for one in memories(value):
                yield torch.Tensor.untyped_storage(one)
        else:
            yield torch.Tensor.untyped_storage(value)


def _is_elsewhere(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_meta or tensor.layout != torch.strided)


def _function(original: Any, count: int) -> Any:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        _pass([*args, *kwargs.values()][:count])
        return original(*args, **kwargs)

    return patched


def _attribute(original: Any) -> property:
    def get(self: Any) -> Any:
        _pass((self,))
        return original.__get__(self)

    def put(self: Any, value: Any) -> None:
        original.__set__(self, value)

    return property(get, put)


def _replay(original: Any) -> Any:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        for on_replay in _held.watchers:
            on_replay()
        copying = _held.now()  # a graph writes wherever it wrote when it was captured
        if copying is not None:
            _wait_for(copying)
        return original(*args, **kwargs)

    return patched


def _capture_begin(original: Any) -> Any:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        copying = _held.now()
        if copying is not None:
            _wait_for(copying)
            copying.wait_for_devices()
        return original(*args, **kwargs)

    return patched


@functools.cache
def _originals() -> list[tuple[Any, str, Any, bool]]:
    """(owner, name, what it is, whether it is the owner's own) of all ways past the counters."""
    names: list[tuple[Any, str]] = [
        (torch.Tensor, name)
        for name in (
            *("data", "numpy", "__array__", "__dlpack__", "__cuda_array_interface__"),
            *("set_", "resize_", "resize_as_"),
        )
    ]
    names += [(torch.UntypedStorage, n) for n in ("resize_", "fill_", "copy_", "__setitem__")]
    names += [(torch, "to_dlpack"), (torch.utils.dlpack, "to_dlpack")]
    names += [
        (torch, name)
        for name in dir(torch)
        if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")) and name.endswith("_")
    ]
    return [
        (owner, name, getattr(owner, name), name in vars(owner))
        for owner, name in names
        if hasattr(owner, name)
    ]


@functools.cache
def _patched() -> list[tuple[Any, str, Any]]:
    made = []
    for owner, name, original, _ in _originals():
        if not callable(original):
            new = _attribute(original)
        else:
            # What is changed, or lent, is the first argument; fused kernels change several, and
            # ``set_`` gives the first one the memory of the second.
            takes_all = name == "set_" or name.startswith("_fused_")
            new = _function(original, _ALL if takes_all else 1)
        made.append((owner, name, new))
    return made
