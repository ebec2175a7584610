"""``outlast checkpoints``: what there is, whether it can be believed, and what to do about it.

``where``   a job and its tiers, as the command line names them
``survey``  which step is in which tier
``listing`` one row a step
``show``    what one checkpoint holds
``verify``  every byte in every tier
``repair``  from one tier into another
``prune``   what retention allows
``export``  as files for others
``bar``     how far it is

A tier that cannot be read is said in one line and the others are gone on with; only when none can
be read is that an error. Memory is not reached from here: it belongs to a job that runs.
"""

from __future__ import annotations

import importlib

import click

from outlast.tiers import nearest

_COMMANDS = {
    "list": ("listing", "every step, and which tier has it"),
    "show": ("show", "what one checkpoint holds"),
    "verify": ("verify", "compare every byte in every tier with its checksum"),
    "repair": ("repair", "mend what is damaged in one tier from another"),
    "prune": ("prune", "remove what need not be kept"),
    "export": ("export", "write one as safetensors, DCP or torch.save"),
}


class _Commands(click.Group):
    """Loads a command's module when it is called: most of them do without torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"{__name__}.{_COMMANDS[cmd_name][0]}")
        found: click.Command = module.command
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS:
            raise click.UsageError(
                f"checkpoints {args[0]} is not a command;{nearest(args[0], tuple(_COMMANDS))}"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(name="checkpoints", cls=_Commands)
def command() -> None:
    """What checkpoints a job has, whether they can be believed, and mending them."""
