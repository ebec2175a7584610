"""States that loaders, data sets and iterators of other libraries have of their own.

Guarantees: a state is believed if it gives the newest batch again from where it stood in front of
it (``replay.py`` tries that at each resume); else the epoch is gone through again. One of which it
is known that it leaves something out is not used at all.

Protocols: ``state_dict`` and ``load_state_dict`` of a loader (torchdata, Mosaic's streaming) or of
the data set in a torch DataLoader without loader processes (Hugging Face's ``datasets``), and
``get_state`` and ``set_state`` of the iterator over one (grain). No library is imported for it.

What can go wrong: a state that is right for the batch that is tried and wrong behind it.

Known of Hugging Face's streams: the state of one that was shuffled has no shuffle buffer in it, and
what lay in the buffer would never come; a state that was loaded counts for every later pass of the
same epoch number, so it is taken back where its pass ends.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

import torch

from outlast.data.random_state import preserved

_SCALARS: Final = frozenset({int, float, bool, str, bytes, type(None)})
_SHUFFLE_BUFFER: Final = "BufferShuffledExamplesIterable"  # of Hugging Face's datasets


class HeldState:
    """That of a loader, or of a loader's data set.

    Args:
        holder: has ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, holder: Any) -> None:
        self._holder = holder
        self._fresh: tuple[Any, Any] | None = None

    def read(self, iterator: Any) -> Any:
        """Where it stands."""
        del iterator
        return _still(self._holder.state_dict())

    def resumed(self, state: Any, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """An iterator that goes on from ``state``; ``begin`` makes one."""
        begins_anew = _begins_anew(self._holder)
        standing: Any = getattr(self._holder, "dataset", None) if begins_anew else self._holder
        if not begins_anew or has_state(standing):
            self._fresh = standing, _still(standing.state_dict())
        self._holder.load_state_dict(_still(state))
        return begin()

    def put_back(self) -> None:
        """Stand where it stood before ``resumed``."""
        self.pass_ended()
        if self._fresh is not None:
            standing, state = self._fresh
            with contextlib.suppress(Exception):  # what comes of it is compared with what came
                standing.load_state_dict(state)

    def pass_ended(self) -> None:
        """The pass that was resumed is over: the next one begins at its beginning."""
        parts: list[Any] = [self._holder, getattr(self._holder, "dataset", None)]
        for one in parts:
            if _pipeline_of(one) is not None:
                one.load_state_dict(None)


class IteratorState:
    """That of an iterator with ``get_state`` and ``set_state``."""

    def read(self, iterator: Any) -> Any:
        """Where it stands, as plain values; None where it has others."""
        try:
            return _as_plain(iterator.get_state())
        except TypeError:
            return None

    def resumed(self, state: Any, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """An iterator that goes on from ``state``; ``begin`` makes one."""
        iterator = begin()
        cast(Any, iterator).set_state(_from_plain(state))
        return iterator

    def put_back(self) -> None:
        """Nothing: each pass has an iterator of its own."""

    def pass_ended(self) -> None:
        """Nothing, likewise."""


def _still(state: Any) -> Any:
    """The same state, which stays as it is while its holder goes on with its own containers."""
    if isinstance(state, dict):
        return {key: _still(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        is_plain = _SCALARS.issuperset(map(type, state))
        kept = list(state) if is_plain else [_still(one) for one in state]
        return kept if isinstance(state, list) else tuple(kept)
    return state.clone() if isinstance(state, torch.Tensor) else copy.copy(state)


def state_within(loader: Any) -> HeldState | None:
    """The state of the data set in a torch DataLoader that is resumed from it."""
    if not isinstance(loader, torch.utils.data.DataLoader) or loader.num_workers:
        return None
    dataset = loader.dataset
    is_stream = isinstance(dataset, torch.utils.data.IterableDataset)
    plain = type(loader).__iter__ is torch.utils.data.DataLoader.__iter__
    is_usable = is_stream and plain and has_state(dataset) and not leaves_out(dataset)
    return HeldState(dataset) if is_usable else None


def state_of_iterator(iterator: Any) -> IteratorState | None:
    """The state of an iterator that can tell where it stands, and go there."""
    has_both = all(callable(getattr(iterator, name, None)) for name in ("get_state", "set_state"))
    return IteratorState() if has_both else None


def is_stateful(loader: Any) -> bool:
    """Whether it has a state that works and leaves nothing out; a wrapper may have the name alone.

    torchdata's is asked where it has begun only: before its first batch it would start its
    processes.
    """
    if leaves_out(loader) or leaves_out(getattr(loader, "dataset", None)):
        return False
    return _is_torchdata(loader) or has_state(loader)


def is_of_others(loader: Any) -> bool:
    """Whether it is of a library whose loaders keep their state to themselves."""
    return _is_torchdata(loader) or _pipeline_of(loader) is not None


def _is_torchdata(loader: Any) -> bool:
    return any(kind.__module__.startswith("torchdata.") for kind in type(loader).__mro__)


def _begins_anew(holder: Any) -> bool:
    """Whether each iterator begins a pass, whatever was loaded for the one before."""
    return _is_torchdata(holder) or isinstance(holder, torch.utils.data.DataLoader)


def has_state(value: Any) -> bool:
    """Whether ``value`` has a ``state_dict`` that works, and ``load_state_dict``."""
    try:
        read, write = value.state_dict, value.load_state_dict
    except Exception:  # noqa: BLE001 - a wrapper may raise anything
        return False
    if not callable(read) or not callable(write):
        return False
    with preserved():
        try:
            return read() is not None
        except Exception:  # noqa: BLE001
            return False


def leaves_out(dataset: Any) -> bool:
    """Whether its state is known not to be all of it: a shuffle buffer is not in it."""
    steps = [_pipeline_of(dataset)]
    while steps:
        step = steps.pop()
        if type(step).__name__ == _SHUFFLE_BUFFER:
            return True
        inner = getattr(step, "ex_iterable", None)
        steps += [one for one in (inner, *getattr(step, "ex_iterables", ())) if one is not None]
    return False


def _pipeline_of(dataset: Any) -> Any:
    """What one of Hugging Face's streams is made of; None of anything else."""
    is_theirs = any(kind.__module__.startswith("datasets.") for kind in type(dataset).__mro__)
    return getattr(dataset, "_ex_iterable", None) if is_theirs else None


def _as_plain(state: Any) -> Any:
    """For a checkpoint.

    Raises:
        TypeError: it has something that is no plain value.
    """
    if isinstance(state, bytes):
        return {"hex": state.hex()}
    if isinstance(state, Mapping):
        return {"of": [[_as_plain(key), _as_plain(value)] for key, value in state.items()]}
    if isinstance(state, list | tuple):
        return [_as_plain(one) for one in state]
    if hasattr(state, "item"):  # NumPy's numbers
        state = state.item()
    if state is None or isinstance(state, str | int | float):
        return state
    raise TypeError(f"{type(state).__name__} is no plain value")


def _from_plain(state: Any) -> Any:
    if isinstance(state, list):
        return [_from_plain(one) for one in state]
    if not isinstance(state, Mapping):
        return state
    if "hex" in state:
        return bytes.fromhex(state["hex"])
    return {_from_plain(key): _from_plain(value) for key, value in state["of"]}
