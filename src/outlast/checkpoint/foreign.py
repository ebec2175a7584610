"""Open weights that a new job may start from, in whatever form somebody has written them.

Four forms are read: a checkpoint of ours, a file that ``torch.save`` wrote, safetensors (a file, or
a directory with an index), and a directory of ``torch.distributed.checkpoint`` (``foreign_dcp``).
What one holds is offered as dotted paths to tensors that have not been read; tensors are then read
into memory that the caller names, plain or spread over workers, and cast to its dtype.

Guarantees: no code that a file names is run: ``torch.load`` is only ever asked for weights. What is
cut short or not understood is refused in one line. Ours is verified, byte by byte, as in a resume.
What can go wrong: the other formats have no checksums that anybody checks, so a flipped bit in them
is not seen. ``digest`` tells files apart, it does not prove them: of large files it samples.
Rejected: a whole digest of foreign files (each worker would read all of them, to prove nothing).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import xxhash

from outlast.checkpoint.catalog import saves_at
from outlast.checkpoint.manifest import BLOCK_BYTES, MANIFEST, Place, SaveName, named, parse
from outlast.checkpoint.plan import OWN
from outlast.checkpoint.reader import Checkpoint, Leaf, open_checkpoint
from outlast.checkpoint.tensors import DTYPES, FillTargets, local_chunks, why_not
from outlast.errors import CheckpointInvalid, ConfigError, OutlastError, StorageError
from outlast.ledger.job import FILE_NAME as JOB

METADATA: Final = ".metadata"  # of DCP; written last
WHOLE_BYTES: Final = 64 << 20  # files up to here are hashed as a whole
ENDS_BYTES: Final = 1 << 20
SAMPLE_BYTES: Final = 4 << 10
_STEP: Final = re.compile(r"^(?P<path>.+)@(?P<step>[0-9]{1,12})\Z")
_CLASS: Final = re.compile(r"(?:GLOBAL|class|Unsupported global:) ([A-Za-z_][\w.]*\.[\w.]+)")
_INDEX: Final = ".safetensors.index.json"

_NEITHER: Final = "it is neither torch.save's nor safetensors"
_SURPRISES: Final = (RuntimeError, ValueError, KeyError, TypeError, AssertionError, EOFError)

Target = tuple[str, torch.Tensor]  # a path that is offered, and the tensor to be filled


class Weights:
    """What one source of weights offers.

    Args:
        where: as a person would write it.
        offered: dotted path → a Leaf for each tensor, the Parts of a subclass, or plain data.
        digest: tells this source from others.

    Attributes:
        step: the step that it was saved at, where that is known.
        save: the name of the save, where it is ours.
    """

    step: int | None = None
    save: str = ""

    def __init__(self, where: str, offered: Mapping[str, Any], digest: str) -> None:
        self.where = where
        self.offered = offered
        self.digest = digest

    def read(self, wanted: Sequence[Target]) -> None:
        """Fill tensors; whoever spreads them decides who reads what.

        Raises:
            ConfigError, StorageError: something is damaged, or cannot be read.
            StateMismatch: elements that share memory were saved with several values.
        """
        apart = FillTargets(wanted)
        with self.one_line(), torch.no_grad():
            self._read(apart.targets)
        apart.lay(self.where)

    def data(self, path: str) -> Any:
        """What is offered at ``path`` and is no tensor."""
        return self.offered[path]

    def state_of(self, key: str) -> Any:
        """The state of something that is no model, for its ``load_state_dict``.

        Raises:
            ConfigError: there is none, or this form does not keep it.
        """
        raise ConfigError(
            f"{self.where} is taken for weights alone, and {key!r} is no model; name the models "
            f'only, as in init_from={{"model": "{self.where}"}}'
        )

    @contextlib.contextmanager
    def one_line(self) -> Iterator[None]:
        """Whatever a library raises becomes one line."""
        try:
            yield
        except CheckpointInvalid as error:
            raise ConfigError(f"{self.where} cannot be started from: {error}") from error
        except OutlastError:
            raise
        except FileNotFoundError as error:
            raise ConfigError(f"{self.where} is not whole: {error.filename} is missing") from error
        except OSError as error:
            raise StorageError(
                f"{self.where} cannot be read: {error.strerror or error}; mend it and run the same "
                "command again"
            ) from error
        except (pickle.PickleError, *_SURPRISES) as error:
            raise _damaged(self.where, error) from error

    def _read(self, targets: Sequence[Target]) -> None:
        for path, target in targets:
            whole = self._tensor(path)
            for offsets, shape, view in local_chunks(target):
                part = whole
                for axis, (start, length) in enumerate(zip(offsets, shape, strict=True)):
                    part = part.narrow(axis, start, length)
                view.copy_(part)

    def _tensor(self, path: str) -> torch.Tensor:
        """The whole tensor, as far as possible not in memory yet."""
        raise NotImplementedError


def open_weights(given: str, rank: int = 0, save: str = "") -> Weights:
    """Open what a person names as the source of a new job's weights.

    Args:
        given: a path; with ``@STEP`` behind it a step of a job's.
        rank: whose state, of a checkpoint of ours.
        save: the name of the save, where another rank has chosen it.

    Raises:
        ConfigError: there is none, it is damaged, or nobody here knows its form.
        StorageError: it cannot be read.
    """
    path, step = given, None
    found = _STEP.match(given)
    if found is not None and not os.path.lexists(given):
        path, step = found["path"], int(found["step"])
    if "://" in path:
        raise ConfigError(
            f"init_from={given!r}: a bucket is not read by training processes; copy the step to a "
            "directory, as with outlast checkpoints export"
        )
    at = Path(path)
    with Weights(given, {}, "").one_line():
        if not at.exists():
            raise ConfigError(f"init_from={given!r}: there is no such file or directory")
        if at.is_dir() and not (at / METADATA).exists() and _is_ours(at):
            return Ours(given, path, step, rank, save)
        if step is not None:
            raise ConfigError(
                f"init_from={given!r}: only checkpoints of Outlast's are found by their step; "
                f"{path} is none"
            )
        if at.is_file():
            return _Safetensors(given, [at]) if _is_safetensors(at) else _TorchFile(given, at)
        if (at / METADATA).exists():
            from outlast.checkpoint.foreign_dcp import DcpDirectory

            return DcpDirectory(given, at)
        return _Safetensors(given, _shards(at))


def flat(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Nested dicts as dotted paths; each also stands as a whole: it may be an extra state."""
    if path:
        yield path, state
    if isinstance(state, Mapping):
        for name, value in state.items():
            yield from flat(value, f"{path}.{name}" if path else str(name))


