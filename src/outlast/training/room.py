"""The memory that this worker's snapshots are copied into, as far as the keeper gave it some."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any, Final

import torch

from outlast.attempt.link import STORE_VARIABLE
from outlast.checkpoint import devices
from outlast.config import Settings
from outlast.keeper import wire
from outlast.keeper.client import Client
from outlast.keeper.memory import Arena
from outlast.policy.retention import num_replicas

logger = logging.getLogger(__name__)

# What is in memory, and what others keep a copy of, stays readable while the next is copied.
MEMORY_TIER_BUFFERS: Final = 2
_PORTABLE: Final = 1  # cudaHostRegisterPortable: for all devices of this process


def snapshots_stay(settings: Settings) -> bool:
    """Whether a snapshot may be all there is of a checkpoint, for a while.

    It is where the machine's agent keeps the memory while workers come and go. Whoever says how
    often there is a checkpoint means one that is in storage; so does he who wants most of them
    without the optimizer's state, and memory that is named as a tier has rules of its own.
    """
    every, first = settings.checkpoint_every, settings.tiers[0]
    is_open = every.steps is None and every.seconds is None and first.kind != "memory"
    is_whole = settings.checkpoint_optimizer_every == 1
    return STORE_VARIABLE in os.environ and is_open and is_whole


class SnapshotRoom:
    """Arenas of one worker.

    Args:
        settings: how many buffers are wanted.
        world_size: number of workers, where nobody says how many are on this machine.
    """

    def __init__(self, settings: Settings, world_size: int) -> None:
        self.reserved: wire.Reserved | None = None
        self._wanted = settings.checkpoint_buffers
        self._workers = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
        machines = -(-world_size // max(self._workers, 1))
        stays = any(tier.kind == "memory" for tier in settings.tiers)
        if stays or num_replicas(settings.peer_replicas, machines):
            self._wanted = MEMORY_TIER_BUFFERS if self._wanted is None else self._wanted
        self._useful = MEMORY_TIER_BUFFERS if snapshots_stay(settings) else 1
        self._lock = threading.Lock()
        self._arenas: dict[int, Arena] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._used: dict[int, int] = {}
        self._alone: int | None = None  # the arena of the newest snapshot, if no tier has it
        self._registered: list[torch.Tensor] = []  # with the GPU's driver
        self._turn = 0

    @property
    def num_buffers(self) -> int:
        """Snapshots that may be in flight at once."""
        return max(len(self._buffers), 1)

    @property
    def keeps(self) -> bool:
        """Whether a snapshot stays in memory until the one after it is whole."""
        return len(self._buffers) > 1

    def reserve(self, client: Client, size: int) -> str:
        """See that there is room for ``size`` bytes; what people should know of it, or "".

        Raises:
            OSError: the keeper is gone, or has no memory to give.
        """
        with self._lock:
            known = self.reserved
            if known is not None and (known.ring_bytes or known.num_bytes >= size):
                return ""
            reserved, arenas = client.reserve(
                size, self._wanted, self._workers, useful=self._useful
            )
            self._unregister()
            for arena in self._arenas.values():
                arena.close()
            self._arenas = dict(zip(reserved.arenas, arenas, strict=True))
            self._buffers = {
                number: torch.frombuffer(arena.view, dtype=torch.uint8)
                for number, arena in self._arenas.items()
            }
            self._register()
            self.reserved = reserved
            self._alone = reserved.alone if reserved.alone in self._arenas else None
            return reserved.words

    def take(self, busy: set[int]) -> tuple[int, torch.Tensor]:
        """An arena that is not busy, the one whose snapshot is oldest.

        Raises:
            RuntimeError: all are busy.
        """
        free = self._free(busy)
        if not free:
            raise RuntimeError("no memory is free for another snapshot")
        number = min(free, key=lambda number: self._used.get(number, 0))
        self._turn += 1
        self._used[number] = self._turn
        return number, self._buffers[number]

    def is_free(self, busy: set[int]) -> bool:
        """Whether there is an arena for another snapshot."""
        return not self._buffers or bool(self._free(busy))

    def ended(self, number: int, *, alone: bool) -> None:
        """The snapshot in this arena is whole; in memory ``alone``, or in a tier as well.

        Until the next one is, nothing may be written over one that is nowhere else.
        """
        self._alone = number if alone else None

    def _free(self, busy: set[int]) -> list[int]:
        kept = self._alone if self.keeps else None  # with room for one there is no choice
        return [one for one in self._buffers if one not in busy and one != kept]

    def buffer(self, number: int) -> torch.Tensor | None:
        """The arena of this number, if there is one."""
        return self._buffers.get(number)

    def close(self) -> None:
        """Nothing is copied any more.

        Memory that is unmapped while the driver has it leaves its pages there, under an address
        that something else gets: copies to that would go to those pages.
        """
        with self._lock:
            self._unregister()
            self._buffers = {}
            for arena in self._arenas.values():
                arena.close()
            self._arenas = {}

    def forget(self) -> None:
        """The keeper that gave it is gone; its successor gives the same memory again."""
        with self._lock:
            self.reserved = None

    def _register(self) -> None:
        """Let copy engines reach the arenas directly; without it copies only take longer."""
        if devices.own() is not None:
            devices.apart(self._register_all, "register")

    def _register_all(self) -> None:
        runtime: Any = torch.cuda.cudart()
        for buffer in self._buffers.values():
            code = int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.numel(), _PORTABLE))
            if code:
                logger.warning("an arena could not be registered with the GPU's driver: %d", code)
            else:
                self._registered.append(buffer)

    def _unregister(self) -> None:
        if self._registered:
            devices.apart(self._unregister_all, "unregister")

    def _unregister_all(self) -> None:
        runtime: Any = torch.cuda.cudart()
        registered, self._registered = self._registered, []
        for buffer in registered:
            runtime.cudaHostUnregister(buffer.data_ptr())
