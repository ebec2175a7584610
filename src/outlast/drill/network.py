"""Several machines on one: network namespaces on a bridge, each with an address and a hostname.

Guarantees: nothing is added to this machine's own network (the bridge has a namespace of its own),
so any number of networks use the same addresses beside each other; names carry the process that
made them, so that networks of processes that died are found and removed by the next one; closing
ends every process that is left inside.

What they share with each other, as real machines do not: files, memory files, the clock, the
table of processes, and the cores. Storage that all of them see is therefore any directory.

Needs Linux, root, iproute2 (``ip``) and util-linux (``unshare``); for most faults also nftables.
Packets can be lost, refused, dropped and held back to a rate (``Throttle``) everywhere; that they
are late with room to spare (``Delay``) needs a kernel with netem, which few containers have.

Rejected: processes on addresses of the loopback (no cable to pull, no firewall of one's own);
user namespaces in place of root (Debian's default forbids what a bridge needs).

What can happen to machines on a network is a small object each: inject it, heal it.

A fault acts when it is told to and keeps nothing but what it needs to undo itself; several may act
on one machine at a time, and each is healed alone. What a machine says to itself over its loopback
is never touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, Self, TypeVar

PROGRAMS: Final = ("ip", "nft", "unshare")
INTERFACE: Final = "eth0"
MOST: Final = 200
_NAMED: Final = Path("/run/netns")
_PREFIX: Final = "outlast"
_NAME: Final = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-\d+-\w+")
_PATH: Final = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_PROBE: Final = """\
table bridge probe {
  chain c { type filter hook forward priority 0; policy accept; numgen random mod 100 < 1 drop; }
}
"""
_CLONE_NEWUTS: Final = 0x04000000
_CLONE_NEWNET: Final = 0x40000000
_END_S: Final = 30.0
_serial = itertools.count()

Result = TypeVar("Result")


class NetworkError(RuntimeError):
    """A network could not be made or changed; the message is what the tool said."""


def unusable() -> str:
    """Why networks cannot be made here, in a few words; empty if they can."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]:
        return f"{missing[0]} is not here: apt install iproute2 nftables util-linux"
    if os.geteuid() != 0:
        return "network namespaces are made as root"
    try:
        run("unshare", "--net", "--uts", "--mount", "nft", "-f", "-", stdin=_PROBE)
    except NetworkError as error:
        return f"this system allows no network namespaces: {error}"
    return ""


def cannot_delay() -> str:
    """Why packets cannot be made late here; empty if they can."""
    if why_not := unusable():
        return why_not
    if shutil.which("tc", path=_PATH) is None:
        return "tc is not here: apt install iproute2"
    probe = "ip link set lo up && tc qdisc add dev lo root netem delay 1ms"
    try:
        run("unshare", "--net", "sh", "-c", probe)
    except NetworkError as error:
        return f"this kernel has no netem (its module sch_netem): {error}"
    return ""


