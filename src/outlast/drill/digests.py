"""Digests of anything that a training script may hold: tensors, numbers, containers, objects.

Two runs are compared by them, in other processes than those that hold the values. So a digest goes
by content alone: no addresses, no order of sets. Of a tensor it has the dtype, the shape and the
bytes; of one that is divided among workers this rank's part; of a subclass that torch can take
apart its inner tensors.

Guarantees: nothing is changed and no random number drawn. What is neither data nor known in kind
counts by its class alone, and whatever raises when it is read counts as unreadable: both are the
same in two runs, so that an odd object hides a difference, and never invents one.
"""

from __future__ import annotations

import collections
import contextlib
import random
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
import xxhash
from torch.utils._python_dispatch import _disable_current_modes

from outlast.checkpoint.tensors import bytes_of, memories

DEPTH_MAX: Final = 12
UNREADABLE: Final = "unreadable"
_NUMBERS: Final = (bool, int, type(None))
_COMPLEX_SPARSE: Final = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_CODE: Final = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """What is read inside is read past autograd, and past modes that count or change what is done.

    A loop may run in a mode that counts operations, or makes them on other devices.
    """
    with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def digest_of(value: Any) -> str:
    """Digest of any value: 16 hexadecimal digits, or ``unreadable``."""
    total = xxhash.xxh3_64()
    try:
        _add(total, value, 0)
    except Exception:  # noqa: BLE001 - whatever an object of the script's does
        return UNREADABLE
    return str(total.hexdigest())


def number_of(value: Any) -> str:
    """A loss: a single real number as a hexadecimal float, anything else as a digest."""
    try:
        if value.numel() == 1 and value.is_floating_point() and type(value) is torch.Tensor:
            return float(value.detach()).hex()
    except Exception:  # noqa: BLE001 - whatever an object of the script's does
        return UNREADABLE
    return digest_of(value)


def _add(total: Any, value: Any, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        _add_tensor(total, value)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        total.update(f"array {value.dtype} {value.shape} ".encode())
        total.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    elif isinstance(value, str):
        total.update(b"s")
        total.update(value.encode(errors="surrogatepass"))
    elif isinstance(value, bytes | bytearray | memoryview):
        total.update(b"b")
        total.update(value)
    elif isinstance(value, float):
        total.update(f"f{value.hex()}".encode())
    elif isinstance(value, _NUMBERS):
        total.update(f"n{value}".encode())
    elif depth >= DEPTH_MAX:
        total.update(_kind(value))
    else:
        _add_parts(total, value, depth)


def _add_parts(total: Any, value: Any, depth: int) -> None:
    if isinstance(value, Mapping):
        total.update(f"m{len(value)}".encode())
        for key, one in value.items():
            _add(total, key, depth + 1)
            _add(total, one, depth + 1)
    elif isinstance(value, set | frozenset):
        total.update(" ".join(sorted(digest_of(one) for one in value)).encode())
    elif isinstance(value, list | tuple | collections.deque):
        total.update(f"l{len(value)}".encode())
        for one in value:
            _add(total, one, depth + 1)
    elif isinstance(value, np.generic):
        _add(total, np.asarray(value), depth)
    elif isinstance(value, torch.Generator):
        _add(total, value.get_state(), depth)
    elif isinstance(value, random.Random):
        _add(total, value.getstate(), depth)
    elif isinstance(value, np.random.Generator):
        _add(total, value.bit_generator.state, depth)
    elif isinstance(value, _CODE) or not hasattr(value, "__dict__"):
        total.update(_kind(value))
    else:
        total.update(_kind(value))
        _add(total, vars(value), depth + 1)


def _kind(value: Any) -> bytes:
    kind = value if isinstance(value, type) else type(value)
    return f"o{kind.__module__}.{kind.__qualname__}".encode()


def _add_tensor(total: Any, tensor: torch.Tensor) -> None:
    total.update(f"t{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}".encode())
    if tensor.is_meta:
        return
    if tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in _COMPLEX_SPARSE:
        parts = [tensor.values()]
    else:
        parts = memories(tensor.detach())
    for part in parts:
        if part.numel():
            total.update(bytes_of(part))
