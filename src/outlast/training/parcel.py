"""Small state as bytes, for another process: data as a checkpoint has it, and the tensors it names.

What is written is what ``checkpoint.tree`` writes, in MessagePack, with each tensor's dtype, shape
and bytes; nothing in it can be decoded into code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec
import torch

from outlast.checkpoint.tensors import bytes_of
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


class Packer:
    """Packs states of one name, one after the other; what is in both is looked through once.

    An object that a state holds at its top is taken to be what it was, if it is the same one.

    Args:
        name: of the states.
        plain: keys of values without tensors, which are compared.
    """

    def __init__(self, name: str, plain: Collection[str] = ()) -> None:
        self._name = name
        self._plain = frozenset(plain)
        self._parts: dict[str, _Part] = {}
        self._packed = b""

    def pack(self, state: Mapping[str, Any]) -> bytes:
        """``state`` as bytes.

        Raises:
            ConfigError: something in it is neither data nor a tensor.
        """
        before, self._parts = self._parts, {}
        is_same = len(before) == len(state)
        for key, value in state.items():
            part = before.get(key)
            is_known = part is not None and (
                part.value is value or (key in self._plain and part.value == value)
            )
            if part is None or not is_known:
                data, tensors = flatten(value, f"{self._name}.{key}")
                known = {} if part is None else part.tensors
                found = {name: _again(name, one, known.get(name)) for name, one in tensors.items()}
                part = _Part(value, data, found)
                is_same = False
            self._parts[key] = part
        if not is_same or not self._packed:
            self._packed = msgspec.msgpack.encode(
                _Parcel(
                    {key: part.data for key, part in self._parts.items()},
                    [one.data for part in self._parts.values() for one in part.tensors.values()],
                )
            )
        return self._packed


class _Part(NamedTuple):
    value: Any
    data: Any
    tensors: dict[str, _Seen]


class _Seen(NamedTuple):
    tensor: torch.Tensor
    version: int | None  # of one that has any
    data: _Tensor


def _again(name: str, tensor: torch.Tensor, before: _Seen | None) -> _Seen:
    version = None if tensor.is_inference() else tensor._version
    if before is not None and before.tensor is tensor and before.version == version is not None:
        return before
    dtype = str(tensor.dtype).removeprefix("torch.")
    data = _Tensor(name, dtype, tuple(tensor.shape), bytes(bytes_of(tensor)))
    return _Seen(tensor, version, data)


def unpack(parcel: bytes) -> Any:
    """The state.

    Raises:
        ValueError: these bytes are not what a packer gave.
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
