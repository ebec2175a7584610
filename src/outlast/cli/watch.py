"""``outlast watch``: notices for jobs that Outlast does not run.

Exit codes: 0 a notice was heard and everybody named was told (or: all of them have ended, or
SIGTERM asked us to stop); 1 somebody could not be told, or with ``--once`` no source answered; 2
usage, among it a machine with nobody to ask; 3 with ``--once``: nothing is announced; 130 SIGINT;
143 SIGTERM where nobody is named, since what follows an ``&&`` is meant for a notice.
"""

from __future__ import annotations

import logging
from pathlib import Path

import click
import msgspec

from outlast import config
from outlast.errors import ConfigError
from outlast.notice.desk import checked, chosen_for
from outlast.notice.lookout import (
    Lookout,
    LookoutResult,
    NotifyCommand,
    PidFile,
    Process,
    parse_pid,
    parse_signal,
    tell_people,
)
from outlast.notice.platform import Chosen

SIGNAL = "USR1"


@click.command(name="watch")
@click.option("--pid", "pids", multiple=True, metavar="PID", help="A process to tell; repeatable.")
@click.option(
    "--pidfile",
    "pidfiles",
    multiple=True,
    metavar="FILE",
    help="A file that holds its id, read when the notice comes; repeatable.",
)
@click.option(
    "--command",
    "line",
    metavar="TEXT",
    help="A program with its arguments, run in place of a signal; OUTLAST_NOTICE_* tell it more.",
)
@click.option("--signal", "number", metavar="NAME", help=f"What is sent; {SIGNAL} by default.")
@click.option("--platform", metavar="NAME", help="Who gives notice: notice.platform.")
@click.option("--base-url", metavar="URL", help="Another address for the metadata service.")
@click.option("--poll", metavar="TIME", help='How often it is asked; "1 s" by default.')
@click.option("--once", is_flag=True, help="Ask one time, say what was said, and end.")
@click.option(
    "--early",
    type=click.Choice(["signal", "ignore"]),
    default="ignore",
    help="Whether early notices are passed on too; they are not by default.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end.")
def command(
    *,
    pids: tuple[str, ...],
    pidfiles: tuple[str, ...],
    line: str | None,
    number: str | None,
    platform: str | None,
    base_url: str | None,
    poll: str | None,
    once: bool,
    early: str,
    as_json: bool,
) -> int:
    """Wait for word that this machine will go, and tell the processes named, or run a command.

    With nobody named it ends when a notice comes:

        outlast watch && ./save.sh
    """
    settings = checked(
        config.load({"notice.platform": platform, "notice.base_url": base_url, "notice.poll": poll})
    )
    if line is not None and (pids or pidfiles):
        raise ConfigError("--command and --pid or --pidfile: give one of them")
    if number is not None and not (pids or pidfiles):
        raise ConfigError("--signal without --pid or --pidfile: nobody would get it")
    if early == "signal" and not (pids or pidfiles or line is not None):
        raise ConfigError("--early signal without --pid, --pidfile or --command: nobody is told")
    ours = parse_signal(SIGNAL if number is None else number)
    program = None if line is None else NotifyCommand(line, quiet_stdout=as_json)
    recipients: list[Process | PidFile] = []
    recipients += [Process(pid, ours) for pid in dict.fromkeys(map(parse_pid, pids))]
    if "" in pidfiles:
        raise ConfigError("--pidfile '' names no file")
    recipients += [PidFile(Path(path), ours) for path in dict.fromkeys(pidfiles)]
    logging.getLogger("outlast").addHandler(logging.NullHandler())  # what ends it is said once
    with Lookout(recipients, program, pass_early=early == "signal") as lookout:
        outcome = _nobody_there(recipients)
        if outcome is None:
            chosen = _chosen(settings)
            tell_people(chosen.reason)
            if not once:
                logging.getLogger("outlast").addHandler(_Saying())
            outcome = lookout.run(
                chosen.watchers, chosen.reason, interval_s=settings.notice_poll_s, once=once
            )
    if as_json:
        click.echo(msgspec.json.encode(outcome))
    return outcome.exit_code


def _chosen(settings: config.Settings) -> Chosen:
    chosen = chosen_for(settings)
    if not chosen.watchers:
        raise ConfigError(
            f"{chosen.reason}. There is nobody to ask, and signals go to the job itself; name the "
            "platform (--platform aws), or set notice.file or notice.command"
        )
    return chosen


def _nobody_there(recipients: list[Process | PidFile]) -> LookoutResult | None:
    """What is wrong with those named, before anything is waited for.

    A process that is not there will not come; a pidfile may still be written.
    """
    for one in recipients:
        if isinstance(one, PidFile) and one.problem:
            tell_people(f"{one.problem}; it is read again when a notice comes")
    lost = [one.tell() for one in recipients if isinstance(one, Process) and one.problem]
    for told in lost:
        tell_people(told.what)
    if not lost:
        return None
    return LookoutResult(
        outcome="not_told",
        exit_code=1,
        reason="",
        notice=None,
        early=[],
        told=lost,
        told_early=[],
    )


class _Saying(logging.Handler):
    """What watchers warn of, as one line of ours."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tell_people(record.getMessage())
        except OSError:
            self.handleError(record)
