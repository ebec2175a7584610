"""A fork's command line and environment, as ``ps`` and /proc show them.

A fork shows its parent's. The kernel lets a process say where they lie (PR_SET_MM_MAP, which takes
no privilege where the kernel has it), so a worker points to what a cold one would show: people and
tools recognise workers by it. Where the kernel refuses, the server's command line is shown.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_PR_SET_MM: Final = 35
_PR_SET_MM_MAP: Final = 14
# Positions in /proc/self/stat, counted after the command's name.
_IN_STAT: Final = {
    "start_code": 23,
    "end_code": 24,
    "start_stack": 25,
    "start_data": 42,
    "end_data": 43,
    "start_brk": 44,
}
_shown: list[Any] = []  # the memory that the kernel reads from lives as long as the process


class _Map(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data")),
        *((name, ctypes.c_uint64) for name in ("start_brk", "brk", "start_stack")),
        *((name, ctypes.c_uint64) for name in ("arg_start", "arg_end", "env_start", "env_end")),
        ("auxv", ctypes.c_void_p),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def show(command: Sequence[bytes], environ: Mapping[bytes, bytes]) -> None:
    """Show this command line and environment from now on, if the kernel lets us."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        _show(command, environ)


def _show(command: Sequence[bytes], environ: Mapping[bytes, bytes]) -> None:
    arguments = b"\0".join(command) + b"\0"
    surroundings = b"".join(name + b"=" + value + b"\0" for name, value in environ.items())
    memory = mmap.mmap(-1, len(arguments) + len(surroundings), flags=mmap.MAP_PRIVATE)
    memory.write(arguments + surroundings)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    middle = start + len(arguments)
    wanted = _Map(
        **{name: int(stat[position]) for name, position in _IN_STAT.items()},
        brk=libc.sbrk(0),
        arg_start=start,
        arg_end=middle,
        env_start=middle,
        env_end=middle + len(surroundings),
        auxv=None,
        auxv_size=0,
        exe_fd=0xFFFFFFFF,
    )
    size = ctypes.sizeof(wanted)
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(wanted), size, 0) == 0:
        _shown.append(memory)
