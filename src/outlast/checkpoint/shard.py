"""One rank's tensors as a safetensors file that any reader of that format opens.

The data section starts at a multiple of 4 KiB (the header is padded with spaces, as the format
allows) so that it can be written in aligned blocks. Tensors follow each other without holes, as
the format demands, widest elements first, so that each is aligned to its own elements.

Rejected: the safetensors library's writer: it neither pads the header nor hashes nor fsyncs, and
wants the whole file as one buffer. Its readers open what is written here; a test holds that.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Final, NamedTuple

import torch

from outlast.errors import ConfigError

ALIGNMENT: Final = 4096

NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES: Final = {name: dtype for dtype, name in NAMES.items()}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as uint8 on the CPU; its own memory where it lies there already."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor's elements, in their order."""
    return memoryview(as_bytes(tensor).numpy())


class Placed(NamedTuple):
    """A tensor's place in a data section, in bytes from the section's start."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def place(tensors: Mapping[str, torch.Tensor]) -> dict[str, Placed]:
    """Lay tensors out one after the other, widest elements first, then by name.

    Raises:
        ConfigError: a dtype that the format has no name for.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise ConfigError(f"{name} has dtype {tensor.dtype}, which safetensors cannot hold")
    placed: dict[str, Placed] = {}
    position = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        tensor = tensors[name]
        end = position + tensor.numel() * tensor.dtype.itemsize
        placed[name] = Placed(NAMES[tensor.dtype], tuple(tensor.shape), position, end)
        position = end
    return placed


def header(placed: Mapping[str, Placed]) -> bytes:
    """The file's first bytes: length, JSON, spaces up to the alignment."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, tensor in placed.items():
        entries[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (tensor.start, tensor.end),
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-(len(text) + 8) // ALIGNMENT) * ALIGNMENT - 8
    return struct.pack("<Q", padded) + text.ljust(padded)
