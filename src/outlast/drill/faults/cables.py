"""The network between machines: cut, parted, reset, lossy, late, or narrow.

Machines are network namespaces with cables between them (:mod:`outlast.drill.network`), so there
have to be several. What a machine says to itself is never touched: a fault within one machine's
network does not exist.

Guarantees: each fault acts on one machine's cable and keeps what it needs to undo itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from outlast.drill import network
from outlast.drill.faults.fault import (
    MayLose,
    Missed,
    Plain,
    Promise,
    Struck,
    count_of,
    machine,
    no_machine,
    seconds_of,
    struck,
    within,
)
from outlast.drill.network import (
    BlackHole,
    Cut,
    Delay,
    NetworkError,
    NetworkFault,
    PacketLoss,
    Reset,
    Throttle,
)
from outlast.drill.target import Target

_LOST: Final = Promise(loses=MayLose.SNAPSHOT, restarts=2, must_notice=False)
_SLOW: Final = Promise(restarts=0, must_notice=False)


class _CableFault(NamedTuple):
    what: str
    done: str
    promise: Promise
    make: Callable[[network.Machine, float], NetworkFault]
    least: float = 0.0  # of the value
    most: float = 0.0  # 0 where a value means nothing
    unit: str = ""


KINDS: Final = {
    "cut-network": _CableFault(
        "the cable of a machine is pulled, and plugged in later",
        "the cable of machine {name} is pulled",
        _LOST,
        lambda cable, _: Cut(cable),
    ),
    "black-hole": _CableFault(
        "the packets of a machine vanish, with its cable plugged in",
        "all packets of machine {name} vanish",
        _LOST,
        lambda cable, _: BlackHole(cable),
    ),
    "reset-network": _CableFault(
        "all connections of a machine are reset, and new ones refused",
        "all connections of machine {name} are reset",
        _LOST,
        lambda cable, _: Reset(cable),
    ),
    "lose-packets": _CableFault(
        "a share of a machine's packets is lost (how much: percent)",
        "{value:g} % of the packets of machine {name} are lost",
        _SLOW,
        lambda cable, value: PacketLoss(cable, round(value)),
        *(1, 99, "percent"),
    ),
    "delay-network": _CableFault(
        "the packets of a machine are late (how much: seconds; needs a kernel with netem)",
        "the packets of machine {name} are {value:g} s late",
        _SLOW,
        Delay,
        *(0.001, 60, "seconds"),
    ),
    "throttle-network": _CableFault(
        "the cable of a machine carries little (how much: Mbit/s)",
        "the cable of machine {name} carries {value:g} Mbit/s",
        _SLOW,
        Throttle,
        *(0.01, 100_000, "Mbit/s"),
    ),
}


class BadCable(Plain):
    """Something is wrong with a machine's cable.

    Args:
        name: which of ``KINDS``.
        number: of the machine.
        value: how much of it, where that means something.
        for_s: how long.
    """

    def __init__(self, name: str, number: int = 0, value: float = 0.0, for_s: float = 5.0) -> None:
        if name not in KINDS:
            raise ValueError(f"{name!r} is nothing that a cable has; there are: {', '.join(KINDS)}")
        self._kind = KINDS[name]
        self.name, self.what, self.promise = name, self._kind.what, self._kind.promise
        self.number, self.lasts_s = count_of("machine", number), seconds_of("for_s", for_s)
        self.value = value
        if self._kind.most:
            within(f"{name} of value", value, self._kind.least, self._kind.most, self._kind.unit)
        self._acts: NetworkFault | None = None

    def why_not(self, target: Target) -> str:
        """There must be a cable, and the kernel's part of the fault."""
        if why_not := no_machine(target, self.number):
            return why_not
        if target.machines[self.number].cable is None:
            return network.unusable() or "the job has one machine, and no network: give it more"
        return network.cannot_delay() if self.name == "delay-network" else ""

    def inject(self, target: Target) -> Struck:
        """Let it happen."""
        place = machine(target, self.number)
        if place.cable is None:
            raise Missed(self.why_not(target))
        words = self._kind.done.format(name=place.name, value=self.value)
        done = struck(target, f"{words}, from step {{step}} on", self._event())
        self._acts = self._kind.make(place.cable, self.value)
        try:
            self._acts.inject()
        except NetworkError as error:
            self.heal(target)
            raise Missed(str(error)) from None
        done.last_step = target.completed()  # the programs that do it take longer than a step
        return done

    def heal(self, target: Target) -> None:
        """Undo it."""
        acts, self._acts = self._acts, None
        if acts is not None:
            acts.heal()

    def _event(self) -> str:
        return "node_lost" if self.promise is _LOST else ""
