"""This machine's newest snapshot to the memory of the machines that keep a copy of it, paced.

One thread; the newest snapshot always takes the place of the one that waits, or is under way to a
machine that fails. It reads the arena itself, block by block, sealed and paced; when the snapshot
is copied over meanwhile, the rest is withdrawn (the receiver compares each block with the manifest,
so a torn one is never kept). What can go wrong: a machine does not answer, or has no memory. That
is said once for each snapshot and tried again with growing pauses; the checkpoint itself is
committed already.

The pace: background traffic goes no faster than it may, and is last in line for a core. While no
core is spare, a thread with a pace has ``BUSY_SHARE`` of one core at most, so that training loses
no more than that to it. (Ranks that wait for each other lose whatever is taken from any one of
them, so it is the share of one core that counts, at any number of cores.) Not bounded is what goes
below ``FLOOR_BYTES``: a copy that never ends is no copy.

The thread itself tells whether a core is spare: one that has to wait for a core longer than a part
of the time that it then has one found none free. The kernel counts both (``schedstat``); that holds
in containers too, whose share of the machine /proc/stat does not tell. Where the kernel does not
count, no core is taken for spare.

Two thirds of what a byte costs are its seal (HMAC-SHA256; hashlib has nothing faster). Tried, and
of no use: being woken for larger pieces only (SO_RCVLOWAT). Smaller pieces cost more of themselves.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from outlast.checkpoint.manifest import BLOCK_BYTES
from outlast.checkpoint.names import SaveName
from outlast.errors import OutlastError
from outlast.keeper import protocol
from outlast.keeper.memory import KeptSnapshot
from outlast.keeper.wire import PeerMachine
from outlast.peer import Channel

logger = logging.getLogger(__name__)

NICENESS: Final = 19
# Sealing and sending take about 0.8 s of a core for each GB, receiving and comparing as much: sent
# and received at this rate, that is a thirtieth of all cores.
RATE_PER_CORE_BYTES: Final = 22e6
RATE_MAX_BYTES: Final = 1e9  # about what one thread can seal
BUSY_SHARE: Final = 0.02
FLOOR_BYTES: Final = 4e6
CATCH_UP_S: Final = 0.05  # of the rate, after a wait that took longer than it should have
LOOK_S: Final = 0.01  # of processor time, between two looks at how long was waited for it
FADES: Final = 0.8  # what the looks before count, with each look
CROWDED: Final = 0.25  # waited, to had
_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")
PAUSE_S: Final = 1.0
PAUSE_MAX_S: Final = 30.0


def rate_of(setting: float | None) -> float:
    """Bytes per second: as it was set, or after the cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    return min(cores * RATE_PER_CORE_BYTES, RATE_MAX_BYTES) if setting is None else setting


