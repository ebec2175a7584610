"""The errors that a caller of outlast can meet, and the exit codes.

    OutlastError                       exit code
    ├── ConfigError      (ValueError)      2     settings, command line, a session's arguments
    │   └── StateMismatch                  2     the model is not the one that was saved
    ├── StorageError     (OSError)        77     the storage cannot be used
    ├── ResumeRefused    (RuntimeError)   78     a checkpoint was expected, none is valid
    ├── StillToDo        (RuntimeError)   76     code behind a finished loop needs what a step sets
    ├── NotInProcess     (ConnectionError) 80    a survivor must start anew after a worker's loss
    ├── CheckpointInvalid (ValueError)     1     one checkpoint failed its verification
    ├── ShardError       (RuntimeError)    1     a shard of a stream raised
    └── SealError        (ValueError)      1     a peer that does not hold the job's key, or worse
        └── CutShort     (ConnectionError) 1     the stream ended inside a frame

Each derives from the builtin that a caller would catch, says what happened, which value was seen
and what to do next, and never derives from BaseException. The exit codes are those of
``outlast run`` (see :class:`Exit`). An error that a room raises for itself is in that room.
"""

from __future__ import annotations

import difflib
import enum
import errno
import sys
from collections.abc import Sequence
from typing import Final


class Exit(enum.IntEnum):
    """Exit codes of ``outlast run``, and of a worker that leaves on purpose.

    Below each: what it means, and what to do. ``docs/reference`` is made of it.
    """

    FINISHED = 0
    """finished"""
    USAGE = 2
    """usage or configuration: one line says what

    correct it
    """
    DRAINED = 75
    """stopped after a notice; everything that there was time to save is committed

    start the same command again
    """
    GAVE_UP = 76
    """gave up: a bug in the script, a failure on all machines or on the only one, or no progress;
    the newest checkpoint stands

    read the last line and the traceback
    """
    STORAGE = 77
    """the storage cannot be used: read-only, failing or full, at the start or for the last save;
    one line names the path and the error

    do what the line says, then start the same command again
    """
    REFUSED = 78
    """refuses to resume: a checkpoint was expected and none is valid, or nothing proves whose the
    checkpoints are

    copy one back, or do what the line says
    """
    ROLLED_BACK = 79
    """of a worker alone: the next attempt goes on from before"""
    STARTS_ANEW = 80
    """of a worker alone: it was to go on after a loss elsewhere, and cannot"""


_SYSTEMS: Final = {"darwin": "macOS", "win32": "Windows"}
_ANYWHERE: Final = ("plan", "simulate", "init", "config")  # commands that ask nothing of the system


def elsewhere() -> str:
    """Say what works on a system that is not Linux; "" on Linux."""
    if sys.platform == "linux":
        return ""
    return (
        f"this is {_SYSTEMS.get(sys.platform, sys.platform)}, and training with outlast needs "
        f"Linux; here these work: outlast {', '.join(_ANYWHERE)}"
    )


def require_linux(what: str) -> None:
    """Refuse what does not work on this system.

    Args:
        what: the name of a command, or of a part of the package.

    Raises:
        ConfigError: this is not Linux, and ``what`` needs it.
    """
    if what not in _ANYWHERE and elsewhere():
        raise ConfigError(f"outlast {what}: {elsewhere()}")


class Leave(SystemExit):
    """A worker leaves on purpose, with one of ours: a script's own exit says nothing of that."""


class OutlastError(Exception):
    """Base of all errors raised on purpose; ``exit_code`` is what the process should leave with."""

    exit_code: int = 1


class ConfigError(OutlastError, ValueError):
    """A setting, a flag or an argument that cannot be used."""

    exit_code = Exit.USAGE


class StateMismatch(ConfigError):
    """The state at hand does not have the names or shapes that the checkpoint has."""


class StorageError(OutlastError, OSError):
    """The storage that the job lives on cannot be read or written."""

    exit_code = Exit.STORAGE


class ResumeRefused(OutlastError, RuntimeError):
    """A checkpoint was expected and none is valid; starting at step 0 would hide a loss."""

    exit_code = Exit.REFUSED


class StillToDo(OutlastError, RuntimeError):
    """The script was cut off behind its loop, and needs for that what only a step would set."""

    exit_code = Exit.GAVE_UP


class NotInProcess(OutlastError, ConnectionError):
    """A process that was to go on after a loss elsewhere, and cannot."""

    exit_code = Exit.STARTS_ANEW


class CheckpointInvalid(OutlastError, ValueError):
    """A checkpoint that must not be believed.

    Attributes:
        step: the checkpoint's step.
        reason: what failed, in words, naming the file.
    """

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"step {step} is not valid: {reason}")
        self.step = step
        self.reason = reason

    def __reduce__(self) -> tuple[type[CheckpointInvalid], tuple[int, str]]:
        # DCP hands one rank's errors to the others.
        return type(self), (self.step, self.reason)


class ShardError(OutlastError, RuntimeError):
    """A shard of a stream raised while it was read; says which, where, and what it said."""


class SealError(OutlastError, ValueError):
    """Bytes from another machine that must not be believed; the connection is of no use any more.

    Attributes:
        reason: what was wrong, in words, without anything that the other side sent but names.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class CutShort(SealError, ConnectionError):
    """The stream ended inside a frame: a peer that died looks like one that was cut off."""


_ELSEWHERE: Final = frozenset(  # a path that somebody has mistyped, and no storage that fails
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR),
        *(errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL),
    }
)
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_REMEDIES: Final = {
    errno.EROFS: "make it writable again (mount -o remount,rw, and see the kernel's log for why)",
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, or have the quota raised",
}


def remedy(error: BaseException) -> str:
    """What to do about an error of a file system, as an order without a full stop."""
    number = getattr(error, "errno", None)
    if number in _ELSEWHERE:
        return "see what is there in place of what should be"
    return _REMEDIES.get(number or 0, "see the kernel's log, and whether the storage answers")


def unusable(what: str, error: OSError) -> OutlastError:
    """The error for a place that cannot be used as it must: the path's fault, or the storage's.

    Args:
        what: the place and what is wrong with it, as in "/mnt/x cannot be written".
        error: as the system gave it.
    """
    words = f"{what}: {error.strerror or error}"
    if error.errno in _ELSEWHERE:
        return ConfigError(f"{words}; give another with --dir")
    return StorageError(f"{words}; {remedy(error)}, or give another directory with --dir")


def exit_code_of(error: BaseException | None) -> int:
    """What the process will leave with if nobody catches ``error``."""
    if error is None:
        return 0
    code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", 1)
    return int(code) if isinstance(code, int) else int(code is not None)


def nearest(word: str, known: Sequence[str]) -> str:
    """The end of a message that refuses ``word``: the nearest of ``known``, or all of them."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" did you mean {close[0]}?" if close else f" known: {', '.join(known)}"
