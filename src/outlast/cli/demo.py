"""``outlast demo``."""

from __future__ import annotations

import threading
from pathlib import Path

import click
import msgspec
from rich.live import Live
from rich.text import Text

from outlast import units
from outlast.drill.demo import STEPS, Corpus, DemoListener, DemoProgress, Recovery, demo
from outlast.drill.faults.fault import Struck
from outlast.ledger.file import read_events
from outlast.ledger.goodput import goodput
from outlast.ledger.narrator import place
from outlast.report.text import Paper, where_time_went


@click.command(name="demo")
@click.option("--dir", "directory", default="outlast-demo", help="Where the two runs go.")
@click.option("--steps", default=STEPS, show_default=True, help="Optimizer steps of each run.")
@click.option("--seed", default=0, show_default=True, help="Decides when the faults strike.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
def command(directory: str, steps: int, seed: int, as_json: bool) -> int:
    """Train through a kill and a preemption notice, and prove that nothing changed."""
    console = Paper(quiet=as_json, highlight=False, soft_wrap=True)
    with Screen(console) as screen:
        outcome = demo(Path(directory), steps=steps, seed=seed, listener=screen)
    if as_json:
        found = {**msgspec.to_builtins(outcome), "holds": outcome.holds, "seed": seed}
        click.echo(msgspec.json.encode(found))
        return 0 if outcome.holds else 1
    console.print("[bold]the proof[/]")
    for check in outcome.checks:
        mark = "[green]✔[/]" if check.holds else "[red]✖[/]"
        console.print(f"  {mark} ", Text(check.what), sep="")
    console.print("[bold]where the time of the disturbed run went[/]")
    for line in where_time_went(goodput(read_events(Path(outcome.directory)))):
        console.print(Text("  ").append(line))
    verdict = "[green]nothing changed[/]" if outcome.holds else "[red]the proof does not hold[/]"
    console.print(f"{verdict} · {outcome.seconds:.0f} s · seed {seed} · {outcome.directory}")
    console.print(f"Next: outlast report {place(Path(outcome.directory))}")
    return 0 if outcome.holds else 1


class Screen(DemoListener):
    """Draws what happens: a line that moves where there is a terminal, else one line a run."""

    def __init__(self, console: Paper) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._first: tuple[float, int] | None = None
        self._thirds = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begun(self, corpus: Corpus, num_parameters: int) -> None:
        """Say what is about to happen."""
        self._say(
            f"[bold]outlast demo[/]: a byte-level GPT of {num_parameters / 1e6:.2f} M parameters "
            f"learns Python's own source ({corpus.num_files:,} files, "
            f"{units.size(corpus.num_bytes)}) on 2 workers, twice"
        )

    def progress(self, progress: DemoProgress) -> None:
        """Move the line; where there is no terminal, say it at each third."""
        if progress.step and self._first is None:
            self._first = (progress.seconds, progress.step)
            self._thirds = 0
        if not self._console.is_terminal:
            third = progress.step * 3 // progress.steps
            if self._thirds < third < 3:
                self._thirds = third
                loss = 0.0 if progress.loss is None else progress.loss
                self._say(
                    f"  step {progress.step} of {progress.steps}, loss {loss:.4f}, "
                    f"{self._left(progress)}"
                )
            return
        share = progress.step / progress.steps
        bar = "━" * round(share * 24)
        line = Text.assemble(
            f"  {progress.label:<12}",
            (f"{bar:<24}", "cyan"),
            f" step {progress.step:>3}/{progress.steps}",
            f"  loss {progress.loss:.4f}" if progress.loss is not None else "  starting",
            f"  {self._left(progress)}",
        )
        with self._lock:
            self._live.update(line, refresh=True)

    def finished(self, progress: DemoProgress) -> None:
        """Leave one line of the run behind."""
        self._first = None
        loss = "" if progress.loss is None else f", loss {progress.loss:.4f}"
        self._say(
            f"[bold]{progress.label}[/]: step {progress.step} of {progress.steps}{loss}, "
            f"{units.seconds(progress.seconds)}"
        )

    def struck(self, struck: Struck) -> None:
        """Say it at once."""
        self._say(f"  [red]✖[/] {struck.what}")

    def recovered(self, recovery: Recovery) -> None:
        """Say what it cost."""
        steps = units.count(recovery.lost_steps, "step")
        self._say(
            f"    detected after {units.seconds(recovery.detected_after_s)} · {steps} lost · "
            f"back after {units.seconds(recovery.back_after_s)} · {recovery.answer}"
        )

    def _left(self, progress: DemoProgress) -> str:
        if self._first is None or progress.step <= self._first[1]:
            return ""
        pace = (progress.seconds - self._first[0]) / (progress.step - self._first[1])
        return f"{units.seconds(pace * (progress.steps - progress.step))} left"

    def _say(self, text: str) -> None:
        try:
            with self._lock:
                self._console.print(text)
        except BrokenPipeError:
            # Faults strike from a thread of their own: the run's next word ends the demo.
            if threading.current_thread() is threading.main_thread():
                raise
