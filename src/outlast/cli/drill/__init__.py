"""``outlast drill``: a job is broken on purpose, and it is proved what that changed.

``resume``  whether a run that was stopped and started again is the one it would have been
"""

from __future__ import annotations

import click

from outlast.cli import LazyGroup

_COMMANDS = {
    "resume": ("resume", "prove that a resume changes nothing, or name what it changes and why"),
}


@click.group(name="drill", cls=LazyGroup, package=__name__, listed=_COMMANDS, noun="command")
def command() -> None:
    """Break a job on purpose, grade what it makes of it, and prove what a resume changes."""
