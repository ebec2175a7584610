"""Our own errors, uncaught, are one clear line and the right exit code, never a traceback."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Final, TypeVar

from outlast.errors import OutlastError
from outlast.ledger.narrator import say

_SAID: Final = "_outlast_has_said_it"
Raised = TypeVar("Raised", bound=BaseException)


def quietly(error: Raised) -> Raised:
    """Mark an error of which all is said: uncaught, it ends the process without a traceback."""
    install()
    setattr(error, _SAID, True)
    return error


def install() -> None:
    """Replace the hook, once; other errors go to the hook that was there."""
    previous = sys.excepthook
    if getattr(previous, "of_outlast", False):
        return

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if getattr(error, _SAID, False):
            return
        if not isinstance(error, OutlastError):
            previous(kind, error, tb)
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads, or closed
            sys.stdout.flush()
        say(str(error))
        # The interpreter would exit with 1 whatever a hook does; the exit code is a contract.
        atexit._run_exitfuncs()
        os._exit(int(error.exit_code))

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
