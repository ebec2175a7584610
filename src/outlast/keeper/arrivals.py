"""What other machines' keepers bring to a slower tier: said, heard, and waited for.

Each keeper says over its connection to that of rank 0 what it brings to a tier: how far it is, that
it is there, or that it does not come. Rank 0's keeper, which puts the manifest, waits for those
words, and looks once for one file of each machine that says it is done.

Guarantees: nobody waits for ever. A machine that says it does not come ends the waiting at once,
one whose keeper is gone after ``GONE_S``, and ``STALL_S`` without any progress does in any case.
Where there are no words (keepers that were started again) storage is asked instead: ``LOOKS`` files
at a time.
"""

from __future__ import annotations

import bisect
import collections
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple, Protocol

from outlast.checkpoint.inventory import rank_of
from outlast.checkpoint.manifest import Manifest, SaveName, part_file
from outlast.keeper import protocol
from outlast.storage import Storage

GONE_S: Final = 5.0  # that nothing moves, and all that is missing is of keepers that are gone
STALL_S: Final = 60.0  # that nothing moves
ASK_STORAGE_S: Final = 10.0  # that nothing moves, before files of living keepers are looked for
LOOK_S: Final = 0.5
LOOKS: Final = 64  # files that are looked for at a time
MAX_KNOWN: Final = 16  # saves and tiers of which words are kept
REASON_MAX: Final = 1024  # characters


class NotComing(Exception):
    """A machine's files of a save do not come to a tier."""


class Late(TimeoutError):
    """Nothing has moved for too long; ``is_final`` if the machines concerned can be asked."""

    def __init__(self, words: str, *, is_final: bool) -> None:
        super().__init__(words)
        self.is_final = is_final


class Arrived(NamedTuple):
    """What is known of other machines' files of a save in a tier.

    Attributes:
        there: ranks whose machine says that they are there.
        never: why some do not come, "" if none says so.
        living: ranks whose machine's keeper is connected.
        gone: ranks whose machine's keeper was, and is not any more.
        moves: changes when something moves.
    """

    there: Sequence[range] = ()
    never: str = ""
    living: Sequence[range] = ()
    gone: Sequence[range] = ()
    moves: int = 0


class OtherMachines(Protocol):
    """The other machines, as whoever brings files to a tier sees them; nothing waits."""

    def bring(self, save: SaveName, word: protocol.Brought) -> None:
        """Say what becomes of this machine's files."""

    def arrived(self, save: SaveName, tier: str) -> Arrived | None:
        """What is known of the others' files; None where they cannot be asked."""


class NoOthers:
    """No other machines, or none that can be asked."""

    def bring(self, save: SaveName, word: protocol.Brought) -> None:
        """Nobody waits for it."""

    def arrived(self, save: SaveName, tier: str) -> Arrived | None:
        """Nobody can be asked."""


class WordsSaid:
    """The last words of this machine, for connections that are made later."""

    def __init__(self) -> None:
        self._words: collections.OrderedDict[tuple[int, str, int], protocol.Brought]
        self._words = collections.OrderedDict()
        self._lock = threading.Lock()

    def note(self, attempt: int, word: protocol.Brought) -> None:
        """This is said."""
        with self._lock:
            key = attempt, word.tier, word.serial
            self._words[key] = word
            self._words.move_to_end(key)
            while len(self._words) > MAX_KNOWN:
                self._words.popitem(last=False)

    def of(self, attempt: int) -> list[protocol.Brought]:
        """What was said of an attempt's saves."""
        with self._lock:
            return [word for key, word in self._words.items() if key[0] == attempt]


class WordsHeard:
    """The last words of other machines about an attempt. Not for several threads at once."""

    def __init__(self) -> None:
        self._words: collections.OrderedDict[
            tuple[str, int], dict[int, tuple[range, protocol.Brought]]
        ] = collections.OrderedDict()
        self._num_heard: collections.Counter[tuple[str, int]] = collections.Counter()

    def note(self, ranks: range, word: protocol.Brought) -> None:
        """The machine that has ``ranks`` says this."""
        key = word.tier, word.serial
        self._words.setdefault(key, {})[ranks.start] = ranks, word
        self._words.move_to_end(key)
        self._num_heard[key] += 1
        while len(self._words) > MAX_KNOWN:
            old, _ = self._words.popitem(last=False)
            del self._num_heard[old]

    def arrived(
        self, tier: str, serial: int, living: Sequence[range], gone: Sequence[range]
    ) -> Arrived:
        """What it comes to."""
        words = self._words.get((tier, serial), {}).values()
        never = (f"rank {one.start}: {word.reason}" for one, word in words if word.state == "never")
        return Arrived(
            there=[ranks for ranks, word in words if word.state == "there"],
            never=next(never, ""),
            living=living,
            gone=gone,
            moves=self._num_heard[tier, serial],
        )


