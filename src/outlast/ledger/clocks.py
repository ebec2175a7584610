"""Clock steps, taken out of a ledger: each machine's wall clock as if nobody had set it.

Every event has its machine's wall-clock time and its monotonic time, which nobody can set. Their
difference belongs to a machine and its boot: it creeps where a clock is disciplined, and leaps
where it is set. A leap is taken back in all events behind it (their times are those that the clock
would have shown), until the clock is set right again or the machine boots anew.

Guarantees: without a leap nothing is changed. Events keep their order and their number, and every
field but those that are wall-clock times. It works on a ledger as it grows: an event is changed by
what came before it alone.

What can go wrong: a clock that was wrong when the job began there and was set right later stays
wrong, as one that differs from other machines' does anyway. A reboot is known by the ``boot`` of
``job_started``; where an older version has not written it, by monotonic time that begins again; and
a machine's leap between an end and a start that cannot be told from a reboot is taken for one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from outlast.ledger.events import Event

STEP_S: Final = 0.5  # a clock that is disciplined is slewed below that (ntpd steps from 0.128 s on)
SLACK_S: Final = 60.0  # lines of several processes are not in the order of their monotonic times


class _Boot:
    """One machine since it was booted: what its wall clock is ahead of its monotonic one."""

    __slots__ = ("boot", "mono", "offset_s", "seen_s")

    def __init__(self, boot: object, event: Event) -> None:
        self.boot, self.mono = boot, event.mono
        self.offset_s = self.seen_s = event.t - event.mono


class SteadyClocks:
    """Takes events as a ledger has them, one after another.

    Attributes:
        shift_s: what was added to the newest event's time; to be added to "now", too.
    """

    def __init__(self) -> None:
        self.shift_s = 0.0
        self._boots: dict[str, _Boot] = {}

    def take(self, event: Event) -> Event:
        """The event as its machine would have written it, had its clock not been set."""
        known = self._boots.get(event.node)
        if known is None or self._is_another_boot(known, event):
            boot = event.get("boot") if event.event == "job_started" else None
            self._boots[event.node] = _Boot(boot, event)
            self.shift_s = 0.0
            return event
        known.mono = max(known.mono, event.mono)
        offset_s = event.t - event.mono
        if abs(offset_s - known.seen_s) <= STEP_S:  # it creeps, whether it was set or not
            known.offset_s += offset_s - known.seen_s
        elif abs(offset_s - known.offset_s) <= STEP_S:  # set right again
            known.offset_s = offset_s
        known.seen_s = offset_s
        self.shift_s = known.offset_s - offset_s
        if abs(self.shift_s) <= STEP_S:
            self.shift_s = 0.0
            return event
        return _shifted(event, self.shift_s)

    @staticmethod
    def _is_another_boot(known: _Boot, event: Event) -> bool:
        if event.event == "job_started":
            boot = event.get("boot")
            if boot is not None and known.boot is not None:
                return bool(boot != known.boot)
            known.boot = known.boot or boot
            return abs(event.t - event.mono - known.seen_s) > STEP_S
        return event.mono < known.mono - SLACK_S


def steady(events: Iterable[Event]) -> tuple[list[Event], float]:
    """A whole ledger, in the file's order, without its clock steps; and the shift of "now"."""
    clocks = SteadyClocks()
    return [clocks.take(event) for event in events], clocks.shift_s


def _shifted(event: Event, by_s: float) -> Event:
    fields = {
        name: value + by_s if name.endswith("_t") and isinstance(value, int | float) else value
        for name, value in event.fields.items()
    }
    return msgspec.structs.replace(event, t=event.t + by_s, fields=fields)
