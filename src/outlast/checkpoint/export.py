"""Export a checkpoint for other programs: safetensors, ``torch.load``, or a stock DCP directory.

Guarantees: every value has the bits it had when it was saved, and every byte was hashed before it
was written on; ``out`` appears whole and durable, or not at all.
What can go wrong: the checkpoint does not verify (CheckpointInvalid), ``out`` is in use or a value
has no place in the format (ConfigError), the disk is full (OSError, as it came). Nothing is left
behind then.

Tensors come one by one from a ``TensorFeed`` and are gone when the next one comes. torch's file is
first written around empty places (``torch.serialization.skip_data``), which are then filled in the
order in which the checkpoint has the bytes.

Memory: what the reader reads ahead and keeps (0.5 GiB at most) and the largest tensor twice; with
"dcp" 0.25 GiB more, of the file that is being written. Never the whole state.

Names of keys come from the checkpoint's files and become names of files here: only plain characters
are let through.

Rejected: safetensors' and torch's writers given all tensors at once (the memory of the whole
state); a torch file whose tensors are views of one storage (each would keep all of it alive).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import torch
import xxhash
from torch.utils import _pytree

from outlast.checkpoint.manifest import Place, SaveName
from outlast.checkpoint.optimizers import OTHER, OURS, OWN_FORM
from outlast.checkpoint.reader import Checkpoint, open_checkpoint
from outlast.checkpoint.tensors import bytes_of, header, place
from outlast.checkpoint.tree import KIND, MergedState, tensor_names
from outlast.durable import sync_directory
from outlast.errors import ConfigError
from outlast.storage import Storage

# --- the export -----------------------------------------------------------------------------------

FORMATS: Final = ("safetensors", "torch", "dcp")
SPLIT_BYTES: Final = 5 * 10**9  # as Hugging Face's save_pretrained did for years
TORCH_FILE: Final = "state.pt"
_NOT_PLAIN: Final = re.compile(r"[^A-Za-z0-9._-]")
_NAME_MAX: Final = 100


class Exported(NamedTuple):
    """What an export wrote.

    Attributes:
        files: their names, below ``out``, sorted.
        num_bytes: of all of them.
    """

    files: tuple[str, ...]
    num_bytes: int


class TensorFeed:
    """The tensors of a checkpoint in the order in which a writer wants them, counted.

    Attributes:
        state: what was saved, as one; of what every rank saved for itself, rank 0's.
        source: the checkpoint.
    """

    def __init__(
        self,
        source: Checkpoint,
        state: MergedState,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.state = state
        self.source = source
        self._progress = progress
        self._done_bytes = 0
        self._total_bytes = sum(self.num_bytes(name) for name in state.entries)

    def num_bytes(self, name: str) -> int:
        """Size of a tensor as it is handed out."""
        return math.prod(self.state.entries[name].shape) * int(self.state.dtype(name).itemsize)

    def tensors(self, names: Iterable[str]) -> Iterator[torch.Tensor]:
        """Whole tensors, in the dtype they were saved from, each in memory of its own.

        Raises:
            CheckpointInvalid, OSError: see ``reader``.
        """
        wanted = list(names)
        entries = [self.state.entries[name] for name in wanted]
        for name, tensor in zip(wanted, self.source.tensors(entries), strict=True):
            self._done_bytes += self.num_bytes(name)
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)
            yield tensor.to(self.state.dtype(name))

    def by_place(self, names: Iterable[str]) -> list[str]:
        """``names`` in the order of their bytes: neighbours share blocks, which are read once."""

        def where(name: str) -> tuple[str, int]:
            chunks = self.state.entries[name].chunks
            return (chunks[0].file, chunks[0].start) if chunks else ("", 0)

        return sorted(names, key=where)


def export(
    places: Storage | Sequence[Place],
    which: int | SaveName,
    to: str,
    out: str | os.PathLike[str],
    progress: Callable[[int, int], None] | None = None,
    *,
    split_bytes: int = SPLIT_BYTES,
) -> Exported:
    """Write one checkpoint in another format.

    "safetensors": a file for each object that was saved, named after its key, with whole tensors
    under the object's own names; ``model.safetensors`` can be loaded by transformers. What is no
    tensor goes to a JSON file beside it. An object larger than ``split_bytes`` is split, with the
    index that Hugging Face's readers expect.

    "torch": ``state.pt``, which ``torch.load(weights_only=True)`` opens: key → state in plain
    containers. Optimizers have torch's own numbering and can be loaded as they are.

    "dcp": a directory that ``torch.distributed.checkpoint.load`` reads, key by key.

    Args:
        places: where the checkpoint lies, fastest first; or one storage.
        which: which save; of a step the newest whose manifest verifies.
        to: "safetensors", "torch" or "dcp".
        out: the directory to write; it must not exist yet, or be empty.
        progress: told (bytes of tensors done, in all).
        split_bytes: the most bytes of tensors in one safetensors file.

    Returns:
        The files and their size. Of what every rank saved for itself, rank 0's is exported.

    Raises:
        CheckpointInvalid: a file is missing, truncated or altered; names it.
        ConfigError: ``to`` or ``out`` cannot be used, or a value has no place in the format.
        OSError: reading or writing failed.
    """
    if to not in FORMATS:
        raise ConfigError(f"{to!r} is not a format; export to {', '.join(FORMATS)}")
    return export_by(
        lambda feed, part: _write(feed, to, part, split_bytes), places, which, out, progress
    )


def export_by(
    write: Callable[[TensorFeed, Path], None],
    places: Storage | Sequence[Place],
    which: int | SaveName,
    out: str | os.PathLike[str],
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """As :func:`export`, in a form of one's own.

    Args:
        write: writes what is fed into a directory, which becomes ``out`` once it returns.
        places: as :func:`export` has it, as the others.
        which: which save.
        out: the directory to write.
        progress: told (bytes of tensors done, in all).
    """
    target = Path(out).absolute()
    _check_free(target)
    source = open_checkpoint(places, which, rank=None)
    state = source.merged(0)
    source.locate_all(state, 0)
    feed = TensorFeed(source, state, progress)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.parent / f".{target.name}.{os.urandom(8).hex()}.part"
    part.mkdir()
    try:
        write(feed, part)
        written = _make_durable(part)
        _check_free(target)
        os.rename(part, target)  # noqa: PTH104 - over an empty directory too
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    sync_directory(target.parent)
    return written


def _write(feed: TensorFeed, to: str, directory: Path, split_bytes: int) -> None:
    if to == "safetensors":
        names = file_names(feed.state.data)
        for key, data in feed.state.data.items():
            write_safetensors(feed, key, data, directory / names[key], split_bytes)
    elif to == "torch":
        write_torch(feed, directory / TORCH_FILE)
    else:
        write_dcp(feed, directory)


def file_names(keys: Iterable[str]) -> dict[str, str]:
    """Key → a name for its files: plain, short, no two alike even where case is ignored."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for key in keys:
        plain = _NOT_PLAIN.sub("_", key).lstrip(".-")[:_NAME_MAX]
        if plain != key or not plain or plain.lower() in taken:
            plain = (
                f"{plain or 'key'}-{xxhash.xxh3_64_hexdigest(key.encode(errors='surrogatepass'))}"
            )
        taken.add(plain.lower())
        names[key] = plain
    return names


