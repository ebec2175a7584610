"""Marks in a device's time, and the seconds between two of them.

A mark is an event on the stream that trains: the host runs ahead, and what it waits for says
nothing about what the device does. An event's time is read when it has passed, and never waited
for.

What can go wrong: work on other streams that the training stream does not wait for is not
seen; in a CUDA graph nothing is marked.
"""

from __future__ import annotations

from typing import Any

import torch


class DeviceClock:
    """Events on the stream that trains.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._free: list[Any] = []

    def anchor(self) -> None:
        """The stream of this moment is the one that trains."""
        self._stream = torch.cuda.current_stream(self._device)

    def mark(self) -> Any:
        """An event behind what was queued so far; None on another stream, or in a CUDA graph."""
        stream = torch.cuda.current_stream(self._device)
        if stream != self._stream or torch.cuda.is_current_stream_capturing():
            return None
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def between(self, first: Any, last: Any) -> float:
        """Seconds between two events that have passed."""
        return float(first.elapsed_time(last)) / 1000

    def has_passed(self, mark: Any) -> bool:
        """Whether the device has come to it."""
        return bool(mark.query())

    def give_back(self, marks: list[Any]) -> None:
        """Events are used again."""
        self._free += [mark for mark in marks if mark is not None]
