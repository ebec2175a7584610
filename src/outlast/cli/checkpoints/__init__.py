"""``outlast checkpoints``: what there is, whether it can be believed, and what to do about it.

``survey``  a job and its tiers as the command line names them; which step is in which tier
``show``    list, show, export: what checkpoints hold, for people and for other programs
``verify``  verify, repair, prune: what is damaged or not needed any more

A tier that cannot be read is said in one line and the others are gone on with; only when none can
be read is that an error. Memory is not reached from here: it belongs to a job that runs.
"""

from __future__ import annotations

import click

from outlast.cli import LazyGroup

_COMMANDS = {
    "list": ("show:list_command", "every step, and which tier has it"),
    "show": ("show:show_command", "what one checkpoint holds"),
    "verify": ("verify:verify_command", "compare every byte in every tier with its checksum"),
    "repair": ("verify:repair_command", "mend what is damaged in one tier from another"),
    "prune": ("verify:prune_command", "remove what need not be kept"),
    "export": ("show:export_command", "write one as safetensors, DCP or torch.save"),
}


@click.group(name="checkpoints", cls=LazyGroup, package=__name__, listed=_COMMANDS, noun="command")
def command() -> None:
    """What checkpoints a job has, whether they can be believed, and mending them."""
