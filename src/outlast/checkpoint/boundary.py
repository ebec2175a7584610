"""Remember pieces as they were at a step boundary, and notice or delay every change until the copy.

A capture leaves a tensor for later because nothing but an optimizer's step is to change it. Most
pieces are the same tensors in the same place from one capture to the next (``Remembered``). Then
only what can differ is taken anew, their versions and some of their bytes; with hundreds of tensors
that is what a step boundary costs. What else they are (dtype, shape) is looked at behind the loop's
back, before anything is copied.

A tensor's version counter tells of a change, unless the writer goes past it: through ``.data``, a
NumPy or DLPack view, torch's fused kernels, its foreach kernels on spread tensors, a CUDA graph.
All of them need either another tensor or array over the same memory, or one of a few functions of
torch. So the boundary looks for other holders of the memory (``held_by_others``): memory that
others hold, or that is not torch's own, is copied at once. And until the copy is whole, a thread
that asks for a new way in, or calls one of those functions on memory that is being copied, has to
wait (``hold_back``), as the optimizer's step does.

Graphs are looked after as long as somebody watches them, not only while something is copied: an
optimizer's step inside of one moves no counter and calls no hook. No graph is captured while a
device still copies: what a capture waits for, or what comes onto its stream, would become part of
it.

What can go wrong: native code that has kept an address from before (``data_ptr()``), an alias of a
spread tensor that is written past the counter, and compiled code that writes through ``.data``:
torch puts the counter back behind it.
Rejected: a TorchDispatchMode for that time (microseconds for each operation, and compiled code is
compiled anew); write-protected pages (userfaultfd: 28 ms for each GiB at the boundary, and not in
most containers); torch's copy-on-write storage (reading through ``data_ptr()`` moves the memory);
hashing at the boundary (100 ms for each GiB).
"""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

import numpy as np
import torch

from outlast.checkpoint.devices import Thread
from outlast.checkpoint.plan import KIND, DigestCheck, Write, WritePlan
from outlast.checkpoint.tensors import PLAIN, is_spread, is_subclass, memories, span, view
from outlast.errors import ConfigError

# --- pieces at the boundary -----------------------------------------------------------------------

_SAMPLE_BYTES: Final = 32
_NUM_BYTES: Final = operator.attrgetter("nbytes")
_VERSION: Final = operator.attrgetter("_version")

# A piece of work: where some bytes of one source start in the file, all within one block of it, and
# how many they are.
Item = tuple["TensorPiece", int, int]


class TensorPiece:
    """One piece as it was at the boundary, and what has become of its copy."""

    __slots__ = (
        *("address", "at", "hasher", "num_parts", "parts_left", "sampled"),
        *("outer", "outer_version", "tensor", "version", "windows", "write"),
    )

    def __init__(
        self, write: Write | DigestCheck, tensor: torch.Tensor, outer: torch.Tensor | None = None
    ) -> None:
        self.write = write
        self.tensor = tensor
        # A spread tensor counts for itself: what goes through it moves no counter of its part.
        self.outer = outer
        self.outer_version = 0 if outer is None else outer._version
        self.version = 0 if tensor.is_inference() else tensor._version
        self.num_parts = self.parts_left = 1
        self.windows: list[Any] = []  # its first and last bytes, where they lie
        self.sampled: bytes | None = None  # what was there at the boundary, from ``at`` on
        self.at = 0
        self.hasher: Any = None  # of what goes through a ring, where it does not stay
        # Where the bytes lie as they are stored; 0 where they do not.
        self.address = 0
        if (
            tensor.is_cpu
            and tensor.dtype == write.dtype
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
        ):
            self.address = tensor.data_ptr()

    @property
    def key(self) -> str:
        """One word for the piece."""
        return self.write.piece.key

    def take_sample(self) -> None:
        """Remember some bytes, to see whether they are those that were copied."""
        tensor = self.tensor
        size = tensor.nbytes
        if not size or not tensor.is_cpu:
            return
        if self.address:
            count = size if size < _SAMPLE_BYTES else _SAMPLE_BYTES
            first, last = self.address, self.address + size - count
        else:  # strided: the first and the last element
            count = tensor.element_size()
            first = tensor.data_ptr()
            last = first + count * (span(tensor.shape, tensor.stride()) - 1)
        at = _array(count).from_address  # ctypes.string_at takes ten times as long
        self.windows = [at(first), at(last)]
        self.sampled = b"".join(self.windows)

    def has_changed(self) -> bool:
        """Whether the tensor is not what it was at the boundary, as far as can be told."""
        tensor = self.tensor
        if not tensor.is_inference() and tensor._version != self.version:
            return True
        if self.outer is not None and self.outer._version != self.outer_version:
            return True
        return self.sampled is not None and b"".join(self.windows) != self._sample()

    def was_copied_late(self, target: int) -> bool:
        """Whether what lies at ``target`` is not the piece as it was at the boundary."""
        if self.sampled is None or not self.address:
            return False
        first, last = self.windows
        count, last_at = len(first), ctypes.addressof(last) - ctypes.addressof(first)
        at = _array(count).from_address
        return at(target).raw + at(target + last_at).raw != self._sample()

    def _sample(self) -> bytes:
        assert self.sampled is not None  # noqa: S101 - whoever asks has looked
        return self.sampled[self.at : self.at + 2 * len(self.windows[0])]