def yield_to_training() -> None:
    """From here on this thread is last in line for a core (Linux).

    Where the kernel groups processes by session ("autogroup", in no container) that holds among the
    keeper's own threads alone: there it is the pace that keeps the traffic in its bounds.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class Cores:
    """Whether the calling thread finds a core when it wants one. For one thread."""

    def __init__(self) -> None:
        self._looked: tuple[float, float] | None = None  # at (had, waited)
        self._had_s = self._waited_s = 0.0  # of late
        self._is_spare = False

    def is_spare(self, had_s: float) -> bool:
        """Whether it did of late.

        Args:
            had_s: processor time that the thread has had so far, in seconds.
        """
        if self._looked is None or had_s - self._looked[0] >= LOOK_S:
            before, waited_s = self._looked, _waited_s()
            self._looked = (had_s, waited_s or 0.0)
            if before is not None and waited_s is not None:
                self._had_s = FADES * self._had_s + had_s - before[0]
                self._waited_s = FADES * self._waited_s + waited_s - before[1]
                self._is_spare = self._waited_s < CROWDED * self._had_s
        return self._is_spare


def _waited_s() -> float | None:
    """How long the calling thread has waited for a core so far; None where nobody counts it."""
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


class TrafficPace:
    """Waits so that no more goes than may. For one thread.

    Args:
        rate_bytes: per second, at most.
        stop: ends every wait.
        cores: gives way while none of them is spare; None to go on at ``rate_bytes`` all the same.
    """

    def __init__(
        self, rate_bytes: float, stop: threading.Event, cores: Cores | None = None
    ) -> None:
        self._rate = rate_bytes
        self._stop = stop
        self._cores = cores
        self._free_s = time.monotonic()  # when everything that was let through has gone
        self._last_bytes = 0
        self._had_s = 0.0  # processor time before the last bytes went

    def __call__(self, num_bytes: int) -> None:
        """Wait until ``num_bytes`` may go.

        Raises:
            ConnectionAbortedError: it was stopped.
        """
        if self._cores is not None:
            self._free_s += self._more_s(self._cores)
        now = time.monotonic()
        self._free_s = max(self._free_s, now - CATCH_UP_S)
        wait_s = self._free_s - now
        self._free_s += num_bytes / self._rate
        self._last_bytes = num_bytes
        if self._stop.wait(wait_s) if wait_s > 0 else self._stop.is_set():
            raise ConnectionAbortedError("it is not to be sent any more")

    def _more_s(self, cores: Cores) -> float:
        """How much longer the last bytes are to have taken, after what they cost."""
        had_s = time.thread_time()
        cost_s, self._had_s = had_s - self._had_s, had_s
        if cores.is_spare(had_s):
            return 0.0
        longest_s = self._last_bytes / FLOOR_BYTES
        return max(min(cost_s / BUSY_SHARE, longest_s) - self._last_bytes / self._rate, 0.0)


class Gone(Exception):
    """The snapshot is not there any more."""


class Declined(OutlastError, OSError):
    """The other machine does not take it."""


class Replicator:
    """Brings copies to other machines, in a thread of its own.

    Args:
        node: this machine.
        newest: (save, snapshot) of the newest one that can be resumed from, if there is one.
        view: a file's bytes in memory, or None if they are gone.
        open_channel: to another machine's keeper.
        rate_bytes: how fast, per second; None: after the cores, and slower while none is spare.
        record: puts an event into the ledger.
    """

    def __init__(
        self,
        node: str,
        *,
        newest: Callable[[], tuple[SaveName, KeptSnapshot] | None],
        view: Callable[[str, KeptSnapshot, str], memoryview | None],
        open_channel: Callable[[PeerMachine], Channel],
        rate_bytes: float | None,
        record: Callable[..., None],
    ) -> None:
        self._node = node
        self._newest = newest
        self._view = view
        self._open_channel = open_channel
        self._record = record
        self._stop = threading.Event()
        cores = Cores() if rate_bytes is None else None
        self._pace = TrafficPace(rate_of(rate_bytes), self._stop, cores)
        self._changed = threading.Condition()
        self._holders: tuple[PeerMachine, ...] = ()
        self._news = 0  # counts what has changed
        self._channels: dict[PeerMachine, Channel] = {}
        self._have: dict[PeerMachine, bytes] = {}  # the manifest of what a machine keeps for us
        self._failed: set[tuple[PeerMachine, SaveName]] = set()
        self._thread = threading.Thread(target=self._run, name="outlast-replicate", daemon=True)
        self._thread.start()

    def to(self, holders: Sequence[PeerMachine]) -> None:
        """Who keeps the copies from here on."""
        with self._changed:
            self._holders = tuple(holders)
            self._news += 1
            self._changed.notify_all()

    def committed(self) -> None:
        """There is a newer snapshot."""
        with self._changed:
            self._news += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Give up what is under way."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()

    def _run(self) -> None:
        yield_to_training()
        seen, pause_s = -1, PAUSE_S
        while not self._stop.is_set():
            with self._changed:
                while seen == self._news and not self._stop.is_set():
                    self._changed.wait()
                if self._stop.is_set():
                    break
                seen, holders = self._news, self._holders
            self._leave_others(holders)
            failed = [holder for holder in holders if not self._bring(holder)]
            if not failed:
                pause_s = PAUSE_S
                continue
            with self._changed:
                if seen == self._news:
                    self._changed.wait(pause_s)
                    pause_s = min(pause_s * 2, PAUSE_MAX_S) if seen == self._news else PAUSE_S
                    self._news += seen == self._news
        self._leave_others(())

    def _leave_others(self, holders: Sequence[PeerMachine]) -> None:
        for member in [one for one in self._channels if one not in holders]:
            self._hang_up(member)
        self._have = {one: have for one, have in self._have.items() if one in holders}

    def _bring(self, holder: PeerMachine) -> bool:
        """Have one machine keep the newest snapshot; whether there is nothing left to do for it."""
        newest = self._newest()
        if newest is None or self._have.get(holder) == newest[1].manifest:
            return True
        save, kept = newest
        start_s = time.monotonic()
        try:
            num_bytes = self._send(holder, save, kept)
        except Gone:
            return True  # a newer one is on its way, which will say so
        except Exception as error:  # noqa: BLE001 - said and tried again: this thread goes on
            if not isinstance(error, Declined):
                self._hang_up(holder)
            if not self._stop.is_set():
                self._say_failed(holder, save, error)
            return False
        self._have[holder] = kept.manifest
        if num_bytes:
            self._record(
                "replicated",
                durable=False,
                attempt=save.attempt,
                step=save.step,
                machine=holder.node,
                bytes=num_bytes,
                seconds=round(time.monotonic() - start_s, 6),
            )
        return True

    def _say_failed(self, holder: PeerMachine, save: SaveName, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or str(error)
        logger.warning("step %d has no copy on %s yet: %s", save.step, holder.node, reason)
        if (holder, save) not in self._failed:
            self._failed = {(holder, save)} | {one for one in self._failed if one[1] == save}
            self._record(
                "replica_failed",
                durable=False,
                attempt=save.attempt,
                step=save.step,
                machine=holder.node,
                reason=reason,
            )

    def _send(self, holder: PeerMachine, save: SaveName, kept: KeptSnapshot) -> int:
        """Bytes sent, 0 if the other machine had it already."""
        channel = self._channel(holder)
        sizes = {name: size for name, (_, size) in kept.files.items()}
        offer = protocol.ReplicaOffer(
            node=self._node,
            save=str(save),
            files=sizes,
            small={name: len(data) for name, data in kept.small.items()},
        )
        protocol.say(channel, offer, kept.small.values(), self._pace)
        if self._verdict(channel) == "have":
            return 0
        for name, size in sizes.items():
            self._send_file(channel, str(save), kept, name, size)
        protocol.say(channel, protocol.ReplicaWhole())
        self._verdict(channel)
        return sum(sizes.values()) + sum(map(len, kept.small.values()))

    def _send_file(
        self, channel: Channel, save: str, kept: KeptSnapshot, name: str, size: int
    ) -> None:
        for index, start in enumerate(range(0, size, BLOCK_BYTES)):
            view = self._view(save, kept, name)
            if view is None:
                protocol.say(channel, protocol.Withdrawn())
                raise Gone
            block = view[start : min(start + BLOCK_BYTES, size)]
            protocol.say(
                channel, protocol.ReplicaBlock(file=name, index=index), [block], self._pace
            )
        if self._view(save, kept, name) is None:
            protocol.say(channel, protocol.Withdrawn())
            raise Gone

    def _verdict(self, channel: Channel) -> str:
        answer = protocol.hear(channel, protocol.ANSWER_S)
        if not isinstance(answer, protocol.ReplicaVerdict):
            raise ConnectionResetError(f"{channel.peer} left without an answer")
        if answer.verdict == "refused":
            raise Declined(answer.reason)
        return answer.verdict

    def _channel(self, holder: PeerMachine) -> Channel:
        channel = self._channels.get(holder)
        if channel is None:
            channel = self._open_channel(holder)
            with self._changed:
                self._channels[holder] = channel
        return channel

    def _hang_up(self, member: PeerMachine) -> None:
        with self._changed:
            channel = self._channels.pop(member, None)
        self._have.pop(member, None)
        if channel is not None:
            channel.close()
