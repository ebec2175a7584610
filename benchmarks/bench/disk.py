"""Files and memory as close to the machine as Python gets: O_DIRECT, huge pages, fsync, caches."""

from __future__ import annotations

import concurrent.futures
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

BLOCK: Final = 16 << 20


def fsync_tree(path: Path) -> None:
    """Make everything under ``path`` durable, and its entry in its parent."""
    for root, _, files in os.walk(path):
        for name in files:
            _fsync(Path(root) / name)
        _fsync(Path(root))
    if path.is_file():
        _fsync(path)
    _fsync(path.parent)


def drop_cache(path: Path) -> None:
    """Take every file under ``path`` out of the page cache, once it is on disk."""
    os.sync()
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def fill_cache(path: Path) -> None:
    """Read every file under ``path`` into the page cache."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.read(BLOCK):
                    pass


def memory(size: int, *, huge: bool, touch: bool = True) -> mmap.mmap:
    """Private memory of ``size`` bytes, of huge pages where the kernel gives them."""
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    if touch:  # with noise: a disk may treat zeros, or what repeats itself, as less than it is
        torch.frombuffer(buffer, dtype=torch.int64, count=size // 8).random_()
    return buffer


def write_direct(path: Path, source: mmap.mmap, threads: int, *, new: bool) -> float:
    """Seconds to write ``source`` to ``path`` with O_DIRECT and fsync it.

    Args:
        path: the file; its blocks are kept and overwritten unless ``new``.
        source: a whole number of blocks of 16 MiB.
        threads: how many write at a time.
        new: remove the file first.
    """
    if new:
        path.unlink(missing_ok=True)
    view = memoryview(source)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)

    def write(offset: int) -> None:
        end = offset + BLOCK
        while offset < end:
            offset += os.pwrite(fd, view[offset:end], offset)

    start = time.perf_counter()
    _in_threads(write, len(source), threads)
    os.fsync(fd)
    elapsed = time.perf_counter() - start
    os.close(fd)
    return elapsed


def read_direct(path: Path, threads: int = 4) -> tuple[int, float]:
    """Bytes and seconds to read a file with O_DIRECT into buffers of huge pages."""
    size = path.stat().st_size
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffers = [memory(BLOCK, huge=True) for _ in range(threads)]

    def read(offset: int) -> None:
        buffer = buffers.pop()
        os.preadv(fd, [buffer], offset)
        buffers.append(buffer)

    start = time.perf_counter()
    _in_threads(read, size, threads)
    elapsed = time.perf_counter() - start
    os.close(fd)
    return size, elapsed


def copy_in_parts(source: torch.Tensor, target: torch.Tensor, threads: int) -> float:
    """Seconds to copy, each thread its part: plain threads, since a team of OpenMP's waits."""
    parts = list(zip(target.chunk(threads), source.chunk(threads), strict=True))
    workers = [threading.Thread(target=to.copy_, args=(of,)) for to, of in parts[1:]]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    parts[0][0].copy_(parts[0][1])
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def _in_threads(work: Callable[[int], None], size: int, threads: int) -> None:
    """Call ``work`` for the offset of every block, ``threads`` at a time."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(0, size, BLOCK)))


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