def run(program: str, *arguments: str, stdin: str = "") -> str:
    """What a tool prints.

    Raises:
        NetworkError: it is not there, or it failed.
    """
    path = shutil.which(program, path=_PATH)
    if path is None:
        raise NetworkError(f"{program} is not here")
    done = subprocess.run(
        [path, *arguments],
        input=stdin,
        env={**os.environ, "PATH": _PATH},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise NetworkError(f"{program} {' '.join(arguments)}: {said}")
    return done.stdout


def nft(namespace: str, rules: str) -> None:
    """Change the firewall of a namespace.

    Raises:
        NetworkError: the rules are wrong.
    """
    run("ip", "netns", "exec", namespace, "nft", "-f", "-", stdin=rules)


@dataclass(frozen=True)
class Machine:
    """One of the machines.

    Attributes:
        number: from 0.
        namespace: its network namespace.
        switch: the namespace at the other end of its cable.
        address: on the network.
        hostname: what it calls itself.
    """

    number: int
    namespace: str
    switch: str
    address: str
    hostname: str

    @property
    def port(self) -> str:
        """The other end of its cable, an interface of the switch."""
        return f"port{self.number}"

    @property
    def environ(self) -> dict[str, str]:
        """What a process inside must have in its environment: gloo is told the interface."""
        return {"GLOO_SOCKET_IFNAME": INTERFACE}

    def command(self, *command: str) -> list[str]:
        """A command line that runs ``command`` inside.

        Every program on the way replaces itself, so that the id of the process that was started is
        that of the command.
        """
        path = shutil.which("ip", path=_PATH) or "ip"
        into = [path, "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c"]
        return [*into, f'hostname {self.hostname} && exec "$@"', "sh", *command]

    def enter(self) -> None:
        """Move the calling thread inside, and so all that it starts from now on.

        For a process that has just been forked; one with more threads would be torn in two.

        Raises:
            OSError: it cannot be entered.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        fd = os.open(_NAMED / self.namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for failed in (libc.setns(fd, _CLONE_NEWNET), libc.unshare(_CLONE_NEWUTS)):
                if failed:
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number), self.namespace)
        finally:
            os.close(fd)
        socket.sethostname(self.hostname)

    def within(self, act: Callable[[], Result]) -> Result:
        """What ``act()`` gives, called inside by a thread of its own: to make a socket there, say.

        Raises:
            OSError: it cannot be entered.
        """

        def inside() -> Result:
            self.enter()
            return act()

        with ThreadPoolExecutor(1, "outlast-within") as thread:
            return thread.submit(inside).result()

    def processes(self) -> list[int]:
        """Ids of the processes inside; those that are dead and not yet waited for do not count."""
        return list(_inside(self.namespace))

    def kill(self) -> None:
        """SIGKILL for every process inside, as often as it takes; returns when none is left.

        Raises:
            NetworkError: some would not die.
        """
        _kill_inside(self.namespace)

    def cable(self, *, plugged: bool) -> None:
        """Pull or plug in its cable, at the switch: nobody is sent a word about it.

        Raises:
            NetworkError: there is no such network any more.
        """
        run("ip", "-n", self.switch, "link", "set", self.port, "up" if plugged else "down")


class Network:
    """Machines on a network of their own; a context manager.

    Args:
        num_machines: how many, up to 200.

    Attributes:
        machines: in order.

    Raises:
        NetworkError: it cannot be made; nothing is left of it.
    """

    def __init__(self, num_machines: int) -> None:
        if not 1 <= num_machines <= MOST:
            raise ValueError(f"num_machines {num_machines} is not between 1 and {MOST}")
        reclaim()
        owner = os.getpid()
        stem = f"{_PREFIX}-{owner}-{started(owner)}-{next(_serial)}"
        self._switch = f"{stem}-switch"
        self.machines = [
            Machine(
                number=number,
                namespace=f"{stem}-m{number}",
                switch=self._switch,
                address=f"10.77.0.{10 + number}",
                hostname=f"machine{number}",
            )
            for number in range(num_machines)
        ]
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs inside and remove the network.

        Raises:
            NetworkError: a process inside would not die.
        """
        for namespace in [*(machine.namespace for machine in self.machines), self._switch]:
            _remove(namespace)

    def _make(self) -> None:
        every = [self._switch, *(machine.namespace for machine in self.machines)]
        _batch("", *(f"netns add {name}" for name in every))
        _batch(self._switch, "link set lo up", "link add br0 type bridge", "link set br0 up")
        _batch(
            "",
            *(
                f"link add {INTERFACE} netns {machine.namespace}"
                f" type veth peer name {machine.port} netns {self._switch}"
                for machine in self.machines
            ),
        )
        _batch(
            self._switch, *(f"link set {machine.port} master br0 up" for machine in self.machines)
        )
        for machine in self.machines:
            _batch(
                machine.namespace,
                "link set lo up",
                f"address add {machine.address}/24 dev {INTERFACE}",
                f"link set {INTERFACE} up",
            )


def reclaim() -> list[str]:
    """Remove the networks of processes that died without doing so; returns their namespaces."""
    found = []
    for entry in sorted(_NAMED.iterdir()) if _NAMED.is_dir() else []:
        match = _NAME.fullmatch(entry.name)
        if match and started(int(match[1])) != match[2]:
            found.append(entry.name)
            _remove(entry.name)
    return found


def _batch(namespace: str, *lines: str) -> None:
    where = ["-n", namespace] if namespace else []
    run("ip", *where, "-batch", "-", stdin="\n".join(lines) + "\n")


def _remove(namespace: str) -> None:
    _kill_inside(namespace)
    with contextlib.suppress(NetworkError):  # another process may have been quicker
        if (_NAMED / namespace).exists():
            run("ip", "netns", "delete", namespace)


def _inside(namespace: str) -> Iterator[int]:
    try:
        wanted = (_NAMED / namespace).stat()
    except FileNotFoundError:
        return
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                if os.path.samestat((entry / "ns" / "net").stat(), wanted):
                    yield int(entry.name)


def _kill_inside(namespace: str) -> None:
    deadline = time.monotonic() + _END_S
    while left := list(_inside(namespace)):
        if time.monotonic() > deadline:
            raise NetworkError(f"still running in {namespace} after {_END_S:.0f} s: {left}")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def started(pid: int) -> str:
    """When a process was started, in ticks of the kernel: with its id, a name for good; or ""."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


_FORWARD: Final = """\
  chain forward {{ type filter hook forward priority 0; policy accept; {rules} }}
"""
_OWN: Final = """\
  chain incoming {{ type filter hook input priority 0; policy accept; iif lo accept; {incoming} }}
  chain outgoing {{ type filter hook output priority 0; policy accept; oif lo accept; {outgoing} }}
"""


class NetworkFault(Protocol):
    """Something that happens to machines, and can be undone."""

    name: str

    def inject(self) -> None:
        """Let it happen; NetworkError if it cannot."""

    def heal(self) -> None:
        """Undo it; nothing happens if it is undone already."""


class KillMachine:
    """SIGKILL of every process of a machine at once: agent, workers, keeper.

    Its kernel lives on and closes the connections, so that the others hear of it at once; for a
    machine that loses power, cut it first. Healing is starting its processes again, which is for
    whoever started them.
    """

    name = "kill a machine"

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def inject(self) -> None:
        """Returns when none of them is left."""
        self.machine.kill()

    def heal(self) -> None:
        """Nothing that is dead comes back."""


class FreezeMachine:
    """Every process of a machine stops for a while (SIGSTOP): a VM that is being moved."""

    name = "freeze a machine"

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._stopped: Sequence[int] = ()

    def inject(self) -> None:
        """Processes that are started later run."""
        self._stopped = self.machine.processes()
        _signal(self._stopped, signal.SIGSTOP)

    def heal(self) -> None:
        """They go on; those that were killed meanwhile do not."""
        inside = set(self.machine.processes())
        _signal([pid for pid in self._stopped if pid in inside], signal.SIGCONT)
        self._stopped = ()


class Cut:
    """The cable is pulled: no packet comes or goes, and nobody is told."""

    name = "cut a machine off"

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def inject(self) -> None:
        """Pull it."""
        self.machine.cable(plugged=False)

    def heal(self) -> None:
        """Plug it in."""
        self.machine.cable(plugged=True)


class _Rules:
    """A fault made of firewall rules, in a table of its own.

    Args:
        machine: the one it happens to.
        rules: of the switch, where losing a packet is kept from both ends. (A machine that drops
            what it sends itself is told: its calls fail with EPERM.)
        incoming, outgoing: or of the machine.
    """

    name = ""

    def __init__(
        self, machine: Machine, rules: str = "", *, incoming: str = "", outgoing: str = ""
    ) -> None:
        self.machine = machine
        table = f"fault{next(_serial)}"
        if rules:
            self._where, self._table = machine.switch, f"bridge {table}"
            chains = _FORWARD.format(rules=rules)
        else:
            self._where, self._table = machine.namespace, f"inet {table}"
            chains = _OWN.format(incoming=incoming, outgoing=outgoing)
        self._rules = f"table {self._table} {{\n{chains}}}\n"
        self._acts = False

    def inject(self) -> None:
        """Add the rules."""
        if not self._acts:
            nft(self._where, self._rules)
            self._acts = True

    def heal(self) -> None:
        """Remove them."""
        if self._acts:
            nft(self._where, f"delete table {self._table}")
            self._acts = False


class BlackHole(_Rules):
    """Packets of a machine vanish both ways, with the cable plugged in: a router gone wrong."""

    name = "black hole"

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine, _either_way(machine, "drop"))


class PacketLoss(_Rules):
    """Of all packets of a machine a share is lost, in each direction.

    Args:
        machine: whose.
        percent: from 1 to 99.
    """

    name = "lose packets"

    def __init__(self, machine: Machine, percent: int) -> None:
        if not 1 <= percent <= 99:
            raise ValueError(f"percent {percent} is not between 1 and 99")
        rule = f"numgen random mod 100 < {percent} drop"
        super().__init__(machine, _either_way(machine, rule))


class Partition(_Rules):
    """Two machines do not see each other; both see all others.

    Args:
        machine: one of them.
        other: the other, on the same network.
    """

    name = "part two machines"

    def __init__(self, machine: Machine, other: Machine) -> None:
        ports = (machine.port, other.port)
        rules = (
            f'iifname "{one}" oifname "{another}" drop;' for one, another in (ports, ports[::-1])
        )
        super().__init__(machine, " ".join(rules))


class Reset(_Rules):
    """Each TCP segment of a machine, either way, is answered with a reset: connections die at once.

    New ones are refused until it is healed.
    """

    name = "reset connections"

    def __init__(self, machine: Machine) -> None:
        rule = "meta l4proto tcp reject with tcp reset;"
        super().__init__(machine, incoming=rule, outgoing=rule)


class _Queue:
    """A fault made of a queueing discipline, at both ends of a machine's cable.

    Args:
        machine: whose.
        discipline: as ``tc qdisc add … root`` takes it.
    """

    name = ""

    def __init__(self, machine: Machine, discipline: str) -> None:
        self.machine = machine
        self._discipline = discipline
        self._ends = ((machine.namespace, INTERFACE), (machine.switch, machine.port))
        self._acts = False

    def inject(self) -> None:
        """Put it at both ends."""
        if not self._acts:
            for namespace, device in self._ends:
                words = f"qdisc add dev {device} root {self._discipline}".split()
                run("ip", "netns", "exec", namespace, "tc", *words)
                self._acts = True

    def heal(self) -> None:
        """Take it away."""
        if self._acts:
            for namespace, device in self._ends:
                with contextlib.suppress(NetworkError):  # the second end may never have had it
                    run(
                        "ip",
                        "netns",
                        "exec",
                        namespace,
                        "tc",
                        "qdisc",
                        "del",
                        "dev",
                        device,
                        "root",
                    )
            self._acts = False


class Delay(_Queue):
    """Each packet of a machine arrives late.

    Args:
        machine: whose.
        seconds: how late, each way.
    """

    name = "delay packets"

    def __init__(self, machine: Machine, seconds: float) -> None:
        super().__init__(machine, f"netem delay {seconds * 1000:.3f}ms limit 100000")


class Throttle(_Queue):
    """A machine's cable carries less; what does not fit waits, up to a second, and then is lost.

    Args:
        machine: whose.
        mbit_s: megabits per second, each way.
    """

    name = "throttle a cable"

    def __init__(self, machine: Machine, mbit_s: float) -> None:
        rate = f"{mbit_s * 1000:.0f}kbit"
        super().__init__(machine, f"tbf rate {rate} burst 32kb latency 1s")


def _either_way(machine: Machine, rule: str) -> str:
    return " ".join(f'{side} "{machine.port}" {rule};' for side in ("iifname", "oifname"))


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
