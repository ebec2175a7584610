"""The runs of ``outlast drill resume``, and what differs first between two of them.

A job is run in a place of its own (``workplace``), up to a step behind which its workers wait to be
ended, or up to the notice that it is given. What is compared comes from the workers' records.

What differs is told in the order in which a step comes about: its batch, the random numbers and the
state that it begins with, the learning rates, its loss, and what it leaves behind. So the first
thing that differs is the one nearest to the cause.

Guarantees: what a run has started is ended when its ``with`` block is left, by the mark of the run
in the environment of each process, and no other process is.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, Self

from outlast.config import Settings
from outlast.drill.compare import RunHistory
from outlast.drill.proof.conditions import CARRIED, HASH_SEED, Conditions, write_conditions
from outlast.drill.record import StateFound, StepRecord, WorkerRecord, WorkerRecords
from outlast.drill.rehearsal import RehearsedMachine, run_command
from outlast.drill.target import RECORDS
from outlast.drill.workplace import JobScript, Workplace
from outlast.errors import OutlastError

POLL_S: Final = 0.02
LIMIT_S: Final = 900.0  # for one start
QUIET_LIMIT_S: Final = 300.0  # without a step
_PARTS: Final = ("job", "tiers", "work", RECORDS)  # of a run's directory: what the job writes


class ScriptFailed(OutlastError, RuntimeError):
    """The script under test does not run through by itself."""


class ProvedRun:
    """One run of a script, which may be started more than once.

    Args:
        script: what is run.
        run: its directory, which is made.
        settings: the user's.
        workers: how many.
        environ: the user's.
    """

    def __init__(
        self,
        script: JobScript,
        run: Path,
        *,
        settings: Settings,
        workers: int,
        environ: Mapping[str, str],
    ) -> None:
        self.place = Workplace(run, settings)
        self.run = self.place.run
        self.workers = workers
        self._environ = self.place.environ(environ)
        self._records = WorkerRecords(self.run)
        self._machine = RehearsedMachine(
            0, run_command(self.place, script, workers), self._environ, self.place, None
        )
        self._began_s = self._moved_s = self._began_t = 0.0
        self._has_notice = False
        self._seen_steps = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, conditions: Conditions) -> None:
        """Start it, or start it again in its place."""
        write_conditions(self.run, conditions)
        self._began_t, self._has_notice = time.time(), False
        self._environ.pop("PYTHONHASHSEED", None)
        if HASH_SEED in conditions.changes:
            self._environ["PYTHONHASHSEED"] = "0"
        self._machine.start()
        self._machine.start_if_wanted()
        self._began_s = self._moved_s = time.monotonic()
        self._seen_steps = -1

    def poll(self) -> bool:
        """Whether the start is over: the job has ended, or its workers wait behind the last step.

        Raises:
            ScriptFailed: nothing comes from it any more.
        """
        is_over = self._machine.agent is None
        done = self.steps()
        now_s = time.monotonic()
        if done != self._seen_steps:
            self._seen_steps, self._moved_s = done, now_s
        if self._is_held() and not is_over:
            self.end()
            return True
        if not is_over and not self._has_notice and any(one.is_due for one in self._newest()):
            self._has_notice = True
            self._machine.ask_to_end()  # as a platform's notice that is a signal
        is_late = now_s - self._moved_s > QUIET_LIMIT_S or now_s - self._began_s > LIMIT_S
        if is_late and not is_over:
            self.end()
            raise ScriptFailed(
                f"no step for {now_s - self._moved_s:.0f} s, and so the run was ended; its output "
                f"is in {self.place.log}"
            )
        return is_over

    @property
    def exit_code(self) -> int | None:
        """Of the newest start; negative, a signal, where it was ended behind its last step."""
        self._machine.ended()
        return self._machine.exit_codes[-1] if self._machine.exit_codes else None

    def steps(self) -> int:
        """Steps that every worker of the newest attempt has completed; 0 ahead of that."""
        newest = self._newest()
        if len(newest) < self.workers:
            return 0
        return min(one.steps[-1].step if one.steps else 0 for one in newest)

    def _newest(self) -> list[WorkerRecord]:
        records = [one for one in self.records() if one.begun.t >= self._began_t]
        attempt = max((one.begun.attempt for one in records), default=0)
        return [one for one in records if one.begun.attempt == attempt]

    def _is_held(self) -> bool:
        newest = self._newest()
        return len(newest) >= self.workers and all(one.is_held for one in newest)

    def records(self) -> list[WorkerRecord]:
        """What its workers have recorded until now."""
        return self._records.look()

    def end(self) -> None:
        """End all of its processes; nothing happens where none is left."""
        self._machine.kill()

    # --- started again from one moment, as often as wanted ------------------------------------

    def keep(self) -> None:
        """Keep what the job has left behind, for :meth:`rewind`."""
        for name in _PARTS:
            if (self.run / name).exists():
                shutil.copytree(self.run / name, self.run / "kept" / name, symlinks=True)

    def rewind(self) -> None:
        """Back to what was kept; what was recorded since is gone, too."""
        for name in _PARTS:
            shutil.rmtree(self.run / name, ignore_errors=True)
            if (self.run / "kept" / name).exists():
                shutil.copytree(self.run / "kept" / name, self.run / name, symlinks=True)
        self._records = WorkerRecords(self.run)
        self._seen_steps = -1

    def bring(self, other: ProvedRun) -> None:
        """Take over what another run has kept of the values that its script's names reach."""
        for path in other.run.glob(f"*.{CARRIED}"):
            shutil.copy2(path, self.run / path.name)

    def output(self, lines: int = 12) -> str:
        """The end of what it said."""
        text = self.place.log.read_text(errors="replace").splitlines()
        return "\n".join(text[-lines:])


