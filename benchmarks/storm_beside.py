"""Workers are killed every few seconds: Outlast beside torchrun and torchft.

A small GPT trains on gloo, on this machine, in steps of about 25 ms (``bench/storm_train.py``).
Each launcher has a turn for every seed, A B C A B C, and in each turn of a seed the same ranks get
SIGKILL at the same moments: half to one and a half of ``--every`` apart.

- outlast run: a session with ``every="auto"``.
- torchrun, tuned: a fresh store for each attempt, enough restarts; rank 0 calls torch.save, fsyncs
  and renames, at Young's interval for the true mean time between kills and its own measured cost
  (``--save-s`` for a fixed one).
- torchft: a replica for each worker, heartbeats of 1 s; whoever has ended is started again at once
  and heals from one that lives. Nothing is on disk: without a survivor it begins at step 0.

Figures of the time under fire, from the first kill on; the end is ``--minutes`` later:

- steps per second: how far the step that was completed last is from the first, over the time. Of
  quiet: beside the same job's rate before the first kill or behind the last, whichever is greater.
- batches per second: the same, each step counted with the workers that took part in it. torchft
  goes on with those that live, the others' batches are left out.
- made twice: of all steps of all workers, those that the same worker had made before, and those
  that torchft did not commit; from the second kill on apart, since the first one comes when nothing
  is known of kills. A step that a kill interrupted counts for nobody.
- missed: workers' parts in steps that were kept without them.
- longest gap: without a completed step of any worker.
- kills: those that found a process of that rank, of those drawn. The others miss.
- same bits: whether all workers' final weights are those of a run of DDP that nothing happened to.
  torchft leaves out batches, so its weights are others; its replicas can be compared with each
  other.

    python benchmarks/storm_beside.py --peers-dir DIR [--minutes 10] [--every 8s] [--seed 1 2 3]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Final

from bench import processes
from bench.launchers import (
    FRESH_STORE,
    Launcher,
    OutlastInProcess,
    OutlastSession,
    TorchftTuned,
    TorchrunFresh,
    Turn,
)
from bench.recovery_records import Line, Records
from bench.tables import Requirements, emit, machine, markdown
from outlast.config import parse_span
from recovery import NotStarted, chosen, find_peers, job, wait_for

TRAIN: Final = Path(__file__).with_name("bench") / "storm_train.py"
START_S: Final = 120.0
CALM_S: Final = 3600.0
STEADY: Final = 20  # steps of all workers: the job runs
AHEAD: Final = 60
POLL_S: Final = 0.02


class Contender(Launcher):
    """A launcher of ``storm_train.py``."""

    way = ""

    def script(self, turn: Turn) -> list[str]:
        """The script and its arguments."""
        return [str(TRAIN), str(turn.records), "--way", self.way, *turn.script_args]

    def tend(self, turn: Turn) -> None:
        """Start again what has ended; most launchers do that themselves."""


class Ours(Contender, OutlastSession):
    """A session."""

    way = "session"


class OursInProcess(Contender, OutlastInProcess):
    """A session whose survivors keep their processes."""

    way = "session"


class Torchrun(Contender, TorchrunFresh):
    """torch.save."""

    way = "save"
    env = {**FRESH_STORE, **OutlastSession.env}  # noqa: RUF012 - constants of the class
    max_restarts = 1_000_000


class Torchft(Contender, TorchftTuned):
    """Replicas that are started again."""

    way = "torchft"

    def replace(self, turn: Turn, rank: int) -> None:
        """A replica."""
        super().replace(turn, rank)
        self._replicas = getattr(self, "_replicas", {}) | {rank: turn.started[-1]}

    def tend(self, turn: Turn) -> None:
        """Whoever has ended comes again."""
        for rank, replica in self._replicas.items():
            if replica.poll() is not None and not (turn.records / f"final-{rank}.json").exists():
                self.replace(turn, rank)


CONTENDERS: Final[dict[str, type[Contender]]] = {
    "outlast run": Ours,
    "torchrun, tuned": Torchrun,
    "torchft": Torchft,
    "outlast run, in process": OursInProcess,
}
USUAL: Final = ("outlast run", "torchrun, tuned", "torchft")


def main() -> None:
    """Measure, print one JSON object and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", default="8s", help="mean time between two kills")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--quiet-s", type=float, default=15.0, help="before and behind the kills")
    parser.add_argument("--sleep-ms", type=float, default=15.0, help="in each step")
    parser.add_argument("--save-s", type=float, default=0.0, help="torchrun's; 0 for Young's")
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--launchers", default=";".join(USUAL), help="separated by ;")
    parser.add_argument("--dir", type=Path, help="where jobs have their directories")
    parser.add_argument("--peers-dir", type=Path, help="virtual environments of other libraries")
    parser.add_argument("--quick", action="store_true", help="a small smoke run")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="the jobs' own output")
    options = parser.parse_args()
    if options.quick:
        options.minutes, options.quiet_s = 0.1, 2.0
    options.every_s = parse_span(options.every)
    names = chosen(parser, options.launchers.split(";"), CONTENDERS)
    # Stopped from outside, the run still ends its jobs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    place = options.dir or Path(tempfile.gettempdir())
    interpreters, unusable = find_peers(options.peers_dir, names, CONTENDERS)
    for name, why in unusable.items():
        print(f"{name}: {why}", file=sys.stderr, flush=True)
    found: list[dict[str, Any]] = []
    with options.log.open("a") as log:
        for seed in options.seed:
            for name in (one for one in names if one not in unusable):
                print(f"seed {seed}: {name}", file=sys.stderr, flush=True)
                launcher = CONTENDERS[name](interpreters.get(name, sys.executable))
                one = {"seed": seed, "launcher": name}
                try:
                    one |= one_storm(launcher, options, place, log, seed)
                except NotStarted as error:
                    one["problem"] = str(error)
                found.append(one)
                print(f"  {one}", file=sys.stderr, flush=True)
        judge_bits(found, options, place, log)
    result = {"benchmark": "storm_beside", "machine": machine(place), "storms": found}
    required = requirements(found)
    result["requirements"] = required.rows
    emit(result, [table(found, unusable), required.table()])


