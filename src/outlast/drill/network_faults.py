"""What can happen to machines on a network, each fault a small object: inject it, heal it.

A fault acts when it is told to and keeps nothing but what it needs to undo itself; several may act
on one machine at a time, and each is healed alone. What a machine says to itself over its loopback
is never touched.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Sequence
from typing import Final, Protocol

from outlast.drill.network import Machine, nft

_FORWARD: Final = """\
  chain forward {{ type filter hook forward priority 0; policy accept; {rules} }}
"""
_OWN: Final = """\
  chain incoming {{ type filter hook input priority 0; policy accept; iif lo accept; {incoming} }}
  chain outgoing {{ type filter hook output priority 0; policy accept; oif lo accept; {outgoing} }}
"""
_serial = itertools.count()


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


class Loss(_Rules):
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


def _either_way(machine: Machine, rule: str) -> str:
    return " ".join(f'{side} "{machine.port}" {rule};' for side in ("iifname", "oifname"))


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
