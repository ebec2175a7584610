"""The random-number generators that a loader, its data set or a loop's body holds, as states.

Python's, NumPy's and torch's global streams are kept by ``random_state.py``. Scripts also make
generators of their own: a sampler has a ``numpy.random.Generator``, a collate function a
``random.Random`` in its closure, the body of the loop a ``torch.Generator`` in a variable. They are
found by walking what the loader and the calling script refer to, and kept under the path on which
they were found, which is the same in each process that runs the same script.

Guarantees: the same objects give the same names in each process; a generator that is found on two
paths has one state. Looking takes milliseconds: at most ``OBJECTS_MAX`` objects are looked at.

What can go wrong: a generator behind more than ``DEPTH_MAX`` references, in the 257th item of a
list, in C code, or made after the loop began is not seen. A copy inside of a loader process is
another object: whether such copies are drawn from is seen by ``GeneratorWatch``.

Rejected: looking through all objects that the garbage collector knows (no stable names, and those
of libraries among them); hooks in NumPy (its generators are C types).

``IteratorOrigin`` notes which iterators of torch DataLoaders a script made, and from which random
numbers. ``enumerate(loader)`` makes the loader's iterator before ``steps`` is called, and a
generator function makes another one in each of its passes. The order of samples follows from the
random numbers at that moment, so they are noted for each iterator that is made while a session is
open.

Guarantees: noting draws nothing; an iterator that nobody holds is forgotten. Only DataLoader's
own iterators: what else a script goes through outside of ``steps`` is not seen.

``GeneratorWatch`` sees whether random numbers are drawn inside a loader's processes, where they
cannot be kept. A map-style data set in loader processes draws from streams of theirs, and from
copies of the generators that it holds. A resume in the midst of an epoch starts new processes,
whose streams begin anew. Batches are not touched to see it: a collate function around the script's
own compares the states after each batch, in the process, and sets a mark in memory that all of them
share.

What can go wrong: what a data set draws without handing out a batch afterwards is not seen.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import itertools
import random
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from outlast.checkpoint.attributes import put_state, state_of
from outlast.data import random_state
from outlast.ledger.command import is_users

OBJECTS_MAX: Final = 4000
DEPTH_MAX: Final = 8
ITEMS_MAX: Final = 256  # of a container
KEPT_MAX: Final = 64  # generators; those that are found later are not

State = dict[str, Any]
_LEAVES: Final = (str, bytes, bytearray, int, float, complex, type(None), torch.Tensor, np.ndarray)
_BUILTIN_ITERATORS: Final = (enumerate, zip, map, filter, itertools.islice, itertools.chain)
_LOOKED_INTO: Final = ("outlast.data.loader", "outlast.data.stream")  # they hold data sets


class Held:
    """Generators that were found, by name.

    Args:
        roots: (name, object) from which to look, in this order.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]] = ()) -> None:
        self._found: dict[str, Any] = {}
        for name, generator in itertools.islice(_walk(roots), KEPT_MAX):
            # An object and its class may both have one under a name: the object's comes first.
            places = (f"{name}#{number}" if number > 1 else name for number in itertools.count(1))
            self._found[next(one for one in places if one not in self._found)] = generator
        self._began = [state_of(generator) for generator in self._found.values()]

    def items(self) -> list[tuple[str, Any]]:
        """Name and generator."""
        return list(self._found.items())

    def state(self) -> list[State]:
        """Where they stand, as plain values and tensors; and whether each has moved since."""
        states = []
        for (name, generator), began in zip(self._found.items(), self._began, strict=True):
            now = state_of(generator)
            states.append({"name": name, "moved": not _equal(now, began), "state": _data(now)})
        return states

    def read(self) -> list[Any]:
        """Where they stand, to be compared by :func:`same`."""
        return [state_of(generator) for generator in self._found.values()]

    def data_of(self, states: list[Any]) -> list[State]:
        """What :meth:`read` gave as :meth:`state` gives it."""
        pairs = zip(self._found, states, strict=True)
        return [{"name": name, "moved": True, "state": _data(state)} for name, state in pairs]

    def restore(self, states: Iterable[Mapping[str, Any]]) -> list[str]:
        """Put back what :meth:`state` gave, here or in another process.

        Returns:
            Names of those that had moved and are not here, or are of another kind now.
        """
        missing = []
        for saved in states:
            generator = self._found.get(saved["name"])
            is_back = False
            if generator is not None:
                try:
                    put_state(generator, _value(saved["state"]))
                    is_back = True
                except (TypeError, ValueError, KeyError, AttributeError, RuntimeError):
                    pass  # another kind of generator than the one that was saved
            if not is_back and saved.get("moved"):
                missing.append(str(saved["name"]))
        return missing


