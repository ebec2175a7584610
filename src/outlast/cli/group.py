"""A command that has others, each loaded when it is called: most of them do without torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """Commands by name.

    Args:
        package: where their modules lie; each has a ``command``.
        listed: name → module, and what it is for.
        noun: what one of them is called.
        hidden: others, for scripts that outlast writes.
        options: click's.
    """

    def __init__(
        self,
        *,
        package: str,
        listed: Mapping[str, tuple[str, str]],
        noun: str,
        hidden: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._package = package
        self._listed = listed
        self._noun = noun
        self._modules = {name: name for name in hidden}
        self._modules |= {name: module for name, (module, _) in listed.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, in order."""
        return list(self._listed)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """One of them, or None."""
        if cmd_name not in self._modules:
            return None
        module = importlib.import_module(f"{self._package}.{self._modules[cmd_name]}")
        found: click.Command = module.command
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but for what is said when there is none of that name."""
        if args and args[0] not in self._modules:
            from outlast.errors import nearest

            close = nearest(args[0], tuple(self._listed))
            raise click.UsageError(
                f"{ctx.command_path} {args[0]} is not a {self._noun};{close}", ctx=ctx
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Without loading them."""
        with formatter.section(f"{self._noun.capitalize()}s"):
            formatter.write_dl([(name, text) for name, (_, text) in self._listed.items()])
