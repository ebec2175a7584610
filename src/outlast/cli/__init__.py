"""The command line: one module or folder per command, loaded only when it is called.

The commands of a few lines, ``run``, ``config`` and ``requeue``, are here; what they need is
imported when they are called. Any other module is the command of its name, but for ``quantities``:
the numbers with units that flags take.

``LazyGroup`` is a command that has others: most of them do without torch.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, cast

import click
from click.shell_completion import CompletionItem

from outlast._version import __version__
from outlast.errors import Exit, OutlastError, require_linux


class LazyGroup(click.Group):
    """A command that has others, which are loaded when they are called.

    Args:
        package: where their modules lie; each has a ``command``.
        listed: name → module ("MODULE:NAME" where it has several), and what it is for.
        noun: what one of them is called.
        options: click's.
    """

    def __init__(
        self,
        *,
        package: str,
        listed: Mapping[str, tuple[str, str]],
        noun: str,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._package = package
        self._listed = listed
        self._noun = noun

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, in order."""
        return list(self._listed)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """One of them, or None."""
        if ctx.parent is None and cmd_name in self._listed:
            require_linux(cmd_name)
        if cmd_name in self.commands or cmd_name not in self._listed:
            return self.commands.get(cmd_name)
        module, _, name = self._listed[cmd_name][0].partition(":")
        found = getattr(importlib.import_module(f"{self._package}.{module}"), name or "command")
        return cast("click.Command", found)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but for what is said when there is none of that name."""
        if args and args[0] not in {*self._listed, *self.commands}:
            from outlast.errors import nearest

            close = nearest(args[0], tuple(self._listed))
            raise click.UsageError(
                f"{ctx.command_path} {args[0]} is not a {self._noun};{close}", ctx=ctx
            )
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """As click does, without loading them."""
        names = [
            CompletionItem(name, help=text)
            for name, (_, text) in self._listed.items()
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Without loading them."""
        with formatter.section(f"{self._noun.capitalize()}s"):
            formatter.write_dl([(name, text) for name, (_, text) in self._listed.items()])


_VALUE_MAX = 24  # a longer one, such as a path, moves what is behind it


class _Run(click.Command):
    """Whose options are torchrun's too, ahead of the script; what stands behind it is its own."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Its options; nothing behind the script."""
        from outlast.launch.arguments import options

        if any(word.endswith(".py") for word in ctx.params.get("arguments") or ()):
            return []
        return [
            CompletionItem(name, help=words)
            for name, words in options()
            if name.startswith(incomplete)
        ]


