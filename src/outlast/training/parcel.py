"""Small state as bytes, for another process: data as a checkpoint has it, and the tensors it names.

What is written is what ``checkpoint.tree`` writes, in MessagePack, with each tensor's dtype, shape
and bytes; nothing in it can be decoded into code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from outlast.checkpoint.shard import bytes_of
from outlast.checkpoint.tree import DTYPE_OF, flatten, unflatten


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor on the CPU."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Parcel(msgspec.Struct, frozen=True, array_like=True):
    data: Any
    tensors: list[_Tensor]


_decoder = msgspec.msgpack.Decoder(_Parcel)


def pack(state: Any, name: str) -> bytes:
    """``state`` as bytes.

    Raises:
        ConfigError: something in it is neither data nor a tensor.
    """
    return pack_flat(*flatten(state, name))


def pack_flat(data: Any, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The same for a state that ``flatten`` has split."""
    found = [
        _Tensor(name, str(one.dtype).removeprefix("torch."), tuple(one.shape), bytes(bytes_of(one)))
        for name, one in tensors.items()
    ]
    return msgspec.msgpack.encode(_Parcel(data, found))


def unpack(parcel: bytes) -> Any:
    """The state.

    Raises:
        ValueError: these bytes are not what ``pack`` gave.
    """
    found = _decoder.decode(parcel)
    tensors = {
        one.name: torch.frombuffer(bytearray(one.data), dtype=torch.uint8)
        .view(DTYPE_OF[one.dtype])
        .reshape(one.shape)
        .clone()
        if one.data
        else torch.empty(one.shape, dtype=DTYPE_OF[one.dtype])
        for one in found.tensors
    }
    return unflatten(found.data, tensors)
