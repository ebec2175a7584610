"""A worker's line to the keeper, and the memory that the keeper gives it for snapshots.

The keeper is found or started, and the line is made again when it has died. Its memory is mapped by
both; there may be less of it than was wanted, down to a small ring.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from outlast.attempt.link import STORE_VARIABLE
from outlast.checkpoint import devices
from outlast.config import Settings
from outlast.errors import OutlastError, StorageError
from outlast.keeper import wire
from outlast.keeper.arena import Arena
from outlast.keeper.client import Client
from outlast.keeper.memory import MemoryTier
from outlast.keeper.place import Setup, is_foreign
from outlast.keeper.process import SOCKET_VARIABLE, Supervisor, TierWaits
from outlast.policy.retention import num_replicas

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 30.0
GONE: Final = "the keeper is gone"


class KeeperLine:
    """The connection to this machine's keeper.

    Attributes:
        client: the keeper's other end, None while there is none.
        socket: where the keeper listens; its log lies beside it.

    Args:
        setup: the keeper's, where this worker has to start it.
        hello: who we are.
        on_message: told what the keeper says, in the thread that reads.
        on_lost: told that the keeper has died.
        on_back: told that there is one again.
        say: tells people what they must know.
    """

    def __init__(
        self,
        setup: Setup,
        hello: wire.Hello,
        *,
        on_message: Callable[[Any, bytes], None],
        on_lost: Callable[[], None],
        on_back: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self.client: Client | None = None
        self._setup = setup
        self.socket = Path(os.environ.get(SOCKET_VARIABLE) or setup.socket)
        self._hello = hello
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_back = on_back
        self._say = say
        self._changed = threading.Condition()
        self._supervisor: Supervisor | None = None
        self._starter: threading.Thread | None = None
        self._unusable: StorageError | None = None  # why no keeper can be started
        self._closing = False
        self._standing: dict[type[Any], tuple[Any, bytes, tuple[int, ...]]] = {}
        self._is_settled = False

    # --- beginning and end ----------------------------------------------------------------------

    def start(self) -> None:
        """Find the keeper; where there is none, begin to start it.

        One that runs already may have snapshots in memory; a new one has none, so that it can get
        ready while the state is read from elsewhere. ``wait_until_ready`` waits for it.

        Raises:
            StorageError: the agent's keeper is of another version.
        """
        if is_foreign(self.socket):
            raise StorageError(
                "outlast was upgraded while the job ran: this worker and the agent's keeper do "
                "not understand each other; start the same command again"
            )
        try:
            self._connect(0.0)
        except OSError:
            self._starter = threading.Thread(target=self._start, name="outlast-start", daemon=True)
            self._starter.start()
        else:
            self._supervise()

    def wait_until_ready(self, *, needed: bool = False) -> None:
        """Wait until the keeper is there; training goes on where only it does not come.

        Args:
            needed: nothing can be read without it.

        Raises:
            StorageError: it cannot be started, and no other one could; or it is needed.
        """
        if self._starter is not None:
            self._starter.join(2 * CONNECT_TIMEOUT_S)
        if self._unusable is not None:
            raise self._unusable
        if self.client is None and needed:
            raise StorageError("there is no keeper to read checkpoints with: it does not answer")
        if self.client is None:
            self._say("the keeper is not there yet; nothing is saved until it is")
            threading.Thread(target=self._reconnect, name="outlast-reconnect", daemon=True).start()

    def close(self, *, clean: bool, copying_s: float | None) -> None:
        """Leave; unless it is ``clean`` the keeper stays for the next attempt.

        Args:
            clean: whether the job, or this run of it, is over.
            copying_s: how long slower tiers may take to get what is due there.
        """
        self._closing = True
        if self._starter is not None:
            self._starter.join(CONNECT_TIMEOUT_S)
        client, self.client = self.client, None
        if client is not None:
            client.close() if clean else client.leave()
        if self._supervisor is None:
            return
        try:
            if clean:
                self._supervisor.close(copying_s)
        finally:  # this process may go on, as a notebook's does, and begin another session
            self._supervisor.leave()

    # --- while it lasts -------------------------------------------------------------------------

    def memory(self) -> MemoryTier | None:
        """The snapshots in this machine's memory, or None if the keeper cannot say.

        It says so once nothing of earlier attempts is in flight any more that is worth a wait.
        """
        self._is_settled = True
        try:
            return self.client.recall() if self.client else None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            logger.warning("snapshots in memory cannot be read: %s", error)
            return None

    def settle(self) -> None:
        """Wait for saves of earlier attempts, where nobody has: their memory can be had then."""
        if not self._is_settled:
            self.memory()

    def reject(self, saves: tuple[str, ...]) -> None:
        """Tell the keeper which saves a resume found not to be valid."""
        if saves:
            self.send_quietly(wire.Rejected(saves=saves))

    def judge(self, judged: wire.Judged) -> None:
        """Tell the keeper, and whichever takes its place, what is known of the checkpoints."""
        self.tell_all(judged)

    def tell_all(self, message: Any, blob: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Tell the keeper, and whichever takes its place; the last one of a kind counts.

        ``fds`` stay the caller's, open for as long as this line.
        """
        with self._changed:
            self._standing[type(message)] = (message, blob, fds)
        client = self.client
        if client is not None:
            with contextlib.suppress(OSError):  # its successor is told
                client.send(message, blob, fds)

    def send(self, message: Any, blob: bytes = b"") -> None:
        """Tell the keeper.

        Raises:
            OSError: it is gone.
        """
        client = self.client
        if client is None:
            raise ConnectionResetError(GONE)
        client.send(message, blob)

    def send_quietly(self, message: Any, blob: bytes = b"") -> None:
        """Tell the keeper, if there is one; if not, whoever reads hears of it too."""
        try:
            self.send(message, blob)
        except OSError as error:
            logger.debug("not sent: %s", error)

    def wait_for_keeper(self, timeout_s: float) -> None:
        """Wait until a keeper that has died is there again, but no longer than it may take."""
        with self._changed:
            limit_s = min(timeout_s, CONNECT_TIMEOUT_S)
            self._changed.wait_for(lambda: self.client is not None, limit_s)

    # --- inside ---------------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            self._supervise()
            self._connect(CONNECT_TIMEOUT_S)
        except OutlastError as error:
            self._unusable = StorageError(f"there is no keeper to save checkpoints with: {error}")
        except OSError as error:
            logger.warning("%s", error)

    def _supervise(self) -> None:
        """Without an agent the first worker of a machine sees to the keeper."""
        if SOCKET_VARIABLE not in os.environ and int(os.environ.get("LOCAL_RANK", "0")) == 0:
            self._supervisor = Supervisor(self._setup, TierWaits(self._say).tell)
            self._supervisor.start()

    def _connect(self, timeout_s: float) -> None:
        self.client = Client(
            self.socket, self._hello, self._on_message, self._lost, timeout_s=timeout_s
        )
        if self._closing:
            self.client.leave()
            return
        with self._changed:
            standing = list(self._standing.values())
        for item in standing:
            with contextlib.suppress(OSError):  # whoever reads hears of it too
                self.client.send(*item)

    def _lost(self) -> None:
        if self._closing:
            return
        self.client = None
        self._on_lost()
        threading.Thread(target=self._reconnect, name="outlast-reconnect", daemon=True).start()

    def _reconnect(self) -> None:
        said = False
        while not self._closing and (self.client is None or self.client.lost):
            try:
                self._connect(CONNECT_TIMEOUT_S)
            except OSError as error:
                if not said and not self._closing:
                    self._say(f"{GONE} ({error}); nothing is saved until it is back")
                said = True
        client = self.client
        if self._closing and client is not None:
            client.close()
        with self._changed:
            self._changed.notify_all()
        self._on_back()


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
