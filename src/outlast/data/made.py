"""Which iterators of torch DataLoaders a script made, and from which random numbers.

``enumerate(loader)`` makes the loader's iterator before ``steps`` is called, and a generator
function makes another one in each of its passes. The order of samples follows from the random
numbers at that moment, so they are noted for each iterator that is made while a session is open.

Guarantees: noting draws nothing; an iterator that nobody holds is forgotten. Only DataLoader's
own iterators: what else a script goes through outside of ``steps`` is not seen.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
from torch.utils.data.dataloader import _BaseDataLoaderIter

from outlast.data import random_state
from outlast.data.generators import Held

WRAPPERS: Final = (enumerate, zip, map, filter, itertools.islice)


class Making(msgspec.Struct, frozen=True):
    """How an iterator was made: when random numbers stood at ``start``.

    Of ``loader``, which is not held where a feed made the iterator.
    """

    loader: Any
    start: dict[str, Any]
    by_feed: bool = False


class _Known:
    """What this process knows; a DataLoader's iterators are made in the training thread."""

    def __init__(self) -> None:
        self.made: weakref.WeakKeyDictionary[Any, Making | None] = weakref.WeakKeyDictionary()
        self.num_made = 0
        self.by_feed = False


_known: Final = _Known()


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
        making = Making(None if _known.by_feed else loader, start, _known.by_feed)
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
        _known.made[value] = msgspec.structs.replace(making or Making(None, {}), by_feed=True)
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
