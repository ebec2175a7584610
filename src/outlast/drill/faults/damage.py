"""Files of a checkpoint are damaged: a bit is flipped, an end is cut off, a file is deleted.

What lies on a disk for weeks rots in ways that no system call reports. The job is made to read what
was damaged: all of its machines are killed with it, and started again. (A snapshot lives as long as
a worker, a keeper or an agent holds its memory.)

Guarantees: the job stands still while its files are damaged, so what is damaged is the newest
checkpoint (or as old a one as was asked for), and no writer of the job is between. At least one
whole checkpoint that is older stays, except where all are asked for.
"""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from outlast.checkpoint.catalog import find_saves
from outlast.checkpoint.manifest import MANIFEST, SaveName
from outlast.drill.faults.fault import (
    KILLED,
    MayLose,
    Missed,
    Plain,
    Promise,
    Struck,
    count_of,
    share_of,
    struck,
)
from outlast.drill.faults.processes import BACK_S, signal_all, start_again
from outlast.drill.faults.storage import first_place
from outlast.drill.target import Target
from outlast.errors import Exit
from outlast.storage import Directory


class Harm(enum.Enum):
    """What is done to a file; the value is part of a fault's name."""

    FLIP = "flip"
    TRUNCATE = "truncate"
    DELETE = "delete"


HARMS: Final = {
    Harm.FLIP: ("flip-bit", "one bit is flipped in"),
    Harm.TRUNCATE: ("truncate-file", "the end is cut off"),
    Harm.DELETE: ("delete-file", "deleted is"),
}
TENSORS: Final = "*.safetensors"
STATE: Final = "rank-*.json"
FILES: Final = (TENSORS, STATE, MANIFEST)


class FileDamage(Plain):
    """A file of a checkpoint is damaged, and the job has to read it.

    Args:
        harm: what is done.
        files: a pattern of names within the checkpoint's directory; of those that match, one.
        place: which of them, and where in it: a fraction from 0 to 1.
        age: how many newer checkpoints there are: 0 for the newest; then the newer ones are hit,
            too, as a resume looks at the newest first.
        every: all of the job's checkpoints there: nothing is left to go on from.
        tiers: names of the tiers in which it is done; () for the first that is a directory.
    """

    def __init__(
        self,
        harm: Harm,
        files: str = TENSORS,
        place: float = 0.5,
        *,
        age: int = 0,
        every: bool = False,
        tiers: Sequence[str] = (),
    ) -> None:
        if not isinstance(files, str) or not files or "/" in files:
            raise ValueError(f"files={files!r} names none; give a pattern, such as {TENSORS!r}")
        self.harm, self.files, self.every = harm, files, every
        self.place, self.age = share_of("place", place), count_of("age", age)
        self.tiers = tiers
        self.name, words = HARMS[harm]
        self.what = f"{words} a file of the newest checkpoint, which the job then has to read"
        self.promise = (
            Promise(exit_codes=(int(Exit.REFUSED),), refuses=True)
            if every
            else Promise(exit_codes=KILLED, loses=MayLose.OLDER)
        )
        self.lasts_s = BACK_S

    def why_not(self, target: Target) -> str:
        """Tiers must be directories."""
        for name in self.tiers:
            if name not in target.tiers:
                there = ", ".join(target.tiers) or "none"
                return f"tier {name!r} is no directory of this job; there are: {there}"
        return ""

    def inject(self, target: Target) -> Struck:
        """Stop the job, damage, and kill all that is left of it."""
        if not target.workers():
            raise Missed("there are no workers now")
        pids = [pid for place in target.machines for pid in place.processes()]
        signal_all(pids, signal.SIGSTOP)
        try:
            harmed = [path for place in self._places(target) for path in self._harm(place)]
            words = f"{HARMS[self.harm][1]} {_short(harmed)}; all processes are killed"
            # A checkpoint without its manifest is none: nothing is found to be damaged.
            is_found = not (self.harm is Harm.DELETE and all(p.name == MANIFEST for p in harmed))
            done = struck(target, words, "verify_failed" if is_found else "resumed")
        except Missed:
            signal_all(pids, signal.SIGCONT)
            raise
        for place in target.machines:
            place.kill()
        return done

    def heal(self, target: Target) -> None:
        """Start what was killed again."""
        start_again(target)

    def _places(self, target: Target) -> list[Path]:
        return [target.tiers[name] for name in self.tiers] or [first_place(target)]

    def _harm(self, place: Path) -> list[Path]:
        saves = find_saves(Directory(place)).committed if place.is_dir() else []
        chosen = saves if self.every else saves[len(saves) - 1 - self.age :]
        if len(saves) < self.age + 1 + (not self.every):
            raise Missed(f"{place} has {len(saves)} checkpoints so far")
        paths = [_one(place, save, self.files, self.place) for save in chosen]
        for path in paths:
            damage(path, self.harm, self.place)
        return paths


def damage(path: Path, harm: Harm, place: float) -> None:
    """Do harm to one file, ``place`` (0 to 1) of the way through it."""
    if harm is Harm.DELETE:
        path.unlink()
        return
    size = path.stat().st_size
    offset = min(int(place * size), size - 1)
    with path.open("r+b", buffering=0) as file:
        if harm is Harm.TRUNCATE:
            file.truncate(offset)
        else:
            file.seek(offset)
            (byte,) = file.read(1)
            file.seek(offset)
            file.write(bytes([byte ^ 1 << int(place * 1e6) % 8]))
        os.fsync(file.fileno())


def _one(place: Path, save: SaveName, files: str, which: float) -> Path:
    found = sorted((place / str(save)).glob(files))
    found = [path for path in found if path.stat().st_size]
    if not found:
        raise Missed(f"{save} has no file {files}")
    return found[min(int(which * len(found)), len(found) - 1)]


def _short(paths: Sequence[Path]) -> str:
    names = [f"{path.parent.name}/{path.name}" for path in paths]
    return " and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} others"
