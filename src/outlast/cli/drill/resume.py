"""``outlast drill resume``."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import click
import msgspec
from rich.text import Text

from outlast import config, units
from outlast.cli.drill import DIRECTORY
from outlast.cli.drill.screen import RunScreen
from outlast.drill.proof.exactness import (
    STEPS,
    ProofListener,
    ResumeDrill,
    ResumeProof,
    StopTried,
)
from outlast.drill.proof.runs import ScriptFailed
from outlast.drill.workplace import empty_place, part_of, script_of
from outlast.ledger.narrator import place
from outlast.report.text import Paper


@click.command(
    name="resume",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--steps", default=STEPS, show_default=True, help="How many steps are compared.")
@click.option("--workers", default=1, show_default=True, help="How many workers run the script.")
@click.option("--at", multiple=True, type=int, help="Stop behind this step; may be repeated.")
@DIRECTORY
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
@click.argument("script", nargs=-1, type=click.UNPROCESSED)
def command(
    *,
    steps: int,
    workers: int,
    at: tuple[int, ...],
    directory: str,
    as_json: bool,
    script: tuple[str, ...],
) -> int:
    """Prove that a run that was stopped and started again is the one it would have been.

    The script runs undisturbed, twice; then it is given notice behind a step, leaves, and is
    started again. All that it computes is compared. What differs is named, with its cause.
    """
    wanted = script_of(script)
    settings = config.load()
    root = Path(directory) / "resume"
    console = Paper(quiet=as_json, highlight=False, soft_wrap=True)
    with contextlib.ExitStack() as held:
        screen = held.enter_context(ResumeScreen(console))
        drill = ResumeDrill(
            wanted,
            root,
            settings=settings,
            workers=workers,
            steps=steps,
            at=at,
            listener=screen,
        )
        held.enter_context(empty_place(part_of(root.parent, root.name)))
        screen.introduce(" ".join(wanted.words), steps, workers)
        screen.tell_linked(root)
        try:
            proof = drill.run()
        except ScriptFailed as error:
            if as_json:  # besides the line on standard error: the same object as ever
                click.echo(msgspec.json.encode(drill.unproved(error)))
            raise
    if as_json:
        click.echo(msgspec.json.encode(proof))
    else:
        _report(console, proof)
    return 0 if proof.is_proved else 1


def _report(console: Paper, proof: ResumeProof) -> None:
    for stop in proof.stops:
        _tell(console, _of_stop(stop), holds=not stop.differs)
    if proof.differs_from_itself:
        words = f"two undisturbed runs differ {proof.differs_from_itself}"
        _tell(console, words, holds=False)
    if proof.trouble:
        console.print(Text(f"  not all of it could be recorded: {proof.trouble}"))
    for cause in proof.causes:
        console.print("[bold]why[/]")
        console.print(Text(f"  {cause.what}"))
        where = f"at {cause.where}, " if cause.where else ""
        console.print(Text(f"  {where}write: {cause.write}"))
    if not proof.is_proved and not proof.causes:
        tried = ", ".join(one.what for one in proof.tried) or "nothing"
        console.print(Text(f"  no cause was found; tried: {tried}"))
        console.print(Text(f"  try: {proof.next_try}"))
    colour = "green" if proof.is_proved else "red"
    console.print(Text(proof.verdict, style=colour))
    console.print(f"{units.seconds(proof.seconds)} · {proof.directory}")
    runs = place(Path(proof.directory) / "run-3" / "job")
    again = "Next: outlast drill resume again, with the line changed"
    console.print(f"Next: outlast report {runs}" if proof.is_proved else again)


def _of_stop(stop: StopTried) -> str:
    left = f"notice behind step {stop.at}, left with exit {stop.exit_code}"
    if stop.exit_code < 0:
        left = f"listens to no notice, and was killed behind step {stop.at}"
    if stop.went_on_from is None:
        return f"{left}, began again from a state that no step had"
    steps = f"{left}, went on from step {stop.went_on_from}"
    again = f", {units.count(stop.again, 'step')} made twice" if stop.again else ""
    if stop.differs:
        return f"{steps}{again}; differs {stop.differs}"
    return (
        f"{steps}{again}: batches, random numbers, rates, losses, weights and optimizer state of "
        f"all {stop.compared} steps equal, bit for bit"
    )


def _tell(console: Paper, words: str, *, holds: bool) -> None:
    mark = "[green]✔[/]" if holds else "[red]✖[/]"
    console.print(f"  {mark} ", Text(words), sep="")


class ResumeScreen(RunScreen, ProofListener):
    """Draws what happens in a proof: a line for each run, where none moves."""

    def __init__(self, console: Paper) -> None:
        super().__init__(console)
        self._what = ""
        self._steps = 0
        self._began_s = 0.0
        self._first: tuple[float, int] | None = None

    def introduce(self, script: str, steps: int, workers: int) -> None:
        """Say what is about to happen."""
        self._console.print(
            Text.assemble(
                ("outlast drill resume", "bold"),
                f": {script} on {units.count(workers, 'worker')}, {steps} steps of it",
            )
        )

    def begins(self, what: str, steps: int) -> None:
        """A run begins."""
        self._what, self._steps, self._first = what, steps, None
        self._began_s = time.monotonic()
        if not self._console.is_terminal:
            self._console.print(Text(f"  {what} …"))

    def progress(self, done: int) -> None:
        """Move the line."""
        if not self._console.is_terminal:
            return
        now_s = time.monotonic()
        if done and self._first is None:
            self._first = (now_s, done)
        left = ""
        if self._first is not None and done > self._first[1]:
            pace_s = (now_s - self._first[0]) / (done - self._first[1])
            left = f"{units.seconds(pace_s * max(self._steps - done, 0))} left"
        since = units.seconds(now_s - self._began_s)
        words = f"  {self._what}: step {done}/{self._steps}, {left or since}"
        self._live.update(Text(words), refresh=True)

    def ended(self, what: str) -> None:
        """Leave one line of the run behind."""
        self._console.print(Text(f"  {self._what}: {what}"))
