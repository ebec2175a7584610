"""A job of two workers as a fault sees it: what the drill makes of a user's job, in small."""

import contextlib
import os
import signal
from pathlib import Path

import psutil
from floor import Job, until

from outlast.drill.faults.processes import signal_all

SCRIPT = Path(__file__).with_name("drilled.py")
STEPS = 60
# On a busy machine a hang is to be told from slowness: hung workers are found in about 5 s.
HANGS = {"OUTLAST_HEALTH_HANG": "auto"}


class DrilledMachine:
    """This machine, or a namespace on it."""

    def __init__(self, job, number, name, host=None):
        self.job, self.number, self.name, self.host = job, number, name, host
        self.cable = host.machine if host else None
        self.started = None
        self.codes = []

    @property
    def agent(self):
        running = self.started is not None and self.started.poll() is None
        return self.started.pid if running else None

    @property
    def keeper(self):
        for process in self._offspring():
            with contextlib.suppress(psutil.Error):
                if "outlast.keeper" in process.cmdline():
                    return process.pid
        return None

    def processes(self):
        return [process.pid for process in self._offspring()]

    def kill(self):
        until(self._kill_some, f"the end of {self.name}")

    def start(self):
        if self.agent is None:
            self.started = self.job.launch(self)

    def _offspring(self):
        inside = None if self.cable is None else set(self.cable.processes())
        return [p for p in self.job.floor.offspring() if inside is None or p.pid in inside]

    def _kill_some(self):
        left = self.processes()
        signal_all(left, signal.SIGKILL)
        # A process of many threads is gone from the table a moment before its end can be waited
        # for; one that still counted as running then would not be started again.
        return not left and self.agent is None


class DrilledJob(Job):
    """A job, and what a fault wants to know of it; :class:`outlast.drill.target.Target`."""

    def __init__(self, floor, place, *options, steps=STEPS, hosts=(), env=None):
        place.mkdir(exist_ok=True)
        super().__init__(place / "job", max(len(hosts), 1) * (1 if hosts else 2))
        self.floor, self.options, self.steps_wanted = floor, options, steps
        self.run = place / "run"
        self.run.mkdir(exist_ok=True)
        self.tiers = {"local": self.checkpoints}
        self.environ = {"OUTLAST_RUNTIME_DIR": place / "rt", **(env or {})}
        names = [host.name for host in hosts] or [os.uname().nodename]
        self.machines = [
            DrilledMachine(self, number, name, hosts[number] if hosts else None)
            for number, name in enumerate(names)
        ]
        self.given_up = False
        (place / "rt").mkdir(mode=0o700, exist_ok=True)

    def launch(self, machine):
        several = len(self.machines)
        where = machine.host or self.floor
        nodes = ("--nproc-per-node", 2)
        if several > 1:
            nodes = ("--nnodes", several, "--nproc-per-node", 1, "--local-addr", where.address)
        # Cold: what the job has in its environment reaches each process from its beginning.
        return where.outlast(
            *("run", *nodes, "--dir", self.directory),
            *(SCRIPT, self.run, self.steps_wanted, *self.options),
            env=self.environ,
            cold=True,
        )

    def start(self):
        for machine in self.machines:
            machine.start()
        return self

    def wait(self):
        """The exit codes, by machine."""
        return [machine.started.wait() for machine in self.machines]

    @property
    def text(self):
        return "\n".join(machine.started.text for machine in self.machines)

    # --- what a fault asks -------------------------------------------------------------------

    def workers(self):
        by_rank = {}
        for process in self.floor.trainers():
            with contextlib.suppress(psutil.Error):
                environ = process.environ()
                if str(process.ppid()) == environ.get("OUTLAST_AGENT_PID"):
                    by_rank[int(environ["RANK"])] = process.pid
        return by_rank

    def machine_of(self, rank):
        pid = self.workers()[rank]
        return next(machine for machine in self.machines if pid in machine.processes())

    def completed(self):
        return self.begun()

    def step_s(self):
        return 0.06

    def is_over(self):
        if self.given_up:
            return True
        codes = [machine.started and machine.started.poll() for machine in self.machines]
        return all(code in (0, 76, 77, 78) for code in codes)

    # --- what a test asks --------------------------------------------------------------------

    def has(self, name, since=0.0):
        return [event for event in self.events(name) if event.t >= since]

    def hashes(self):
        return [final["hash"] for final in self.finals()]

    def losses(self, rank=0):
        return {line["step"]: line["loss"] for line in self.lines(rank)}

    def lines(self, rank=0):
        self.records = self.run
        return super().lines(rank)

    def final(self, rank=0):
        self.records = self.run
        return super().final(rank)