def digest_of(files: Iterable[Path]) -> str:
    """What tells files apart: all of small ones; of large ones both ends, and 4 KiB of each 16 MiB.

    Raises:
        OSError: one cannot be read.
    """
    hasher = xxhash.xxh3_128()
    for path in files:
        size = path.stat().st_size
        hasher.update(f"{path.name} {size}\n".encode())
        ranges = [(0, size)]
        if size > WHOLE_BYTES:
            ranges = [(0, ENDS_BYTES), (size - ENDS_BYTES, ENDS_BYTES)]
            ranges += [(start, SAMPLE_BYTES) for start in range(0, size, BLOCK_BYTES)]
        with path.open("rb") as file:
            for start, length in ranges:
                file.seek(start)
                hasher.update(file.read(length))
    return hasher.hexdigest()


def _damaged(where: str, error: Exception) -> ConfigError:
    words = " ".join(str(error).split()) or type(error).__name__
    return ConfigError(
        f"{where} is damaged, or was written in a form that is not known here ({words[:200]}); "
        "bring it back from a copy"
    )


def _is_ours(at: Path) -> bool:
    if parse(at.name) is not None and (at / MANIFEST).exists():
        return True
    below = at / "checkpoints"
    there = [*at.iterdir(), *(below.iterdir() if below.is_dir() else ())]
    return (at / JOB).exists() or any(parse(one.name) is not None for one in there)


# --- ours -----------------------------------------------------------------------------------------


class Ours(Weights):
    """A checkpoint of ours, of this job or of another.

    Attributes:
        checkpoint: itself; what is no model is taken from it as in a resume.
    """

    def __init__(self, given: str, path: str, step: int | None, rank: int, save: str) -> None:
        places, saves = saves_at(path)
        if step is not None:
            there = sorted({one.step for one in saves})
            saves = [one for one in saves if one.step == step]
            if not saves:
                shown = ", ".join(map(str, there))
                raise ConfigError(f"init_from={given!r}: {path} has no step {step}; it has {shown}")
        # A worker reads no buckets; what lies there only is not found.
        places = [place for place in places if "://" not in place.storage.describe()]
        if not places:
            raise ConfigError(f"init_from={given!r}: it lies in buckets only; copy the step here")
        self.checkpoint = _first(places, [named(save)] if save else saves, rank)
        super().__init__(given, _offered_by(self.checkpoint), self.checkpoint.manifest.checksum)
        self.step = self.checkpoint.manifest.step
        self.save = str(self.checkpoint.save)

    @property
    def keys(self) -> set[str]:
        """The names of the objects that were saved."""
        return set(self.checkpoint.data) - {OWN}

    def _read(self, targets: Sequence[Target]) -> None:
        names = [(self.offered[path].name, target) for path, target in targets]
        self.checkpoint.read(names)


def _first(places: Sequence[Place], saves: Sequence[SaveName], rank: int) -> Checkpoint:
    failure: CheckpointInvalid | None = None
    for save in saves:
        try:
            return open_checkpoint(places, save, rank=rank)
        except CheckpointInvalid as error:
            failure = failure or error
    assert failure is not None  # noqa: S101 - there is a save, or saves_at says that there is none
    raise failure