def _files(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


_COMMANDS = {
    "run": "run a script under outlast, in place of torchrun",
    "init": "write the file with which Slurm, Kubernetes or SkyPilot runs a script, or an image",
    "demo": "train through a kill and a preemption notice, and prove nothing changed",
    "drill": "break your own job on purpose, grade it, and prove that a resume changes nothing",
    "plan": "know before you rent: failures, intervals, spot, flush, budget, deadline",
    "simulate": "what a job would go through, and which policy does best on the same failures",
    "top": "a job as it runs: how far it is, what it costs, what happens to it",
    "report": "what happened to a job and where its time went",
    "metrics": "a job's metrics, and the alerts and the dashboard for Prometheus and Grafana",
    "tell": "who is told of incidents, and a message to try it",
    "checkpoints": "list, verify, mend, prune and export a job's checkpoints",
    "watch": "tell a job that outlast does not run that its machine will go",
    "doctor": "whether this machine, and those it works with, are fit for the job",
    "config": "the settings in force and where each came from",
}


class _NobodyReadsError(Exception):
    """Whoever read standard output has gone; click makes exit code 1 of a BrokenPipeError."""


@contextlib.contextmanager
def _while_read() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise _NobodyReadsError from None


class _Commands(LazyGroup):
    """Whose output may be read by somebody who leaves."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _while_read():  # --help prints in here
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _while_read():
            return super().invoke(ctx)


@click.group(
    cls=_Commands,
    package=__name__,
    listed={name: (name, text) for name, text in _COMMANDS.items()},
    noun="command",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="outlast")
def cli() -> None:
    """Keep PyTorch training going on machines that fail, hang, slow down or are taken back."""


@cli.command(
    name="run",
    cls=_Run,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=_files)
def run_command(arguments: tuple[str, ...]) -> int:
    """Run a script under outlast: torchrun's flags and PET_* variables, --dir, --resume."""
    from outlast.notice.signals import EarlySignals

    early = EarlySignals()
    from outlast import config
    from outlast.launch.arguments import Launch, command_of, parse
    from outlast.launch.first_look import level_to_set
    from outlast.launch.warm.client import begin
    from outlast.ledger.command import refuse_other
    from outlast.notice.desk import checked

    parsed = parse(arguments)
    settings = checked(config.load({"dir": parsed.dir, "resume": parsed.resume}))
    refuse_other(settings, command_of(parsed))
    os.environ.update(level_to_set(os.environ))
    is_warm = settings.workers_warm and not parsed.no_python
    server = begin(parsed.nproc_per_node) if is_warm else None
    try:
        from outlast.launch.run import run  # torch is imported here, and meanwhile in the server

        if early.heard:
            from outlast.ledger.narrator import say

            say(f"{early.heard} came before anything had begun; start me again (exit 75)")
            return int(Exit.DRAINED)
        return run(list(arguments), Launch(parsed), settings, server)
    finally:
        if server is not None:
            server.close()


@cli.command(name="config")
@click.option("--dir", "directory", default=None, help="The job's directory.")
@click.option("--explain", is_flag=True, help="Say where each setting came from.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
def config_command(directory: str | None, explain: bool, as_json: bool) -> None:
    """Print the settings in force: argument, then OUTLAST_*, then outlast.toml, then default.

    A star marks what differs from the default. Values are in the units that outlast.toml takes.
    """
    import msgspec

    from outlast import config

    settings = config.load({"dir": directory})
    rows = config.as_rows(settings)
    if as_json:
        found: dict[str, Any] = {row.key: {"value": row.value, "from": row.source} for row in rows}
        for tier in settings.tiers:
            parts = {"kind": tier.kind, "url": tier.url, "every": tier.every, "keep": tier.keep}
            found[f"tier.{tier.name}"] |= parts
        click.echo(msgspec.json.encode(found))
        return
    names = max(len(row.key.rpartition(".")[2]) for row in rows)
    values = max(len(row.value) for row in rows if len(row.value) <= _VALUE_MAX)
    section = ""
    if explain:
        click.echo(f"  {'setting':<{names}}  {'value':<{values}}  from")
    for row in rows:
        name = row.key.rpartition(".")
        if name[0] != section:
            section = name[0]
            click.echo(f"\n[{section}]")
        line = f"{' ' if row.is_default else '*'} {name[2]:<{names}}  {row.value:<{values}}"
        click.echo((f"{line}  {row.source}" if explain else line).rstrip())


@cli.command(name="requeue", hidden=True)
def requeue_command() -> None:
    """Ask Slurm to run the job that this is called in once more, unless it was cancelled."""
    if "SLURM_JOB_ID" not in os.environ:
        raise click.UsageError("this is no Slurm job; outlast requeue is for batch scripts")
    from outlast.notice.slurm import requeue

    requeue(os.environ)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``outlast``: our own errors are one line and their exit code."""
    _leave(_called(arguments))


def _called(arguments: list[str] | None) -> int:
    """Call the command; its exit code."""
    try:
        code: Any = cli.main(args=arguments, prog_name="outlast", standalone_mode=False)
    except OutlastError as error:
        return _failed(str(error), int(error.exit_code))
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        return _failed(_usage(error), 2)
    except click.Abort:
        return _failed("stopped", 130)
    except _NobodyReadsError:
        return 141  # whoever was reading has seen enough
    except OSError as error:
        hint = "look at the disk, or give another directory"
        return _failed(f"{error}; {hint}", int(Exit.STORAGE))
    return int(code or 0)


def _usage(error: click.ClickException) -> str:
    """What is wrong with a command line, and where it is explained."""
    words = error.format_message()
    found = getattr(error, "ctx", None)
    path = found.command_path if isinstance(found, click.Context) else "outlast"
    return f"{words.rstrip()}{'' if words.rstrip()[-1:] in '.?!' else '.'} See: {path} --help"


def _failed(text: str, code: int) -> int:
    from outlast.ledger.narrator import say

    say(text, is_answer=True)
    return code


def _leave(code: int) -> NoReturn:
    """End with this exit code, whether or not anybody still reads what was printed.

    What a stream could not write stays in its buffer. The interpreter tries it again at its end,
    and leaves with 120 if that fails: a stream that is broken is led to nowhere before.
    """
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if stream is None:  # closed by a shell's >&-
            continue
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
    sys.exit(code)
