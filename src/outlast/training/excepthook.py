"""Our own errors, uncaught, are one clear line and the right exit code, never a traceback.

So is what fails behind the loop of a job that had finished, for want of what the loop would have
set (:mod:`outlast.training.unset`). One rank's excuse counts for all: it leaves, and ranks that
wait for it fail by that. Such a rank asks in the session's store whether another was excused.
Under torchrun that store may have gone with rank 0. Then nobody can be asked, and nobody has to:
rank 0 has an exit code of its own, which says it if it failed for another reason.

Where the script was cut off behind its loop before the job finished, what is there is still to be
done, and no further attempt could: the error is one of ours then, with a way on.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Final, NamedTuple, TypeVar

import torch.distributed as dist

from outlast.attempt.link import Link
from outlast.errors import OutlastError, StillToDo, exit_code_of
from outlast.ledger.narrator import say
from outlast.policy.failures import reads_as_echo
from outlast.training.unset import left_unset

_SAID: Final = "_outlast_has_said_it"
_FOUND: Final = "_outlast_has_found"
_EXCUSED: Final = "behind/excused"  # a rank was, in the session's store
_ASK_S: Final = 5.0  # it was said before that rank left
_OF_OTHERS: Final = (getattr(dist, "DistError", ConnectionError), ConnectionError)


class _Behind(NamedTuple):
    """A session of this process had no step left."""

    finished_t: float  # 0 where the script was cut off behind its loop before it finished
    link: Link


_behind: _Behind | None = None  # of the newest session of this process
Raised = TypeVar("Raised", bound=BaseException)


def quietly(error: Raised) -> Raised:
    """Mark an error of which all is said: uncaught, it ends the process without a traceback."""
    install()
    setattr(error, _SAID, True)
    return error


def no_step_was_left(
    error: BaseException | None, link: Link, *, finished_t: float, step: int, ends: bool
) -> bool:
    """Note that this process's loop had ended before, and say it if the whole script had.

    Args:
        error: with which the session is left.
        link: the other ranks.
        finished_t: when the script had finished; 0 if it has not.
        step: completed steps.
        ends: whether the script leaves the session as it means to.

    Returns:
        Whether it, or another rank's, failed for want of what its loop would have set.
    """
    global _behind  # noqa: PLW0603 - as the hook itself
    _behind = _Behind(finished_t, link)
    install()
    is_excused = error is not None and is_forgiven(error)
    if finished_t and (is_excused or ends) and link.rank == 0:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(finished_t))
        say(
            f"nothing is left to do: finished at step {step} on {when}; the code behind "
            "the loops runs again, without what they would have set or filled"
        )
    return is_excused


def begins() -> None:
    """Another session of this process begins."""
    global _behind  # noqa: PLW0603 - as the hook itself
    _behind = None


def is_forgiven(error: BaseException) -> bool:
    """Whether the script, or another rank's, failed only as a finished job had no step left."""
    return _found(error) is True


def still_to_do(error: BaseException) -> StillToDo | None:
    """The error in place of one that only says that there was no step left, in a job cut off."""
    found = _found(error)
    return found if isinstance(found, StillToDo) else None


def _found(error: BaseException) -> StillToDo | bool:
    """What is behind an error; asked and said once."""
    if not hasattr(error, _FOUND):
        setattr(error, _FOUND, _look(error, _behind) if _behind is not None else False)
    found: StillToDo | bool = getattr(error, _FOUND)
    return found


def _look(error: BaseException, behind: _Behind) -> StillToDo | bool:
    what = left_unset(error, finished_t=behind.finished_t)
    why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if what and not behind.finished_t:
        return StillToDo(
            f"no step was left, so the loop has not set {what} ({why}); what is behind the loop "
            "was cut off before and is still to be done: set that ahead of the loop or compute it "
            "behind, or train further (a larger until), and run the same command again"
        )
    if what:
        _excuse(behind.link)
        unset = f"the loop has not set {what}; what follows is not done again ({why})"
        say(f"no step was left, so {unset}")
        return True
    if behind.finished_t and _is_of_others(error) and _is_excused(behind.link):
        how = type(error).__name__  # its words say which socket was closed, and nothing more
        say(f"another rank had no step left and has left; what follows is not done again ({how})")
        return True
    return False


def _is_of_others(error: BaseException) -> bool:
    """Whether it may be what torch raises when another rank has gone."""
    return isinstance(error, _OF_OTHERS) or reads_as_echo(str(error))


def _excuse(link: Link) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # the store has gone: others see that
        link.publish(_EXCUSED, b"%d" % link.rank)


def _is_excused(link: Link) -> bool:
    """Whether any rank was; also where rank 0 has gone, and the store with it."""
    if link.world_size == 1:
        return False
    try:
        link.fetch(_EXCUSED, _ASK_S)
    except TimeoutError:
        return False
    except (OSError, RuntimeError):
        return link.rank != 0
    return True


def install() -> None:
    """Replace the hook, once; other errors go to the hook that was there."""
    previous = sys.excepthook
    if getattr(previous, "of_outlast", False):
        return

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if getattr(error, _SAID, False):
            return
        ours = error if isinstance(error, OutlastError) else still_to_do(error)
        if ours is not error and not is_forgiven(error):
            previous(kind, error, tb)
            if ours is None:
                return
        with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads, or closed
            sys.stdout.flush()
        if ours is not None:
            say(str(ours))
        # The interpreter would exit with 1 whatever a hook does; the exit code is a contract.
        atexit._run_exitfuncs()
        os._exit(exit_code_of(ours))

    hook.of_outlast = True  # type: ignore[attr-defined]
    sys.excepthook = hook


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Our own errors, if nobody catches them, end the process with one line and their exit code."""
    try:
        yield
    except OutlastError:
        install()
        raise
