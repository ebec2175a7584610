"""From a kill to the next completed step: Outlast beside other launchers.

A small GPT trains on gloo (``tests/real/scripts/ddp_plain.py``, which knows none of them) in steps
of about 50 ms and saves every fifth. Two parts:

- worker: four workers on this machine; one of them gets SIGKILL at a random moment. Each turn
  starts a job and kills ``--kills`` times; the first kill of a job is reported apart, since what is
  prepared in the background may not be ready by then.
- machines: three machines (network namespaces; root, iproute2 and nftables are needed). One is
  killed and comes back, leaves on SIGTERM to its agent, is cut off silently; so is the first one,
  where stock torchrun has its store; two are cut off from each other.

The launchers take turns, A B C A B C, each turn a job of its own; what each is started with is in
``bench/launchers.py`` and ``bench/machine_jobs.py``, what counts as being back in
``bench/recovery_records.py``. One that is not back within ``--limit`` seconds has not recovered.

    python benchmarks/recovery.py --peers-dir DIR [--turns 10] [--parts worker,machines] [--quick]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, TypeVar

from bench import peers
from bench.launchers import LAUNCHERS, Launcher, Turn
from bench.machine_jobs import EVENTS, MACHINE_LAUNCHERS, NUM_MACHINES, MachineJob, MachineLauncher
from bench.recovery_records import Back, Records, summary
from bench.rotation import directory
from bench.tables import Requirements, cell, emit, machine, markdown
from machine_network import Network
from machine_network import unusable as unusable_network

POLL_S: Final = 0.01
START_S: Final = 120.0
RETURNED: Final = "returning"
T = TypeVar("T")
Found = dict[str, dict[str, list[float | None]]]


class NotStarted(Exception):
    """A job did not come to its first steps."""


def main() -> None:
    """Measure, print one JSON object and the tables."""
    options = parse()
    place = options.dir or Path(tempfile.gettempdir())
    result: dict[str, Any] = {"benchmark": "recovery", "machine": machine(place)}
    rng = random.Random(options.seed)
    tables: list[str] = []
    workers: Found = {}
    machines: Found = {}
    # Stopped from outside, the run still ends its jobs and removes its networks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with options.log.open("a") as log:
        if "worker" in options.parts:
            interpreters, unusable = find_peers(options.peers_dir, options.launchers, LAUNCHERS)
            launchers = {
                name: LAUNCHERS[name](interpreters.get(name, sys.executable))
                for name in options.launchers
                if name in LAUNCHERS and name not in unusable
            }
            workers = rotate(
                options,
                launchers,
                lambda one, found: worker_turn(one, found, options, place, log, rng),
            )
            result["worker"] = workers | {name: {"problem": why} for name, why in unusable.items()}
            tables.append(worker_table(workers, unusable, options.limit))
        if "machines" in options.parts:
            if why_not := unusable_network():
                tables.append(f"Machines: not run: {why_not}")
            else:
                several = {
                    name: MACHINE_LAUNCHERS[name]()
                    for name in options.launchers
                    if name in MACHINE_LAUNCHERS
                }
                machines = rotate(
                    options,
                    several,
                    lambda one, found: machine_turns(one, found, options, place, log, rng),
                )
                result["machines"] = machines
                tables.append(machine_table(machines, options))
    required = requirements(workers, machines)
    result["requirements"] = required.rows
    emit(result, [*tables, required.table()])


def parse() -> argparse.Namespace:
    """The command line."""
    everything = [*LAUNCHERS, *(name for name in MACHINE_LAUNCHERS if name not in LAUNCHERS)]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--kills", type=int, default=2, help="of a worker, in each turn")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--settle", type=int, default=15, help="steps before each event")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds until it is given up")
    parser.add_argument("--pause", type=float, default=0.03, help="seconds in each of its steps")
    parser.add_argument("--parts", default="worker,machines")
    parser.add_argument("--launchers", default=";".join(everything), help="separated by ;")
    parser.add_argument("--events", default=",".join(EVENTS), help="of the part with machines")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--dir", type=Path, help="where jobs have their directories")
    parser.add_argument("--peers-dir", type=Path, help="virtual environments of other libraries")
    parser.add_argument("--quick", action="store_true", help="a small smoke run")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="the jobs' own output")
    options = parser.parse_args()
    if options.quick:
        options.turns, options.settle, options.limit = 1, 5, min(options.limit, 30.0)
    for name, known in (("parts", ["worker", "machines"]), ("events", EVENTS)):
        setattr(options, name, chosen(parser, getattr(options, name).split(","), known))
    options.launchers = chosen(parser, options.launchers.split(";"), everything)
    return options


def chosen(parser: argparse.ArgumentParser, names: list[str], known: Any) -> list[str]:
    """The names, stripped; a usage error for unknown ones."""
    names = [name.strip() for name in names]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def find_peers(
    place: Path | None, names: list[str], launchers: Mapping[str, type[Launcher]]
) -> tuple[dict[str, str], dict[str, str]]:
    """Interpreters of the peers among ``names``, and why others cannot be used."""
    wanted = {name: launchers[name].peer for name in names if name in launchers}
    wanted = {name: peer for name, peer in wanted.items() if peer}
    if place is None:
        return {}, dict.fromkeys(wanted, "not run: no --peers-dir")
    found = peers.prepare(place, sorted(set(wanted.values())))
    return (
        {name: found[peer].interpreter for name, peer in wanted.items()},
        {name: found[peer].problem for name, peer in wanted.items() if found[peer].problem},
    )


def rotate(
    options: argparse.Namespace,
    launchers: dict[str, Any],
    turn: Callable[[Any, dict[str, list[float | None]]], None],
) -> Found:
    """Every launcher ``--turns`` times, in turn; launcher → figure → samples."""
    found: Found = {name: {} for name in launchers}
    for number in range(options.turns):
        for name, launcher in launchers.items():
            print(f"turn {number + 1}/{options.turns}: {name}", file=sys.stderr, flush=True)
            try:
                turn(launcher, found[name])
            except NotStarted as error:
                print(f"  {error}", file=sys.stderr, flush=True)
                found[name].setdefault("start", []).append(None)
    return found


@contextmanager
def job(place: Path, world: int, log: IO[str]) -> Iterator[tuple[Turn, Records]]:
    """A directory, a mark and an end for one job."""
    with directory(place) as path:
        turn = Turn(place=path, world=world, log=log)
        turn.records.mkdir()
        try:
            yield turn, Records(turn.records)
        finally:
            turn.close()


# --- one worker of a machine -------------------------------------------------------------------


def worker_turn(
    launcher: Launcher,
    found: dict[str, list[float | None]],
    options: argparse.Namespace,
    place: Path,
    log: IO[str],
    rng: random.Random,
) -> None:
    """Start a job, kill a worker of it a few times."""
    with job(place, options.workers, log) as (turn, records):
        turn.script_args = ("--sleep", str(options.pause))
        since_t = time.time()
        launcher.start(turn)
        found.setdefault("start", []).append(first_step(turn, records, since_t))
        for kill in range(options.kills):
            settle(turn, records, since_t, options.settle, rng)
            rank = rng.randrange(turn.world)
            victim = records.newest(rank).pid
            since_t = time.time()
            os.kill(victim, signal.SIGKILL)
            left = turn.world - launcher.shrinks
            kind = "later kills" if kill else "first kill"
            if launcher.refills:
                others = partial(back_in_any, records, since_t, (turn.world - 1, turn.world))
                note(found, f"{kind}, the others", wait_for(turn, others, options.limit))
            back = wait_for(turn, partial(records.back, since_t, left), options.limit)
            note(found, kind, back)
            if back is None:
                return
            since_t = back.t
            if launcher.shrinks and kill + 1 < options.kills:
                launcher.replace(turn, rank)


def back_in_any(records: Records, since_t: float, sizes: Sequence[int]) -> Back | None:
    """The first step of a new formation of one of these sizes."""
    return next(filter(None, (records.back(since_t, size) for size in sizes)), None)


def first_step(turn: Turn, records: Records, since_t: float) -> float:
    """Seconds until all workers have completed a step.

    Raises:
        NotStarted: they have not.
    """
    if not wait_for(turn, lambda: records.steps_of_all(turn.world, since_t), START_S):
        raise NotStarted(f"no step of all {turn.world} within {START_S:.0f} s")
    return records.lines[-1].t - since_t


def settle(turn: Turn, records: Records, since_t: float, steps: int, rng: random.Random) -> None:
    """Let a job make steps in full strength, and a part of one.

    Raises:
        NotStarted: it does not.
    """
    enough = wait_for(turn, lambda: records.steps_of_all(turn.world, since_t) >= steps, START_S)
    if not enough:
        raise NotStarted(f"not {steps} steps of all {turn.world} within {START_S:.0f} s")
    time.sleep(rng.random() * 0.05)


def wait_for(turn: Turn, condition: Callable[[], T], limit_s: float) -> T | None:
    """What ``condition`` gives; None after ``limit_s`` or when everything has ended."""
    deadline = time.monotonic() + limit_s
    while not (answer := condition()):
        if time.monotonic() > deadline or turn.is_over():
            return None
        time.sleep(POLL_S)
    return answer


def say(what: str, back: Back | None) -> None:
    """Progress, for whoever watches."""
    words = f"{back.after_s:.3f} s, pause {back.pause_s:.3f} s" if back else "not back"
    print(f"  {what}: {words}", file=sys.stderr, flush=True)


# --- machines ----------------------------------------------------------------------------------


def machine_turns(
    launcher: MachineLauncher,
    found: dict[str, list[float | None]],
    options: argparse.Namespace,
    place: Path,
    log: IO[str],
    rng: random.Random,
) -> None:
    """One job for each event."""
    for name in options.events:
        with (
            job(place, NUM_MACHINES, log) as (turn, records),
            Network(NUM_MACHINES) as machines,
        ):
            turn.script_args = ("--sleep", str(options.pause))
            one = MachineJob(launcher, turn, machines)
            since_t = time.time()
            one.start(*one.machines)
            settle(turn, records, since_t, options.settle, rng)
            found.setdefault("start", []).append(records.lines[0].t - since_t)
            back = strike(one, records, name, options.limit)
            add(found, name, back)
            if name == "killed" and back is not None:
                settle_smaller(one, records, back.t, options.settle)
                since_t = time.time()
                one.start(one.machines[-1])
                again = wait_for(turn, partial(records.back, since_t, NUM_MACHINES), options.limit)
                add(found, RETURNED, again)
            turn.close()  # before its network goes


def strike(one: MachineJob, records: Records, name: str, limit_s: float) -> Back | None:
    """Let an event happen; when its survivors were back."""
    event = EVENTS[name]
    since_t = time.time()
    event.strike(one)

    def back() -> Back | None:
        for survivors in filter(None, (event.survivors, event.alternative)):
            found = records.back(since_t, NUM_MACHINES - 1, survivors)
            if found is not None:
                return found
        return None

    return wait_for(one.turn, back, limit_s)


def settle_smaller(one: MachineJob, records: Records, since_t: float, steps: int) -> None:
    """Let the survivors make steps."""
    smaller = NUM_MACHINES - 1
    wait_for(one.turn, lambda: records.steps_of_all(smaller, since_t) >= steps, START_S)


def note(found: dict[str, list[float | None]], name: str, back: Back | None) -> None:
    """Keep a sample."""
    say(name, back)
    found.setdefault(name, []).append(back.after_s if back else None)


def add(found: dict[str, list[float | None]], name: str, back: Back | None) -> None:
    """Keep a sample, with its pause."""
    note(found, name, back)
    found.setdefault(f"{name}, pause", []).append(back.pause_s if back else None)


# --- tables ------------------------------------------------------------------------------------


def figure(samples: list[float | None], limit_s: float) -> str:
    """Median and spread of those that came back, and how many did not."""
    good, words = summary(samples, limit_s)
    return "; ".join(filter(None, [cell(good) if good else "", words])) or "–"


def worker_table(found: Found, unusable: dict[str, str], limit_s: float) -> str:
    """One row for each launcher."""
    columns = {
        "first kill, the others": "the others' next step, s",
        "later kills, the others": "later, s",
        "first kill": "first kill of a job, s",
        "later kills": "later kills, s",
        "start": "start to first step, s",
    }
    rows = [
        [name, *(figure(samples.get(key, []), limit_s) for key in columns)]
        for name, samples in found.items()
    ]
    rows += [[name, why.replace("|", "/"), "", ""] for name, why in unusable.items()]
    return markdown(["a worker is killed", *columns.values()], rows)


def machine_table(found: Found, options: argparse.Namespace) -> str:
    """One row for each event; what a return or a leave costs is the pause."""
    names = [*options.events, *([RETURNED] if "killed" in options.events else [])]
    keys = [key for name in names for key in (name, f"{name}, pause")]
    rows = [
        [key, *(figure(samples.get(key, []), options.limit) for samples in found.values())]
        for key in [*keys, "start"]
    ]
    return markdown(["three machines, one of them is", *found], rows)


def requirements(workers: Found, machines: Found) -> Requirements:
    """What ours must show: seconds, and beside torchrun at the start."""

    def of(found: Found, launcher: str, key: str) -> float | None:
        samples = found.get(launcher, {}).get(key, [])
        if not samples or any(value is None for value in samples):
            return None
        return sorted(value for value in samples if value is not None)[len(samples) // 2]

    required = Requirements()
    for key in ("first kill", "later kills"):
        ours = of(workers, "outlast run", key)
        required.at_most(f"a worker is killed, {key}, s", ours, 0.4, 1.0)
    start = of(workers, "outlast run", "start")
    theirs = of(workers, "torchrun", "start")
    required.at_most("start to first step beside torchrun", start, 1.0, theirs)
    limits = {
        "killed": 0.5,
        "leaving": 0.5,
        "cut off": 1.5,
        "first killed": 3.0,
        "first cut off": 3.0,
        "two parted": 5.0,
        f"{RETURNED}, pause": 0.4,
    }
    for key, limit in limits.items():
        required.at_most(f"machine {key}, s", of(machines, "outlast run", key), limit, 1.0)
    return required


if __name__ == "__main__":
    main()