def drawn(options: argparse.Namespace, seed: int) -> list[tuple[float, int]]:
    """When to kill, in seconds since the first kill, and which rank."""
    chance = random.Random(seed)
    kills, at_s = [], 0.0
    while at_s < 60 * options.minutes:
        kills.append((at_s, chance.randrange(options.workers)))
        at_s += options.every_s * chance.uniform(0.5, 1.5)
    return kills


def one_storm(
    launcher: Contender, options: argparse.Namespace, place: Path, log: IO[str], seed: int
) -> dict[str, Any]:
    """A job in a storm, and what came of it.

    Raises:
        NotStarted: it did not come to its first steps.
    """
    with job(place, options.workers, log) as (turn, records):
        end = turn.place / "end"
        times = ("--mean-s", str(options.every_s), "--save-s", str(options.save_s))
        turn.script_args = ("--end", str(end), "--sleep", str(options.sleep_ms / 1000), *times)
        launcher.start(turn)
        if not steady(launcher, turn, records, time.time()):
            raise NotStarted(f"no {STEADY} steps of all within {START_S:.0f} s")
        quiet = [pass_quiet(options.quiet_s)]
        begun_t, struck = time.time(), 0
        kills = drawn(options, seed)
        for at_s, rank in kills:
            tend_until(launcher, turn, begun_t + at_s)
            struck += kill(turn, rank)
        ended_t = begun_t + 60 * options.minutes
        tend_until(launcher, turn, ended_t)
        is_back = steady(launcher, turn, records, ended_t)
        back_t = time.time()
        if is_back:
            quiet.append(pass_quiet(options.quiet_s))
        finals = finish(launcher, turn, records, end) if is_back else []
        thrown_t = thrown_away(turn)
        figures = under_fire(records.look(), thrown_t, begun_t, ended_t, turn.world)
        second_t = begun_t + kills[min(1, len(kills) - 1)][0]
        later = under_fire(records.lines, thrown_t, second_t, ended_t, turn.world)
        return figures | {
            "made_twice_later": later["made_twice"],
            "quiet": max(rate(records.lines, *one) for one in quiet),
            "gap_s": longest_gap(records.lines, begun_t, back_t),
            "workers": turn.world,
            "kills": [struck, len(kills)],
            "is_back": is_back,
            "finals": finals,
        }