class Remembered:
    """The sources of the capture before, to be used again where nothing has moved.

    Only one capture at a time may hold them.
    """

    def __init__(self) -> None:
        self.sources: list[TensorPiece] = []
        self.items: list[Item] = []
        self._plan: WritePlan | None = None
        self._lazy: Collection[str] = ()
        self._get: Any = None
        self.rest: list[Write] = []  # what is copied at once
        self._names: list[str] = []  # of all tensors
        self._kinds: list[Any] = []  # of the sources' tensors
        self._others: list[tuple[str, Any]] = []  # name and kind of those that are no sources
        self._addresses: list[int] = []
        self._sizes: list[int] = []
        self._windows: list[list[Any]] = []
        self._held: tuple[torch.Tensor, ...] = ()
        self._memory: list[torch.UntypedStorage] = []
        self._counts: list[int] = []  # how many hold each memory, if nobody else does
        self._versions: list[int] = []
        self._sampled = b""

    def keep(
        self,
        plan: WritePlan,
        lazy: Collection[str],
        tensors: Mapping[str, torch.Tensor],
        sources: list[TensorPiece],
        items: list[Item],
    ) -> None:
        """Remember a capture's sources, if they are plain tensors in this memory, and no others."""
        self._plan, self._held, self._memory = None, (), []
        names = [source.write.piece.name for source in sources]
        meant = [write.piece.name for write in plan.writes if write.piece.name in lazy]
        usable = (
            len(set(names)) == len(names) > 1
            and names == meant
            and set(map(type, tensors.values())) <= PLAIN
            and all(
                source.address
                and source.sampled is not None
                and not source.write.where.cuts
                and not source.tensor.is_complex()
                and not source.tensor.is_inference()
                for source in sources
            )
        )
        if not usable:
            return
        self._plan, self._lazy = plan, lazy
        self.sources, self.items = sources, items
        self.rest = [write for write in plan.writes if write.piece.name not in lazy]
        self._get = operator.itemgetter(*names)
        held = self._get(tensors)
        self._names = list(tensors)
        self._kinds = list(map(KIND, held))
        own = set(names)
        self._others = [(name, KIND(value)) for name, value in tensors.items() if name not in own]
        self._addresses = [source.address for source in sources]
        self._counts = list(expected(tensors, names).values())
        self._sizes = list(map(_NUM_BYTES, held))
        windows = [window for source in sources for window in source.windows]
        # In groups: to join a thousand at once takes memory for a moment that is given back to the
        # system, and then milliseconds in some runs.
        self._windows = [windows[at : at + 100] for at in range(0, len(windows), 100)]
        sampled = b"".join(source.sampled or b"" for source in sources)
        at = 0
        for source in sources:
            source.sampled, source.at = sampled, at
            at += 2 * len(source.windows[0])

    def forget(self) -> None:
        """Nothing is used again; what is held on to stays so until ``let_go``."""
        self._plan = None

    def again(
        self, plan: WritePlan, lazy: Collection[str], tensors: Mapping[str, torch.Tensor]
    ) -> bool:
        """Whether ``plan`` fits ``tensors`` and the sources' bytes lie where they lay.

        Then their versions and samples are noted; ``moved`` makes the sources those of ``tensors``.
        """
        if (
            plan is not self._plan
            or (lazy is not self._lazy and lazy != self._lazy)
            or list(tensors) != self._names
            or not set(map(type, tensors.values())) <= PLAIN
            or [(name, KIND(tensors[name])) for name, _ in self._others] != self._others
        ):
            return False
        held = self._get(tensors)
        try:  # what has no memory of its own, as a sparse tensor, says so
            if (
                list(map(torch.Tensor.data_ptr, held)) != self._addresses
                or list(map(_NUM_BYTES, held)) != self._sizes
                or not all(map(torch.Tensor.is_contiguous, held))
            ):
                return False
            self._versions = list(map(_VERSION, held))
            # It is this memory that is copied, whatever is assigned to the tensor's data meanwhile.
            self._memory = storages_of(held)
            if counts(self._memory) != self._counts:
                return False
        except RuntimeError:
            return False
        self._sampled = b"".join(map(b"".join, self._windows))
        self._held = held
        return True

    def moved(self) -> list[str]:
        """Make the sources those of the tensors that were noted; names of those that do not fit.

        These have the same bytes in the same place, and are something else all the same.
        """
        held, self._held = self._held, ()
        for source, tensor, version in zip(self.sources, held, self._versions, strict=True):
            source.tensor = tensor
            source.version = version
            source.sampled = self._sampled
            source.parts_left = source.num_parts
        found = zip(self.sources, held, self._kinds, strict=True)
        return [
            source.write.piece.name
            for source, tensor, kind in found
            if KIND(tensor) != kind or tensor.is_neg()
        ]

    @property
    def memory(self) -> list[torch.UntypedStorage]:
        """What the sources lie in, while they are used again."""
        return self._memory

    def let_go(self) -> None:
        """Nothing is captured any more: the tensors are not held on to."""
        self._held, self._memory = (), []
        for source in self.sources:
            source.tensor, source.outer = _NOTHING, None


