"""Copies from GPUs, on a stream of their own, behind the training's stream.

What training had put into its queue at the boundary comes before the copies; the optimizer's stream
waits for them on the device, so the host never waits. Pieces that other ranks hold too are hashed
on the device: bringing a replica to the host only to compare it would cost as much as its copy.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    """

    def __init__(
        self,
        reports: Reports,
        sources: Sequence[Piece],
        checks: Sequence[Piece],
        buffer: torch.Tensor,
    ) -> None:
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
            target.view(write.piece.shape).copy_(source.tensor, non_blocking=True)
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
        event = torch.cuda.Event()
        event.record(_stream(device))
        self._last[device] = event
        return event


def sums_of(tensor: torch.Tensor) -> torch.Tensor:
    """A digest of a tensor's bits that a device computes: their sum and their exclusive or."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    bits = flat.view(_INTEGERS[min(flat.element_size(), 8)])
    return torch.stack((bits.sum(dtype=torch.int64), torch.hash_tensor(bits).view(torch.int64)))


def in_words(sums: torch.Tensor) -> str:
    """The digest as text; waits for the device."""
    return "-".join(str(number) for number in sums.tolist())


_streams: dict[torch.device, Any] = {}


def _stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
