"""Launchers that start a job of several workers and are to bring it back: ours and its peers.

Each runs the same plain script, except torchft, which is a library: a script for it has the same
model, data and records (``torchft_train.py``), and every worker is a replica of its own. One that
was killed is started anew by us, since nothing of torchft's does that.

*As it comes* is what its documentation's first example gives; *tuned* are the settings with which
each is quickest here and still comes back each time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from bench import processes
from bench.ports import free_port

ROOT: Final = Path(__file__).resolve().parents[2]
SCRIPTS: Final = ROOT / "tests" / "real" / "scripts"
PLAIN: Final = SCRIPTS / "ddp_plain.py"
FRESH_STORE: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TUNED_RENDEZVOUS: Final = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3"
TUNED_TIMEOUT_S: Final = 10  # of collectives: less, and a busy machine's pause ends the job


@dataclass
class Turn:
    """One job and all of its processes.

    Attributes:
        place: its own directory.
        world: workers on this machine, or machines.
        log: where the processes' output goes.
        script_args: of the training script, besides where to record.
        mark: what all its processes have in their environment.
        started: those that were started by us.
    """

    place: Path
    world: int
    log: IO[str]
    script_args: tuple[str, ...] = ()
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def records(self) -> Path:
        """Where the script records."""
        return self.place / "records"

    def spawn(self, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a process."""
        process = subprocess.Popen(
            command,
            env={**_environment(), processes.MARK: self.mark, **(env or {})},
            cwd=self.place,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def is_over(self) -> bool:
        """Whether nothing of what was started runs any more."""
        return all(process.poll() is not None for process in self.started)

    def close(self) -> None:
        """End all of it."""
        while processes.marked(self.mark):
            processes.kill(self.mark)
            for process in self.started:
                process.poll()


def _environment() -> dict[str, str]:
    dropped = ("OUTLAST_", "PET_", "TORCH", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "OMP_NUM_THREADS": "1", "OUTLAST_NOTICE_PLATFORM": "none"}


def _path(*more: str) -> str:
    """Where scripts of ours find the plain one and this package."""
    return os.pathsep.join(filter(None, [str(SCRIPTS), str(ROOT / "benchmarks"), *more]))


class Launcher:
    """Starts a job on this machine.

    Args:
        interpreter: the Python that has it.

    Attributes:
        peer: its name among ``peers.PEERS``; empty for what this interpreter has itself.
        shrinks: whether the job goes on without a worker that was killed.
        refills: whether it does so until another one has taken its place.
    """

    peer = ""
    shrinks = refills = False

    def __init__(self, interpreter: str = sys.executable) -> None:
        self.interpreter = interpreter

    def start(self, turn: Turn) -> None:
        """Start ``turn.world`` workers."""
        raise NotImplementedError

    def replace(self, turn: Turn, rank: int) -> None:
        """Start a worker anew that was killed; launchers do that themselves."""

    def script(self, turn: Turn) -> list[str]:
        """The training script and its arguments."""
        return [str(PLAIN), str(turn.records), *turn.script_args]


class Torchrun(Launcher):
    """Stock torchrun as it comes."""

    module: tuple[str, ...] = ("-m", "torch.distributed.run", "--standalone")
    env: dict[str, str] = {}  # noqa: RUF012 - constants of the class
    max_restarts = 100

    def start(self, turn: Turn) -> None:
        """An agent."""
        restarts = ("--max-restarts", str(self.max_restarts))
        workers = ("--nproc-per-node", str(turn.world), *restarts)
        command = [self.interpreter, *self.module, *workers, *self.script(turn)]
        turn.spawn(*command, env=self.env)


class TorchrunFresh(Torchrun):
    """The same with a fresh store for each attempt."""

    env = FRESH_STORE


class FtLauncher(Torchrun):
    """nvidia-resiliency-ext's ``ft_launcher``, a torchrun with a monitor of ranks.

    The script sends it no heartbeats: it sees a killed worker as torchrun does.
    """

    peer = "nvidia-resiliency-ext"
    module = (
        *("-m", "nvidia_resiliency_ext.fault_tolerance.launcher"),
        *("--ignore-missing-fault-tol-cfg", "--standalone"),
    )
    env = FRESH_STORE


class Outlast(Launcher):
    """``outlast run``."""

    env: dict[str, str] = {}  # noqa: RUF012 - constants of the class

    def start(self, turn: Turn) -> None:
        """An agent."""
        workers = ("--nproc-per-node", str(turn.world), "--dir", str(turn.place / "job"))
        command = [self.interpreter, "-m", "outlast", "run", *workers, *self.script(turn)]
        turn.spawn(*command, env=self.env)


class OutlastCold(Outlast):
    """The same with fresh interpreters as workers."""

    env = {"OUTLAST_WORKERS_WARM": "false"}  # noqa: RUF012


class OutlastSession(Outlast):
    """The same with a session in the script, which saves in place of it."""

    env = {"PYTHONPATH": _path(os.environ.get("PYTHONPATH", ""))}  # noqa: RUF012

    def script(self, turn: Turn) -> list[str]:
        """The script's variant."""
        variant = Path(__file__).with_name("session_train.py")
        return [str(variant), str(turn.records), *turn.script_args]


class OutlastInProcess(OutlastSession):
    """The same with survivors that keep their processes, and the state in them."""

    env = {**OutlastSession.env, "OUTLAST_WORKERS_IN_PROCESS": "true"}  # noqa: RUF012


class OutlastAnySize(OutlastInProcess):
    """The same with ``outlast.SameBits``: survivors do not wait for who takes the place."""

    refills = True

    def script(self, turn: Turn) -> list[str]:
        """The script's variant."""
        variant = Path(__file__).with_name("session_same_bits.py")
        return [str(variant), str(turn.records), *turn.script_args]


class Torchft(Launcher):
    """torchft's replicas and lighthouse, with its default heartbeats."""

    peer = "torchft"
    shrinks = True
    lighthouse: tuple[str, ...] = ()

    def start(self, turn: Turn) -> None:
        """The lighthouse, and a replica for each worker."""
        self._port = free_port()
        program = str(Path(self.interpreter).with_name("torchft_lighthouse"))
        flags = ("--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000")
        turn.spawn(program, "--bind", f"[::]:{self._port}", *flags, *self.lighthouse)
        for rank in range(turn.world):
            self.replace(turn, rank)

    def replace(self, turn: Turn, rank: int) -> None:
        """A replica."""
        env = {
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self._port}",
            "REPLICA": str(rank),
            "PYTHONPATH": _path(),
        }
        turn.spawn(self.interpreter, *self.script(turn), env=env)

    def script(self, turn: Turn) -> list[str]:
        """The script's variant."""
        variant = Path(__file__).with_name("torchft_train.py")
        return [str(variant), str(turn.records), *turn.script_args]


class TorchftTuned(Torchft):
    """The same with heartbeats that are given up after a second."""

    lighthouse = ("--heartbeat_timeout_ms", "1000")


LAUNCHERS: Final[dict[str, type[Launcher]]] = {
    "outlast run": Outlast,
    "outlast run, with a session": OutlastSession,
    "outlast run, in process": OutlastInProcess,
    "outlast run, in process, SameBits": OutlastAnySize,
    "outlast run, cold": OutlastCold,
    "torchrun": Torchrun,
    "torchrun, fresh store": TorchrunFresh,
    "torchft, 1 s heartbeats": TorchftTuned,
    "torchft": Torchft,
    "ft_launcher, fresh store": FtLauncher,
}
