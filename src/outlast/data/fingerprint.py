"""A short word for an item of data, to see that it is the one that it was.

Guarantees: equal items have equal words, in every process and every version of Python; other ones
have the same word once in 2^64. Made of bytes, never of ``hash`` or pickle.

What can go wrong: an item that holds an object of a kind that is not known here has no word, and
is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash


def fingerprint(item: Any) -> str | None:
    """The word of ``item``: of tensors, arrays, numbers, text, bytes and containers of them."""
    digest = xxhash.xxh3_64()
    try:
        _feed(digest, item)
    except (TypeError, ValueError, RuntimeError, RecursionError):
        return None
    return str(digest.hexdigest())


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
