"""Our own errors, uncaught, are one clear line and the right exit code, never a traceback."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Final, TypeVar

from outlast.errors import OutlastError, exit_code_of
from outlast.ledger.narrator import say
from outlast.training.unset import left_unset

_SAID: Final = "_outlast_has_said_it"
_TOLD: Final = "_outlast_has_told_of_it"
_no_step_left = _had_finished = False  # of the newest session of this process
Raised = TypeVar("Raised", bound=BaseException)


def quietly(error: Raised) -> Raised:
    """Mark an error of which all is said: uncaught, it ends the process without a traceback."""
    install()
    setattr(error, _SAID, True)
    return error


def no_step_was_left(*, had_finished: bool) -> None:
    """Note that this process's loop had ended before, and whether the whole script had too."""
    global _no_step_left, _had_finished
    _no_step_left, _had_finished = True, had_finished
    install()


def begins() -> None:
    """Another session of this process begins."""
    global _no_step_left  # noqa: PLW0603 - as the hook itself
    _no_step_left = False


def is_forgiven(error: BaseException) -> bool:
    """Whether the script failed only because a finished job had no step left.

    That it failed for want of a step is said either way. Where what is behind the loop was cut off
    before, it is still to be done, and the failure stands.
    """
    what = left_unset(error) if _no_step_left else ""
    if what and not getattr(error, _TOLD, False):
        setattr(error, _TOLD, True)
        _tell_of_unset(what, error)
    return bool(what) and _had_finished


def _tell_of_unset(what: str, error: BaseException) -> None:
    if _had_finished:
        words = str(error).partition("\n")[0]
        say(
            f"no step was left, so the loop has not set {what}; what follows is not done again "
            f"({type(error).__name__}: {words})"
        )
    else:
        say(
            f"no step was left, so the loop has not set {what}; what is behind the loop was cut "
            "off before and is still to be done: set it ahead of the loop, or compute it behind"
        )


def install() -> None:
    """Replace the hook, once; other errors go to the hook that was there."""
    previous = sys.excepthook
    if getattr(previous, "of_outlast", False):
        return

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if getattr(error, _SAID, False):
            return
        is_ours = isinstance(error, OutlastError)
        if not is_ours and not is_forgiven(error):
            previous(kind, error, tb)
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads, or closed
            sys.stdout.flush()
        if is_ours:
            say(str(error))
        # The interpreter would exit with 1 whatever a hook does; the exit code is a contract.
        atexit._run_exitfuncs()
        os._exit(exit_code_of(error) if is_ours else 0)

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