_NOTHING: Final = torch.empty(0)


def source_of(tensors: Mapping[str, torch.Tensor], one: Write | DigestCheck) -> TensorPiece:
    """A piece as it is now."""
    tensor = tensors[one.piece.name]
    return TensorPiece(one, local_of(tensors, one), tensor if is_spread(tensor) else None)


def local_of(tensors: Mapping[str, torch.Tensor], one: Write | DigestCheck) -> torch.Tensor:
    """This process's memory of a piece, under a name of its own: it stays what it was."""
    piece = one.piece
    tensor: Any = tensors[piece.name]
    local = tensor._local_tensor if is_spread(tensor) else tensor
    # An alias: it stays what it was, whatever is assigned to the tensor's data meanwhile.
    local = view(local, one.where.cuts) if one.where.cuts else local.detach()
    if local.shape != piece.shape and local.numel():
        raise ConfigError(f"{piece.name} has shape {tuple(local.shape)}, planned as {piece.shape}")
    return local


@functools.cache
def _array(count: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * count


# --- writers past the version counters ------------------------------------------------------------

OWN_THREADS: Final = "outlast-"
_ALL: Final = 1 << 10  # of a function's arguments
_STORAGE: Final = torch.Tensor.untyped_storage
_RESIZABLE: Final = torch.UntypedStorage.resizable
_ADDRESS: Final = operator.attrgetter("_cdata")
_COUNT: Final[Callable[[int], int]] = torch._C._storage_Use_Count


class Copying(Protocol):
    """A capture on its way, as whoever must wait for it sees it."""

    error: Exception | None

    @property
    def is_confirmed(self) -> bool:
        """Whether all is copied, or will be before this thread's stream goes on."""

    def help(self) -> None:
        """Copy what is left, in the calling thread."""

    def wait(self) -> None:
        """The same, and wait for what other threads are copying."""

    def wait_for_devices(self) -> None:
        """Wait until no device is copying any more."""

    def storages(self) -> Iterable[torch.UntypedStorage]:
        """The memory of what is copied later than at the boundary."""


# --- at the boundary -----------------------------------------------------------------------------


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The memory of plain tensors."""
    return list(map(_STORAGE, tensors))


def counts(storages: Iterable[torch.UntypedStorage]) -> list[int]:
    """How many hold each memory, ``storages`` themselves as one; -1 if it is not torch's own.

    Once there was a NumPy view of some memory, torch counts it as not its own.
    """
    storages = list(storages)
    found = map(_COUNT, map(_ADDRESS, storages))  # without a line of Python for each: in each save
    own = map(_RESIZABLE, storages)
    return [count if is_own else -1 for count, is_own in zip(found, own, strict=True)]


def expected(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, int]:
    """What ``counts`` says of each name's memory if nobody holds it but ``tensors``."""
    holders: dict[int, set[int]] = {}
    at: dict[str, int] = {}
    for name, tensor in tensors.items():
        if type(tensor) in PLAIN and tensor.layout == torch.strided and not tensor.is_meta:
            storage = _STORAGE(tensor)
            at[name] = storage._cdata
            own = holders.setdefault(storage._cdata, set())
            own.add(tensor._cdata)
            if not tensor.is_inference() and tensor._is_view():
                own.add(tensor._base._cdata)  # it shares the view's counter
    return {name: len(holders[at[name]]) + 1 for name in names if name in at}


def held_by_others(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> set[str]:
    """Which of these plain tensors lie in memory that others hold too, or that is not torch's."""
    wanted = expected(tensors, [name for name in names if name in tensors])
    found = counts(storages_of(map(tensors.__getitem__, wanted)))
    return {name for (name, want), is_ in zip(wanted.items(), found, strict=True) if want != is_}


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The memory of a plain tensor of integers as an array, of which torch takes no note.

    Whoever uses it keeps the tensor.
    """
    width = tensor.element_size()
    size = width * span(tensor.shape, tensor.stride())
    return np.ndarray(
        tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        buffer=memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())),
        strides=[stride * width for stride in tensor.stride()],
    )


# --- until the copy is whole ---------------------------------------------------------------------


class _HeldBack:
    """The capture that is waited for: one at a time, as there is one torch."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.copying: weakref.ref[Copying] | None = None
        self.pid = 0  # a process that is forked meanwhile has the functions, and no copiers
        self.addresses: frozenset[int] | None = None  # of its memory, once somebody has asked
        self.watchers: list[Callable[[], None]] = []  # told of each graph that is replayed
        self.graphs: list[tuple[Any, str, Any]] = []  # what was of CUDAGraph's before

    def now(self) -> Copying | None:
        """The capture, if there is one."""
        reference = self.copying
        return None if reference is None or self.pid != os.getpid() else reference()


_held: Final = _HeldBack()


def hold_back(copying: Copying) -> None:
    """From here on, whoever finds a way past the counters waits until ``copying`` is over."""
    with _held.lock:
        _held.copying, _held.addresses = weakref.ref(copying), None
        _held.pid = os.getpid()
        for owner, name, patched in _patched():
            setattr(owner, name, patched)
        _look_after_graphs()


def let_go(copying: Copying) -> None:
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


def _pass(values: Iterable[Any]) -> None:
    """Before anything is done with these: the copy of what they lie in comes first."""
    copying = _held.now()
    if copying is None or copying.is_confirmed:
        return
    if threading.current_thread().name.startswith(OWN_THREADS):
        return
    if any(_is_copied(value, copying) for value in values):
        _wait_for(copying)


def _wait_for(copying: Copying) -> None:
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


def _is_copied(value: Any, copying: Copying) -> bool:
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
                yield _STORAGE(one)
        else:
            yield _STORAGE(value)


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
