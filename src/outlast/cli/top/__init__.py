"""``outlast top``: a job as it runs, for a terminal, a log, or another program.

``view``  what there is to say, followed from the ledger and the workers' memory
``draw``  that as lines: a full screen, or one line of a log

Nothing is written and nothing is locked: it may be another user's job, and one that is dead. On a
terminal it stays until it is left (q, Ctrl-C), with exit code 0; as a log it ends with the job. Its
last view's exit code, and that of ``--once`` and ``--json``, is for scripts: ``CODES``.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from typing import Final

import click
import msgspec
from rich.live import Live
from rich.text import Text

from outlast import config
from outlast.cli.top.draw import ViewScreen, place_of, screen, status_line
from outlast.cli.top.view import Following, Standing, View, to_json
from outlast.errors import Exit
from outlast.ledger.file import FILE_NAME
from outlast.ledger.job import read_job, settings_of
from outlast.ledger.narrator import log_time
from outlast.report.facts import State
from outlast.report.text import Paper

REFRESH_S: Final = 1.0
LOG_S: Final = 5.0  # between two lines, at least
STEPS_S: Final = 30.0  # between two lines, where nothing but the step has changed
CODES: Final[dict[State | Standing, int]] = {
    "running": Exit.FINISHED,
    "finished": Exit.FINISHED,
    "drained": Exit.DRAINED,
    "gave up": Exit.GAVE_UP,
    "storage unusable": Exit.STORAGE,
    "refuses to resume": Exit.REFUSED,
    "failed": 1,
    "gone": 1,
    "silent": 3,
    "not started": 3,
}
_LEAVE: Final = b"qQ\x03\x04"


@click.command(name="top")
@click.argument("directory", required=False)
@click.option("--once", is_flag=True, help="Show one view and end.")
@click.option("--plain", is_flag=True, help="Lines as of a log, on a terminal too.")
@click.option("--json", "as_json", is_flag=True, help="One view as one JSON object.")
def command(directory: str | None, once: bool, plain: bool, as_json: bool) -> None:
    """Look on while a job runs: how far it is, what it costs, what happens to it.

    Exit code: 0 it runs or has finished, or you have left; 1 it failed, or nobody runs it; 3 nobody
    here can tell, or nothing was started; 75 drained; 76 gave up; 77 storage unusable; 78 refuses
    to resume.
    """
    if plain and as_json:
        raise click.UsageError("--plain is for people and --json for programs; give one of them")
    settings = config.load({"dir": directory})
    job = read_job(settings.dir)  # says what is wrong when this is no job's directory
    following = Following(settings.dir, job, settings_of(directory, settings, job))
    console = Paper(highlight=False, soft_wrap=True)
    is_screen = console.is_terminal and not (console.is_dumb_terminal or plain)
    if once or as_json or not (settings.dir / FILE_NAME).exists():
        code = CODES[_once(following, console, as_json=as_json, is_screen=is_screen)]
    elif is_screen:
        code = _follow_on_screen(following, console)
    else:
        code = _follow_in_lines(following, console)
    click.get_current_context().exit(code)


def _once(
    following: Following, console: Paper, *, as_json: bool, is_screen: bool
) -> State | Standing:
    while following.look():
        pass
    following.settle()
    view = following.view(time.time())
    if as_json:
        click.echo(msgspec.json.encode(to_json(view)))
    elif view.state == "not started":
        console.print(f"{place_of(view.directory)}: nothing has been started here yet")
    else:
        for line in screen(view, console.width if is_screen else 100):
            console.print(line)
    return view.state


def _follow_in_lines(following: Following, console: Paper) -> int:
    """Print a line when something has changed, at most one every ``LOG_S``; the exit code."""
    before: View | None = None
    told_s = 0.0
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            while following.look():
                pass
            view = following.view(time.time())
            if before is None or view.is_over or _differs(view, before, time.monotonic() - told_s):
                is_new = before is None or _incident_of(view) != _incident_of(before)
                line = status_line(view, with_incident=is_new)
                console.print(Text(f"{log_time(view.t)}{line}"))
                console.file.flush()
                before, told_s = view, time.monotonic()
            if view.is_over:
                return CODES[view.state]
            time.sleep(max(LOG_S - (time.monotonic() - told_s), REFRESH_S))
    return 0


def _differs(view: View, before: View, since_s: float) -> bool:
    if _matter(view) != _matter(before):
        return True
    return view.step != before.step and since_s >= STEPS_S


def _matter(view: View) -> tuple[object, ...]:
    late = [one.name for one in view.tiers if one.is_late]
    goes = [one.name for one in view.machines if one.notice_left_s is not None]
    untold = view.untold and (view.untold.num, view.untold.until_t)
    return view.state, view.attempt, _incident_of(view), late, goes, untold, view.note


def _incident_of(view: View) -> tuple[object, ...]:
    newest = view.incidents[0] if view.incidents else None
    return view.num_incidents, newest and (newest.what, newest.is_open)


def _follow_on_screen(following: Following, console: Paper) -> int:
    with (
        contextlib.suppress(KeyboardInterrupt),
        _Keys() as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while not keys.has_left:
            shown_s = time.monotonic()
            is_behind = following.look()
            while is_behind and time.monotonic() - shown_s < REFRESH_S:
                is_behind = following.look()
            if is_behind:
                words = f"reading the ledger: {100 * following.progress:.0f} %"
                live.update(Text(words), refresh=True)
                keys.wait(0.0)
                continue
            live.update(ViewScreen(following.view(time.time()), "q: leave"), refresh=True)
            keys.wait(REFRESH_S)
    return 128 + keys.signal if keys.signal else 0  # the terminal is as it was


class _Keys:
    """What is typed, and whether the terminal's size has changed; the terminal as it was, after."""

    def __init__(self) -> None:
        self.has_left = False
        self.signal = 0
        self._read, self._write = os.pipe()
        self._before: list[object] | None = None
        self._handlers: dict[int, object] = {}
        self._input = -1

    def __enter__(self) -> _Keys:
        os.set_blocking(self._write, False)
        for number in (signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, self._heard)
        if sys.stdin is not None and sys.stdin.isatty():
            self._input = sys.stdin.fileno()
            self._before = termios.tcgetattr(self._input)
            tty.setcbreak(self._input)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            with contextlib.suppress(termios.error):  # its terminal has gone
                termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._read)
        os.close(self._write)

    def wait(self, timeout_s: float) -> None:
        """For so long, or until there is something to be done."""
        fds = [self._read, *([self._input] if self._input >= 0 else [])]
        for fd in select.select(fds, [], [], timeout_s)[0]:
            data = os.read(fd, 64)
            if fd == self._input:
                self.has_left |= not data or any(key in _LEAVE for key in data)

    def _heard(self, number: int, _: object) -> None:
        if number != signal.SIGWINCH:
            self.signal, self.has_left = number, True
        with contextlib.suppress(OSError):
            os.write(self._write, b"!")
