"""Have ckpt-chaos count and strike in the job's keeper, as its own ``sitecustomize`` in a script.

ckpt-chaos arms the first Python process of its command, and leaves the children alone. Here the
command's processes take this file for theirs, and the first keeper arms itself, by the same call
and the same variables. A keeper that follows one that was struck is not armed again.

The tool hears of files that are opened, renamed and removed, and of directories that are made. What
else changes files in a keeper is told to it from here: links (which commit), truncations, writes
(which can be torn) and fsyncs.

Where the whole job is to die, the keeper takes its processes with it: SIGKILL to each of them, and
to itself at last. A file behind the name of the tool's log says that it came to that.

``EXPLORER_WITHOUT`` names a protection that the keeper goes without: the tool must see that.
"""

import contextlib
import os
import signal
import sys

KEEPER = ["-P", "-m", "outlast.keeper"]
STRUCK = 137  # with what ckpt-chaos ends the process that it strikes


def arm():
    """Count, and strike where that is asked for."""
    from ckpt_chaos import inject
    from ckpt_chaos.targets.common import arm_from_env

    if os.environ.get("EXPLORER_WITHOUT"):
        sys.path.append(os.environ["CHAOS_PROTECTIONS"])
        import protections

        protections.off_as_told()
    os._exit = _or_strike(os._exit)
    _tell(inject)
    arm_from_env(0, lazy=True)


def first_to(do):
    """Whether nobody did that before, in this run of the tool's command."""
    mark = f"{os.environ['CKPT_CHAOS_LOG']}.{do}"
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


# --- events ---------------------------------------------------------------------------------------


def _tell(inject):
    """Tell the tool of what it does not hear of itself."""
    at_new_name = {"os.link": 1, "os.truncate": 0}

    def heard(event, args):
        if event in at_new_name:
            path = args[at_new_name[event]]
            path = _path_of(path) if isinstance(path, int) else path
            if inject._under(path):
                inject._event(event, path, tornable=False)

    sys.addaudithook(heard)
    for name in ("write", "pwrite"):
        setattr(os, name, _counted(inject, f"os.{name}", getattr(os, name), _half))
    os.fsync = _counted(inject, "os.fsync", os.fsync)


def _counted(inject, name, call, torn=None):
    """``call``, whose first argument is a descriptor; ``torn`` does half of it."""

    def counted(fd, *rest):
        path = _path_of(fd)
        if inject._under(path) and inject._event(name, path, tornable=torn is not None):
            torn(call, fd, *rest)
            os._exit(STRUCK)
        return call(fd, *rest)

    return counted


def _half(write, fd, data, *offset):
    """Write half of the data; of several pages whole ones: a direct write takes no less."""
    half = len(data) // 2
    with contextlib.suppress(OSError):
        write(fd, memoryview(data)[: half - half % 4096 or half], *offset)


def _path_of(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - at each write
    except OSError:
        return "/"


# --- the strike -----------------------------------------------------------------------------------


def _or_strike(leave):
    def left(code):
        if code != STRUCK:
            leave(code)
        first_to("strike")
        if os.environ["CHAOS_KILLS"] == "job":
            _kill_all_below(int(os.environ["CHAOS_LAUNCHER"]))
        os.kill(os.getpid(), signal.SIGKILL)

    return left


def _kill_all_below(launcher):
    """SIGKILL to each process that descends from ``launcher``, but this one; until there is none.

    The launcher adopts what its descendants leave behind, so that none is missed.
    """
    killed = {os.getpid()}
    while found := _below(launcher) - killed:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found


def _below(pid):
    found = set()
    for task in _listed(f"/proc/{pid}/task"):
        for child in map(int, _read(f"/proc/{pid}/task/{task}/children").split()):
            found |= {child} | _below(child)
    return found


def _listed(path):
    try:
        return os.listdir(path)  # noqa: PTH208
    except OSError:
        return []


def _read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


if sys.orig_argv[1:4] == KEEPER and os.environ.get("CKPT_CHAOS_WATCH") and first_to("arm"):
    arm()
