"""A checkpoint as files for other programs: safetensors, ``torch.load``, or a stock DCP directory.

Guarantees: every value has the bits it had when it was saved, and every byte was hashed before it
was written on; ``out`` appears whole and durable, or not at all.
What can go wrong: the checkpoint does not verify (CheckpointInvalid), ``out`` is in use or a value
has no place in the format (ConfigError), the disk is full (OSError, as it came). Nothing is left
behind then.

Memory: what ``source`` reads ahead and keeps (0.5 GiB at most) and the largest tensor twice; with
"dcp" 0.25 GiB more, of the file that is being written. Never the whole state.

Names of keys come from the checkpoint's files and become names of files here: only plain characters
are let through.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
import xxhash

from outlast.checkpoint import export_formats
from outlast.checkpoint.names import SaveName
from outlast.checkpoint.places import Place
from outlast.checkpoint.source import Source, State
from outlast.durable import sync_directory
from outlast.errors import ConfigError
from outlast.storage import Storage

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


class Feed:
    """The tensors of a checkpoint in the order in which a writer wants them, counted."""

    def __init__(
        self, source: Source, state: State, progress: Callable[[int, int], None] | None
    ) -> None:
        self.state = state
        self._source = source
        self._progress = progress
        self._done_bytes = 0
        self._total_bytes = sum(self.num_bytes(name) for name in state.entries)

    def num_bytes(self, name: str) -> int:
        """Size of a tensor as it is handed out."""
        return math.prod(self.state.entries[name].shape) * int(self.state.dtype(name).itemsize)

    def tensors(self, names: Iterable[str]) -> Iterator[torch.Tensor]:
        """Whole tensors, in the dtype they were saved from, each in memory of its own.

        Raises:
            CheckpointInvalid, OSError: see ``source``.
        """
        wanted = list(names)
        entries = [self.state.entries[name] for name in wanted]
        for name, tensor in zip(wanted, self._source.tensors(entries), strict=True):
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
    target = Path(out).absolute()
    _check_free(target)
    source = Source(places, which)
    state = source.state(0)
    source.locate_all(state, 0)
    feed = Feed(source, state, progress)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.parent / f".{target.name}.{os.urandom(8).hex()}.part"
    part.mkdir()
    try:
        _write(feed, to, part, split_bytes)
        written = _make_durable(part)
        _check_free(target)
        os.rename(part, target)  # noqa: PTH104 - over an empty directory too
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    sync_directory(target.parent)
    return written


def _write(feed: Feed, to: str, directory: Path, split_bytes: int) -> None:
    if to == "safetensors":
        names = file_names(feed.state.data)
        for key, data in feed.state.data.items():
            export_formats.write_safetensors(feed, key, data, directory / names[key], split_bytes)
    elif to == "torch":
        export_formats.write_torch(feed, directory / TORCH_FILE)
    else:
        export_formats.write_dcp(feed, directory)


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
