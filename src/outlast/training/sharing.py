"""What a save needs before it: memory that is shared with the keeper, and the ranks' agreement.

``SnapshotRoom``: the memory that this worker's snapshots are copied into, as far as the keeper gave
it some.

``KeptSteps``: what is known of the snapshots that are taken of each step (``each_step``).

``Sharing``: the ranks agree on who writes what, without a barrier and off the training thread. Each
rank names the digest of its structure; rank 0 publishes which rank has which; a structure that not
all ranks have is published once, by the first that has it. From that each rank works out its own
share (see ``checkpoint.plan``): no message grows with ranks times tensors. A new round begins at
the same points on all ranks: after the first step, and after a save that was void.

``KeeperMeeting``: where the keepers of several machines find each other. Rank 0 opens a socket for
its machine's keeper and tells the others, through the attempt's store, where it is and by which key
whoever speaks is recognised: 32 random bytes of this session. After that a save needs no worker
once its copies are whole. With one machine nothing of this happens. The socket is this worker's, so
that a keeper that takes the place of one that has died is found at the same address.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import torch

from outlast.attempt.link import STORE_VARIABLE, Link
from outlast.checkpoint import devices
from outlast.checkpoint.plan import (
    Held,
    Share,
    Structure,
    World,
    describe,
    is_of_one_rank,
    share,
)
from outlast.config import EACH_STEP_BUFFERS, Settings
from outlast.errors import ConfigError
from outlast.keeper import wire
from outlast.keeper.client import Client, KeeperLine
from outlast.keeper.memory import Arena
from outlast.peer import Tls, listen
from outlast.policy.retention import num_replicas

# What is in memory, and what others keep a copy of, stays readable while the next is copied.
MEMORY_TIER_BUFFERS: Final = 2
EACH_STEP_COPIES: Final = 3  # of another machine's snapshot: two versions and the one that comes
_VERSIONS: Final = 2
NEWEST_STEPS: Final = 8  # of which it is remembered how they ended
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
    """The memory for one worker's snapshots: its arenas.

    Args:
        settings: how many buffers are wanted.
        world_size: number of workers, where nobody says how many are on this machine.
    """

    def __init__(self, settings: Settings, world_size: int) -> None:
        self.reserved: wire.Reserved | None = None
        self._wanted = settings.checkpoint_buffers
        self._workers = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
        machines = -(-world_size // max(self._workers, 1))
        self._num_copies = num_replicas(settings.peer_replicas, machines)
        self._each_step = settings.checkpoint_each_step
        self._held: int | None = None  # the arena of the newest that was copied from every machine
        # Those of the attempt before, oldest first, until there is such a one.
        self._resumed: list[int] = []
        if self._each_step:
            self._wanted = EACH_STEP_BUFFERS if self._wanted is None else self._wanted
        stays = any(tier.kind == "memory" for tier in settings.tiers)
        if stays or self._num_copies:
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

    def reserve(self, client: Client, size: int, *, beyond: int = 0, is_ahead: bool = False) -> str:
        """See that there is room for ``size`` bytes; what people should know of it, or "".

        Args:
            client: of whom it is asked.
            size: that there must be.
            beyond: what is asked for besides, where any is, for snapshots that are a little larger.
            is_ahead: nothing needs it yet: whoever did has seen to it, and may be writing there.

        Raises:
            OSError: the keeper is gone, or has no memory to give.
        """
        with self._lock:
            known = self.reserved
            if known is not None and (is_ahead or known.ring_bytes or known.num_bytes >= size):
                return ""
            reserved, arenas = client.reserve(
                *(size + beyond, self._wanted, self._workers),
                useful=self._useful,
                versions=_VERSIONS if self._each_step else 1,
                copies=self._num_copies * EACH_STEP_COPIES if self._each_step else 0,
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
            self._held = self._held if self._held in self._arenas else None
            self._resumed = []
            if self._each_step and self._alone is not None and self._held is None:
                others = min(_VERSIONS, len(self._arenas) - MEMORY_TIER_BUFFERS)
                self._resumed = list(reserved.arenas[-others:]) if others > 0 else []
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

    def ended(self, number: int, *, alone: bool, is_step: bool = False) -> None:
        """The snapshot in this arena is whole; in memory ``alone``, or in a tier as well.

        Until the next one is, nothing may be written over one that is nowhere else. Where each step
        is kept, a checkpoint takes no other step's protection away.
        """
        if is_step or not self._each_step:
            self._alone = number if alone else None
        elif number == self._alone and not alone:
            self._alone = None

    def held(self, number: int) -> None:
        """What lies in this arena was copied from every machine: all of that step is twice there.

        Until a newer one is, nothing may be written over it: whatever is lost, it is what is left.
        """
        self._held, self._resumed = number, []

    def _free(self, busy: set[int]) -> list[int]:
        while True:
            kept = {self._alone} if self.keeps else set()  # with room for one there is no choice
            if len(self._buffers) > MEMORY_TIER_BUFFERS:
                kept |= {self._held, *self._resumed}
            free = [one for one in self._buffers if one not in busy and one not in kept]
            if free or not self._resumed or not busy.isdisjoint(self._buffers):
                return free
            # Nothing in flight will free any, and no newer step is held before one is kept.
            del self._resumed[0]

    @property
    def total_bytes(self) -> int:
        """Memory of this worker's snapshots, and of those of others that are kept for them."""
        reserved = self.reserved
        if reserved is None:
            return 0
        num = len(reserved.arenas)
        return reserved.num_bytes * (num + self._num_copies * EACH_STEP_COPIES * self._each_step)

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


