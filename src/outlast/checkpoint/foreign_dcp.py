"""Read weights from a directory that ``torch.distributed.checkpoint`` wrote.

DCP's planner finds which chunks are needed, and its reader reads them, weights only. Two things are
done in another way: the metadata is a pickle, which DCP loads with all the code that it names; here
it may name DCP's own records and nothing else. What is no tensor, DCP unpickles; here it is loaded
as weights are. In a module of its own: importing DCP takes a second.
"""

from __future__ import annotations

import enum
import io
import pathlib
import pickle
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, ReadItem
from torch.serialization import _get_layout

from outlast.checkpoint.foreign import METADATA, Target, Weights, digest_of
from outlast.checkpoint.reader import Leaf
from outlast.errors import ConfigError

_RECORDS: Final = (
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
)
_PATHS: Final = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
_KNOWN: Final[dict[tuple[str, str], Any]] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in _RECORDS},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    # A path is where it was written; nobody goes there.
    **{(room, name): pathlib.PurePath for room in ("pathlib", "pathlib._local") for name in _PATHS},
}
_ALONE: Final = threading.Lock()  # what is done about warnings is the process's, not a thread's


class DcpDirectory(Weights):
    """What lies in ``path``."""

    def __init__(self, given: str, path: pathlib.Path) -> None:
        self._path = path
        self._metadata = _read_metadata(given, path / METADATA)
        offered: dict[str, Any] = {}
        for name, one in self._metadata.state_dict_metadata.items():
            offered[name] = one
            if isinstance(one, metadata.TensorStorageMetadata):
                offered[name] = Leaf(name, tuple(one.size), one.properties.dtype)
        self._nested: dict[str, list[str]] = {}  # what DCP took apart → its names
        for name, inner in (self._metadata.planner_data or {}).items():
            for depth in range(1, len(inner)):
                whole = ".".join(map(str, inner[:depth]))
                self._nested.setdefault(whole, []).append(name)
        offered = {**dict.fromkeys(self._nested), **offered}
        super().__init__(given, offered, "")
        ends: dict[str, int] = {}
        for info in self._metadata.storage_data.values():
            end = info.offset + info.length
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), end)
        with self.one_line():
            for file, end in ends.items():
                if (size := (path / file).stat().st_size) < end:
                    raise ValueError(f"{file} has {size} bytes of {end}")
            self.digest = digest_of([path / METADATA, *(path / file for file in sorted(ends))])

    def data(self, path: str) -> Any:
        """What is no tensor, read now, and put together where DCP took it apart."""
        names = self._nested.get(path, [path])
        found = {
            name: torch.empty(one.shape, dtype=one.dtype) if isinstance(one, Leaf) else None
            for name in names
            for one in [self.offered[name]]
        }
        with self.one_line():
            self._load(found)
        if path in found:
            return found[path]
        paths = {name: self._metadata.planner_data[name] for name in names}
        depth = next(
            depth
            for depth in range(1, len(paths[names[0]]))
            if ".".join(map(str, paths[names[0]][:depth])) == path
        )
        return unflatten_state_dict(found, {name: inner[depth:] for name, inner in paths.items()})

    def _read(self, targets: Sequence[Target]) -> None:
        left = list(targets)
        while left:  # one target for each name at a time
            now = dict(reversed(left))
            left = [one for one in left if one[1] is not now[one[0]]]
            self._load(now)

    def _load(self, state: dict[str, Any]) -> None:
        try:
            with _ALONE, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is no process group: none is needed
                dcp.load(
                    state,
                    storage_reader=_ReaderOf(self._path, self._metadata),
                    planner=_Planner(flatten_state_dict=False),
                    no_dist=True,
                )
        except CheckpointException as error:  # it is no Exception
            reason = next(iter(error.failures.values()))[0]
            raise reason if isinstance(reason, Exception) else ValueError(str(reason)) from None


class _ReaderOf(filesystem.FileSystemReader):  # type: ignore[misc]
    def __init__(self, path: pathlib.Path, known: metadata.Metadata) -> None:
        super().__init__(path)
        self._known = known

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        return self._known


class _Planner(DefaultLoadPlanner):  # type: ignore[misc]
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        found = torch.load(value, weights_only=True)
        self.original_state_dict[read_item.dest_index.fqn] = found


class _Records(pickle.Unpickler):
    """Makes the records of DCP's metadata, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if (module, name) == ("builtins", "getattr"):
            return _member  # so Python 3.11.2 names a member of an enumeration
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no record of DCP's")


def _member(kind: Any, name: str) -> Any:
    """A member of an enumeration that is known, and nothing else."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(
            f"it asks for {name!r} of {kind!r}, which is no record of DCP's"
        )
    return kind.__members__[name]


def _read_metadata(given: str, path: pathlib.Path) -> metadata.Metadata:
    """The metadata of a directory.

    Raises:
        ConfigError: it is damaged, or would run code.
    """
    try:
        found = _Records(io.BytesIO(path.read_bytes())).load()
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        words = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"{given}: its {METADATA} is damaged, or is not DCP's ({words[:200]}); bring it back "
            "from a copy"
        ) from None
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise ConfigError(f"{given}: its {METADATA} is not DCP's own")
    return cast("metadata.Metadata", found)
