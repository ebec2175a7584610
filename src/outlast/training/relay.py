"""Between the keepers of several machines, which talk through their workers.

A keeper that does not have rank 0 hands each rank's part to that rank, which publishes it; rank 0
brings the parts to its keeper, which commits, and publishes what came of it. On one machine nothing
of this happens.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from outlast.attempt.link import Link
from outlast.keeper import wire
from outlast.keeper.commit import Part

logger = logging.getLogger(__name__)

PART_TIMEOUT_S: Final = 1800.0
_SLICE_S: Final = 1.0


class _Word(msgspec.Struct, frozen=True):
    error: str
    void: tuple[str, ...]
    manifest: bytes


class Relay:
    """One worker's side of it.

    Args:
        link: the other ranks.
        send: to this machine's keeper.
    """

    def __init__(self, link: Link, send: Callable[[Any, bytes], None]) -> None:
        self._link = link
        self._send = send
        local = int(os.environ.get("LOCAL_WORLD_SIZE", str(link.world_size)))
        self._is_needed = local < link.world_size
        self._first = link.rank - int(os.environ.get("LOCAL_RANK", "0"))
        self._local = range(self._first, self._first + local)
        self._open: set[int] = set()
        self._lock = threading.Lock()

    def begun(self, step: int, serial: int) -> None:
        """A save has begun on this rank."""
        if not self._is_needed:
            return
        with self._lock:
            self._open.add(serial)
        act = None
        if self._link.rank == 0:
            act = self._bring_parts
        elif self._link.rank == self._first:
            act = self._bring_outcome
        if act is not None:
            threading.Thread(
                target=act, args=(step, serial), name="outlast-relay", daemon=True
            ).start()

    def ended(self, serial: int) -> None:
        """A save is over on this rank."""
        with self._lock:
            self._open.discard(serial)

    def publish_part(self, message: wire.Part, data: bytes) -> None:
        """This rank's part, for rank 0."""
        self._publish(f"save/{message.serial}/part/{message.rank}", data)

    def publish_outcome(self, message: wire.Outcome, manifest: bytes) -> None:
        """What rank 0's keeper decided, for the other machines."""
        word = _Word(message.error, message.void, manifest)
        self._publish(f"save/{message.serial}/outcome", msgspec.msgpack.encode(word))

    def fail(self, serial: int, error: str) -> None:
        """This machine's keeper is gone: the others must not wait for its parts."""
        if self._is_needed:
            data = msgspec.json.encode(Part(error=error, by_storage=False))
            self._publish(f"save/{serial}/part/{self._link.rank}", data)
            if self._link.rank == 0:
                word = msgspec.msgpack.encode(_Word(error, (), b""))
                self._publish(f"save/{serial}/outcome", word)

    def _publish(self, key: str, data: bytes) -> None:
        try:
            self._link.publish(key, data)
        except (OSError, RuntimeError) as error:  # the store is gone: the attempt is over
            logger.warning("a save's part was not passed on: %s", error)

    def _bring_parts(self, step: int, serial: int) -> None:
        for rank in range(self._link.world_size):
            if rank in self._local:
                continue
            data = self._wait(serial, f"save/{serial}/part/{rank}")
            if data is None:
                return
            if not data:
                words = f"its part did not come within {PART_TIMEOUT_S:.0f} s"
                data = msgspec.json.encode(Part(error=words))
            self._hand_over(wire.Part(step=step, serial=serial, rank=rank), data)

    def _bring_outcome(self, step: int, serial: int) -> None:
        data = self._wait(serial, f"save/{serial}/outcome")
        if data is None:
            return
        error = f"rank 0 did not commit within {PART_TIMEOUT_S:.0f} s"
        word = msgspec.msgpack.decode(data, type=_Word) if data else _Word(error, (), b"")
        outcome = wire.Outcome(step=step, serial=serial, error=word.error, void=word.void)
        self._hand_over(outcome, word.manifest)

    def _wait(self, serial: int, key: str) -> bytes | None:
        """The value of ``key``; b"" when it never came, None when nobody needs it any more."""
        until_s = time.monotonic() + PART_TIMEOUT_S
        while time.monotonic() < until_s:
            with self._lock:
                if serial not in self._open:
                    return None
            try:
                return self._link.fetch(key, _SLICE_S)
            except TimeoutError:
                continue
            except (OSError, RuntimeError):
                return None
        return b""

    def _hand_over(self, message: Any, data: bytes) -> None:
        try:
            self._send(message, data)
        except OSError as error:
            logger.warning("a save's part was not passed on: %s", error)
