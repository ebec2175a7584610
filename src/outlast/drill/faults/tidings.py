"""What a machine is told: that it will be taken back, and what time it is.

A notice comes as it does from EC2 (its metadata protocol, over HTTP), or as SIGTERM from a
scheduler. When its lead is over, what still runs of the start that was told is killed, as the
machine would be. A clock jumps as after a wrong step of NTP, or on a VM that was paused.

Guarantees: only the machine that is meant is told; all machines ask all the time, each its own
service at the same address on its own loopback. The machine's own clock is not touched: the job's
processes see another time (``outlast.drill.clock`` says where they do not).
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Final

from outlast.drill import clock
from outlast.drill.faults.fault import (
    FOR_GOOD,
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
)
from outlast.drill.faults.processes import signal_all
from outlast.drill.metadata_server import AwsMetadataServer
from outlast.drill.target import JobMachine, Target
from outlast.errors import Exit

AMPLE_S: Final = 20.0  # with so much time a save is made in any case
_KILLED: Final = (-signal.SIGKILL, 128 + signal.SIGKILL)


class _Announced(Plain):
    """The machine goes ``lead_s`` from now.

    Args:
        number: of the machine.
        lead_s: how long it has.
    """

    def __init__(self, number: int = 0, lead_s: float = 120.0) -> None:
        self.number = count_of("machine", number)
        self.lead_s = self.lasts_s = lead_s = seconds_of("lead_s", lead_s)
        drained = (int(Exit.DRAINED),)
        if lead_s >= AMPLE_S:
            self.promise = Promise(exit_codes=drained)
        else:
            self.promise = Promise(loses=MayLose.COMMIT, exit_codes=(*drained, *_KILLED))
        self._told: tuple[JobMachine, int, float] | None = None  # machine, agent, when it goes

    def why_not(self, target: Target) -> str:
        """A machine must be one of the job's."""
        return no_machine(target, self.number)

    def heal(self, target: Target) -> None:
        """Take the notice back; if its time is over, the machine goes first."""
        told, self._told = self._told, None
        if told is not None:
            place, agent, goes_t = told
            if time.monotonic() >= goes_t and place.agent == agent:
                place.kill()

    def _tell(self, target: Target) -> tuple[JobMachine, int]:
        place = machine(target, self.number)
        agent = place.agent
        if agent is None:
            raise Missed(f"machine {place.name} is down")
        self._told = place, agent, time.monotonic() + self.lead_s
        return place, agent


class AwsNotice(_Announced):
    """EC2 says that a spot machine will be taken back."""

    name = "notice"
    what = "EC2's metadata service says that the machine will be taken back, a while ahead"

    def __init__(self, number: int = 0, lead_s: float = 120.0) -> None:
        super().__init__(number, lead_s)
        self._servers: list[AwsMetadataServer] = []

    def prepare(self, target: Target) -> None:
        """A service for each machine, all at one address, each on its machine's own loopback."""
        port = 0
        for place in target.machines:
            server = made(place, port)
            port = server.port
            self._servers.append(server)
            server.start()
        target.environ["OUTLAST_NOTICE_PLATFORM"] = "aws"
        target.environ["OUTLAST_NOTICE_BASE_URL"] = self._servers[0].url
        target.environ.setdefault("OUTLAST_NOTICE_POLL", "500 ms")

    def inject(self, target: Target) -> Struck:
        """Put the notice up."""
        place, _ = self._tell(target)
        self._servers[self.number].preempt(in_s=self.lead_s)
        words = f"EC2 takes machine {place.name} back in {self.lead_s:g} s (said in step {{step}})"
        return struck(target, words, "notice")

    def heal(self, target: Target) -> None:
        """The next machine in this one's place has heard nothing."""
        super().heal(target)
        if self._servers:
            self._servers[self.number].withdraw()

    def release(self, target: Target) -> None:
        """Stop the services."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.stop()


def made(place: JobMachine, port: int) -> AwsMetadataServer:
    """A metadata service on a machine's own loopback; one on port 0 finds a free one."""
    if place.cable is None:
        return AwsMetadataServer(port=port)
    return place.cable.within(lambda: AwsMetadataServer(port=port))


class SigtermNotice(_Announced):
    """SIGTERM to an agent, as schedulers send it; SIGKILL when its time is over."""

    name = "sigterm"
    what = "SIGTERM to an agent, as a scheduler sends it, and SIGKILL a while later"

    def __init__(self, number: int = 0, lead_s: float = 30.0) -> None:
        super().__init__(number, lead_s)

    def inject(self, target: Target) -> Struck:
        """Send SIGTERM."""
        place, agent = self._tell(target)
        words = f"SIGTERM to machine {place.name}, {self.lead_s:g} s ahead, in step {{step}}"
        done = struck(target, words, "notice")
        signal_all([agent], signal.SIGTERM)
        return done


class ClockJump(Plain):
    """The wall clock jumps.

    What the job writes of times is then of that clock: events of the ledger, too.

    Args:
        by_s: how far; negative: back.
        number: of the machine; None for all.
        for_s: after so long it jumps back.
    """

    name = "clock-jump"
    what = "the wall clock of the job's Python processes jumps, and back later"
    promise = Promise(restarts=0, must_notice=False)

    def __init__(self, by_s: float, number: int | None = None, for_s: float = FOR_GOOD) -> None:
        seconds_of("by_s", abs(by_s) if isinstance(by_s, int | float) else by_s)
        self.by_s, self.lasts_s = by_s, seconds_of("for_s", for_s, for_good=True)
        self.number = None if number is None else count_of("machine", number)

    def why_not(self, target: Target) -> str:
        """A machine must be one of the job's."""
        return "" if self.number is None else no_machine(target, self.number)

    def prepare(self, target: Target) -> None:
        """Every Python process of the job gets a clock that can be moved."""
        clock.install(_clocks(target), [place.name for place in target.machines], target.environ)

    def inject(self, target: Target) -> Struck:
        """Let it jump."""
        where = "all machines" if self.number is None else machine(target, self.number).name
        done = struck(target, f"the clock of {where} jumps by {self.by_s:+g} s in step {{step}}")
        self._set(target, self.by_s)
        return done

    def heal(self, target: Target) -> None:
        """It jumps back."""
        if _clocks(target).is_dir():
            self._set(target, 0.0)

    def _set(self, target: Target, seconds: float) -> None:
        for place in target.machines:
            if self.number in (None, place.number):
                clock.move(_clocks(target), place.name, seconds)


def _clocks(target: Target) -> Path:
    return target.run / "clocks"
