"""What the kernel is asked for: a group with little memory, and file systems that fail."""

import contextlib
import ctypes
import os
import uuid
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_MS_RDONLY, _MNT_DETACH = 1, 2


class MemoryGroup:
    """A control group with a limit, v1 or v2; ``why_not`` says why there is none."""

    def __init__(self, limit_bytes):
        self.path, self.why_not = None, ""
        try:
            self._make(limit_bytes)
        except OSError as error:
            self.why_not = f"no control group can be made here: {error}"
            self.close()

    def _make(self, limit_bytes):
        v1 = Path("/sys/fs/cgroup/memory")
        root = v1 if (v1 / "memory.limit_in_bytes").exists() else Path("/sys/fs/cgroup")
        self.path = root / f"outlast-test-{uuid.uuid4().hex[:8]}"
        self.path.mkdir()
        name = "memory.limit_in_bytes" if root == v1 else "memory.max"
        (self.path / name).write_text(str(limit_bytes))
        with contextlib.suppress(OSError):  # no swap: it would only make it slow
            (self.path / "memory.swap.max").write_text("0")

    def enter(self):
        """Move this process into it."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def close(self):
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.rmdir()


@contextlib.contextmanager
def mounted(path, *, size_bytes=1 << 16, read_only=False):
    """A small file system at ``path``; an OSError where this process may not mount."""
    path.mkdir()
    options = f"size={size_bytes}".encode()
    flags = _MS_RDONLY if read_only else 0
    if _libc.mount(b"none", bytes(path), b"tmpfs", flags, options):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    try:
        yield path
    finally:
        _libc.umount2(bytes(path), _MNT_DETACH)