class Waiting:
    """Waits for the files of other machines in a tier.

    Args:
        manifest: of the save.
        ranks: those of this machine.
        tier: the tier's name.
        storage: the tier's.
        others: says what is known of the other machines.
        clock: monotonic seconds.

    Attributes:
        pause_s: until the next look is worth it.
    """

    def __init__(
        self,
        manifest: Manifest,
        ranks: Collection[int],
        *,
        tier: str,
        storage: Storage,
        others: OtherMachines,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pause_s = LOOK_S
        self._save, self._tier = manifest.save, tier
        self._storage, self._others, self._clock = storage, others, clock
        mine = set(ranks)
        self._missing: dict[int, list[tuple[str, int]]] = {}
        # A rank's part comes last: where it is, the others are.
        entries = [(part_file(rank), part.file) for rank, part in enumerate(manifest.parts)]
        for name, entry in [*entries, *manifest.files.items()]:
            rank = rank_of(name)
            if rank is not None and rank not in mine:
                self._missing.setdefault(rank, []).append((name, entry.size))
        self._moved_s = clock()
        self._moves = -1
        self._last = -1  # rank that was looked for

    def look(self) -> bool:
        """Whether everything is there.

        Raises:
            NotComing: something does not come; says what, and why.
            Late: nothing has moved for too long; says what is missing.
            OSError: storage cannot be asked.
        """
        if not self._missing:
            return True
        known = self._others.arrived(self._save, self._tier)
        arrived = known or Arrived()
        if arrived.never:
            raise NotComing(arrived.never)
        quiet_s = self._clock() - self._moved_s
        done = self._done(arrived)
        chosen = self._choose(arrived, done, all_of_them=quiet_s >= ASK_STORAGE_S)
        found = [rank for rank in chosen if self._is_there(rank)]
        for rank in found:
            for one in done.get(rank, (rank,)):
                self._missing.pop(one, None)
        if found or arrived.moves != self._moves:
            self._moves, self._moved_s = arrived.moves, self._clock()
        elif self._missing:
            self._be_late(known, quiet_s)
        self.pause_s = 0.0 if found and len(found) == len(chosen) else LOOK_S
        return not self._missing

    def _done(self, arrived: Arrived) -> dict[int, list[int]]:
        """Of each machine that says it is done: one rank → its ranks that are missing."""
        found = {}
        for ranks in arrived.there:
            missing = [rank for rank in ranks if rank in self._missing]
            if missing:
                found[missing[0]] = missing
        return found

    def _choose(
        self, arrived: Arrived, done: dict[int, list[int]], *, all_of_them: bool
    ) -> list[int]:
        """The ranks whose files are looked for this time, in turn."""
        skipped: set[int] = set()
        if not all_of_them:
            skipped.update(*arrived.living)
        skipped.update(*done.values())
        wanted = sorted([*done, *(rank for rank in self._missing if rank not in skipped)])
        at = bisect.bisect_right(wanted, self._last)
        chosen = (wanted[at:] + wanted[:at])[:LOOKS]
        if chosen:
            self._last = chosen[-1]
        return chosen

    def _is_there(self, rank: int) -> bool:
        try:
            return all(
                self._storage.size(f"{self._save}/{name}") == size
                for name, size in self._missing[rank]
            )
        except FileNotFoundError:
            return False

    def _be_late(self, known: Arrived | None, quiet_s: float) -> None:
        gone: set[int] = set().union(*known.gone) if known else set()
        is_gone = self._missing.keys() <= gone
        if quiet_s < (GONE_S if is_gone else STALL_S):
            return
        num, first = len(self._missing), min(self._missing)
        why = "its machine's keeper is gone" if is_gone else f"nothing moved for {quiet_s:.0f} s"
        more = f", nor did those of {num - 1} more ranks" if num > 1 else ""
        name = self._missing[first][0][0]
        raise Late(
            f"{name} did not come from its machine{more}: {why}",
            is_final=known is not None and not is_gone,
        )