class StepKept(NamedTuple):
    """How it went with keeping a step.

    Attributes:
        error: why it is not kept, "" where it is.
        void: whether it is to be taken again; all ranks hear so.
        is_own: whether the error is this machine's alone; else all ranks hear it.
    """

    error: str = ""
    void: bool = False
    is_own: bool = False


class KeptSteps:
    """What is known of the newest snapshots of each step; not for several threads at once.

    Args:
        room: where they lie.
    """

    def __init__(self, room: SnapshotRoom) -> None:
        self._room = room
        self._ends: dict[int, StepKept] = {}  # by number
        self._arenas: dict[int, int] = {}  # of those that are whole, by number
        self._copy: wire.CopyMade | None = None  # the newest word of it

    def ended(self, serial: int, kept: StepKept) -> None:
        """One has ended; only the newest are asked for."""
        self._ends[serial] = kept
        for old in sorted(self._ends)[:-NEWEST_STEPS]:
            del self._ends[old]

    def taken(self, arena: int) -> None:
        """Something is about to be written there: whatever lay there is no step's any more."""
        self._arenas = {one: place for one, place in self._arenas.items() if place != arena}

    def whole(self, serial: int, arena: int, held: int) -> None:
        """One is whole on all machines; that of number ``held`` was copied from all by then."""
        self.taken(arena)
        self._arenas[serial] = arena
        self._room.ended(arena, alone=True, is_step=True)
        known = max((one for one in self._arenas if one <= held), default=0)
        if known:
            self._room.held(self._arenas[known])

    def copied(self, word: wire.CopyMade) -> None:
        """Another machine holds a copy now, or does not take it."""
        if self._copy is None or word.serial >= self._copy.serial:
            self._copy = word

    def how(self, serial: int, *, copied: bool) -> StepKept | None:
        """How it went with one; None where that is not known yet."""
        end, word = self._ends.get(serial), self._copy
        if end is None:
            return None
        if end.error or not copied:
            return end
        if word is None or word.serial < serial:
            return None
        if word.num:
            return StepKept()
        return StepKept(word.reason or "no other machine is to hold copies", is_own=True)

    def late(self, serial: int) -> StepKept:
        """Why one has not been waited for any longer."""
        if serial in self._ends:
            return StepKept("its copy has not arrived in time", is_own=True)
        # Those who had it in time know nothing of it: also this is a machine's own.
        return StepKept("not all machines had their part of it in time", is_own=True)


logger = logging.getLogger(__name__)

