"""The memory that the keeper holds: given to workers, held by supervisors, written into the books.

The books lie in memory of their own, which a successor inherits with the arenas: two pages written
in turn, so that one is whole whenever the keeper dies.

Guarantees: an arena that a save has yet to be written from is neither given back nor given away.
What can go wrong: there is too little memory (fewer snapshots at once, or none: a ring that a
snapshot goes through block by block), or none at all (no arena; the save fails in words).
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import xxhash

from outlast.checkpoint.manifest import BLOCK_BYTES
from outlast.keeper import wire
from outlast.keeper.arena import Arena
from outlast.keeper.budget import available_bytes
from outlast.keeper.memory import Books
from outlast.policy.retention import Admission, admit

logger = logging.getLogger(__name__)

RING_BYTES: Final = 4 * BLOCK_BYTES
BOOKS: Final = 0  # number of the books among the held descriptors
COPIES: Final = -1  # in place of a rank: arenas with other machines' snapshots
ROUNDING: Final = 8  # ranks' shares differ by less than one part in this many
_BOOKS_BYTES: Final = 1 << 30  # of which only what is written exists
_MAGIC: Final = b"outlast1"
_HEAD_BYTES: Final = 40

Tell = Callable[[wire.Message, tuple[int, ...]], None]


class Holdings:
    """Arenas and books; not for several threads at once.

    Args:
        inherited: number → descriptor of memory that a predecessor left.
        tell: sends a message with descriptors to every supervisor.
    """

    def __init__(self, inherited: Mapping[int, int], tell: Tell) -> None:
        self.books = Books()
        self._tell = tell
        self._turn = 0
        self._admitted: tuple[int, int, Admission] | None = None  # attempt, bytes, decision
        self._granted: dict[int, tuple[int, ...]] = {}  # rank → what it was given last
        self._page = self._take_over(inherited)

    def all(self) -> dict[int, int]:
        """Number → descriptor of everything that a supervisor is to hold."""
        return {BOOKS: self._page.fd} | {n: arena.fd for n, arena in self.books.arenas.items()}

    def note(self) -> None:
        """Leave word of what is in memory."""
        self._turn += 1
        write_page(self._page, self._turn, self.books.encode())

    def reserve(
        self,
        message: wire.Reserve,
        *,
        rank: int,
        attempt: int,
        ranks: Collection[int],
        in_use: Collection[int],
    ) -> wire.Reserved:
        """Arenas for a rank, as many and as large as the machine's memory allows.

        Args:
            message: what is asked for.
            rank: who asks.
            attempt: in which attempt.
            ranks: all ranks of this machine.
            in_use: arenas that saves in flight have yet to be written from.
        """
        decision = self._admit(attempt, message, ranks, in_use)
        ring = 0 if decision.buffers else RING_BYTES
        size = ring or max(message.num_bytes, 1)
        wanted = max(decision.buffers, 1)
        free = [number for number in self.books.of_rank(rank) if number not in in_use]
        # The first one is written first: what is newest stays for longest.
        free.sort(key=self.books.newest_in)
        fitting = [n for n in free if self.books.arenas[n].num_bytes >= size][-wanted:]
        alone = self.books.alone()
        # What no tier has is given back behind the next commit, if there is room until then.
        has_room = alone and admit(size, wanted=1, available_bytes=available_bytes()).buffers
        kept = alone if has_room else ()
        self._give_back(number for number in free if number not in fitting and number not in kept)
        words = decision.words
        try:
            for place in range(wanted - len(fitting)):
                fitting.insert(place, self._make(rank, size))
        except OSError as error:
            words = f"no memory for snapshots: {error.strerror or error}"
            logger.warning("%s", words)
        self._granted[rank] = tuple(fitting)
        self.note()
        return wire.Reserved(
            arenas=tuple(fitting),
            num_bytes=size,
            ring_bytes=ring,
            words=words,
            alone=next((number for number in fitting if number in alone), -1),
        )

    def room(self, sizes: Sequence[int], spare: Collection[int]) -> list[int]:
        """Arenas for files of these sizes of another machine; what is not used is given back.

        Args:
            sizes: of the files, in bytes.
            spare: arenas that may be used again.

        Raises:
            OSError: this machine has no memory for them.
        """
        left = sorted(spare, key=lambda number: self.books.arenas[number].num_bytes)
        fitting: list[int | None] = []
        for size in sizes:
            fits = (n for n in left if self.books.arenas[n].num_bytes >= size)
            number = next(fits, None)
            fitting.append(number)
            if number is not None:
                left.remove(number)
        self._give_back(left)
        missing = sum(size for size, n in zip(sizes, fitting, strict=True) if n is None)
        if missing and not admit(missing, wanted=1, available_bytes=available_bytes()).buffers:
            self._give_back(number for number in fitting if number is not None)
            self.note()
            raise OSError(errno.ENOMEM, f"no memory for {missing / 2**30:.2f} GiB of a copy")
        return [
            self._make(COPIES, size) if number is None else number
            for size, number in zip(sizes, fitting, strict=True)
        ]

    def drop(self, numbers: Collection[int]) -> None:
        """Give arenas back."""
        if self._give_back(numbers):
            self.note()

    def leave_out(self, ranks: Collection[int], in_use: Collection[int]) -> None:
        """A snapshot of these ranks is committed: what others have left is of no use any more."""
        useless = {
            number
            for number, owner in self.books.owners.items()
            if owner != COPIES
            and (owner not in ranks or number not in self._granted.get(owner, (number,)))
        }
        if self._give_back(useless - set(in_use)):
            self.note()

    def _make(self, rank: int, size: int) -> int:
        number = self.books.make(rank, size)
        arena = self.books.arenas[number]
        arena.touch_in_background()
        self._tell(wire.Hold(arena=number), (arena.fd,))
        return number

    def _give_back(self, numbers: Iterable[int]) -> bool:
        gone = list(numbers)
        for number in gone:
            self.books.drop(number)
            self._tell(wire.Drop(arena=number), ())
        return bool(gone)

    def _admit(
        self,
        attempt: int,
        message: wire.Reserve,
        ranks: Collection[int],
        in_use: Collection[int],
    ) -> Admission:
        """Decide once an attempt for all workers of this machine, before memory is taken.

        Ranks' snapshots differ a little in size, and all ranks must be told the same.
        """
        known = self._admitted
        if known is not None and known[0] == attempt and message.num_bytes <= known[1]:
            return known[2]
        most = message.num_bytes + message.num_bytes // ROUNDING
        # Of an arena that is not touched yet nothing is missing in what is available.
        ours = sum(
            os.fstat(arena.fd).st_blocks * 512
            for number, arena in self.books.arenas.items()
            if self.books.owners[number] in ranks and number not in in_use
        )
        decision = admit(
            most * message.workers,
            wanted=message.buffers,
            useful=message.useful,
            available_bytes=available_bytes() + ours,
        )
        self._admitted = (attempt, most, decision)
        return decision

    def _take_over(self, inherited: Mapping[int, int]) -> Arena:
        if BOOKS not in inherited:
            return Arena.make(_BOOKS_BYTES)
        page = Arena.of(inherited[BOOKS])
        arenas = {number: Arena.of(fd) for number, fd in inherited.items() if number != BOOKS}
        pages = (read_page(page, turn) for turn in (0, 1))
        self._turn, data = max((one for one in pages if one is not None), default=(0, b""))
        self.books.take_over(data, arenas)
        return page


def write_page(arena: Arena, turn: int, data: bytes) -> None:
    """Write ``data`` into the page of this turn; a reader sees all of it or none."""
    start = turn % 2 * (arena.num_bytes // 2)
    head = turn.to_bytes(8, "little") + len(data).to_bytes(8, "little")
    whole = _MAGIC + head + xxhash.xxh3_128_digest(head + data) + data
    if len(whole) > arena.num_bytes // 2:
        whole = bytes(_HEAD_BYTES)  # too much to be kept: nothing is better than the page before
    arena.view[start : start + len(whole)] = whole


def read_page(arena: Arena, turn: int) -> tuple[int, bytes] | None:
    """What ``write_page`` wrote, with its turn; None where nothing whole lies."""
    start = turn % 2 * (arena.num_bytes // 2)
    head = bytes(arena.view[start : start + _HEAD_BYTES])
    size = int.from_bytes(head[16:24], "little")
    if head[:8] != _MAGIC or size > arena.num_bytes // 2 - _HEAD_BYTES:
        return None
    data = bytes(arena.view[start + _HEAD_BYTES : start + _HEAD_BYTES + size])
    if xxhash.xxh3_128_digest(head[8:24] + data) != head[24:_HEAD_BYTES]:
        return None
    return int.from_bytes(head[8:16], "little"), data
