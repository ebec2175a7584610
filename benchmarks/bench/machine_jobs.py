"""Jobs on three machines, and what happens to them.

The machines are network namespaces (``tests/machine_network``) that share this machine's cores and
disk; each has one agent with one worker.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from bench.launchers import (
    FRESH_STORE,
    TUNED_RENDEZVOUS,
    TUNED_TIMEOUT_S,
    Launcher,
    OutlastAnySize,
    Turn,
)
from machine_network import Cut, KillMachine, Machine, Network, Partition

NUM_MACHINES: Final = 3
_PORT: Final = 29_400


class MachineLauncher(Launcher):
    """Starts a job's agents, one on each machine."""

    env: dict[str, str] = {}  # noqa: RUF012 - constants of the class
    timeout_s: float | None = None

    def rendezvous(self, turn: Turn, machine: Machine, first: Machine) -> list[str]:
        """Flags with which the agents find each other."""
        raise NotImplementedError

    def agent(self, turn: Turn, machine: Machine, first: Machine) -> subprocess.Popen[bytes]:
        """Start one machine's agent."""
        flags = [
            *("--nnodes", f"1:{NUM_MACHINES}", "--nproc-per-node", "1", "--max-restarts", "100"),
            *("--local-addr", machine.address, *self.rendezvous(turn, machine, first)),
        ]
        more = [] if self.timeout_s is None else ["--timeout", str(self.timeout_s)]
        command = [self.interpreter, *self.module, *flags, *self.script(turn), *more]
        return turn.spawn(*machine.command(*command), env={**machine.environ, **self.env})

    module: tuple[str, ...] = ("-m", "torch.distributed.run")


class TorchrunMachines(MachineLauncher):
    """Stock torchrun as it comes; its store is on the first machine."""

    conf: tuple[str, ...] = ()

    def rendezvous(self, turn: Turn, machine: Machine, first: Machine) -> list[str]:
        """The first machine serves the store."""
        del turn
        is_host = "is_host=1" if machine is first else "is_host=0"
        conf = ",".join((*self.conf, is_host))
        endpoint = f"{first.address}:{_PORT}"
        return [
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint),
            *("--rdzv-id", "recovery", "--rdzv-conf", conf),
        ]


class TorchrunMachinesTuned(TorchrunMachines):
    """The same with a fresh store for each attempt and short waits, also of the collectives."""

    conf = (TUNED_RENDEZVOUS,)
    env = FRESH_STORE
    timeout_s = TUNED_TIMEOUT_S


class OutlastMachines(MachineLauncher):
    """``outlast run`` with its own rendezvous: a directory that all machines see.

    A machine may be silent for a second, as with the tuned ones.
    """

    env = {"OUTLAST_MEMBERSHIP_SILENCE": "1 s"}  # noqa: RUF012
    module = ("-m", "outlast", "run")

    def rendezvous(self, turn: Turn, machine: Machine, first: Machine) -> list[str]:
        """No endpoint: the job's directory is enough."""
        del machine, first
        return ["--rdzv-backend", "outlast", "--dir", str(turn.place / "job")]


class OutlastMachinesAnySize(OutlastMachines):
    """The same with survivors that keep their processes, and ``outlast.SameBits``."""

    env = {**OutlastMachines.env, **OutlastAnySize.env}  # noqa: RUF012
    script = OutlastAnySize.script


MACHINE_LAUNCHERS: Final[dict[str, type[MachineLauncher]]] = {
    "outlast run": OutlastMachines,
    "outlast run, in process, SameBits": OutlastMachinesAnySize,
    "torchrun, tuned": TorchrunMachinesTuned,
    "torchrun": TorchrunMachines,
}


@dataclass
class MachineJob:
    """A job on three machines.

    Attributes:
        launcher: who starts it.
        turn: its processes.
        network: its machines.
        agents: by machine.
    """

    launcher: MachineLauncher
    turn: Turn
    network: Network
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def machines(self) -> Sequence[Machine]:
        """In order; the first hosts what must have a host."""
        return self.network.machines

    def start(self, *machines: Machine) -> None:
        """Start agents."""
        for machine in machines:
            agent = self.launcher.agent(self.turn, machine, self.machines[0])
            self.agents[machine.hostname] = agent

    def notify(self, machine: Machine) -> None:
        """Tell a machine's agent that it has to go."""
        os.kill(self.agents[machine.hostname].pid, signal.SIGTERM)


@dataclass(frozen=True)
class Event:
    """What happens to a job of three machines.

    Attributes:
        strike: does it.
        survivors: hostnames of those that are to go on; with ``alternative`` either these or those.
        alternative: where either of two machines may be the one that has to go.
    """

    strike: Callable[[MachineJob], None]
    survivors: frozenset[str]
    alternative: frozenset[str] = frozenset()


_OTHERS: Final = frozenset({"machine0", "machine1"})
_NOT_FIRST: Final = frozenset({"machine1", "machine2"})
_NOT_SECOND: Final = frozenset({"machine0", "machine2"})

EVENTS: Final[dict[str, Event]] = {
    "killed": Event(lambda job: KillMachine(job.machines[2]).inject(), _OTHERS),
    "leaving": Event(lambda job: job.notify(job.machines[2]), _OTHERS),
    "cut off": Event(lambda job: Cut(job.machines[2]).inject(), _OTHERS),
    "first killed": Event(lambda job: KillMachine(job.machines[0]).inject(), _NOT_FIRST),
    "first cut off": Event(lambda job: Cut(job.machines[0]).inject(), _NOT_FIRST),
    "two parted": Event(
        lambda job: Partition(job.machines[1], job.machines[2]).inject(), _OTHERS, _NOT_SECOND
    ),
}