def complete(runs: list[ProvedRun], told: Callable[[list[ProvedRun]], None]) -> None:
    """Wait until each of them is over; ``told`` is called meanwhile."""
    left = list(runs)
    while left:
        left = [run for run in left if not run.poll()]
        told(runs)
        time.sleep(POLL_S)


# --- what differs ---------------------------------------------------------------------------------

BATCH: Final = "batch"
RANDOM: Final = "random numbers"
BEFORE: Final = "state before"
RATE: Final = "learning rate"
LOSS: Final = "loss"
STATE: Final = "state"
RANDOM_AFTER: Final = "random numbers behind it"
MISSING: Final = "end"  # the step was never made
_RECORDED: Final = (
    (BATCH, "inputs"),
    (RANDOM, "random_before"),
    (RATE, "rates"),
    (LOSS, "losses"),
    (STATE, "state"),
    (RANDOM_AFTER, "random"),
)


class Difference(NamedTuple):
    """The first thing that differs between two runs.

    Attributes:
        step: in which step, from 1.
        rank: whose.
        part: what kind of thing; see the constants above.
        names: of the tensors, values or generators, as far as it has names.
        values: of a number: what it was in the one run and in the other.
    """

    step: int
    rank: int
    part: str
    names: list[str]
    values: tuple[str, str] | None = None

    @property
    def words(self) -> str:
        """In words, as the subject of a sentence without its end."""
        if self.part == MISSING:
            return f"step {self.step}, rank {self.rank}: it was never made {''.join(self.names)}"
        some = ", ".join(self.names[:3])
        more = f" and {len(self.names) - 3} more" if len(self.names) > 3 else ""
        named = f": {some}{more}" if some else ""
        two = ""
        if self.values is not None:
            one, other = map(_readable, self.values)
            two = f", {one} and {other}" if one != other else ", in its last bits"
        what = {
            BEFORE: f"what it begins with{named}",
            STATE: f"what it leaves behind{named}",
        }.get(self.part, f"the {self.part}{named}{two}")
        return f"step {self.step}, rank {self.rank}: {what}"


def _readable(number: str) -> str:
    with contextlib.suppress(ValueError):
        return f"{float.fromhex(number):.6g}"
    return number


def difference(undisturbed: RunHistory, other: RunHistory, upto: int) -> Difference | None:
    """What differs first in the steps 1 … ``upto``; None where nothing does.

    Args:
        undisturbed: the run that others are compared with.
        other: its attempts are put where they belong.
        upto: the newest step that is compared.
    """
    streams = {rank: _drawn_from(undisturbed, rank) for rank in undisturbed.ranks}
    for step in range(1, upto + 1):
        for rank in undisturbed.ranks:
            was = undisturbed.made(rank, step)
            for one in other.made(rank, step) if was else ():
                found = other.found_by(one.pid)
                first = found is not None and other.first_of(one.pid) is one.record
                before = _before(undisturbed, rank, step) if first else None
                begun = found if first else None
                differs = _differs(was[0].record, one.record, begun, before, streams[rank])
                if differs is not None:
                    return Difference(step, rank, *differs)
            if was and not other.made(rank, step):
                return Difference(step, rank, MISSING, [])
    return None


def _drawn_from(undisturbed: RunHistory, rank: int) -> set[str]:
    """The generators that steps draw from: others may have any state, and make no difference."""
    seen: dict[str, set[str]] = {}
    for made in undisturbed.steps(rank):
        for name, digest in [*made.record.random_before.items(), *made.record.random.items()]:
            seen.setdefault(name, set()).add(digest)
    return {name for name, digests in seen.items() if len(digests) > 1}


def _before(undisturbed: RunHistory, rank: int, step: int) -> Mapping[str, str] | None:
    if step == 1:
        found = undisturbed.found(rank)
        return found.state if found is not None else None
    made = undisturbed.made(rank, step - 1)
    return made[0].record.state if made else None


def _differs(
    was: StepRecord,
    now: StepRecord,
    found: StateFound | None,
    before: Mapping[str, str] | None,
    streams: set[str],
) -> tuple[str, list[str], tuple[str, str] | None] | None:
    for part, field in _RECORDED:
        if part == RATE and found is not None and before is not None:
            names = [n for n in found.state if n in before and found.state[n] != before[n]]
            if names:
                return BEFORE, names, None
        one, other = getattr(was, field), getattr(now, field)
        if part in (RANDOM, RANDOM_AFTER):
            one, other = ({n: d for n, d in all_.items() if n in streams} for all_ in (one, other))
        if one == other:
            continue
        if isinstance(one, dict):
            return part, [n for n in {**one, **other} if one.get(n) != other.get(n)], None
        pairs = [pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]]
        is_number = part in (RATE, LOSS) and pairs
        values = (_hex(pairs[0][0]), _hex(pairs[0][1])) if is_number else None
        return part, [], values
    return None


def _hex(number: str | float) -> str:
    return number if isinstance(number, str) else number.hex()
