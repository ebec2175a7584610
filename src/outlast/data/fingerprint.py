"""A short word for an item of data, to see that it is the one that it was.

Guarantees: equal items have equal words, in every process and every version of Python; other ones
have the same word once in 2^64. Made of bytes, never of ``hash`` or pickle.

What can go wrong: an item that holds an object of a kind that is not known here has no word, and
is not compared.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
import xxhash

PICKED: Final = 256
PICKED_ITEMS: Final = 32


def fingerprint(item: Any) -> str | None:
    """The word of ``item``: of tensors, arrays, numbers, text, bytes and containers of them."""
    digest = xxhash.xxh3_64()
    try:
        _feed(digest, item)
    except (TypeError, ValueError, RuntimeError, RecursionError):
        return None
    return str(digest.hexdigest())


def chained(before: int, item: Any) -> int:
    """The word, as a number below 2^63, of a sequence that ``item`` comes behind.

    For speed: of a large tensor or array some ``PICKED`` elements count, of a long container its
    first ones and its length, of a tensor on a device its shape, of an object of a kind that is not
    known nothing.
    """
    if type(item) is list and all(type(one) is int for one in item):
        data = repr(item).encode()  # a sampler's indices
    else:
        digest = xxhash.xxh3_64()
        # What was fed before an error counts.
        with contextlib.suppress(TypeError, ValueError, RuntimeError, RecursionError):
            _feed(digest, _picked(item))
        data = digest.digest()
    return int(xxhash.xxh3_64_intdigest(data, seed=before)) >> 1


def _picked(item: Any) -> Any:
    """A short stand-in for ``item``, of plain values."""
    if isinstance(item, torch.Tensor):
        if item.device.type != "cpu" or item.layout is not torch.strided:
            return ["t", str(item.dtype), list(item.shape)]
        flat = item.detach().reshape(-1) if item.numel() <= PICKED else _some(item.detach())
        return [list(item.shape), flat.contiguous()]
    if isinstance(item, np.ndarray) and item.size > PICKED:
        return [list(item.shape), item[_places(item.shape)]]
    if isinstance(item, Mapping):
        pairs = itertools.islice(item.items(), PICKED_ITEMS)
        return [len(item), [[_picked(key), _picked(value)] for key, value in pairs]]
    if isinstance(item, list | tuple):
        return [len(item), [_picked(one) for one in item[:PICKED_ITEMS]]]
    if isinstance(item, str | bytes):
        return [len(item), item[:PICKED]]
    known = item is None or isinstance(item, bool | int | float | complex | np.ndarray | np.generic)
    return item if known else type(item).__name__


def _some(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[tuple(torch.from_numpy(one) for one in _places(tuple(tensor.shape)))]


@functools.lru_cache(maxsize=64)  # batches are of few shapes
def _places(shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], ...]:
    """Evenly spread elements, by their index in each dimension."""
    numbers = np.linspace(0, np.prod(shape) - 1, PICKED).astype(np.int64)
    return np.unravel_index(numbers, shape)


def _feed(digest: Any, item: Any) -> None:
    if isinstance(item, torch.Tensor):
        digest.update(f"t{item.dtype}{tuple(item.shape)}".encode())
        item = item.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    if isinstance(item, np.ndarray | np.generic):
        array = np.ascontiguousarray(item)
        if array.dtype.hasobject:
            raise TypeError("an array of objects has no bytes of its own")
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(array.tobytes())
    elif isinstance(item, bytes | bytearray):
        digest.update(b"b%d:" % len(item))
        digest.update(item)
    elif item is None or isinstance(item, str | bool | int | float | complex):
        digest.update(f"{type(item).__name__}{item!r};".encode("utf-8", "surrogatepass"))
    elif isinstance(item, Mapping):
        digest.update(b"d%d:" % len(item))
        for key, value in item.items():
            _feed(digest, key)
            _feed(digest, value)
    elif isinstance(item, list | tuple):
        digest.update(b"l%d:" % len(item))
        for one in item:
            _feed(digest, one)
    else:
        raise TypeError(f"{type(item).__name__} is of no known kind")