KEY_BYTES: Final = 32
WHERE: Final = "keepers"  # the key in the attempt's store
_SLICE_S: Final = 1.0
_ANYBODY: Final = "192.0.2.1"  # a documentation address; nothing is sent there


class _KeeperPlace(msgspec.Struct, frozen=True):
    host: str
    port: int
    key: bytes


def local_ranks(link: Link) -> range:
    """The ranks of this process's machine, as its launcher says."""
    count = int(os.environ.get("LOCAL_WORLD_SIZE", str(link.world_size)))
    if count >= link.world_size:
        return range(link.world_size)
    first = link.rank - int(os.environ.get("LOCAL_RANK", "0"))
    return range(first, first + count)


class KeeperMeeting:
    """One worker's part in bringing the keepers of several machines together.

    Attributes:
        is_needed: whether there are several machines.

    Args:
        settings: the job's.
        link: the other ranks.
        local: the ranks of this machine.
        line: to this machine's keeper.
        say: tells people what they must know.
    """

    def __init__(
        self,
        settings: Settings,
        link: Link,
        local: range,
        line: KeeperLine,
        say: Callable[[str], None],
    ) -> None:
        self.is_needed = len(local) < link.world_size
        self._link = link
        self._local = local
        self._line = line
        self._say = say
        self._listener: socket.socket | None = None
        self._closing = threading.Event()
        self._tls: tuple[str, str, str] | None = None
        if not self.is_needed:
            return
        tls = Tls.of(settings)
        if tls is not None:
            self._tls = tls.files
        act = None
        if link.rank == 0:
            act = self._lead
        elif link.rank == local.start:
            act = self._follow
        if act is not None:
            devices.Thread(target=act, name="outlast-meeting", daemon=True).start()

    def stop(self) -> None:
        """The session is over: the keepers go on without it, and none comes in their place."""
        self._closing.set()
        if self._listener is not None:
            self._listener.close()

    def _lead(self) -> None:
        try:
            host = reached_at(self._link.host)
            listener = self._listener = listen(host)
            key = os.urandom(KEY_BYTES)
            self._line.tell_all(wire.Lead(tls=self._tls), key, (listener.fileno(),))
            where = _KeeperPlace(host, int(listener.getsockname()[1]), key)
            self._link.publish(WHERE, msgspec.msgpack.encode(where))
        except (OSError, RuntimeError, ConfigError) as error:
            self._say(
                f"the keepers of other machines cannot reach that of rank 0: {error}; nothing is "
                "saved. See that this machine's name means an address that the others can reach"
            )

    def _follow(self) -> None:
        while not self._closing.is_set():
            try:
                data = self._link.fetch(WHERE, _SLICE_S)
            except TimeoutError:
                continue
            except (OSError, RuntimeError):  # the store is gone: the attempt is over
                return
            where = msgspec.msgpack.decode(data, type=_KeeperPlace)
            follow = wire.Follow(host=where.host, port=where.port, tls=self._tls)
            self._line.tell_all(follow, where.key)
            return


def reached_at(host: str) -> str:
    """The address of this machine, as a number, on the way between it and ``host``.

    ``host`` is where the attempt's store is: on this machine, its address as the others know it. A
    name of this machine that means loopback here, as some systems have it, stands for the address
    of its default route.

    Raises:
        OSError: there is no way there.
    """
    found = _towards(host)
    is_name = host != "localhost" and not _is_number(host)
    if is_name and ipaddress.ip_address(found).is_loopback:
        try:
            return _towards(_ANYBODY)
        except OSError:
            return found
    return found


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _towards(host: str) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class _Table(msgspec.Struct, frozen=True, array_like=True):
    words: tuple[str, ...]  # digests of the structures
    runs: tuple[tuple[int, int], ...]  # (number of the structure, how many ranks have it)


def _common(structure: Sequence[Held]) -> list[Held]:
    return [one for one in structure if not is_of_one_rank(one[0].name)]


