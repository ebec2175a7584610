"""What this machine can do at best: copies, disk, checksums. The other tables are read against it.

- memory: one buffer copied into another with ``torch.Tensor.copy_`` by one or two plain threads
  (half of the buffer each), into memory that was never touched, that was touched before, and that
  was touched before and asks for huge pages;
- disk, writing: O_DIRECT blocks of 16 MiB and one fsync, two threads, from pages of 4 KiB and from
  huge ones, into a new file and over an old one;
- disk, reading: the same file, cold (out of the page cache), O_DIRECT blocks of 16 MiB into buffers
  of huge pages, one and four threads;
- XXH3: 64 and 128 bits over blocks of 16 MiB in memory, one thread.

All in GB/s (10^9 bytes), medians over the repetitions, which go through all kinds in turn. What is
"on disk" here is what the device says is: on a virtual one that may be the host's memory.

    python benchmarks/limits.py [--mb 1024] [--repeats 5] [--dir DIR] [--quick]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash

from bench.disk import BLOCK, copy_in_parts, drop_cache, memory, read_direct, write_direct
from bench.rotation import directory
from bench.tables import cell, emit, machine, markdown


def main() -> None:
    """Measure, print one JSON object and a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=1024.0, help="bytes of each repetition, MB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to write: a directory on the disk meant")
    parser.add_argument("--quick", action="store_true", help="a small smoke run")
    options = parser.parse_args()
    if options.quick:
        options.mb, options.repeats = 64.0, 2
    torch.set_num_threads(1)
    size = max(int(options.mb * 1e6) // BLOCK, 1) * BLOCK
    place = options.dir or Path(tempfile.gettempdir())
    found: dict[str, list[float]] = {}
    description = machine(place)
    with directory(place) as path:
        kinds = {**copies(size), **disk(size, path), **checksums(size)}
        for repetition in range(options.repeats + 1):
            for name, measure in kinds.items():
                elapsed = measure()
                if repetition:  # the first time round is for caches and allocators
                    found.setdefault(name, []).append(size / elapsed / 1e9)
    result = {"benchmark": "limits", "machine": description, "bytes": size, "gb_per_s": found}
    rows = ([name, cell(values, 2)] for name, values in found.items())
    emit(result, [markdown(["limit", "GB/s"], rows)])


def copies(size: int) -> dict[str, Callable[[], float]]:
    """Copies of memory, by how the target was prepared and by threads."""
    source = torch.frombuffer(memory(size, huge=True), dtype=torch.uint8)

    def copy(*, fresh: bool, huge: bool, threads: int) -> Callable[[], float]:
        kept = None if fresh else memory(size, huge=huge)

        def measure() -> float:
            buffer = memory(size, huge=huge, touch=False) if kept is None else kept
            target = torch.frombuffer(buffer, dtype=torch.uint8)
            return copy_in_parts(source, target, threads)

        return measure

    kinds: dict[str, Callable[[], float]] = {}
    for threads in (1, 2):
        by = f"{threads} thread{'s' * (threads > 1)}"
        kinds[f"copy, fresh, {by}"] = copy(fresh=True, huge=False, threads=threads)
        kinds[f"copy, touched, {by}"] = copy(fresh=False, huge=False, threads=threads)
        kinds[f"copy, touched, huge pages, {by}"] = copy(fresh=False, huge=True, threads=threads)
    return kinds


def disk(size: int, path: Path) -> dict[str, Callable[[], float]]:
    """Writes by pages and by file, then reads of what was written."""
    small, huge = memory(size, huge=False), memory(size, huge=True)
    file = path / "data"

    def read(threads: int) -> Callable[[], float]:
        def measure() -> float:
            drop_cache(file)
            return read_direct(file, threads)[1]

        return measure

    return {
        "disk write, 4 KiB pages, new file": lambda: write_direct(file, small, 2, new=True),
        "disk write, 4 KiB pages, old file": lambda: write_direct(file, small, 2, new=False),
        "disk write, huge pages, new file": lambda: write_direct(file, huge, 2, new=True),
        "disk write, huge pages, old file": lambda: write_direct(file, huge, 2, new=False),
        "disk read, cold, 1 thread": read(1),
        "disk read, cold, 4 threads": read(4),
    }


def checksums(size: int) -> dict[str, Callable[[], float]]:
    """XXH3 over blocks."""
    view = memoryview(memory(size, huge=True))

    def over_blocks(digest: Callable[[memoryview], int]) -> Callable[[], float]:
        def measure() -> float:
            start = time.perf_counter()
            for offset in range(0, size, BLOCK):
                digest(view[offset : offset + BLOCK])
            return time.perf_counter() - start

        return measure

    return {
        "XXH3-64, 1 thread": over_blocks(xxhash.xxh3_64_intdigest),
        "XXH3-128, 1 thread": over_blocks(xxhash.xxh3_128_intdigest),
    }


if __name__ == "__main__":
    main()
