"""``outlast drill``: break a job on purpose and grade it; prove that a resume changes nothing.

``faults``  the drill itself: the job undisturbed, then once for each fault; tables, JSON, JUnit
``soak``    one long run with one fault after another, and its curves
``resume``  the proof of a resume by itself
``screen``  what is shown while a drill runs

What stands behind ``--`` is the job. A first word that is no command of this group's is a fault's
name: ``outlast drill kill-worker -- train.py``.
"""

from __future__ import annotations

from typing import Final

import click

from outlast.cli import LazyGroup

_COMMANDS: Final = {
    "faults": ("faults:command", "break the job in each of these ways, and grade it"),
    "resume": ("resume:command", "prove that a resume changes nothing, or name what does"),
}


DIRECTORY: Final = click.option(
    "--dir",
    "directory",
    default="outlast-drill",
    help="Where the runs go, each command's in a part of its own.",
)


class _DrillGroup(LazyGroup):
    """Whose first command is meant where none is named."""

    default: Final = "faults"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put its name ahead of what is no command."""
        asks_help = bool(args) and args[0] in ctx.help_option_names
        if not args or (args[0] not in _COMMANDS and not asks_help):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


@click.group(
    name="drill",
    cls=_DrillGroup,
    package=__name__,
    listed=_COMMANDS,
    noun="command",
    epilog="outlast drill -- train.py is outlast drill faults -- train.py.",
)
def command() -> None:
    """Break your own job on purpose, in every way that it is meant to survive, and grade it."""


def split(args: list[str]) -> tuple[list[str], list[str]]:
    """What is the drill's, and the job's command line behind ``--``.

    Without ``--`` the job begins with the first word that ends in ``.py``.
    """
    if "--" in args:
        at = args.index("--")
        return args[:at], args[at + 1 :]
    at = next((place for place, word in enumerate(args) if word.endswith(".py")), len(args))
    return args[:at], args[at:]