class Sharing:
    """One rank's side of the agreement on who writes what.

    Args:
        link: the other ranks.
        on_settled: told that a round has come to its end.
    """

    def __init__(self, link: Link, on_settled: Callable[[], None]) -> None:
        self._link = link
        self._on_settled = on_settled
        self._changed = threading.Condition()
        self._round = 0
        self._offered: Sequence[Held] = ()
        self._share: Share | None = None
        self._is_over = False

    def stop(self) -> None:
        """No round comes to its end any more: whoever waits is let go."""
        with self._changed:
            self._is_over = True
            self._round += 1  # ends the thread of the one under way
            self._changed.notify_all()

    def offer(self, structure: Sequence[Held], own: Collection[str]) -> None:
        """Begin a round; all ranks do. ``own`` are names known to differ, the same on all ranks."""
        with self._changed:
            self._round += 1
            self._share = None
            self._offered = structure
            number = self._round
        mine = describe(structure, self._link.rank)
        if self._link.world_size == 1:
            self._settle(number, share(World([0], [mine]), 0, own))
            return
        devices.Thread(
            target=self._agree,
            args=(number, mine, sorted(own)),
            name="outlast-sharing",
            daemon=True,
        ).start()

    @property
    def is_settled(self) -> bool:
        """Whether this round's share is known."""
        return self._share is not None

    @property
    def has_begun(self) -> bool:
        """Whether there was an offer."""
        return self._round > 0

    def of(self, structure: Sequence[Held], timeout_s: float) -> Share | None:
        """This rank's share, waited for; None if ``structure`` is another than was offered.

        What each rank has for itself is in no agreement: it may come and go, as gradients in the
        making do.
        """
        if structure is not self._offered and _common(structure) != _common(self._offered):
            return None
        with self._changed:
            self._changed.wait_for(lambda: self._share is not None or self._is_over, timeout_s)
            return self._share

    def _agree(self, number: int, mine: Structure, own: list[str]) -> None:
        link = self._link
        try:
            link.publish(f"sharing/{number}/{link.rank}", mine.digest().encode())
            if link.rank == 0:
                self.publish_table(number)
            world = self._world(number, mine)
            self._settle(number, share(world, link.rank, own))
        except (
            OSError,
            RuntimeError,
            msgspec.MsgspecError,
        ) as error:  # the attempt is over, or another round has begun
            logger.info("the ranks did not agree on who writes what: %s", error)

    def publish_table(self, number: int) -> None:
        """Say which rank has which structure: runs of ranks that have the same one."""
        words: dict[str, int] = {}
        runs: list[tuple[int, int]] = []
        for rank in range(self._link.world_size):
            word = self._fetch(number, f"sharing/{number}/{rank}").decode()
            which = words.setdefault(word, len(words))
            if runs and runs[-1][0] == which:
                runs[-1] = (which, runs[-1][1] + 1)
            else:
                runs.append((which, 1))
        table = _Table(tuple(words), tuple(runs))
        self._link.publish(f"sharing/{number}/table", msgspec.msgpack.encode(table))

    def _world(self, number: int, mine: Structure) -> World:
        raw = self._fetch(number, f"sharing/{number}/table")
        found = msgspec.msgpack.decode(raw, type=_Table)
        table = [which for which, length in found.runs for _ in range(length)]
        ours = table[self._link.rank]
        if len(found.words) > 1 and table.index(ours) == self._link.rank:
            self._link.publish(f"structure/{found.words[ours]}", mine.encode())
        structures = [
            mine if which == ours else Structure.decode(self._fetch(number, f"structure/{word}"))
            for which, word in enumerate(found.words)
        ]
        return World(table, structures)

    def _fetch(self, number: int, key: str) -> bytes:
        """Wait in slices, since a link serves one waiting thread at a time; a rank may be late."""
        while number == self._round:
            try:
                return self._link.fetch(key, _SLICE_S)
            except TimeoutError:
                continue
        raise ConnectionAbortedError("another round has begun")

    def _settle(self, number: int, share: Share) -> None:
        with self._changed:
            if number == self._round:
                self._share = share
                self._changed.notify_all()
        self._on_settled()