def steady(launcher: Contender, turn: Turn, records: Records, since_t: float) -> bool:
    """Whether all workers make steps together again, after some waiting."""

    def made() -> bool:
        launcher.tend(turn)
        return records.steps_of_all(turn.world, since_t) >= STEADY

    return bool(wait_for(turn, made, START_S))


def pass_quiet(seconds: float) -> tuple[float, float]:
    """Let nothing happen; from when to when."""
    begun_t = time.time()
    time.sleep(seconds)
    return begun_t, time.time()


def tend_until(launcher: Contender, turn: Turn, until_t: float) -> None:
    """Let the job go on."""
    while (left_s := until_t - time.time()) > 0:
        launcher.tend(turn)
        time.sleep(min(POLL_S, left_s))


def kill(turn: Turn, rank: int) -> bool:
    """SIGKILL of a rank's process; whether there was one."""
    with suppress(OSError, ValueError):
        pid = int((turn.records / f"pid-{rank}").read_text())
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if status != "Z" and pid in processes.marked(turn.mark):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def finish(launcher: Contender, turn: Turn, records: Records, end: Path) -> list[dict[str, Any]]:
    """Let the job end a few steps later; the final weights' digests."""
    unfinished = end.with_suffix(".tmp")
    unfinished.write_text(str(records.look()[-1].step + AHEAD))
    unfinished.replace(end)
    paths = [turn.records / f"final-{rank}.json" for rank in range(turn.world)]

    def are_there() -> bool:
        launcher.tend(turn)
        return all(path.exists() for path in paths)

    wait_for(turn, are_there, START_S)
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def judge_bits(
    found: list[dict[str, Any]], options: argparse.Namespace, place: Path, log: IO[str]
) -> None:
    """Compare final weights with one run that passes all the ends undisturbed."""
    ends = sorted({final["step"] for one in found for final in one.get("finals", [])})
    if not ends:
        return
    print(f"undisturbed, {ends[-1]} steps", file=sys.stderr, flush=True)
    with job(place, options.workers, log) as (turn, _):
        end = turn.place / "end"
        end.write_text(str(ends[-1]))
        turn.script_args = ("--end", str(end), "--sleep", "0", "--save-s", str(CALM_S))
        turn.script_args += ("--digest-at", *map(str, ends))
        Torchrun().start(turn)
        wait_for(turn, (turn.records / "final-0.json").exists, CALM_S)
        calm = {step: digest_of(turn.records / f"digest-{step}-0.json") for step in ends}
    for one in found:
        digests = {final["hash"] for final in one.get("finals", [])}
        steps = {final["step"] for final in one.get("finals", [])}
        whole = len(one.get("finals", [])) == options.workers
        one["agree"] = whole and len(digests) == len(steps) == 1
        one["same_bits"] = one["agree"] and digests == {calm[step] for step in steps}


def digest_of(path: Path) -> str:
    """The digest in a file; empty without it."""
    return json.loads(path.read_text())["hash"] if path.exists() else ""


# --- figures -------------------------------------------------------------------------------------


def rate(lines: list[Line], begun_t: float, ended_t: float) -> float:
    """Steps per second: from the step that was newest at the begin to the newest at the end."""
    return (newest(lines, ended_t) - newest(lines, begun_t)) / (ended_t - begun_t)


