"""How often a job failed while it ran, and how long it was down each time: for plans and reports.

Guarantees: a failure is what the job's own cadence takes for one (:class:`.past.Failures`): a drain
is none, whatever announced it; several losses before the job was back are one; a notice after which
the machine went before all was saved is one. The time in which nobody had started the job is
nobody's: it is neither running nor coming back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from outlast.ledger.events import Event
from outlast.ledger.incidents import Incident
from outlast.ledger.past import Failures
from outlast.policy.hazard import Posterior

_JUST_S = 1.0  # between what is told of a loss and the sample before it


class Lived(msgspec.Struct, frozen=True, kw_only=True):
    """A job's life.

    Attributes:
        ran_s: seconds in which it trained.
        num_failures: that ended some of it.
        known: what its cadence makes of that: what is long ago counts for less.
        failures: the incidents that they are told as.
        stops: (from, to) of each time in which nobody had started it.
    """

    ran_s: float
    num_failures: int
    known: Posterior
    failures: list[Incident]
    stops: list[tuple[float, float]]

    def away_s(self, begin_t: float, end_t: float) -> float:
        """Seconds between these in which nobody had started it."""
        return sum(max(min(end_t, to) - max(begin_t, since), 0.0) for since, to in self.stops)

    def downs_s(self) -> list[float]:
        """Of each failure: from its detection to the first new step, if the job is back."""
        return [
            one.back_t - one.detected_t - self.away_s(one.detected_t, one.back_t)
            for one in self.failures
            if one.back_t is not None
        ]

    def detections_s(self) -> list[float]:
        """Of each failure: until it was noticed."""
        return [
            one.detected_t - one.began_t - self.away_s(one.began_t, one.detected_t)
            for one in self.failures
        ]


def lived(ordered: Sequence[Event], incidents: Iterable[Incident]) -> Lived:
    """A job's life, from its events in order and the incidents in them."""
    seen, stops, stopped_t = Failures(), [], None
    for event in ordered:
        if event.get("joins"):  # another machine of the same attempt
            continue
        seen.see(event.event, event.t)
        if event.event in ("drained", "job_finished") and stopped_t is None:
            stopped_t = event.t
        elif event.event in ("job_started", "attempt_formed") and stopped_t is not None:
            stops.append((stopped_t, event.t))
            stopped_t = None
    failures = [
        one
        for one in incidents
        if any(
            one.began_t - _JUST_S <= t and (one.back_t is None or t <= one.back_t)
            for t in seen.moments
        )
    ]
    return Lived(
        ran_s=seen.ran_s,
        num_failures=len(seen.moments),
        known=seen.known,
        failures=failures,
        stops=stops,
    )
