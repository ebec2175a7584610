"""Processes of one measurement: all that a worker started, what memory they hold, their end.

A worker and everything it starts carry the same mark in their environment, so that a process that
left its parent (a keeper, a daemon) is still found.

The memory of the lot: the anonymous part of each process' proportional set size, and its shared
memory, which is taken in two ways of which the larger counts: the shared part of those sizes (what
is mapped, each page once in all), and the blocks of the memory files that are open, mapped or not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

MARK: Final = "BENCH_TURN"


def marked(mark: str) -> list[int]:
    """Ids of the processes that carry ``mark``."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def held_bytes(mark: str) -> int:
    """Bytes of memory that the processes with ``mark`` hold."""
    private = mapped = 0
    files: dict[tuple[int, int], int] = {}
    for pid in marked(mark):
        rollup = _kilobytes(Path(f"/proc/{pid}/smaps_rollup"))
        private += rollup.get("Pss_Anon", 0) * 1024
        mapped += rollup.get("Pss_Shmem", 0) * 1024
        files |= _memory_files(pid)
    return private + max(mapped, sum(files.values()))


def kill(mark: str) -> None:
    """End what a measurement left behind: its own processes, by their ids."""
    for pid in marked(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


class Peak:
    """The most memory held while it runs, sampled in a process of its own.

    Walking page tables takes tens of milliseconds of a core: never run it in a save that is timed.
    """

    def __init__(self, mark: str, interval_s: float = 0.05) -> None:
        command = [sys.executable, str(Path(__file__)), mark, str(interval_s)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def stop(self) -> int:
        """Bytes at the peak."""
        out, _ = self._process.communicate("", timeout=30)
        return int(out)


def _kilobytes(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()[1:]
    except OSError:  # the process is gone
        return {}
    return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}


def _memory_files(pid: int) -> dict[tuple[int, int], int]:
    """The memory files that a process has open: (device, number) → bytes that exist."""
    found: dict[tuple[int, int], int] = {}
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(entry.readlink()).startswith(("/memfd:", "/dev/shm/")):
                    status = entry.stat()
                    found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return found


def main() -> None:
    """Sample until standard input closes, then print the peak."""
    mark, interval_s = sys.argv[1], float(sys.argv[2])
    over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    peak = 0
    while not over.is_set():
        start = time.monotonic()
        peak = max(peak, held_bytes(mark))
        over.wait(max(interval_s - (time.monotonic() - start), 0.0))
    print(peak)


if __name__ == "__main__":
    main()