# --- states as data -----------------------------------------------------------------------------


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and bool(torch.equal(one, other))
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, dict):
        if not isinstance(other, dict) or len(one) != len(other):
            return False
        return all(_equal(value, other.get(key)) for key, value in one.items())
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # tensors or arrays are in it
        is_alike = isinstance(one, list | tuple) and type(one) is type(other)
        return is_alike and same(list(one), list(other))


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists of states are equal."""
    return len(one) == len(other) and all(map(_equal, one, other))


def _data(value: Any) -> Any:
    """A state as values that a checkpoint can have: NumPy's states hold integers of 128 bits."""
    if isinstance(value, np.ndarray):
        words = torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())
        return {"array": words, "dtype": value.dtype.str}
    if isinstance(value, dict):
        return {"dict": {key: _data(one) for key, one in value.items()}}
    if isinstance(value, tuple) and len(value) > ITEMS_MAX:  # the words of Python's generator
        return {"words": torch.tensor(value, dtype=torch.int64)}
    if isinstance(value, list | tuple):
        return {"list": [_data(one) for one in value]}
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return {"int": str(int(value))}
    return value


def _value(data: Any) -> Any:
    if not isinstance(data, Mapping):
        return data
    if "array" in data:
        return np.frombuffer(data["array"].cpu().numpy().tobytes(), data["dtype"]).copy()
    if "dict" in data:
        return {key: _value(one) for key, one in data["dict"].items()}
    if "words" in data:
        return tuple(data["words"].tolist())
    if "list" in data:
        return [_value(one) for one in data["list"]]
    return int(data["int"])


# --- finding them -------------------------------------------------------------------------------


def _kept(value: Any) -> Any | None:
    """What is to be kept of ``value``, if it is a generator and not one of the global ones."""
    if isinstance(value, np.random.Generator):
        value = value.bit_generator
    if isinstance(value, np.random.RandomState):
        return None if value is np.random.mtrand._rand else value
    if isinstance(value, torch.Generator):
        known = (torch.default_generator, *torch.cuda.default_generators)
        return None if any(value is one for one in known) else value
    if isinstance(value, random.Random):
        is_known = value is random._inst or isinstance(value, random.SystemRandom)
        return None if is_known else value
    if isinstance(value, np.random.BitGenerator):
        return None if value is np.random.mtrand._rand._bit_generator else value
    return None


