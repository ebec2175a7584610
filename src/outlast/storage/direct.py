"""Reading and writing past the page cache (O_DIRECT), and what the kernel says about that cache.

A checkpoint's bytes are used once: copying them through the page cache costs a core and evicts
what the training loop reads. A direct transfer needs the memory's address, the offset and the
length aligned; what is not goes another way, always right, only slower.

Rejected: asking statx for the alignment (kernel 6.1 and newer only; a page satisfies every disk we
know, and a file system that wants more says EINVAL, upon which callers go on without); mixing
direct and buffered transfers within a page, where the cache may write stale bytes back. Hence
``ALIGN`` is at least the page size.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import Final

ALIGN: Final = max(4096, mmap.PAGESIZE)

# EINVAL: what file systems without direct transfers say, at opening or at the first transfer.
REFUSED: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})

_CACHESTAT: Final = 451  # the same number on all platforms of Linux that PyTorch runs on


def open_direct(path: Path, flags: int) -> int | None:
    """A descriptor for direct transfers, or None where this file system has none."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in REFUSED:
            return None
        raise


def bytes_of(data: memoryview | bytes) -> memoryview:
    """``data`` seen as plain bytes."""
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def aligned_bytes(view: memoryview, offset: int) -> int:
    """How many bytes from the start of ``view`` can be transferred directly at ``offset``."""
    length = len(view) - len(view) % ALIGN
    if not length or offset % ALIGN or address_of(view) % ALIGN:
        return 0
    return length


class _Buffer(ctypes.Structure):
    """Python's ``Py_buffer``."""

    _fields_ = (
        *(("buf", ctypes.c_void_p), ("obj", ctypes.c_void_p), ("len", ctypes.c_ssize_t)),
        *(("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int)),
        *((name, ctypes.c_void_p) for name in ("format", "shape", "strides", "suboffsets", "more")),
    )


def address_of(view: memoryview) -> int:
    """Where a non-empty ``view`` lies in memory; read-only ones too.

    NumPy would say it as well; importing it is half of what a keeper needs for its start.
    """
    found = _Buffer()
    python = ctypes.pythonapi
    python.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(found), ctypes.c_int(0))
    address = int(found.buf)
    python.PyBuffer_Release(ctypes.byref(found))
    return address


def mostly_cached(fd: int, size: int) -> bool:
    """Whether at least half of an open file of ``size`` bytes is in the page cache.

    Where the kernel does not say, yes: reading through the cache is never wrong.
    """
    if not size:
        return True
    num_pages = _cachestat(fd)
    if num_pages is None:
        num_pages = _mincore(fd, size)
    return num_pages is None or num_pages * mmap.PAGESIZE * 2 >= size


class _CacheRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def _cachestat(fd: int) -> int | None:
    """Pages in the cache by cachestat(2): Linux 6.5 and newer; a length of 0 means all."""
    counts = _Counts()
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(_CACHESTAT),
        ctypes.c_uint(fd),
        ctypes.byref(_CacheRange(0, 0)),
        ctypes.byref(counts),
        ctypes.c_uint(0),
    )
    return None if failed else int(counts.cached)


def _mincore(fd: int, size: int) -> int | None:
    """Pages in the cache by mincore(2), which wants a mapping."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapping:
            states = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
            view = memoryview(mapping)
            address = address_of(view)
            view.release()
            failed = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), states)
    except OSError:
        return None
    return None if failed else sum(state & 1 for state in states.raw)
