"""Copies from GPUs, on a stream of their own, behind the training's stream.

What training had put into its queue at the boundary comes before the copies; the optimizer's stream
waits for them on the device, so the host never waits. Pieces that other ranks hold too are hashed
on the device: bringing a replica to the host only to compare it would cost as much as its copy.

While copies are under way no CUDA graph is captured (``aliases``): torch hands out streams in turn
from a small pool, so that ours may be the one that is captured.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch

_CHUNK: Final = 1 << 21  # words of 32 bits that are hashed at once
_SEED: Final = 20_261_123
_BASES: Final = (0x9E3779B97F4A7C13, 0xBF58476D1CE4E5BB)  # odd, of the chunks


class Piece(Protocol):
    """A source, as this module sees it."""

    write: Any
    tensor: torch.Tensor

    @property
    def key(self) -> str:
        """One word for it."""


class Reports(Protocol):
    """Who is told of what has arrived."""

    digests: dict[str, str]

    def count(self, start: int, end: int) -> None:
        """These bytes of the file are there."""


class CudaCopies:
    """The copies of one snapshot from all devices.

    Args:
        reports: told of bytes that have arrived.
        sources: what is to be copied.
        checks: what is only to be hashed.
        buffer: the arena; its memory should be registered with the driver.

    Attributes:
        over: set once no copy is under way any more.
    """

    def __init__(
        self,
        reports: Reports,
        sources: Sequence[Piece],
        checks: Sequence[Piece],
        buffer: torch.Tensor,
    ) -> None:
        self.over = threading.Event()
        self._reports = reports
        self._buffer = buffer
        self._sources = sources
        self._checks = checks
        self._launched = threading.Event()
        self._last: dict[torch.device, Any] = {}
        self._begun: dict[torch.device, Any] = {}
        for device in {source.tensor.device for source in [*sources, *checks]}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._begun[device] = event

    def run(self) -> None:
        """Launch everything, then report blocks as they arrive; in a copier's thread."""
        try:
            self._run()
        finally:
            try:  # where it failed, too: the arena and the tensors may be used for something else
                for event in self._last.values():
                    event.synchronize()
            finally:
                self.over.set()

    def _run(self) -> None:
        arrived: list[tuple[Any, Piece]] = []
        hashed: list[tuple[Piece, torch.Tensor]] = []
        try:
            for source in self._sources:
                arrived.append((self._launch(source, hashed), source))  # noqa: PERF401 - in order
            for check in self._checks:
                self._launch_hash(check, hashed)
        finally:
            self._launched.set()
        for event, source in arrived:
            event.synchronize()
            self._reports.count(source.write.start, source.write.end)
        for source, sums in hashed:
            with torch.cuda.stream(_stream(source.tensor.device)):
                self._reports.digests[source.key] = in_words(sums)

    def hold_back_training(self) -> None:
        """Before anything is changed: the device finishes the copies first, the host goes on."""
        self._launched.wait()
        for device, event in self._last.items():
            torch.cuda.current_stream(device).wait_event(event)

    def _launch(self, source: Piece, hashed: list[tuple[Piece, torch.Tensor]]) -> Any:
        write, device = source.write, source.tensor.device
        with torch.cuda.stream(self._behind(device)):
            target = self._buffer[write.start : write.end].view(write.dtype)
            # Here: torch would do it on the host, as soon as the copy is queued.
            plain = source.tensor.resolve_conj().resolve_neg()
            target.view(write.piece.shape).copy_(plain, non_blocking=True)
            if write.shared:
                hashed.append((source, sums_of(source.tensor.to(write.dtype))))
        return self._record(device)

    def _launch_hash(self, check: Piece, hashed: list[tuple[Piece, torch.Tensor]]) -> None:
        device = check.tensor.device
        with torch.cuda.stream(self._behind(device)):
            hashed.append((check, sums_of(check.tensor.to(check.write.dtype))))
        self._record(device)

    def _behind(self, device: torch.device) -> Any:
        stream = _stream(device)
        if device not in self._last:
            stream.wait_event(self._begun[device])
        return stream

    def _record(self, device: torch.device) -> Any:
        event = torch.cuda.Event(blocking=True)  # waited for asleep: a core is training's
        event.record(_stream(device))
        self._last[device] = event
        return event


# --- digests -------------------------------------------------------------------------------------


def sums_of(tensor: torch.Tensor) -> torch.Tensor:
    """A digest of a tensor's bits and their order that a device computes.

    Two sums modulo 2^64 of its words of 32 bits, each times an odd number drawn for its place in
    its chunk, and each chunk's sum times a power of another odd number (multilinear hashing; Lemire
    and Kaser, 2014): words that differ, or have changed places, keep one sum with about 2^-31.
    """
    words = _words_of(tensor)
    found = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    numbers = _numbers(tensor.device)
    for chunk, start in enumerate(range(0, len(words), _CHUNK)):
        part = words[start : start + _CHUNK]
        for index, base in enumerate(_BASES):
            power = pow(base, chunk, 1 << 64)
            power -= (power >> 63) << 64  # as torch counts
            found[index] += (part * numbers[index, : len(part)]).sum() * power
    return found


def in_words(sums: torch.Tensor) -> str:
    """The digest as text; waits for the device."""
    return "-".join(str(number) for number in sums.tolist())


def _words_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    raw = flat.view(torch.uint8)
    if raw.numel() % 4 or raw.storage_offset() % 4 or raw.data_ptr() % 4:
        whole = raw.new_zeros(-(-raw.numel() // 4) * 4)
        whole[: raw.numel()] = raw
        raw = whole
    return raw.view(torch.int32)


_drawn: dict[torch.device, torch.Tensor] = {}


def _numbers(device: torch.device) -> torch.Tensor:
    """Those of the places, the same in every process."""
    if device not in _drawn:
        generator = torch.Generator().manual_seed(_SEED)
        least, most = -(1 << 63), (1 << 63) - 1
        drawn = torch.randint(least, most, (2, _CHUNK), generator=generator)
        _drawn[device] = (drawn | 1).to(device)
    return _drawn[device]


_streams: dict[torch.device, Any] = {}


def _stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
