"""Where commands print what is drawn for people: rich's console, with our exit codes."""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console


class Paper(Console):
    """Standard output; whoever reads it may leave.

    Rich's own answer is exit code 1, which says that something failed, and in any other thread
    than the main one it stays silent from then on.
    """

    def on_broken_pipe(self) -> NoReturn:
        """Let the command line answer as it does for what is printed without rich."""
        raise BrokenPipeError
