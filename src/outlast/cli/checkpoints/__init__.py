"""``outlast checkpoints``: what there is, whether it can be believed, and what to do about it.

``where``   a job and its tiers, as the command line names them; how far a command is
``survey``  which step is in which tier
``listing`` one row a step
``show``    what one checkpoint holds
``verify``  every byte in every tier
``repair``  from one tier into another
``prune``   what retention allows
``export``  as files for others

A tier that cannot be read is said in one line and the others are gone on with; only when none can
be read is that an error. Memory is not reached from here: it belongs to a job that runs.
"""

from __future__ import annotations

import click

from outlast.cli import LazyGroup

_COMMANDS = {
    "list": ("listing", "every step, and which tier has it"),
    "show": ("show", "what one checkpoint holds"),
    "verify": ("verify", "compare every byte in every tier with its checksum"),
    "repair": ("repair", "mend what is damaged in one tier from another"),
    "prune": ("prune", "remove what need not be kept"),
    "export": ("export", "write one as safetensors, DCP or torch.save"),
}


@click.group(name="checkpoints", cls=LazyGroup, package=__name__, listed=_COMMANDS, noun="command")
def command() -> None:
    """What checkpoints a job has, whether they can be believed, and mending them."""
