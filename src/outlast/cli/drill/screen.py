"""What a drill shows while it runs: a line that moves where there is a terminal, and one a run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Self

from rich.live import Live
from rich.text import Text

from outlast import units
from outlast.drill.course import DrillListener
from outlast.drill.faults.fault import Struck
from outlast.drill.grade import Grade
from outlast.drill.workplace import linked_directories
from outlast.report.text import Paper


class RunScreen:
    """A line that moves where there is a terminal; while it is shown, SIGTERM ends what runs.

    Args:
        console: where.
    """

    def __init__(self, console: Paper) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._before: Any = signal.SIG_DFL

    def __enter__(self) -> Self:
        # As Ctrl-C: jobs are ended and faults are healed on the way out.
        self._before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)
        self._live.stop()

    def tell_linked(self, root: Path) -> None:
        """Say in one line which directories are the real ones in every run below ``root``."""
        linked = linked_directories(Path.cwd(), root)
        if linked:
            some = ", ".join(linked[:3]) + (f" and {len(linked) - 3} more" if linked[3:] else "")
            words = f"  too many files to copy, so these are the real directories: {some}; "
            words += "what the script writes there stays"
            self._live.console.print(Text(words, style="yellow"))


class DrillScreen(RunScreen, DrillListener):
    """Draws what happens in a drill, and leaves a line of each run and fault."""

    def __init__(self, console: Paper) -> None:
        super().__init__(console)
        self._run = self._of = 0
        self._ended_s: list[float] = []

    def say(self, line: str | Text) -> None:
        """A line that stays."""
        self._live.console.print(line)

    def begun(self, label: str, number: int, of: int) -> None:
        """Say which, where nothing moves."""
        self._run, self._of = number, of

    def progress(self, label: str, step: int, steps: int) -> None:
        """Move the line."""
        if not self._console.is_terminal:
            return
        bar = "━" * round(min(step / steps, 1.0) * 24)
        count = f" run {self._run}" + (f" of {self._of}" if self._of else "")
        line = Text.assemble(
            f"  {label:<22}", (f"{bar:<24}", "cyan"), f" step {step}/{steps} ·{count}{self._left()}"
        )
        self._live.update(line, refresh=True)

    def struck(self, struck: Struck) -> None:
        """Say it at once."""
        self.say(Text(f"  ✖ {struck.what}", style="red"))

    def ended(self, label: str, seconds: float) -> None:
        """Remember how long it took; of the undisturbed run, say it."""
        self._ended_s.append(seconds)
        if label.startswith("undisturbed"):
            self.say(f"  [bold]{label}[/]: {units.seconds(seconds)}")

    def graded(self, grade: Grade) -> None:
        """One line of it."""
        self.say(_line(grade))

    def _left(self) -> str:
        if not self._of or not self._ended_s:
            return ""
        left = sum(self._ended_s) / len(self._ended_s) * (self._of - len(self._ended_s))
        return f" · about {units.seconds(left)} left" if left > 2 else ""


def _line(grade: Grade) -> Text:
    if grade.why_not:
        return Text(f"    {grade.fault}: not here: {grade.why_not}", style="yellow")
    line = Text("    ")
    mark, style = ("✔ ", "green") if grade.holds else ("? ", "yellow")
    if not grade.holds and not grade.is_open:
        mark, style = "✖ ", "red"
    line.append(mark, style=style)
    parts = []
    if grade.found_after_s is not None:
        parts.append(f"found after {units.seconds(grade.found_after_s)}")
    if grade.lost_steps is not None:
        parts.append(f"{units.count(grade.lost_steps, 'step')} made again")
    if grade.stood_s is not None:
        parts.append(f"stood still for {units.seconds(grade.stood_s)}")
    line.append(f"{grade.fault}: {' · '.join(parts) or 'nothing came of it'}")
    for one in grade.held:
        if not one.holds:
            words, style = ("not proven", "yellow") if one.is_open else ("does not hold", "red")
            line.append(f"\n      {words}: {one.what}", style=style)
    return line