def newest(lines: list[Line], until_t: float) -> int:
    """The step that was completed last."""
    return next((line.step for line in reversed(lines) if line.t <= until_t), 0)


def under_fire(
    lines: list[Line], discarded_t: list[float], begun_t: float, ended_t: float, world: int
) -> dict[str, float]:
    """What became of steps between these times.

    Args:
        lines: of the whole job, in order of time.
        discarded_t: when a step was made that was not committed.
        begun_t: the first kill.
        ended_t: the end of it.
        world: workers of the job.
    """
    made: set[tuple[int, int]] = set()
    took_part: dict[int, int] = {}
    twice = num_lines = 0
    for line in lines:
        if begun_t < line.t <= ended_t:
            num_lines += 1
            twice += (line.rank, line.step) in made
            took_part[line.step] = line.world
        made.add((line.rank, line.step))
    thrown = sum(begun_t < t <= ended_t for t in discarded_t)
    part = sum(took_part.values()) / (world * len(took_part)) if took_part else 0.0
    per_s = rate(lines, begun_t, ended_t)
    return {
        "rate": per_s,
        "batches_rate": per_s * part,
        "made_twice": (twice + thrown) / max(num_lines + thrown, 1),
        "missed": 1 - part if took_part else 0.0,
    }


def thrown_away(turn: Turn) -> list[float]:
    """When steps were made that were not committed."""
    paths = turn.records.glob("discarded-*.jsonl")
    return [json.loads(line)["t"] for path in paths for line in path.read_text().splitlines()]


def longest_gap(lines: list[Line], begun_t: float, ended_t: float) -> float:
    """Seconds without a completed step of any worker."""
    times = [begun_t, *(one.t for one in lines if begun_t < one.t < ended_t), ended_t]
    return max(later - earlier for earlier, later in pairwise(times))


def table(found: list[dict[str, Any]], unusable: dict[str, str]) -> str:
    """One row for each turn."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "steps/s": lambda one: f"{one['rate']:.1f}",
        "in quiet": lambda one: f"{one['quiet']:.1f}",
        "of quiet": lambda one: f"{one['rate'] / one['quiet']:.0%}",
        "batches/s": lambda one: f"{one['batches_rate'] * one['workers']:.1f}",
        "of quiet ": lambda one: f"{one['batches_rate'] / one['quiet']:.0%}",
        "made twice": lambda one: f"{one['made_twice']:.1%}",
        "from the second kill on": lambda one: f"{one['made_twice_later']:.1%}",
        "missed": lambda one: f"{one['missed']:.1%}",
        "longest gap, s": lambda one: f"{one['gap_s']:.1f}",
        "kills": lambda one: "{} of {}".format(*one["kills"]),
        "same bits": bits,
    }
    rows = []
    for one in found:
        cells = [one["problem"]] if "problem" in one else [cell(one) for cell in columns.values()]
        rows.append([str(one["seed"]), one["launcher"], *cells])
    rows += [["", name, why.replace("|", "/")] for name, why in unusable.items()]
    rows = [row + [""] * (len(columns) + 2 - len(row)) for row in rows]
    return markdown(["seed", "launcher", *columns], rows)


def bits(one: dict[str, Any]) -> str:
    """In words."""
    if not one["is_back"]:
        return "not back"
    if one["same_bits"]:
        return "yes"
    return "no; workers agree" if one["agree"] else "NO, workers differ"


def requirements(found: list[dict[str, Any]]) -> Requirements:
    """Ours gets through as many batches per second as any other."""
    required = Requirements()
    good = [one for one in found if "problem" not in one]
    ours = {one["seed"]: one for one in good if one["launcher"] == "outlast run"}
    for one in good:
        if one["launcher"] in USUAL[1:] and (mine := ours.get(one["seed"])):
            what = f"seed {one['seed']}: batches per second beside {one['launcher']}"
            required.at_least(what, mine["batches_rate"], 1.0, one["batches_rate"])
    return required


if __name__ == "__main__":
    main()
