"""``outlast doctor``: exit 0 where the job may start, 1 where it should not, 2 usage."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from typing import TYPE_CHECKING, Final

import click

from outlast.cli.quantities import SIZE, WAIT
from outlast.errors import ConfigError

if TYPE_CHECKING:
    from outlast.config import Settings
    from outlast.health.doctor.examination import Examined, WantedMachines

TERMINATED: Final = 128 + signal.SIGTERM
WIDTH: Final = 100  # where the output is no terminal
_NODES: Final = re.compile(r"([1-9]\d{0,5})(?::([1-9]\d{0,5}))?\Z")


@click.command(name="doctor")
@click.option("--dir", "directory", default=None, help="The job's directory.")
@click.option(
    "--state",
    metavar="SIZE",
    help="How large the whole state is, such as 640GB; else that of the newest checkpoint.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
@click.option(
    "--nnodes",
    default="1",
    envvar="PET_NNODES",
    metavar="N or MIN:MAX",
    help="Machines that the job wants; with more than one, start it on each of them.",
)
@click.option(
    "--nproc-per-node",
    default=1,
    type=click.IntRange(1),
    metavar="N",
    help="Workers of each machine.",
)
@click.option(
    "--rdzv-endpoint",
    default="",
    envvar="PET_RDZV_ENDPOINT",
    metavar="PLACE",
    help="Where machines meet, as for outlast run: a directory or bucket; else --dir.",
)
@click.option(
    "--local-addr",
    default=None,
    envvar="PET_LOCAL_ADDR",
    metavar="ADDRESS",
    help="The address that other machines reach this one at.",
)
@click.option(
    "--wait",
    "wait_h",
    default="60s",
    type=WAIT,
    show_default=True,
    help="For the other machines to come.",
)
def command(
    *,
    directory: str | None,
    state: str | None,
    as_json: bool,
    nnodes: str,
    nproc_per_node: int,
    rdzv_endpoint: str,
    local_addr: str | None,
    wait_h: float,
) -> int:
    """Look whether this machine, and those it works with, are fit for the job.

    \b
    outlast doctor --dir /mnt/job --state 640GB
    outlast doctor --dir /mnt/job --nnodes 2:4      on each machine
    """  # noqa: D301 - the letter that click wants, no backslash
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # removes what was written
    state_bytes = None if state is None else _bytes(state)
    nodes = _machines(nnodes)
    flags: dict[str, object] = {
        "--dir": directory,
        "--nnodes": nnodes if nnodes != "1" else None,
        "--nproc-per-node": nproc_per_node if nproc_per_node > 1 else None,
        "--rdzv-endpoint": rdzv_endpoint,
        "--local-addr": local_addr,
    }
    from outlast import config
    from outlast.health.doctor.examination import WantedMachines, examine
    from outlast.notice.desk import checked

    try:
        settings = checked(config.load({"dir": directory}))
    except ConfigError as error:
        return _show(_unread(str(error)), as_json, again=_words("doctor", flags), start="")
    machines = WantedMachines(min_nodes=nodes[0], max_nodes=nodes[1], workers=nproc_per_node)
    if nodes[1] > 1:
        machines = _meeting(machines, settings, rdzv_endpoint, local_addr, wait_h * 3600)
    examined = examine(settings, machines, state_bytes=state_bytes, progress=_progress)
    again = _words("doctor", flags | {"--state": state})
    return _show(examined, as_json, again=again, start=f"{_words('run', flags)} train.py")


def _meeting(
    machines: WantedMachines, settings: Settings, endpoint: str, address: str | None, wait_s: float
) -> WantedMachines:
    import msgspec

    from outlast.launch.first_look import own_address, place_of

    return msgspec.structs.replace(
        machines,
        place=place_of(endpoint or str(settings.dir)),
        host=address or own_address(),
        wait_s=wait_s,
    )


def _unread(words: str) -> Examined:
    """The settings themselves are what is wrong: nothing else can be looked at."""
    import socket

    from outlast.health.doctor.examination import Examined
    from outlast.policy.fitness import CheckResult

    todo = "correct the setting; outlast config --explain shows the rest"
    found = CheckResult(name="settings", status="failed", seen=words, todo=todo)
    return Examined(machine=socket.gethostname(), fit=False, findings=[found], seconds=0.0)


def _words(command: str, flags: dict[str, object]) -> str:
    """A command line with those of its flags that were given."""
    given = [(flag, str(value)) for flag, value in flags.items() if value]
    return shlex.join(["outlast", command, *(word for pair in given for word in pair)])


def _show(examined: Examined, as_json: bool, *, again: str, start: str) -> int:
    """Tell it, and what to run next: the doctor once more, or the job where it may start."""
    from outlast.health.doctor.examination import lines, to_json

    after = again if examined.exit_code else start

    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(to_json(examined) | {"next": after}))
        return examined.exit_code
    from rich.text import Text

    from outlast.report.text import Paper

    _clear()
    paper = Paper(highlight=False, soft_wrap=True)
    for style, text in lines(examined, paper.width if paper.is_terminal else WIDTH):
        line = Text(text)
        line.stylize(style, 0, len(text) if style == "bold" else 1)
        paper.print(line)
    paper.print(Text(f"Next: {after}"))
    return examined.exit_code


def _progress(words: str) -> None:
    """What is still looked at; on a terminal one line that is written over."""
    if sys.stderr is not None and sys.stderr.isatty():
        _clear()
        width = os.get_terminal_size(sys.stderr.fileno()).columns
        sys.stderr.write(words[: max(width - 1, 0)])
        sys.stderr.flush()
    else:
        from outlast.ledger.narrator import say

        say(words, is_answer=True)


def _clear() -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K")
        sys.stderr.flush()


def _bytes(text: str) -> int:
    try:
        return int(SIZE.read(text))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--state'") from None


def _machines(text: str) -> tuple[int, int]:
    match = _NODES.match(text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if low > high:
        raise ConfigError(f"--nnodes {text} is neither N nor MIN:MAX")
    return low, high
