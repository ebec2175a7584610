"""Pieces as they were at a step boundary, and how it is seen that they have changed since.

Most of them are the same from one capture to the next: the same tensors in the same place. Then
only what can differ is taken anew, their versions and some of their bytes; with hundreds of tensors
that is what a step boundary costs. What else they are (dtype, shape) is looked at behind the loop's
back, before anything is copied.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Collection, Mapping
from typing import Any, Final

import torch

from outlast.checkpoint.aliases import counts, expected, storages_of
from outlast.checkpoint.overlaps import span
from outlast.checkpoint.plan import KIND, Check, Plan, Write
from outlast.checkpoint.reshard import PLAIN, is_spread, view
from outlast.errors import ConfigError

_SAMPLE_BYTES: Final = 32
_NUM_BYTES: Final = operator.attrgetter("nbytes")
_VERSION: Final = operator.attrgetter("_version")

# A piece of work: where some bytes of one source start in the file, all within one block of it, and
# how many they are.
Item = tuple["Source", int, int]


class Source:
    """One piece as it was at the boundary, and what has become of its copy."""

    __slots__ = (
        *("address", "at", "hasher", "num_parts", "parts_left", "sampled"),
        *("outer", "outer_version", "tensor", "version", "windows", "write"),
    )

    def __init__(
        self, write: Write | Check, tensor: torch.Tensor, outer: torch.Tensor | None = None
    ) -> None:
        self.write = write
        self.tensor = tensor
        # A spread tensor counts for itself: what goes through it moves no counter of its part.
        self.outer = outer
        self.outer_version = 0 if outer is None else outer._version
        self.version = 0 if tensor.is_inference() else tensor._version
        self.num_parts = self.parts_left = 1
        self.windows: list[Any] = []  # its first and last bytes, where they lie
        self.sampled: bytes | None = None  # what was there at the boundary, from ``at`` on
        self.at = 0
        self.hasher: Any = None  # of what goes through a ring, where it does not stay
        # Where the bytes lie as they are stored; 0 where they do not.
        self.address = 0
        if (
            tensor.is_cpu
            and tensor.dtype == write.dtype
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
        ):
            self.address = tensor.data_ptr()

    @property
    def key(self) -> str:
        """One word for the piece."""
        return self.write.piece.key

    def take_sample(self) -> None:
        """Remember some bytes, to see whether they are those that were copied."""
        tensor = self.tensor
        size = tensor.nbytes
        if not size or not tensor.is_cpu:
            return
        if self.address:
            count = size if size < _SAMPLE_BYTES else _SAMPLE_BYTES
            first, last = self.address, self.address + size - count
        else:  # strided: the first and the last element
            count = tensor.element_size()
            first = tensor.data_ptr()
            last = first + count * (span(tensor.shape, tensor.stride()) - 1)
        at = _array(count).from_address  # ctypes.string_at takes ten times as long
        self.windows = [at(first), at(last)]
        self.sampled = b"".join(self.windows)

    def has_changed(self) -> bool:
        """Whether the tensor is not what it was at the boundary, as far as can be told."""
        tensor = self.tensor
        if not tensor.is_inference() and tensor._version != self.version:
            return True
        if self.outer is not None and self.outer._version != self.outer_version:
            return True
        return self.sampled is not None and b"".join(self.windows) != self._sample()

    def was_copied_late(self, target: int) -> bool:
        """Whether what lies at ``target`` is not the piece as it was at the boundary."""
        if self.sampled is None or not self.address:
            return False
        first, last = self.windows
        count, last_at = len(first), ctypes.addressof(last) - ctypes.addressof(first)
        at = _array(count).from_address
        return at(target).raw + at(target + last_at).raw != self._sample()

    def _sample(self) -> bytes:
        assert self.sampled is not None  # noqa: S101 - whoever asks has looked
        return self.sampled[self.at : self.at + 2 * len(self.windows[0])]


class Remembered:
    """The sources of the capture before, to be used again where nothing has moved.

    Only one capture at a time may hold them.
    """

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.items: list[Item] = []
        self._plan: Plan | None = None
        self._lazy: Collection[str] = ()
        self._get: Any = None
        self.rest: list[Write] = []  # what is copied at once
        self._names: list[str] = []  # of all tensors
        self._kinds: list[Any] = []  # of the sources' tensors
        self._others: list[tuple[str, Any]] = []  # name and kind of those that are no sources
        self._addresses: list[int] = []
        self._sizes: list[int] = []
        self._windows: list[list[Any]] = []
        self._held: tuple[torch.Tensor, ...] = ()
        self._memory: list[torch.UntypedStorage] = []
        self._counts: list[int] = []  # how many hold each memory, if nobody else does
        self._versions: list[int] = []
        self._sampled = b""

    def keep(
        self,
        plan: Plan,
        lazy: Collection[str],
        tensors: Mapping[str, torch.Tensor],
        sources: list[Source],
        items: list[Item],
    ) -> None:
        """Remember a capture's sources, if they are plain tensors in this memory, and no others."""
        self._plan, self._held, self._memory = None, (), []
        names = [source.write.piece.name for source in sources]
        meant = [write.piece.name for write in plan.writes if write.piece.name in lazy]
        usable = (
            len(set(names)) == len(names) > 1
            and names == meant
            and set(map(type, tensors.values())) <= PLAIN
            and all(
                source.address
                and source.sampled is not None
                and not source.write.where.cuts
                and not source.tensor.is_complex()
                and not source.tensor.is_inference()
                for source in sources
            )
        )
        if not usable:
            return
        self._plan, self._lazy = plan, lazy
        self.sources, self.items = sources, items
        self.rest = [write for write in plan.writes if write.piece.name not in lazy]
        self._get = operator.itemgetter(*names)
        held = self._get(tensors)
        self._names = list(tensors)
        self._kinds = list(map(KIND, held))
        own = set(names)
        self._others = [(name, KIND(value)) for name, value in tensors.items() if name not in own]
        self._addresses = [source.address for source in sources]
        self._counts = list(expected(tensors, names).values())
        self._sizes = list(map(_NUM_BYTES, held))
        windows = [window for source in sources for window in source.windows]
        # In groups: to join a thousand at once takes memory for a moment that is given back to the
        # system, and then milliseconds in some runs.
        self._windows = [windows[at : at + 100] for at in range(0, len(windows), 100)]
        sampled = b"".join(source.sampled or b"" for source in sources)
        at = 0
        for source in sources:
            source.sampled, source.at = sampled, at
            at += 2 * len(source.windows[0])

    def forget(self) -> None:
        """Nothing is used again; what is held on to stays so until ``let_go``."""
        self._plan = None

    def again(self, plan: Plan, lazy: Collection[str], tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether ``plan`` fits ``tensors`` and the sources' bytes lie where they lay.

        Then their versions and samples are noted; ``moved`` makes the sources those of ``tensors``.
        """
        if (
            plan is not self._plan
            or (lazy is not self._lazy and lazy != self._lazy)
            or list(tensors) != self._names
            or not set(map(type, tensors.values())) <= PLAIN
            or [(name, KIND(tensors[name])) for name, _ in self._others] != self._others
        ):
            return False
        held = self._get(tensors)
        try:  # what has no memory of its own, as a sparse tensor, says so
            if (
                list(map(torch.Tensor.data_ptr, held)) != self._addresses
                or list(map(_NUM_BYTES, held)) != self._sizes
                or not all(map(torch.Tensor.is_contiguous, held))
            ):
                return False
            self._versions = list(map(_VERSION, held))
            # It is this memory that is copied, whatever is assigned to the tensor's data meanwhile.
            self._memory = storages_of(held)
            if counts(self._memory) != self._counts:
                return False
        except RuntimeError:
            return False
        self._sampled = b"".join(map(b"".join, self._windows))
        self._held = held
        return True

    def moved(self) -> list[str]:
        """Make the sources those of the tensors that were noted; names of those that do not fit.

        These have the same bytes in the same place, and are something else all the same.
        """
        held, self._held = self._held, ()
        for source, tensor, version in zip(self.sources, held, self._versions, strict=True):
            source.tensor = tensor
            source.version = version
            source.sampled = self._sampled
            source.parts_left = source.num_parts
        found = zip(self.sources, held, self._kinds, strict=True)
        return [
            source.write.piece.name
            for source, tensor, kind in found
            if KIND(tensor) != kind or tensor.is_neg()
        ]

    @property
    def memory(self) -> list[torch.UntypedStorage]:
        """What the sources lie in, while they are used again."""
        return self._memory

    def let_go(self) -> None:
        """Nothing is captured any more: the tensors are not held on to."""
        self._held, self._memory = (), []
        for source in self.sources:
            source.tensor, source.outer = _NOTHING, None


_NOTHING: Final = torch.empty(0)


def source_of(tensors: Mapping[str, torch.Tensor], one: Write | Check) -> Source:
    """A piece as it is now."""
    tensor = tensors[one.piece.name]
    return Source(one, local_of(tensors, one), tensor if is_spread(tensor) else None)


def local_of(tensors: Mapping[str, torch.Tensor], one: Write | Check) -> torch.Tensor:
    """This process's memory of a piece, under a name of its own: it stays what it was."""
    piece = one.piece
    tensor: Any = tensors[piece.name]
    local = tensor._local_tensor if is_spread(tensor) else tensor
    # An alias: it stays what it was, whatever is assigned to the tensor's data meanwhile.
    local = view(local, one.where.cuts) if one.where.cuts else local.detach()
    if local.shape != piece.shape and local.numel():
        raise ConfigError(f"{piece.name} has shape {tuple(local.shape)}, planned as {piece.shape}")
    return local


@functools.cache
def _array(count: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * count