def _offered_by(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the ranks have saved together: those of a pipeline each name their own tensors only."""
    offered: dict[str, Any] = {}
    for rank in (checkpoint.source_rank, *checkpoint.inventory.firsts()):
        for key in checkpoint.small(rank).data:
            if key != OWN:
                for path, value in flat(checkpoint.outline(key, rank), key):
                    offered.setdefault(path, value)
    return offered


# --- torch.save -----------------------------------------------------------------------------------


class _TorchFile(Weights):
    """A file of ``torch.save``, mapped into memory."""

    def __init__(self, given: str, path: Path) -> None:
        self._state = torch_file(given, path)
        if not isinstance(self._state, Mapping):
            kind = type(self._state).__name__
            raise ConfigError(f"{given} holds a {kind} and no state_dict: save model.state_dict()")
        self._tensors: dict[str, torch.Tensor] = {}
        offered: dict[str, Any] = {}
        for name, value in flat(self._state):
            offered[name] = value
            if isinstance(value, torch.Tensor) and not why_not(value):
                self._tensors[name] = value.detach()
                offered[name] = Leaf(name, tuple(value.shape), value.dtype)
        super().__init__(given, offered, digest_of([path]))

    def state_of(self, key: str) -> Any:
        for name in (key, f"{key}_state_dict", f"{key}_state"):
            if name in self._state:
                return _copied(self._state[name])
        there = ", ".join(map(str, list(self._state)[:6]))
        raise ConfigError(f"{self.where} holds no {key!r}; it has {there}")

    def _tensor(self, path: str) -> torch.Tensor:
        return self._tensors[path]


def torch_file(given: str, path: Path) -> Any:
    """What a file of ``torch.save`` holds; ``given`` names it in messages.

    Raises:
        ConfigError: it needs code to be loaded, or is no such file.
    """
    with path.open("rb") as file:
        is_zip = file.read(2) == b"PK"
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        found = _CLASS.search(str(error))
        if found is None and not is_zip:
            raise _damaged(
                given, ValueError("it is neither torch.save's nor safetensors")
            ) from None
        what = found[1] if found is not None else "something that is no data"
        raise ConfigError(
            f"{given} needs pickle: it holds {what}, and loading that runs code that the file "
            "names. If you trust where it comes from, convert it once, where its classes can be "
            "imported: x = torch.load(OLD, weights_only=False); "
            "torch.save(x.state_dict(), NEW) for a module, or torch.save(x[…], NEW) for the part "
            "that is a state_dict"
        ) from None
    except Exception as error:
        # A damaged file may raise anything; a map past its end is "invalid argument".
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise _damaged(given, error if is_zip else ValueError(_NEITHER)) from None


def _copied(state: Any) -> Any:
    """A state in memory of its own: the file's is not to be an optimizer's."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, Mapping):
        return {name: _copied(value) for name, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_copied, state))
    return state


# --- safetensors ----------------------------------------------------------------------------------


class _Safetensors(Weights):
    """One file of safetensors, or those that an index names together."""

    def __init__(self, given: str, files: Sequence[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self._holders: dict[str, Any] = {}
        offered: dict[str, Any] = {}
        for path in files:
            try:
                file: Any = safe_open(path, "pt")
            except SafetensorError as error:
                raise _damaged(str(path), error) from None
            for name in file.keys():  # noqa: SIM118 - it is no dict
                if name in offered:
                    raise ConfigError(f"{given} holds {name} twice, the second time in {path.name}")
                part = file.get_slice(name)
                dtype = DTYPES.get(part.get_dtype())
                self._holders[name] = file
                offered[name] = None if dtype is None else Leaf(name, (*part.get_shape(),), dtype)
        super().__init__(given, offered, digest_of(files))

    def _tensor(self, path: str) -> torch.Tensor:
        tensor: torch.Tensor = self._holders[path].get_tensor(path)
        return tensor


def _is_safetensors(path: Path) -> bool:
    """By the beginning: the length of a header, and the header, which is JSON."""
    with path.open("rb") as file:
        head = file.read(9)
    return path.suffix == ".safetensors" or (len(head) == 9 and head[8:] == b"{")


def _shards(at: Path) -> list[Path]:
    """The files of a directory of safetensors.

    Raises:
        ConfigError: there is no index, or files that it names are missing.
    """
    indices = sorted(at.glob(f"*{_INDEX}"))
    files = sorted(at.glob("*.safetensors"))
    if len(indices) == 1:
        try:
            names = set(json.loads(indices[0].read_bytes())["weight_map"].values())
            shards = [at / name for name in sorted(names) if Path(name).name == name]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(str(indices[0]), ValueError(f"its weight_map: {error!r}")) from None
        missing = sorted(names - {path.name for path in files})
        if missing:
            raise ConfigError(
                f"{at} is not whole: {len(missing)} of the {len(names)} files that its index names "
                f"are missing ({', '.join(missing[:3])})"
            )
        return shards
    if len(files) == 1 and not indices:
        return files
    if files or indices:
        found = ", ".join(path.name for path in [*indices, *files][:4])
        raise ConfigError(f"{at} holds several things to start from ({found}); name one of them")
    raise ConfigError(
        f"{at} holds nothing to start from: neither a job's directory or a step of Outlast's, nor "
        f"a DCP directory ({METADATA}), nor safetensors; of torch.save's files name one"
    )
