"""This machine's newest snapshot to the memory of the machines that keep a copy of it.

One thread; the newest snapshot always takes the place of the one that waits, or is under way to a
machine that fails. It reads the arena itself, block by block, sealed and paced; when the snapshot
is copied over meanwhile, the rest is withdrawn (whoever receives it compares each block with the
manifest, so a torn one is never kept).

What can go wrong: a machine does not answer, or has no memory. That is said once for each snapshot
and tried again with growing pauses; the checkpoint itself is committed already.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from outlast.checkpoint.manifest import BLOCK_BYTES
from outlast.checkpoint.names import SaveName
from outlast.errors import OutlastError
from outlast.keeper import parley
from outlast.keeper.memory import Kept
from outlast.keeper.pace import Cores, Pace, rate_of, yield_to_training
from outlast.keeper.wire import Member
from outlast.peer import Channel

logger = logging.getLogger(__name__)

PAUSE_S: Final = 1.0
PAUSE_MAX_S: Final = 30.0


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
        newest: Callable[[], tuple[SaveName, Kept] | None],
        view: Callable[[str, Kept, str], memoryview | None],
        open_channel: Callable[[Member], Channel],
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
        self._pace = Pace(rate_of(rate_bytes), self._stop, cores)
        self._changed = threading.Condition()
        self._holders: tuple[Member, ...] = ()
        self._news = 0  # counts what has changed
        self._channels: dict[Member, Channel] = {}
        self._have: dict[Member, bytes] = {}  # the manifest of what a machine keeps for us
        self._failed: set[tuple[Member, SaveName]] = set()
        self._thread = threading.Thread(target=self._run, name="outlast-replicate", daemon=True)
        self._thread.start()

    def to(self, holders: Sequence[Member]) -> None:
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

    def _leave_others(self, holders: Sequence[Member]) -> None:
        for member in [one for one in self._channels if one not in holders]:
            self._hang_up(member)
        self._have = {one: have for one, have in self._have.items() if one in holders}

    def _bring(self, holder: Member) -> bool:
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

    def _say_failed(self, holder: Member, save: SaveName, error: Exception) -> None:
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

    def _send(self, holder: Member, save: SaveName, kept: Kept) -> int:
        """Bytes sent, 0 if the other machine had it already."""
        channel = self._channel(holder)
        sizes = {name: size for name, (_, size) in kept.files.items()}
        offer = parley.Offer(
            node=self._node,
            save=str(save),
            files=sizes,
            small={name: len(data) for name, data in kept.small.items()},
        )
        parley.say(channel, offer, kept.small.values(), self._pace)
        if self._verdict(channel) == "have":
            return 0
        for name, size in sizes.items():
            self._send_file(channel, str(save), kept, name, size)
        parley.say(channel, parley.Whole())
        self._verdict(channel)
        return sum(sizes.values()) + sum(map(len, kept.small.values()))

    def _send_file(self, channel: Channel, save: str, kept: Kept, name: str, size: int) -> None:
        for index, start in enumerate(range(0, size, BLOCK_BYTES)):
            view = self._view(save, kept, name)
            if view is None:
                parley.say(channel, parley.Withdrawn())
                raise Gone
            block = view[start : min(start + BLOCK_BYTES, size)]
            parley.say(channel, parley.Block(file=name, index=index), [block], self._pace)
        if self._view(save, kept, name) is None:
            parley.say(channel, parley.Withdrawn())
            raise Gone

    def _verdict(self, channel: Channel) -> str:
        answer = parley.hear(channel, parley.ANSWER_S)
        if not isinstance(answer, parley.Verdict):
            raise ConnectionResetError(f"{channel.peer} left without an answer")
        if answer.verdict == "refused":
            raise Declined(answer.reason)
        return answer.verdict

    def _channel(self, holder: Member) -> Channel:
        channel = self._channels.get(holder)
        if channel is None:
            channel = self._open_channel(holder)
            with self._changed:
                self._channels[holder] = channel
        return channel

    def _hang_up(self, member: Member) -> None:
        with self._changed:
            channel = self._channels.pop(member, None)
        self._have.pop(member, None)
        if channel is not None:
            channel.close()


def by_node(members: Sequence[Member]) -> Mapping[str, Member]:
    """Members by their names."""
    return {member.node: member for member in members}
