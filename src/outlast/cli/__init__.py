"""The command line: one thin module per command, loaded only when it is called."""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import Any

import click

from outlast._version import __version__
from outlast.errors import Exit, OutlastError

_COMMANDS = {
    "run": "run a script under outlast, in place of torchrun",
    "init": "write the file with which Slurm, Kubernetes or SkyPilot runs a script",
    "demo": "train through a kill and a preemption notice, and prove nothing changed",
    "report": "what happened to a job and where its time went",
    "checkpoints": "list, verify, mend, prune and export a job's checkpoints",
    "watch": "tell a job that outlast does not run that its machine will go",
    "config": "the settings in force and where each came from",
}
_HIDDEN = ("requeue",)  # for scripts that outlast writes


class _Commands(click.Group):
    """Finds a command's module by its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS and cmd_name not in _HIDDEN:
            return None
        module = importlib.import_module(f"outlast.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in (*_COMMANDS, *_HIDDEN):
            close = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            hint = (
                f"did you mean outlast {close[0]}?" if close else f"known: {', '.join(_COMMANDS)}"
            )
            raise click.UsageError(f"{args[0]} is not a command; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="outlast")
def cli() -> None:
    """Keep PyTorch training going on machines that fail, hang, slow down or are taken back."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``outlast``: our own errors are one line and their exit code."""
    try:
        code: Any = cli.main(args=arguments, prog_name="outlast", standalone_mode=False)
    except OutlastError as error:
        _fail(str(error), int(error.exit_code))
    except click.ClickException as error:
        _fail(f"{error.format_message()} See: outlast --help", 2)
    except click.Abort:
        _fail("stopped", 130)
    except BrokenPipeError:
        sys.exit(141)  # whoever was reading has seen enough
    except OSError as error:
        _fail(f"{error}; look at the disk, or give another directory", int(Exit.STORAGE))
    sys.exit(int(code or 0))


def _fail(text: str, code: int) -> None:
    click.echo(f"outlast: {text}", err=True)
    sys.exit(code)