def _check_free(target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not target.is_dir():
            if os.path.lexists(target):
                raise ConfigError(f"{target} is a file; give a directory that does not exist yet")
        elif any(target.iterdir()):
            raise ConfigError(f"{target} is not empty; give a directory that does not exist yet")


def _make_durable(directory: Path) -> Exported:
    files, num_bytes = [], 0
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            sync_directory(path)
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files.append(str(path.relative_to(directory)))
        num_bytes += path.stat().st_size
    sync_directory(directory)
    return Exported(tuple(files), num_bytes)


# --- the formats ----------------------------------------------------------------------------------

_DCP_FILE_BYTES: Final = 256 << 20
_CENTRAL: Final = b"PK\1\2"
_DESCRIPTOR_FOLLOWS: Final = 8


# --- safetensors ---------------------------------------------------------------------------------


def write_safetensors(feed: TensorFeed, key: str, data: Any, stem: Path, split_bytes: int) -> None:
    """Write one object: its tensors, and in a JSON file what else it has."""
    names = {_short(name, key): name for name in tensor_names(data)}
    if "__metadata__" in names:
        raise ConfigError(f"{key}: safetensors has no place for a tensor named __metadata__")
    groups = _split(feed, names, split_bytes)
    for number, group in enumerate(groups, 1):
        many = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        _write_one(feed, {short: names[short] for short in group}, _add(stem, many))
    if len(groups) > 1:
        weight_map = {
            short: _add(stem, f"-{number:05d}-of-{len(groups):05d}").name
            for number, group in enumerate(groups, 1)
            for short in group
        }
        total = sum(feed.num_bytes(name) for name in names.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        _put_text(stem.with_name(f"{stem.name}.safetensors.index.json"), text)
    if not names or not _is_tensors(data):
        text = json.dumps(_renamed(data, key), indent=2, allow_nan=False) + "\n"
        _put_text(stem.with_name(f"{stem.name}.json"), text)


def _put_text(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


def _write_one(feed: TensorFeed, names: Mapping[str, str], path: Path) -> None:
    state = feed.state
    placed = place(
        {
            short: torch.empty(state.entries[name].shape, dtype=state.dtype(name), device="meta")
            for short, name in names.items()
        }
    )
    with path.open("xb") as file:
        file.write(header(placed))
        for tensor in feed.tensors(names[short] for short in placed):
            file.write(bytes_of(tensor))


def _split(feed: TensorFeed, names: Mapping[str, str], split_bytes: int) -> list[list[str]]:
    groups: list[list[str]] = []
    room = 0
    for short, name in names.items():
        size = feed.num_bytes(name)
        if not groups or size > room:
            groups.append([])
            room = split_bytes
        groups[-1].append(short)
        room -= size
    return groups


def _add(stem: Path, many: str) -> Path:
    return stem.with_name(f"{stem.name}{many}.safetensors")


def _short(name: str, key: str) -> str:
    """A tensor's name in its own object: what ``state_dict()`` called it."""
    return name.removeprefix(f"{key}.")


def _renamed(data: Any, key: str) -> Any:
    if isinstance(data, list):
        return [_renamed(value, key) for value in data]
    if not isinstance(data, dict):
        return data
    if data.get(KIND) == "tensor":
        return {**data, "name": _short(data["name"], key)}
    return {inner: _renamed(value, key) for inner, value in data.items()}


def _is_tensors(data: Any) -> bool:
    """Whether the file of tensors, and their names, already say all there is."""
    if not isinstance(data, dict):
        return False
    if KIND in data:
        return data[KIND] == "tensor" or (
            data[KIND] == "ordered" and all(_is_tensors(value) for _, value in data["pairs"])
        )
    return all(_is_tensors(value) for value in data.values())


# --- torch ---------------------------------------------------------------------------------------


def write_torch(feed: TensorFeed, path: Path, key: str = "") -> None:
    """Write ``{key: state}`` for ``torch.load(weights_only=True)``; of one ``key`` its state."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    names: dict[int, str] = {}
    with FakeTensorMode():

        def empty(name: str, entry: Any) -> torch.Tensor:
            tensor = torch.empty(entry.shape, dtype=feed.state.dtype(name))
            names[id(tensor)] = name
            return tensor

        tree = feed.state.build(empty)
    tree = {name: plain(_numbered(value), name) for name, value in tree.items()}
    tree = tree[key] if key else tree
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(tree, path)
    leaves = [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    with path.open("r+b") as file:
        records = _storages(file)
        homes: dict[str, zipfile.ZipInfo] = {}
        for leaf, record in zip(leaves, records, strict=True):
            if id(leaf) in names:
                homes[names[id(leaf)]] = record
            else:
                _fill(file, record, leaf)
        ordered = feed.by_place(homes)
        for name, tensor in zip(ordered, feed.tensors(ordered), strict=True):
            _fill(file, homes[name], tensor)
        _write_checksums(file, {record.header_offset: record for record in records})


def _numbered(state: Any) -> Any:
    """An optimizer's state with torch's numbers in place of names; anything else as it is."""
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        return state
    if OWN_FORM in state:
        return state[OWN_FORM]
    groups, inner = state["param_groups"], state["state"]
    if not isinstance(groups, list) or not isinstance(inner, Mapping):
        return state
    names = [str(name) for group in groups for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    if any(str(name) not in numbers for name in inner):
        return state
    left = iter(range(len(names)))
    numbered = {key: value for key, value in state.items() if key not in OURS}
    by_number = {numbers[str(name)]: value for name, value in inner.items()}
    numbered["state"] = {**dict(sorted(by_number.items())), **state.get(OTHER, {})}
    numbered["param_groups"] = [
        {**group, "params": [next(left) for _ in group["params"]]} for group in groups
    ]
    return numbered


def plain(value: Any, name: str) -> Any:
    """``value`` in containers that torch loads without running anything.

    Arrays become tensors, numpy's numbers Python's; neither changes a bit of the value.

    Raises:
        ConfigError: an array whose dtype torch does not have.
    """
    if isinstance(value, Mapping):
        return {plain(key, name): plain(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, torch.Size) or not isinstance(
        value, list | tuple | set | frozenset | collections.deque | np.ndarray | np.generic
    ):
        return value
    if isinstance(value, np.ndarray | np.generic):
        try:
            array = np.asarray(value)
            tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))
        except TypeError:
            raise ConfigError(
                f"{name} is an array of {value.dtype}, which torch cannot hold"
            ) from None
        return tensor if isinstance(value, np.ndarray) else value.item()
    items = [plain(inner, f"{name}.{index}") for index, inner in enumerate(value)]
    if isinstance(value, set | frozenset):
        return set(items)
    return tuple(items) if isinstance(value, tuple) else items


def _storages(file: BinaryIO) -> list[zipfile.ZipInfo]:
    """The records of the tensors, in the order in which they were pickled."""
    with zipfile.ZipFile(file) as archive:
        found = [
            (int(record.filename.rpartition("/")[2]), record)
            for record in archive.infolist()
            if record.filename.rpartition("/")[0].endswith("/data")
        ]
    return [record for _, record in sorted(found, key=lambda one: one[0])]


def _fill(file: BinaryIO, record: zipfile.ZipInfo, tensor: torch.Tensor) -> None:
    data = bytes_of(tensor)
    if len(data) != record.file_size:
        raise AssertionError(f"{record.filename} has room for {record.file_size}, not {len(data)}")
    file.seek(_data_start(file, record))
    file.write(data)
    record.CRC = zlib.crc32(data)


def _data_start(file: BinaryIO, record: zipfile.ZipInfo) -> int:
    file.seek(record.header_offset + 26)
    name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
    return record.header_offset + 30 + int(name_bytes) + int(extra_bytes)


def _write_checksums(file: BinaryIO, records: Mapping[int, zipfile.ZipInfo]) -> None:
    """For other programs that read zips: torch leaves out the checksums of empty places."""
    for record in records.values():
        crc = struct.pack("<L", record.CRC)
        file.seek(record.header_offset + 14)
        file.write(crc)
        if record.flag_bits & _DESCRIPTOR_FOLLOWS:
            file.seek(_data_start(file, record) + record.file_size + 4)
            file.write(crc)
    with zipfile.ZipFile(file) as archive:
        position, in_order = archive.start_dir, archive.infolist()
    for record in in_order:
        file.seek(position)
        entry = file.read(46)
        if not entry.startswith(_CENTRAL):
            raise AssertionError(f"{record.filename} is not where the zip's directory has it")
        if record.header_offset in records:
            file.seek(position + 16)
            file.write(struct.pack("<L", records[record.header_offset].CRC))
        position += 46 + sum(struct.unpack("<HHH", entry[28:34]))


# --- DCP -----------------------------------------------------------------------------------------


def write_dcp(feed: TensorFeed, directory: Path) -> None:
    """Write what ``torch.distributed.checkpoint.save`` would have written in one process."""
    import torch.distributed.checkpoint as dcp

    names: dict[int, str] = {}

    def stand_in(name: str, entry: Any) -> torch.Tensor:
        tensor = torch.empty(entry.shape, dtype=feed.state.dtype(name), device="meta")
        names[id(tensor)] = name
        return tensor

    tree = feed.state.build(stand_in)
    ready: dict[str, torch.Tensor] = {}  # what the next file holds: neighbours are read together
    order = {name: number for number, name in enumerate(feed.by_place(feed.state.entries))}

    class Planner(dcp.DefaultSavePlanner):  # type: ignore[misc]
        """Looks tensors up in the checkpoint, when their turn comes."""

        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()

            def where(item: Any) -> int:
                leaf = self.state_dict[item.index.fqn]
                return order.get(names.get(id(leaf), ""), -1)

            return dataclasses.replace(plan, items=sorted(plan.items, key=where))

        def lookup_object(self, index: Any) -> Any:
            return _pytree.tree_map_only(torch.Tensor, whole, super().lookup_object(index))

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        name = names.get(id(tensor))
        if name is None:
            return tensor
        return ready[name] if name in ready else next(feed.tensors([name]))

    class Writer(dcp.FileSystemWriter):  # type: ignore[misc]
        """Several files: DCP's writer keeps all tensors of a file until it is complete."""

        def write_data(self, plan: Any, planner: Any) -> Any:
            results = []
            for number, items in enumerate(_in_groups(plan.items)):
                prefix = dataclasses.replace(plan.storage_data, prefix=f"__0_{number}_")
                part = dataclasses.replace(plan, items=items, storage_data=prefix)
                leaves = (planner.state_dict[item.index.fqn] for item in items)
                wanted = dict.fromkeys(names[id(leaf)] for leaf in leaves if id(leaf) in names)
                ready.update(zip(wanted, feed.tensors(wanted), strict=True))
                results += super().write_data(part, planner).wait()
                ready.clear()
            done: Any = torch.futures.Future()
            done.set_result(results)
            return done

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*single process.*")
        try:
            dcp.save(
                tree,
                storage_writer=Writer(directory),
                planner=Planner(),
                no_dist=True,
            )
        except dcp.CheckpointException as error:  # what was raised here, wrapped
            raise error.failures[0][0] from None


def _in_groups(items: Sequence[Any]) -> list[list[Any]]:
    groups: list[list[Any]] = [[]]
    size = 0
    for item in items:
        size += item.tensor_storage_size() or 0
        if size > _DCP_FILE_BYTES and groups[-1]:
            groups.append([])
            size = item.tensor_storage_size() or 0
        groups[-1].append(item)
    return groups
