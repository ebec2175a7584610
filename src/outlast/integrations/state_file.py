"""A nested state in one file of safetensors, whole or not there, and verified when it is read.

Each tensor stands under its path in the state (``state_dict.layer.weight``). A tensor ``outlast``
is text: 32 hexadecimal digits, the XXH3-128 of what follows; then JSON with ``data``, all that is
no tensor (as in ``checkpoint/tree.py``), and ``hashes``, the XXH3-128 of each tensor's dtype, shape
and elements.

Guarantees: the name appears once the file is whole and durable; nothing is given that was not
compared with its hash; nothing is pickled or unpickled. A file of ``torch.save`` is read as well,
if it needs no code and its checksums are right.

What can go wrong: the state holds something that is no data, which is refused by its path. Tensors
that share memory are written once each, and lie apart when they are read. What lies on a GPU is
copied to the host's memory first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from outlast.checkpoint.foreign import torch_file
from outlast.checkpoint.tensors import bytes_of, header, place
from outlast.checkpoint.tree import encode_into, unflatten
from outlast.durable import sync_directory
from outlast.errors import ConfigError
from outlast.integrations.trainer_checkpoints import broken_file
from outlast.storage.directory import FileBlob, Spares

_TEXT: Final = "outlast"
_HASH_BYTES: Final = 32
_hash: Final = xxhash.xxh3_128_hexdigest


class FileDamagedError(ConfigError):
    """A file that must not be believed."""


def write(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` to the file ``path``.

    Raises:
        ConfigError: something in it is no data.
        OSError: it cannot be written; nothing is left of it.
    """
    found: dict[str, torch.Tensor] = {}
    data = {key: encode_into(value, key, found) for key, value in state.items()}
    tensors = {name: one.detach().cpu() for name, one in found.items()}
    text = {"data": data, "hashes": {name: _hash_of(one) for name, one in tensors.items()}}
    said = json.dumps(text, separators=(",", ":")).encode()
    said = _hash(said).encode() + said
    tensors[_TEXT] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    placed = place(tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    sync_directory(path.parent.parent)
    blob = FileBlob(path, Spares(path.parent, 0))
    try:
        blob.write(header(placed))
        for name in placed:
            blob.write(bytes_of(tensors[name]))
        blob.finish()
    except BaseException:
        blob.abandon()
        raise


def is_one(path: Any) -> bool:
    """Whether :func:`write` has written the file ``path``."""
    try:
        with safe_open(path, "pt") as source:
            return _TEXT in source.keys()  # noqa: SIM118 - it is no dict
    except (SafetensorError, OSError, TypeError):
        return False


def read(path: Path, map_location: Any = None) -> dict[str, Any]:
    """What a file holds: one of :func:`write`, or of ``torch.save``.

    Args:
        path: the file.
        map_location: the device for tensors; anything that is none stands for the CPU.

    Raises:
        FileDamagedError: it is damaged.
        ConfigError: it needs code to be loaded.
        FileNotFoundError: there is none.
    """
    device = map_location if isinstance(map_location, str | torch.device) else "cpu"
    with path.open("rb") as file:
        is_zip = file.read(2) == b"PK"
    if is_zip:
        if why_not := broken_file(path):
            raise FileDamagedError(f"{path} is damaged ({why_not})")
        state: dict[str, Any] = torch_file(str(path), path)
        return state
    try:
        with safe_open(path, "pt") as source:
            tensors = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
        said = bytes_of(tensors.pop(_TEXT)).tobytes()
        if _hash(said[_HASH_BYTES:]).encode() != said[:_HASH_BYTES]:
            raise ValueError("what is no tensor has another hash than it had")
        text = json.loads(said[_HASH_BYTES:])
        for name, wanted in text["hashes"].items():
            if _hash_of(tensors[name]) != wanted:
                raise ValueError(f"{name} has another hash than it had")
        tensors = {name: one.to(device) for name, one in tensors.items()}
        return {key: unflatten(value, tensors) for key, value in text["data"].items()}
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise FileDamagedError(f"{path} is damaged ({error})") from None


def to_torch(path: str | Path, out: str | Path) -> None:
    """Write the state of a file for ``torch.load(weights_only=True)``.

    Args:
        path: the file.
        out: the file to write.

    Raises:
        FileDamagedError: ``path`` is damaged.
        FileExistsError: ``out`` is there.
    """
    state = read(Path(path))
    with Path(out).open("xb") as file:
        torch.save(state, file)


def _hash_of(tensor: torch.Tensor) -> str:
    hasher = xxhash.xxh3_128(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    hasher.update(bytes_of(tensor))
    return hasher.hexdigest()
