"""Crash and pause points: a process kills or stops itself before one of its calls.

Counted are the calls that change storage below the explored directory, in the order in which the
process makes them, whichever of its threads does; the same every time, as far as its threads are.
strace counts each thread's calls for itself, so that those of a second thread cannot be told from
the first one's. What a file object writes is not seen here: job.json's bytes, and nothing else.

``EXPLORER_POINT`` says ``NUMBER:SIGNAL:ROOT:LOG``: which call, what then (as ``KILL``), below which
directory, and a file that gets a line for each call.
"""

import os
import signal
import threading

VARIABLE = "EXPLORER_POINT"
_NAMES = ("open", "write", "pwrite", "ftruncate", "fsync", "rename", "replace", "link", "unlink")
_NAMES += ("remove", "mkdir", "rmdir")


def as_told():
    """Have the point in this process that the environment names, if it names one."""
    told = os.environ.get(VARIABLE, "")
    if told:
        number, what, root, log = told.split(":")
        _Counter(int(number), getattr(signal, f"SIG{what}"), root, log)


class _Counter:
    def __init__(self, number, what, root, log):
        self._number, self._what, self._root = number, what, root
        self._count = 0
        self._lock = threading.RLock()
        self._write, self._readlink, self._kill = os.write, os.readlink, os.kill
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for name in _NAMES:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name, call):
        def counted(where, *rest, **options):
            if self._concerns(name, where, rest, options):
                with self._lock:
                    self._count += 1
                    is_point = self._count == self._number
                    self._write(self._log, f"{name}\n".encode())
                if is_point:
                    self._kill(os.getpid(), self._what)
            return call(where, *rest, **options)

        return counted

    def _concerns(self, name, where, rest, options):
        if name == "open" and not rest[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return False
        fd = where if isinstance(where, int) else options.get("dir_fd")
        try:
            path = self._readlink(f"/proc/self/fd/{fd}") if fd is not None else os.fspath(where)
        except OSError:
            return False
        return path.startswith(self._root)
