"""One run of a job under test on this machine: started, watched, started again, stopped.

The job is started by ``outlast run`` as its user would, its script wrapped in ``inside``, which
records what each step computed. Where it leaves with 75 (drained and committed) it is started again
by the same command, as a scheduler does; a machine that was killed is started again when the fault
heals. Several machines are network namespaces on a bridge, each with an agent of its own.

Guarantees: a job is ended by the processes that carry its run in their environment, and no other
process is signalled; leaving the ``with`` block ends them all, also where it is left by an error. A
drill that is killed takes its agents with it, and they their workers (the kernel tells them, where
util-linux is installed).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Self

from outlast.config import DRILL_VARIABLE, Settings
from outlast.drill.network import Machine, Network
from outlast.drill.record import WorkerRecord, WorkerRecords, completed
from outlast.drill.workplace import JobScript, Workplace
from outlast.errors import Exit
from outlast.ledger.events import Event
from outlast.ledger.file import Follower

MACHINE_VARIABLE: Final = "OUTLAST_DRILL_MACHINE"
POLL_S: Final = 0.01
STEP_GUESS_S: Final = 0.05
STOP_S: Final = 20.0  # for a job that is asked to end
_KEEPER: Final = b"outlast.keeper"
_STARTS_MAX: Final = 20  # of one machine, in one run


class RehearsedMachine:
    """A machine of a job under test: this one, or a namespace on it.

    Args:
        number: from 0.
        command: of its agent.
        environ: of that.
        place: the run's.
        cable: its place in the network; None where the job has this machine alone.

    Attributes:
        exit_codes: of its agents that have ended, in order.
        is_down: whether it was killed and is not to be started but by :meth:`start`.
        is_wanted: whether its agent is to be started when the run is next looked at.
    """

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        place: Workplace,
        cable: Machine | None,
    ) -> None:
        self.number = number
        self.name = cable.hostname if cable is not None else os.uname().nodename
        self.cable = cable
        self.exit_codes: list[int] = []
        self.is_down = False
        self._command = cable.command(*command) if cable is not None else list(command)
        self._job_environ = environ
        self._mark = f"{DRILL_VARIABLE}={environ[DRILL_VARIABLE]}".encode()
        self._number = f"{MACHINE_VARIABLE}={number}".encode()
        self._place = place
        self.is_wanted = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def agent(self) -> int | None:
        """Id of its agent; None while it is down."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if running and self._process is not None else None

    @property
    def keeper(self) -> int | None:
        """Id of its keeper; None while there is none."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if _KEEPER in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    def processes(self) -> Sequence[int]:
        """Ids of all of the job's processes on it; those that have ended do not count."""
        return [pid for pid, environ in _environs() if {self._mark, self._number} <= environ]

    def start(self) -> None:
        """Have its agent started, by whoever watches the run; nothing happens where it runs.

        Not here: the kernel ends a process with the *thread* that has started it.
        """
        self.is_wanted = True

    def start_if_wanted(self) -> None:
        """In the thread that watches the run: start its agent, if that was asked for."""
        is_wanted, self.is_wanted = self.is_wanted, False
        if not is_wanted or self.agent is not None:
            return
        self.is_down = False
        environ = {**self._job_environ, MACHINE_VARIABLE: str(self.number)}
        environ |= self.cable.environ if self.cable is not None else {}
        with self._place.log.open("ab") as log:
            self._process = _started(self._command, environ, self._place.copy, log)

    def kill(self) -> None:
        """End all of its processes at once; they are not started again by themselves."""
        self.is_down = True
        self._end(signal.SIGKILL, STOP_S)

    def ask_to_end(self) -> None:
        """What a scheduler does first."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def ended(self) -> int | None:
        """The exit code of an agent that has ended since the last question."""
        if self._process is None or self._process.poll() is None:
            return None
        code, self._process = self._process.returncode, None
        self.exit_codes.append(code)
        return code

    def has_left(self) -> bool:
        """Whether its agent has ended with a word that is its last: neither drained nor killed."""
        is_running = self._process is not None
        code = self.exit_codes[-1] if self.exit_codes and not is_running else None
        return code is not None and code >= 0 and code != Exit.DRAINED

    def _end(self, number: signal.Signals, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if self._process is not None:
                self._process.poll()
            if time.monotonic() > deadline:
                raise TimeoutError(f"still running after {limit_s:.0f} s: {left}")
            time.sleep(POLL_S)
        if self._process is not None:
            self._process.wait()


class Rehearsal:
    """One run of a job under test; a context manager, and what faults see (``target.Target``).

    Args:
        script: what is run.
        run: the run's directory; it is made.
        settings: the user's.
        workers: on each machine.
        num_machines: more than one wants root, and network namespaces.
        least_machines: with so many the job goes on while others are away; None for all of them.
        environ: the user's.
        source: the directory of which it has a copy; None for the working directory.

    Attributes:
        before_restart: called ahead of each start that the job has asked for.
        is_held: whether a machine that is down will be started again: then the job is not over.

    Raises:
        NetworkError: the machines cannot be made.
        OSError: the directory cannot be made.
    """

    def __init__(
        self,
        script: JobScript,
        run: Path,
        *,
        settings: Settings,
        workers: int,
        num_machines: int = 1,
        least_machines: int | None = None,
        environ: Mapping[str, str],
        source: Path | None = None,
    ) -> None:
        self.place = Workplace(run, settings, source)
        self.run, self.directory = self.place.run, self.place.directory
        self.tiers = self.place.tiers
        self.environ = self.place.environ(environ)
        self.workers_each, self.num_machines = workers, num_machines
        self._nodes = f"{least_machines or num_machines}:{num_machines}"
        self.machines: list[RehearsedMachine] = []
        self._script = script
        self._records = WorkerRecords(self.run)
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._follower = Follower(self.directory)
        self._network: Network | None = None
        self._is_over = False
        self.before_restart: Callable[[], None] = lambda: None
        self.is_held: Callable[[], bool] = lambda: False

    def __enter__(self) -> Self:
        if self.num_machines > 1:
            self._network = Network(self.num_machines)
        cables = self._network.machines if self._network is not None else [None]
        for number, cable in enumerate(cables):
            several: list[str] = []
            if cable is not None:
                several = ["--nnodes", self._nodes, "--rdzv-backend", "outlast"]
                several += ["--local-addr", cable.address]
            command = run_command(self.place, self._script, self.workers_each, *several)
            machine = RehearsedMachine(number, command, self.environ, self.place, cable)
            self.machines.append(machine)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            if self._network is not None:
                self._network.close()

    # --- running it --------------------------------------------------------------------------

    def start(self) -> None:
        """Start the job on every machine; what faults added to the environment holds from here."""
        for machine in self.machines:
            machine.start()
            machine.start_if_wanted()

    def watch(self) -> None:
        """Look once: start what is to be started, and note what has ended for good."""
        for machine in self.machines:
            code = machine.ended()
            if code is None or machine.is_down:
                continue
            if code == Exit.DRAINED and len(machine.exit_codes) < _STARTS_MAX:
                self.before_restart()
                machine.start()
        for machine in self.machines:
            machine.start_if_wanted()
        is_held = self.is_held()  # asked first: a fault that heals starts what is down before
        runs = any(one.agent is not None or one.is_down or one.is_wanted for one in self.machines)
        has_left = all(machine.has_left() for machine in self.machines)
        self._is_over = not runs and (has_left or not is_held)

    def wait(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        """Watch until something is so; False if the job ended first, or it took too long."""
        deadline = time.monotonic() + limit_s
        while not is_done():
            self.watch()
            if self._is_over or time.monotonic() > deadline:
                return is_done()
            time.sleep(POLL_S)
        return True

    def stop(self) -> None:
        """End the job: it is asked first, and what is left of it is killed."""
        for machine in self.machines:
            machine.ask_to_end()
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline and any(m.agent for m in self.machines):
            time.sleep(POLL_S)
        for machine in self.machines:
            machine.kill()
            machine.ended()
        self._is_over = True

    # --- what is seen of it ------------------------------------------------------------------

    def look(self) -> list[WorkerRecord]:
        """What the workers have recorded until now."""
        return self._records.look()

    def events(self) -> Sequence[Event]:
        """The ledger's events until now."""
        with self._lock:
            if self.directory.exists():
                self._events += self._follower.poll()
            return list(self._events)

    def workers(self) -> Mapping[int, int]:
        """Rank → process id, of those that run."""
        found = {}
        for record in self.look():
            if Path(f"/proc/{record.begun.pid}").exists():
                rank = record.steps[-1].rank if record.steps else record.begun.rank
                found[rank] = record.begun.pid
        return dict(sorted(found.items()))

    def machine_of(self, rank: int) -> RehearsedMachine:
        """Where the rank's worker runs."""
        pid = self.workers()[rank]
        return next(machine for machine in self.machines if pid in machine.processes())

    def completed(self) -> int:
        """The newest step that some rank has completed."""
        return completed(self.look())

    def all_completed(self) -> int:
        """The newest step that every rank of the newest attempt has completed."""
        records = self.look()
        newest = max((one.begun.attempt for one in records), default=0)
        ranks = [one for one in records if one.begun.attempt == newest or self._lives_on(one)]
        return min((one.steps[-1].step if one.steps else 0 for one in ranks), default=0)

    def step_s(self) -> float:
        """A typical step's length in seconds."""
        steps = next((one.steps for one in reversed(self.look()) if one.steps), [])
        gaps = [later.t - earlier.t for earlier, later in itertools.pairwise(steps[-20:])]
        return statistics.median(gaps) if gaps else STEP_GUESS_S

    def is_over(self) -> bool:
        """Whether the job has ended for good."""
        return self._is_over

    @staticmethod
    def _lives_on(record: WorkerRecord) -> bool:
        return Path(f"/proc/{record.begun.pid}").exists()


def run_command(place: Workplace, script: JobScript, workers: int, *options: str) -> list[str]:
    """``outlast run`` of a script whose workers record what they do."""
    return [
        *(sys.executable, "-m", "outlast", "run", "--dir", str(place.directory)),
        *("--nproc-per-node", str(workers), *options),
        *("-m", "outlast.drill.inside", *script.words),
    ]


def _started(
    command: Sequence[str], environ: Mapping[str, str], work: Path, log: IO[bytes]
) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C is the drill's to hear, and it ends the job in order.
    dies_with_us = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    return subprocess.Popen(
        [*dies_with_us, *command],
        env=dict(environ),
        cwd=work,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def _environs() -> Iterator[tuple[int, set[bytes]]]:
    own = os.getpid()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != own:
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                yield int(entry.name), set(Path(entry.path, "environ").read_bytes().split(b"\0"))
