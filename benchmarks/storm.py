"""A fault every few seconds: how far a job gets, and whether what it computes stays the same.

Machines are network namespaces (root, iproute2 and nftables are needed) with one worker each; the
script (``tests/real/scripts/elastic.py``, steps of ``--pause-ms`` and a little more) computes the
same bits at any number of workers, with a session that saves by ``auto``. Faults are drawn: their
kind, the moment (half to one and a half of ``--every`` after the last), whom they strike, how long
they last. Whoever is killed or has left is started again at once, as a scheduler would.

Figures of each seed: steps per second beside those of the same job in quiet (all machines, before
the first fault and behind the last); the share of steps that were made twice; how the agents that
nobody killed have ended (0 and 75 are as they should be); and whether the final weights are those
of a run that nothing happened to.

    python benchmarks/storm.py [--machines 3] [--every 8s] [--minutes 10] [--seed 1 2 3]
    python benchmarks/storm.py --machines 1 --every 5s --faults worker
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

import psutil

from bench.launchers import SCRIPTS, Turn
from bench.machine_jobs import MachineJob, OutlastMachines
from bench.rotation import directory
from bench.tables import Requirements, emit, machine, markdown
from machine_network import Cut, FreezeMachine, KillMachine, Machine, Network, Partition, unusable
from outlast.config import parse_span

ELASTIC: Final = SCRIPTS / "elastic.py"
SAME_BITS: Final = SCRIPTS / "elastic_same_bits.py"  # whose sums are torch's
STEPS: Final = 10_000_000
START_S: Final = 120.0
END_S: Final = 120.0
AHEAD: Final = 20
POLL_S: Final = 0.02
LASTS_S: Final = (1.0, 4.0)
GOOD: Final = (0, 75)
OFTEN_S: Final = 5.0  # faults that come more often may cost more
TWICE: Final = 0.05  # of the steps


class Launch(OutlastMachines):
    """One agent with one worker on a machine."""

    def __init__(self, pause_ms: float, end: Path, *, in_process: bool) -> None:
        super().__init__()
        self._script = SAME_BITS if in_process else ELASTIC
        if in_process:
            self.env = {**self.env, "OUTLAST_WORKERS_IN_PROCESS": "true"}
        self._options = ("--every", "auto", "--pause", str(pause_ms / 1000), "--end", str(end))

    def script(self, turn: Turn) -> list[str]:
        """The script and its arguments."""
        return [str(self._script), str(turn.records), str(STEPS), *self._options]


class Storm:
    """One job in one storm.

    Args:
        job: its machines.
        chance: what is drawn.
    """

    def __init__(self, job: MachineJob, chance: random.Random) -> None:
        self.job = job
        self.ends: Counter[int] = Counter()  # of agents that nobody has killed
        self.struck: Counter[str] = Counter()
        self._chance = chance
        self._later: list[tuple[float, Callable[[], None]]] = []  # what heals, and when
        self._killed: set[int] = set()  # agents

    def strike(self, kind: str) -> None:
        """Let a fault of this kind happen."""
        self.struck[kind] += 1
        many = len(self.job.machines)
        one, *others = self._chance.sample(list(self.job.machines), many)
        match kind:
            case "worker":
                self._kill(one, "outlast.launch.worker", "elastic")
            case "keeper":
                self._kill(one, "outlast.keeper")
            case "machine":
                self._kill_machine(one)
            case "two machines":
                for victim in (one, *others[:1]):
                    self._kill_machine(victim)
            case "frozen":
                self._for_a_while(FreezeMachine(one))
            case "cut off":
                self._for_a_while(Cut(one))
            case "parted" if others:
                self._for_a_while(Partition(one, others[0]))
            case "leaves":
                self.job.notify(one)

    def look(self) -> None:
        """Heal what is over, and start agents that have ended."""
        now_s = time.monotonic()
        due = [heal for at_s, heal in self._later if at_s <= now_s]
        self._later = [(at_s, heal) for at_s, heal in self._later if at_s > now_s]
        for heal in due:
            heal()
        for one in self.job.machines:
            agent = self.job.agents[one.hostname]
            code = agent.poll()
            if code is not None:
                if agent.pid not in self._killed:
                    self.ends[code] += 1
                self.job.start(one)

    def heal(self) -> None:
        """All of it is over."""
        for _, heal in self._later:
            heal()
        self._later = []

    def _for_a_while(self, fault: Any) -> None:
        fault.inject()
        self._later.append((time.monotonic() + self._chance.uniform(*LASTS_S), fault.heal))

    def _kill_machine(self, one: Machine) -> None:
        self._killed.add(self.job.agents[one.hostname].pid)
        KillMachine(one).inject()

    def _kill(self, one: Machine, *marks: str) -> None:
        """SIGKILL of one process of a machine: the first whose command line has a mark."""
        agent = self.job.agents[one.hostname].pid
        for pid in one.processes():
            try:
                line = " ".join(psutil.Process(pid).cmdline())
                if pid != agent and "outlast run" not in line and any(m in line for m in marks):
                    os.kill(pid, signal.SIGKILL)
                    return
            except (psutil.Error, ProcessLookupError):
                continue


FAULTS: Final = (
    *("worker", "worker", "keeper", "machine", "two machines"),
    *("frozen", "cut off", "parted", "leaves"),
)


def main() -> None:
    """Measure, print one JSON object and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=3)
    parser.add_argument("--every", default="8s", help="mean time between two faults")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--quiet-s", type=float, default=15.0, help="before and behind the storm")
    parser.add_argument("--pause-ms", type=float, default=20.0, help="in each step")
    parser.add_argument("--faults", default=",".join(FAULTS), help="named twice: twice as often")
    parser.add_argument("--in-process", action="store_true", help="survivors keep their processes")
    parser.add_argument("--seed", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--dir", type=Path, help="where jobs have their directories")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="the jobs' own output")
    options = parser.parse_args()
    options.every_s = parse_span(options.every)
    options.faults = [one.strip() for one in options.faults.split(",")]
    if unknown := set(options.faults) - set(FAULTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(set(FAULTS))}")
    if why_not := unusable():
        parser.error(why_not)
    # Stopped from outside, the run still ends its jobs and removes its networks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    place = options.dir or Path(tempfile.gettempdir())
    found = []
    with options.log.open("a") as log:
        for seed in options.seed:
            print(f"seed {seed}", file=sys.stderr, flush=True)
            found.append(one_storm(options, place, log, seed))
            print(f"  {found[-1]}", file=sys.stderr, flush=True)
    result = {"benchmark": "storm", "machine": machine(place), "storms": found}
    required = Requirements()
    share = 0.7 if options.every_s >= OFTEN_S else 0.25
    for one in found:
        seed = f"seed {one['seed']}"
        required.at_least(f"{seed}: steps per second", one["rate"], share, one["quiet"])
        if options.every_s >= OFTEN_S:
            required.at_most(f"{seed}: steps made twice", one["made_twice"], TWICE, 1.0)
        required.at_least(f"{seed}: the same bits", float(one["same_bits"]), 1.0, 1.0)
        bad = sum(count for code, count in one["agents_ended"].items() if code not in GOOD)
        required.at_most(f"{seed}: agents that ended badly", float(bad), 0.0, 1.0)
    result["requirements"] = required.rows
    emit(result, [table(found), required.table()])


def one_storm(options: argparse.Namespace, place: Path, log: IO[str], seed: int) -> dict[str, Any]:
    """A job in a storm, and what came of it."""
    chance = random.Random(seed)
    with directory(place) as path, Network(options.machines) as machines:
        turn = Turn(place=path, world=options.machines, log=log)
        turn.records.mkdir()
        end = path / "end"
        launcher = Launch(options.pause_ms, end, in_process=options.in_process)
        job = MachineJob(launcher, turn, machines)
        try:
            job.start(*job.machines)
            wait_for(lambda: whole(turn, options.machines) > AHEAD, START_S, "a first step")
            storm = Storm(job, chance)
            before = quiet(turn, options.quiet_s)
            first, begun_s = newest(turn), time.monotonic()
            while time.monotonic() < begun_s + 60 * options.minutes:
                storm.strike(chance.choice(options.faults))
                until_s = time.monotonic() + options.every_s * chance.uniform(0.5, 1.5)
                while time.monotonic() < until_s:
                    storm.look()
                    time.sleep(POLL_S)
            rate = (newest(turn) - first) / (time.monotonic() - begun_s)
            storm.heal()
            calmed = newest_attempt(turn)
            wait_for(lambda: _all_back(storm, turn, options.machines, calmed), START_S, "all of it")
            behind = quiet(turn, options.quiet_s)
            ends = finish(job, end)
            made = [(line["attempt"], line["step"]) for line in lines(turn) if line["rank"] == 0]
            return {
                "seed": seed,
                "faults": dict(storm.struck),
                "rate": rate,
                "quiet": max(before, behind),
                "made_twice": 1 - len({step for _, step in made}) / len(set(made)),
                "agents_ended": dict(storm.ends + ends),
                "same_bits": same_bits(job, path, int(end.read_text())),
            }
        finally:
            turn.close()


def finish(job: MachineJob, end: Path) -> Counter[int]:
    """Let the job end a few steps later; the exit codes of its agents."""
    unfinished = end.with_suffix(".tmp")
    unfinished.write_text(str(newest(job.turn) + AHEAD))
    unfinished.replace(end)
    agents = list(job.agents.values())
    wait_for(lambda: all(one.poll() is not None for one in agents), END_S, "the job's end")
    return Counter(one.returncode for one in agents)


def same_bits(job: MachineJob, path: Path, last: int) -> bool:
    """Whether the final weights are those of a run on one machine that nothing happened to."""
    calm = path / "calm"
    calm.mkdir()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OUTLAST_NOTICE_PLATFORM": "none"}
    command = [sys.executable, "-m", "outlast", "run", "--dir", str(path / "calm-job")]
    command += [job.launcher.script(job.turn)[0], str(calm), str(last)]
    subprocess.run(command, check=True, env=environ, stdout=subprocess.DEVNULL)
    expected = json.loads((calm / "final-0.json").read_text())
    finals = [json.loads(one.read_text()) for one in job.turn.records.glob("final-*.json")]
    newest_of = max(one["attempt"] for one in finals)
    found = {(one["step"], one["hash"]) for one in finals if one["attempt"] == newest_of}
    return found == {(last, expected["hash"])}


# --- what the script has recorded ----------------------------------------------------------------


def lines(turn: Turn) -> list[dict[str, Any]]:
    """Steps that processes have completed."""
    found = []
    for path in turn.records.glob("steps-*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # it was killed as it wrote
                continue
    return found


def _tails(turn: Turn) -> list[dict[str, Any]]:
    found = []
    for path in turn.records.glob("steps-*.jsonl"):
        with path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
            for line in reversed(file.read().splitlines()[:-1]):
                try:
                    found.append(json.loads(line))
                    break
                except ValueError:
                    continue
    return found


def newest(turn: Turn) -> int:
    """The farthest step of the newest attempt."""
    tails = _tails(turn)
    latest = max((one["attempt"] for one in tails), default=0)
    return max((one["step"] for one in tails if one["attempt"] == latest), default=0)


def newest_attempt(turn: Turn) -> int:
    """Its number."""
    return max((one["attempt"] for one in _tails(turn)), default=0)


def whole(turn: Turn, world: int) -> int:
    """The newest step of the newest attempt, where all machines take part in it; 0 otherwise."""
    tails = _tails(turn)
    latest = max((one["attempt"] for one in tails), default=0)
    inside = [one for one in tails if one["attempt"] == latest]
    if len(inside) < world or any(one["world"] != world for one in inside):
        return 0
    return min(int(one["step"]) for one in inside)


def _all_back(storm: Storm, turn: Turn, world: int, before: int) -> bool:
    storm.look()
    return bool(whole(turn, world)) and (newest_attempt(turn) >= before)


def quiet(turn: Turn, seconds: float) -> float:
    """Steps per second while nothing happens."""
    first, begun_s = newest(turn), time.monotonic()
    time.sleep(seconds)
    return (newest(turn) - first) / (time.monotonic() - begun_s)


def wait_for(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Wait for it.

    Raises:
        SystemExit: it does not come.
    """
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            sys.exit(f"{what} did not come within {limit_s:.0f} s")
        time.sleep(POLL_S)


def table(found: list[dict[str, Any]]) -> str:
    """One row for each seed."""
    header = ["seed", "faults", "steps/s", "of quiet", "made twice", "agents ended", "same bits"]
    return markdown(
        header,
        [
            [
                str(one["seed"]),
                str(sum(one["faults"].values())),
                f"{one['rate']:.1f}",
                f"{one['rate'] / one['quiet']:.0%}",
                f"{one['made_twice']:.1%}",
                ", ".join(
                    f"{code}: {count}" for code, count in sorted(one["agents_ended"].items())
                ),
                "yes" if one["same_bits"] else "NO",
            ]
            for one in found
        ],
    )


if __name__ == "__main__":
    main()
