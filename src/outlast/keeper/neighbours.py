"""Other machines' memory as a tier that can be read: their snapshots, and the copies they keep.

What lies where is asked when the tier is listed, of all machines at once; one that says nothing for
some seconds (its keeper is stopped, say) has nothing. Bytes are then read from any machine that has
them, and from another when one fails. Nothing is believed here: whoever reads
compares each block with the manifest, as with any tier.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from outlast.checkpoint.manifest import BLOCK_BYTES
from outlast.errors import OutlastError
from outlast.keeper import parley
from outlast.keeper.wire import Member
from outlast.peer import Channel

logger = logging.getLogger(__name__)

ASKED_AT_ONCE: Final = 16
IDLE_CHANNELS: Final = 4  # kept open to each machine
LOOK_AGAIN_S: Final = 1.0  # for a file that nobody had
MUTE_S: Final = 30.0  # for which one that did not answer is not asked again


class Neighbours:
    """The other machines of an attempt.

    Args:
        attempt: which one.
        members: the other machines.
        open_channel: to one of them.
    """

    def __init__(
        self, attempt: int, members: Sequence[Member], open_channel: Callable[[Member], Channel]
    ) -> None:
        self.members = tuple(members)
        self._attempt = attempt
        self._open_channel = open_channel
        self._lock = threading.Lock()
        self._idle: dict[Member, list[Channel]] = {member: [] for member in members}
        self._found: dict[str, _Save] | None = None
        self._mute: dict[Member, float] = {}  # who did not answer in time, and when
        self._looked_s = 0.0
        self._closed = False

    def close(self) -> None:
        """They are not asked any more."""
        with self._lock:
            self._closed = True
            channels = [channel for idle in self._idle.values() for channel in idle]
        for channel in channels:
            channel.close()

    # --- as a tier ------------------------------------------------------------------------------

    def children(self, name: str = "") -> list[str]:
        """Saves, asked for anew; or the files of a save."""
        if not name:
            self._look_round()
            return sorted(self._saves())
        save = self._saves().get(name)
        return sorted(save.where) if save else []

    def exists(self, name: str) -> bool:
        """Whether some machine has the file."""
        return self._place(name) is not None

    def size(self, name: str) -> int:
        """Size of the file in bytes; FileNotFoundError if nobody has it."""
        return self._placed(name).size

    def read(self, name: str) -> bytes:
        """The whole file, which is small."""
        buffer = bytearray(self.size(name))
        for start in range(0, len(buffer), BLOCK_BYTES):
            self.read_into(name, memoryview(buffer)[start : start + BLOCK_BYTES], start)
        return bytes(buffer)

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        """Fill ``buffer`` from byte ``offset``, from the first machine that can."""
        place = self._placed(name)
        view = buffer[: max(place.size - offset, 0)]
        failure: Exception | None = None
        for member in place.members:
            try:
                for start in range(0, len(view), BLOCK_BYTES):
                    self._read(member, name, view[start : start + BLOCK_BYTES], offset + start)
            except (OSError, OutlastError, ValueError) as error:
                logger.warning("%s was not read from %s: %s", name, member.node, error)
                failure = error
            else:
                return len(view)
        raise OSError(errno.EIO, f"no machine that has {name} could give it: {failure}")

    # --- inside ---------------------------------------------------------------------------------

    def _saves(self) -> Mapping[str, _Save]:
        if self._found is None:
            self._look_round()
        return self._found or {}

    def _look_round(self) -> None:
        """Ask all what they have; who does not answer has nothing."""
        if not self.members:
            self._found = {}
            return
        with ThreadPoolExecutor(ASKED_AT_ONCE, "outlast-ask") as pool:
            answers = list(pool.map(self._list, self.members))
        found: dict[str, _Save] = {}
        for member, listing in zip(self.members, answers, strict=True):
            for name, listed in listing.items():
                save = found.setdefault(name, _Save(listed.manifest))
                if save.manifest == listed.manifest:
                    save.add(member, listed.files)
        self._found, self._looked_s = found, time.monotonic()

    def _list(self, member: Member) -> dict[str, parley.Listed]:
        if time.monotonic() - self._mute.get(member, float("-inf")) < MUTE_S:
            return {}
        try:
            with self._talking(member) as channel:
                ask = parley.List(attempt=self._attempt)
                parley.ask(channel, ask, parley.Listing, timeout_s=parley.QUIET_S)
                return parley.decode_listing(parley.take_bulk(channel, parley.SMALL_BYTES_MAX))
        except (OSError, OutlastError, ValueError) as error:
            logger.warning("%s does not say what it has: %s", member.node, error)
            if isinstance(error, TimeoutError):
                self._mute[member] = time.monotonic()
            return {}

    def _read(self, member: Member, name: str, view: memoryview, start: int) -> None:
        directory, _, file = name.partition("/")
        save = self._saves().get(directory)
        if save is None:
            raise FileNotFoundError(errno.ENOENT, "no machine has it", name)
        ask = parley.Read(
            save=directory,
            manifest=save.manifest,
            file=file,
            start=start,
            size=len(view),
        )
        with self._talking(member) as channel:
            answer = parley.ask(channel, ask, parley.Data)
            if answer.error:
                raise FileNotFoundError(errno.ENOENT, answer.error, name)
            channel.receive_into(view)

    def _talking(self, member: Member) -> _Talk:
        with self._lock:
            idle = self._idle[member]
            channel = idle.pop() if idle else None
        return _Talk(channel or self._open_channel(member), lambda done: self._back(member, done))

    def _back(self, member: Member, channel: Channel) -> None:
        with self._lock:
            idle = self._idle[member]
            if not self._closed and len(idle) < IDLE_CHANNELS:
                idle.append(channel)
                return
        channel.close()

    def _place(self, name: str) -> _File | None:
        directory, _, file = name.partition("/")
        save = self._saves().get(directory)
        place = save.where.get(file) if save else None
        if place is None and time.monotonic() - self._looked_s > LOOK_AGAIN_S:
            self._look_round()  # a machine may not have answered before
            save = self._saves().get(directory)
            place = save.where.get(file) if save else None
        return place

    def _placed(self, name: str) -> _File:
        place = self._place(name)
        if place is None:
            raise FileNotFoundError(errno.ENOENT, "no machine has it in memory", name)
        return place


class _Talk:
    """A channel in use: put back when all went well, closed when not."""

    def __init__(self, channel: Channel, on_done: Callable[[Channel], None]) -> None:
        self._channel = channel
        self._on_done = on_done

    def __enter__(self) -> Channel:
        return self._channel

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and not self._channel.bulk_bytes:
            self._on_done(self._channel)
        else:
            self._channel.close()


class _File:
    """A file: its size, and the machines that have it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.members: list[Member] = []


class _Save:
    """One save, as far as the others have it."""

    def __init__(self, manifest: str) -> None:
        self.manifest = manifest
        self.where: dict[str, _File] = {}

    def add(self, member: Member, files: Mapping[str, int]) -> None:
        for name, size in files.items():
            place = self.where.setdefault(name, _File(size))
            if place.size == size:
                place.members.append(member)
