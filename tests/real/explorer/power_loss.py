"""What a power loss may leave of a recording: trees, built offline, without any process.

The model is the one of ALICE (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014)
in the terms of B3/CrashMonkey (Mohan et al., OSDI 2018), with the semantics that POSIX grants and
no file system's favours. So it is weaker than ext4 with ``data=ordered``, where an fsync commits
the whole journal: what survives here survives there, and on XFS, btrfs and NFS.

- What was there when the recording began is durable.
- fsync of a file makes its bytes and its size durable: those of calls that had returned by then.
  It does not make its name durable.
- fsync of a directory makes the changes of names in it durable, not those above it.
- Anything else may be on disk or not, each change for itself and in any order, but for these rules:
  changes of one name in one directory keep their order; a rename is atomic, and durable with an
  fsync of either directory; a hard link is one change of one name.
- A write that is not durable is there in full, missing, or cut short (its first half is there); or
  its length is there and its bytes are zeros, as where blocks are allocated late. Writes to one
  file are independent of each other.
- A name whose directory's own name is not there is not there either. A name may be durable before
  the bytes of its file are: the file is then empty, or what it was.

What is left out: sectors that are torn (our formats take a file as good by its hash, whatever the
bytes are), bytes that a disk returns wrong (``test_bit_flips``, ``test_corruption``), who may read
a file, and disks that say a flush is done before it is.

A moment is the number of operations that had ended. ``at`` of a moment gives the two extremes (all
or nothing of what is not durable), ``drawn`` any others.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from recording import Operation, Recording

Tree = dict[str, bytes | None]  # path below the root → a file's bytes; None for a directory
FATES = ("whole", "missing", "short", "zeros")


class State(NamedTuple):
    """One tree that a power loss may leave.

    Attributes:
        moment: how many operations had ended.
        tree: what is on disk.
        lost: what was not durable and is not there, or only in part, in words.
    """

    moment: int
    tree: Tree
    lost: tuple[str, ...]


class Disk:
    """The disk below a recorded process.

    Args:
        recording: what was done.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._operations = recording.operations
        self._syncs = [one for one in enumerate(self._operations) if one[1].kind == "sync"]
        self._durable_from = [self._synced_at(one) for one in self._operations]
        self._entries: dict[tuple[int, str], int] = {}
        numbers = {name: number for number, name in recording.directories.items()}
        for number, name in recording.directories.items():
            if name:
                self._enter(numbers, name, number)
        for number, (names, _) in recording.files.items():
            for name in names:
                self._enter(numbers, name, number)
        self._data: dict[int, list[int]] = {}
        for number, one in enumerate(self._operations):
            if one.kind in ("write", "size"):
                self._data.setdefault(one.what, []).append(number)
        self._contents: dict[tuple, bytes] = {}
        self._directories = set(recording.directories) | {
            change.what
            for one in self._operations
            for change in one.changes
            if one.call.startswith("mkdir") and change.what is not None
        }

    def _enter(self, numbers: dict[str, int], name: str, number: int) -> None:
        above, _, last = name.rpartition("/")
        self._entries[numbers[above], last] = number

    def _synced_at(self, one: Operation) -> int:
        """The number of the sync that makes an operation durable; behind all for none."""
        if one.kind == "names":
            targets = {change.directory for change in one.changes}
        else:
            targets = {one.what}
        for number, sync in self._syncs:
            if sync.what in targets and one.ended <= sync.began:
                return number
        return len(self._operations)

    # --- moments -----------------------------------------------------------------------------

    @property
    def moments(self) -> range:
        """Every one, the start and the end too."""
        return range(len(self._operations) + 1)

    def said(self, moment: int) -> list[bytes]:
        """The lines that were said by then."""
        return [one.data for one in self._operations[:moment] if one.kind == "said"]

    def durable(self, moment: int) -> list[bytes]:
        """The lines of the ledger that had been made durable by then."""
        found = []
        for number, one in enumerate(self._operations[:moment]):
            following = self._operations[number + 1 : number + 2]
            is_line = [(two.kind, two.what) for two in following] == [("said", one.what)]
            if one.kind == "write" and is_line and self._durable_from[number] < moment:
                found += one.data.splitlines()
        return found

    def call(self, moment: int) -> str:
        """The last call that had returned."""
        return self._operations[moment - 1].call if moment else "nothing"

    def pending(self, moment: int) -> list[int]:
        """The operations that had ended and were not durable."""
        return [
            number
            for number in range(moment)
            if self._operations[number].kind in ("names", "write", "size")
            and self._durable_from[number] >= moment
        ]

    def at(self, moment: int) -> Iterator[State]:
        """With everything that had ended, and with nothing of what was not durable."""
        pending = self.pending(moment)
        yield self._state(moment, dict.fromkeys(pending, "whole"))
        if pending:
            yield self._state(moment, dict.fromkeys(pending, "missing"))

    def drawn(self, moment: int, rng: random.Random, num: int) -> Iterator[State]:
        """``num`` others, where there are any."""
        pending = self.pending(moment)
        if not pending:
            return
        for _ in range(num):
            share = rng.random()
            fates = {}
            for number in pending:
                is_data = self._operations[number].kind == "write"
                partly = rng.choice(FATES[1:]) if is_data else "missing"
                fates[number] = "whole" if rng.random() < share else partly
            yield self._state(moment, fates)

    # --- a state -----------------------------------------------------------------------------

    def _state(self, moment: int, fates: dict[int, str]) -> State:
        """The tree with these fates of what is not durable; all else is there."""
        self._keep_order(moment, fates)
        entries = dict(self._entries)
        for number, one in enumerate(self._operations[:moment]):
            if one.kind == "names" and fates.get(number, "whole") == "whole":
                for change in one.changes:
                    if change.what is None:
                        entries.pop((change.directory, change.name), None)
                    else:
                        entries[change.directory, change.name] = change.what
        below: dict[int, list[tuple[str, int]]] = {}
        for (directory, name), what in entries.items():
            below.setdefault(directory, []).append((name, what))
        tree: Tree = {}
        self._grow(tree, below, 0, "", moment, fates)
        lost = [
            f"{self._operations[number].call} ({fate})"
            for number, fate in fates.items()
            if fate != "whole"
        ]
        return State(moment, tree, tuple(lost))

    def _keep_order(self, moment: int, fates: dict[int, str]) -> None:
        """Of one name, what came before something that is there is there as well."""
        needed: set[tuple[int, str]] = set()
        for number in reversed(range(moment)):
            one = self._operations[number]
            if one.kind != "names":
                continue
            names = {(change.directory, change.name) for change in one.changes}
            if fates.get(number, "whole") == "whole" or names & needed:
                needed |= names
                if number in fates:
                    fates[number] = "whole"

    def _grow(self, tree, below, directory, path, moment, fates) -> None:
        for name, what in below.get(directory, ()):
            full = f"{path}/{name}" if path else name
            if what in self._directories:
                tree[full] = None
                self._grow(tree, below, what, full, moment, fates)
            else:
                tree[full] = self._content(what, moment, fates)

    def _content(self, what: int, moment: int, fates: dict[int, str]) -> bytes:
        numbers = itertools.takewhile(lambda number: number < moment, self._data.get(what, ()))
        applied = tuple((number, fates.get(number, "whole")) for number in numbers)
        key = (what, applied)
        if key not in self._contents:
            data = bytearray(self._recording.files.get(what, ((), b""))[1])
            for number, fate in applied:
                _apply(data, self._operations[number], fate)
            self._contents[key] = bytes(data)
        return self._contents[key]


def _apply(data: bytearray, one: Operation, fate: str) -> None:
    if fate == "missing":
        return
    if one.kind == "size":
        del data[one.at :]
        data.extend(bytes(one.at - len(data)))
        return
    written = one.data if fate != "short" else one.data[: len(one.data) // 2]
    written = written if fate != "zeros" else bytes(len(written))
    data.extend(bytes(max(one.at + len(written) - len(data), 0)))
    data[one.at : one.at + len(written)] = written


def lay(tree: Tree, root: Path) -> None:
    """Write a tree into the directory ``root``, which must be empty or not be there.

    All of it is this user's alone: who may read what is not explored.
    """
    root.mkdir(parents=True, exist_ok=True)
    for path, data in tree.items():  # a directory comes before what is in it
        if data is None:
            (root / path).mkdir(0o700)
        else:
            fd = os.open(root / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(fd, "wb") as file:
                file.write(data)


def tree_of(root: Path) -> Tree:
    """The tree that lies in ``root``, in which nobody changes anything meanwhile."""
    paths = sorted(root.rglob("*"))
    return {str(p.relative_to(root)): None if p.is_dir() else p.read_bytes() for p in paths}
