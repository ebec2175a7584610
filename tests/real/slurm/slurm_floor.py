"""A real Slurm on this machine, private to one run of tests: a controller and two nodes.

Keys, sockets, state and logs lie in one directory, the ports are free ones of the loopback, and
every process is ended by its id. A Slurm or a munge that the machine has itself is not touched.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from floor import free_port, until

SCRIPT = Path(__file__).with_name("train.sbatch")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
NODES = ("node1", "node2")
ASK_S = 0.3  # between two questions, each of which is a process
# Generous both: what leaves in order leaves at once, and nothing may depend on a busy machine.
KILL_WAIT_S = 30
GRACE_TIME_S = 60
CONF = """\
ClusterName=outlast-test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={top}/munge.socket
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldPort={port}
SlurmctldPidFile={top}/slurmctld.pid
SlurmctldLogFile={top}/slurmctld.log
StateSaveLocation={top}/state
SlurmdPidFile={top}/slurmd.%n.pid
SlurmdLogFile={top}/slurmd.%n.log
SlurmdSpoolDir={top}/spool.%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
PropagateResourceLimits=NONE
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
KillWait={kill_wait}
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=spot Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF
"""


def missing():
    """Which of the programs this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


class Slurm:
    """Slurm's processes, and its commands.

    Args:
        floor: starts the processes; whatever runs in a job has its mark.
    """

    def __init__(self, floor):
        self.top = floor.directory
        self.environ = {**floor.environ, "SLURM_CONF": str(self.top / "slurm.conf")}
        self.environ["PATH"] = _path()
        self._floor = floor
        self._daemons = []

    def start(self):
        """Start the daemons; returns when both nodes take jobs."""
        self._configure()
        files = [f"--{name}-file={self.top}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        socket_path = self.top / "munge.socket"
        self._daemon("munged", "--foreground", "--force", f"--socket={socket_path}", *files)
        until(socket_path.exists, "munged's socket", running=self._daemons[-1])
        self._daemon("slurmctld", "-D", "-i")
        for name in NODES:
            self._daemon("slurmd", "-D", "-N", name)
        until(
            lambda: self.ask("sinfo", "-h", "-N", "-p", "spot", "-o", "%T") == ["idle"] * 2,
            "two idle nodes",
            running=self._daemons[1],
            every_s=ASK_S,
        )

    def ask(self, *command):
        """The lines that a command prints; none when it fails."""
        done = self._run(command)
        return done.stdout.splitlines() if done.returncode == 0 else []

    def tell(self, *command, env=None):
        """What a command prints; fails with its complaint."""
        done = self._run(command, env)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def sbatch(self, *arguments, env=None):
        """Submit; returns the job's id."""
        return self.tell("sbatch", "--parsable", *arguments, env=env)

    def show(self, job):
        """What the controller knows about a job: field → value."""
        shown = self.tell("scontrol", "show", "job", "-o", job)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait(self, job, state, out):
        """Until the job is in ``state``; ``out`` is what it prints, for a failing test."""
        final = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        ended_s = []

        def reached():
            shown = self.show(job)
            now = shown["JobState"]
            if now != state and now in final:
                # A job that is being requeued shows how it ended, for a moment.
                ended_s.append(time.monotonic())
                assert ended_s[-1] - ended_s[0] < 10, f"{shown}\n{_text(out)}"
            return shown if now == state else None

        return until(reached, f"job {job} is {state}", every_s=ASK_S)

    def again(self, job, out):
        """A requeued job would wait for two minutes: have it start now."""
        shown = self.wait(job, "PENDING", out)
        # Slurm counts in seconds: a start in the second of the end is refused ("already killed").
        time.sleep(2)
        self.tell("scontrol", "update", f"JobId={job}", "StartTime=now")
        return shown

    def cancel_all(self):
        """End every job at once; returns when nothing of them is left."""
        self._run(("scancel", "--user", getpass.getuser(), "--full", "--signal=KILL"))
        self._run(("scancel", "--user", getpass.getuser()))
        until(lambda: not self.ask("squeue", "-h"), "no job is left", every_s=ASK_S)

    def close(self):
        """End the daemons."""
        for daemon in reversed(self._daemons):
            if daemon.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    daemon.signal(15)
                daemon.wait()

    def _configure(self):
        host = socket.gethostname()
        nodes = [
            f"NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={free_port()} CPUs=4"
            for name in NODES
        ]
        (self.top / "slurm.conf").write_text(
            CONF.format(
                top=self.top,
                host=host,
                user=getpass.getuser(),
                port=free_port(),
                nodes="\n".join(nodes),
                kill_wait=KILL_WAIT_S,
                grace=GRACE_TIME_S,
            )
        )
        (self.top / "state").mkdir()
        (self.top / "munge.key").touch(mode=0o600)
        (self.top / "munge.key").write_bytes(os.urandom(128))

    def _daemon(self, program, *arguments):
        path = shutil.which(program, path=_path())
        self._daemons.append(self._floor.cold(*arguments, program=path, env=self.environ))

    def _run(self, command, env=None):
        given = {name: str(value) for name, value in (env or {}).items()}
        return subprocess.run(
            [str(word) for word in command],
            env={**self.environ, **given},
            cwd=self.top,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


def _path():
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _text(path):
    return path.read_text(errors="replace")[-6000:] if path.exists() else "(it printed nothing)"