def _walk(roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """(name, generator), those on shorter paths first."""
    seen: set[int] = set()
    alive = []  # an id is one object's only while that lives
    waiting = collections.deque((name, value, 0) for name, value in roots)
    while waiting and len(seen) < OBJECTS_MAX:
        name, value, depth = waiting.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        alive.append(value)
        generator = _kept(value)
        if generator is not None:
            if generator is value or id(generator) not in seen:
                seen.add(id(generator))
                yield name, generator
            continue
        if depth < DEPTH_MAX and not _is_of_a_library(value):
            waiting.extend((f"{name}{path}", one, depth + 1) for path, one in _parts(value))


def _is_of_a_library(value: Any) -> bool:
    """Whether looking inside is of no use: modules, types, functions that libraries define."""
    if isinstance(value, types.ModuleType | type | torch.nn.Module | torch.optim.Optimizer):
        return True
    if isinstance(value, types.FunctionType):
        return not is_users(value.__code__.co_filename) and value.__closure__ is None
    module = type(value).__module__
    return module.startswith("outlast.") and module not in _LOOKED_INTO


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple | collections.deque):
        yield from _of_container(value)
    elif isinstance(value, functools.partial):
        yield from ((f".{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, types.MethodType):
        yield from (("", value.__self__), (".__func__", value.__func__))
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, types.GeneratorType):
        if value.gi_frame is not None:
            yield from ((f".{name}", one) for name, one in value.gi_frame.f_locals.items())
            if is_users(value.gi_code.co_filename):
                yield from _named(value.gi_code, value.gi_frame.f_globals)
    elif isinstance(value, _BUILTIN_ITERATORS):
        yield from ((f"<{n}>", one) for n, one in enumerate(gc.get_referents(value)))
    elif isinstance(value, types.BuiltinMethodType):  # rng.random, given as a function
        yield "", value.__self__
    elif isinstance(value, _BaseDataLoaderIter):  # its sampler's own iterator draws on the way
        names = ("_dataset", "_index_sampler", "_collate_fn")
        yield from ((f".{name}", getattr(value, name, None)) for name in names)
    else:
        yield from _of_object(value)


def _of_container(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        pairs = itertools.islice(value.items(), ITEMS_MAX)
        yield from ((f"[{key!r}]", one) for key, one in pairs if isinstance(key, str | int))
    else:
        items = itertools.islice(value, ITEMS_MAX)
        yield from ((f"[{number}]", one) for number, one in enumerate(items))


def _of_function(value: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:
            continue  # not set yet
    yield ".__defaults__", value.__defaults__ or ()
    if is_users(value.__code__.co_filename):
        yield from _named(value.__code__, value.__globals__)


def _named(code: types.CodeType, names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The global variables that a script's function names."""
    for name in code.co_names:
        if name in names:
            yield f".{name}", names[name]


def _of_object(value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    own = None
    with contextlib.suppress(Exception):  # past what an object answers for itself: it may raise
        own = object.__getattribute__(value, "__dict__")
    if isinstance(own, dict):
        yield from ((f".{name}", one) for name, one in list(own.items())[:ITEMS_MAX])
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            slot = vars(base).get(name)
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    yield f".{name}", slot.__get__(value, kind)
                except AttributeError:
                    continue
        module = sys.modules.get(base.__module__)
        if base.__module__ == "__main__" or is_users(_file_of(module)):
            # What the class has, and the global variables that its methods name.
            yield from ((f".{name}", one) for name, one in vars(base).items())


def _file_of(module: types.ModuleType | None) -> str:
    return getattr(module, "__file__", None) or "<frozen"


WRAPPERS: Final = (enumerate, zip, map, filter, itertools.islice)


class IteratorOrigin(msgspec.Struct, frozen=True):
    """How an iterator was made: when random numbers stood at ``start``.

    Of ``loader``, which is not held where a feed made the iterator.
    """

    loader: Any
    start: dict[str, Any]
    by_feed: bool = False


class _KnownIterators:
    """What this process knows; a DataLoader's iterators are made in the training thread."""

    def __init__(self) -> None:
        self.made: weakref.WeakKeyDictionary[Any, IteratorOrigin | None] = (
            weakref.WeakKeyDictionary()
        )
        self.num_made = 0
        self.by_feed = False


_known: Final = _KnownIterators()


def num_made() -> int:
    """How many were made so far in this process."""
    return _known.num_made


@contextlib.contextmanager
def by_a_feed() -> Iterator[None]:
    """What is made within is known to ``steps``."""
    before, _known.by_feed = _known.by_feed, True
    try:
        yield
    finally:
        _known.by_feed = before


def noted(loader: Any, begin: Callable[[], Any]) -> Any:
    """What ``begin`` gives, an iterator of ``loader``; it is noted how it was made."""
    start = {}
    if not _known.by_feed:  # a feed keeps them itself
        held = Held([("loader", loader)]).state()
        start = {"random": random_state.capture(cuda=False), "held": held}
    iterator = begin()
    _known.num_made += 1
    with contextlib.suppress(TypeError):  # an iterator of a kind that cannot be noted
        making = IteratorOrigin(None if _known.by_feed else loader, start, _known.by_feed)
        _known.made[iterator] = making
    return iterator


def forget() -> None:
    """Forget all, as in a new process."""
    _known.made.clear()


def adopt(value: Any) -> None:
    """An iterator that was made before the session, which the script holds."""
    if isinstance(value, _BaseDataLoaderIter) and value not in _known.made:
        _known.made[value] = None


def in_progress() -> list[str]:
    """What the script goes through besides ``steps``, in words: iterators that have begun.

    One that has ended counts while the script holds it: when the next one is made follows from it.
    """
    found = []
    for iterator, making in list(_known.made.items()):
        if making is not None:
            is_kept = getattr(making.loader, "_iterator", None) is iterator  # its processes persist
            if making.by_feed or is_kept:
                continue
        num_yielded = getattr(iterator, "_num_yielded", 0)
        if num_yielded:
            found.append(f"a DataLoader's iterator ({num_yielded} batches in)")
    return found


def starts_within(value: Any) -> list[dict[str, Any]]:
    """From which random numbers the iterators in ``enumerate(loader)`` and the like were made."""
    if isinstance(value, _BaseDataLoaderIter):
        making = _known.made.get(value)
        _known.made[value] = msgspec.structs.replace(
            making or IteratorOrigin(None, {}), by_feed=True
        )
        return [making.start] if making is not None and making.loader is not None else []
    if isinstance(value, WRAPPERS):
        inner = _taken_apart(value)[1]
        return [start for one in inner for start in starts_within(one)]
    return []


def made_again(
    value: Any, starts: Iterator[dict[str, Any]], shut_down: Callable[[Any], None]
) -> Any:
    """``value`` with the iterators in it made anew, each from its random numbers in ``starts``."""
    if isinstance(value, _BaseDataLoaderIter):
        making = _known.made.get(value)
        if making is None or making.loader is None:
            return value
        start = next(starts, None)
        if start is None:
            return value
        shut_down(value)
        making.loader._iterator = None  # persistent processes have ended with it
        random_state.restore(start["random"])
        Held([("loader", making.loader)]).restore(start["held"])
        return iter(making.loader)
    if isinstance(value, WRAPPERS):
        kind, inner, *rest = _taken_apart(value)
        if not inner:
            return value
        again = kind(*[made_again(one, starts, shut_down) for one in inner])
        if rest and rest[0] is not None:
            again.__setstate__(rest[0])
        return again
    return value


def _taken_apart(value: Any) -> tuple[Any, ...]:
    """What makes a built-in iterator, of what, and its further state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # by islice, from Python 3.12 on
        try:
            return tuple(value.__reduce__())
        except TypeError:  # Python 3.14 has no more of it for islice
            return type(value), ()


GLOBAL: Final = "Python's, NumPy's or torch's global generator"


class GeneratorWatch:
    """Goes with a loader's processes in place of its ``collate_fn`` and ``worker_init_fn``.

    Args:
        loader: a torch DataLoader with processes; a copy, whose two functions are replaced.
        roots: (name, object): what of the script's goes into the processes.
    """

    def __init__(self, loader: Any, roots: list[tuple[str, Any]]) -> None:
        carried = Held(roots).items()
        self._names = [GLOBAL, *[name for name, _ in carried]]
        self._marks = torch.zeros(len(self._names), dtype=torch.uint8).share_memory_()
        watching = _Watching(
            loader.collate_fn, loader.worker_init_fn, [one for _, one in carried], self._marks
        )
        loader.collate_fn, loader.worker_init_fn = watching, watching.begin

    def drawn(self) -> list[str]:
        """Names of what was drawn from."""
        return [name for name, mark in zip(self._names, self._marks.tolist(), strict=True) if mark]


class _Watching:
    def __init__(
        self,
        collate: Callable[[Any], Any],
        user_init: Callable[[int], Any] | None,
        generators: list[Any],
        marks: torch.Tensor,
    ) -> None:
        self._collate = collate
        self._user_init = user_init
        self._generators = generators
        self._marks = marks
        self._latest: list[Any] = []

    def begin(self, worker_id: int) -> None:
        """In a process, before its first item."""
        if self._user_init is not None:
            self._user_init(worker_id)
        self._latest = self._states()

    def __call__(self, items: Any) -> Any:
        """The script's batch of ``items``."""
        batch = self._collate(items)
        if self._latest:  # else no process of ours
            now = self._states()
            for number, (one, other) in enumerate(zip(now, self._latest, strict=True)):
                if not self._marks[number] and not same([one], [other]):
                    self._marks[number] = 1
            self._latest = now
        return batch

    def _states(self) -> list[Any]:
        return [random_state.look(), *map(state_of, self._generators)]
