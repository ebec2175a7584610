"""Real text that is on every machine: the source files of Python's standard library.

The list of files is fixed (sorted, without tests and what was installed on top), so that two runs
on one machine read the same bytes.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch

from outlast.errors import ConfigError

WINDOW: Final = 64  # bytes that a sample predicts, each from those before it
BYTES_MIN: Final = 10_000_000
_LEFT_OUT: Final = frozenset({"test", "tests", "site-packages", "dist-packages", "__pycache__"})


class Corpus(NamedTuple):
    """What was gathered: number of files and of bytes."""

    num_files: int
    num_bytes: int


def gather(target: Path) -> Corpus:
    """Write all the text into one file.

    Raises:
        ConfigError: this Python has less than 10 MB of source.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not _LEFT_OUT.intersection(path.relative_to(root).parts)
    ]
    with target.open("wb") as file:
        for path in paths:
            file.write(path.read_bytes())
    size = target.stat().st_size
    if size < BYTES_MIN:
        raise ConfigError(
            f"the standard library in {root} has {size / 1e6:.1f} MB of source and the demo needs "
            "10 MB; install Python with its library (on Debian: apt install libpython3-stdlib)"
        )
    return Corpus(len(paths), size)


class Windows(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """The text cut into windows; a sample is (its id, ``WINDOW + 1`` bytes as int64)."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // WINDOW

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        start = index * WINDOW
        window = self._bytes[start : start + WINDOW + 1].astype(np.int64)
        return index, torch.from_numpy(window)
