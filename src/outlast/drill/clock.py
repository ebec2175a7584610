"""A wall clock that can be moved, for the Python processes of one job.

``install`` copies this very file into a directory as a ``sitecustomize``, which Python imports in
every process that has the directory on PYTHONPATH, and puts it there. Each process then maps a file
of eight bytes, that of its machine, and adds what is in it to what it is told of the time. Whatever
other ``sitecustomize`` comes behind it on the path (a user's, a distribution's) is run as well.

Moved are ``time.time``, ``time_ns``, ``clock_gettime`` and ``clock_gettime_ns`` of CLOCK_REALTIME,
and what ``gmtime``, ``localtime``, ``ctime`` and ``strftime`` say without an argument.

Not reached: ``datetime.now()`` and C and C++ code (they ask the kernel themselves), the kernel's
times of files, programs that are not Python, and ``python -I``. Monotonic clocks do not jump, as
they do not anywhere.

Rejected: setting the machine's clock (it is not the job's), time namespaces (they have no wall
clock), libfaketime (a library that has to be there).
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from collections.abc import Iterable, MutableMapping
from pathlib import Path

PLACE = "OUTLAST_DRILL_CLOCKS"  # the variable that names the directory of the clocks
_SECONDS = struct.Struct("d")


def install(directory: Path, machines: Iterable[str], environ: MutableMapping[str, str]) -> None:
    """Make clocks for machines of these names, and let ``environ`` lead processes to them."""
    import shutil  # only here: every Python process of the job imports this file

    site = directory / "site"
    site.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(__file__, site / "sitecustomize.py")
    for name in machines:
        move(directory, name, 0.0)
    before = environ.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    if str(site) not in before.split(os.pathsep):
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), before]))
    environ[PLACE] = str(directory)


def move(directory: Path, machine: str, seconds: float) -> None:
    """Let a machine's clock be ahead by so much; negative: behind."""
    fd = os.open(directory / machine, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(fd, _SECONDS.pack(seconds), 0)
    finally:
        os.close(fd)


def follow(file: Path) -> None:
    """Let this process' clock follow what is in ``file`` from now on."""
    with file.open("rb") as opened:
        shared = mmap.mmap(opened.fileno(), _SECONDS.size, prot=mmap.PROT_READ)
    ahead = _SECONDS.unpack_from
    real_time, real_ns = time.time, time.time_ns
    real_get, real_get_ns = time.clock_gettime, time.clock_gettime_ns

    def moved() -> float:
        return real_time() + float(ahead(shared)[0])

    def moved_ns() -> int:
        return real_ns() + int(ahead(shared)[0] * 1e9)

    def clock_gettime(clk_id: int, /) -> float:
        return moved() if clk_id == time.CLOCK_REALTIME else real_get(clk_id)

    def clock_gettime_ns(clk_id: int, /) -> int:
        return moved_ns() if clk_id == time.CLOCK_REALTIME else real_get_ns(clk_id)

    time.time, time.time_ns = moved, moved_ns
    time.clock_gettime, time.clock_gettime_ns = clock_gettime, clock_gettime_ns
    for name in ("gmtime", "localtime", "ctime"):
        _default(name, moved)
    of_tuple = time.strftime
    local = time.localtime
    time.strftime = lambda form, when=None, /: of_tuple(form, local() if when is None else when)


def _default(name: str, moved: object) -> None:
    real = getattr(time, name)

    def told(seconds: float | None = None, /) -> object:
        return real(moved() if seconds is None else seconds)  # type: ignore[operator]

    setattr(time, name, told)


def _begin() -> None:
    """What Python does when it imports this file as ``sitecustomize``."""
    place = os.environ.get(PLACE)
    if place and time.time.__module__ == "time":  # else a copy of this file was here before
        file = Path(place) / os.uname().nodename
        if file.is_file():
            follow(file)
    _run_next()


def _run_next() -> None:
    """Run the ``sitecustomize`` that this one hides, if there is one."""
    here = Path(__file__).resolve().parent
    for entry in sys.path:
        other = Path(entry or ".") / "sitecustomize.py"
        if other.is_file() and other.resolve().parent != here and _behind(entry, here):
            code = compile(other.read_bytes(), str(other), "exec")
            names = {
                "__name__": "sitecustomize",
                "__file__": str(other),
                "__builtins__": __builtins__,
            }
            exec(code, names)  # noqa: S102 - Python itself would have run it
            return


def _behind(entry: str, here: Path) -> bool:
    places = [Path(one or ".").resolve() for one in sys.path]
    return here in places and places.index(Path(entry or ".").resolve()) > places.index(here)


if __name__ == "sitecustomize":
    _begin()
