"""What this job's own saves and steps have shown: seconds to each tier, seconds a step.

A fold over the ledger, so the agent, a worker and a report see the same numbers. Only the newest
are looked at: storage that has become slow is slow. "Slow" is the ninth decile, which for few
numbers is the largest; "fast" is the smallest.

``Interference`` says by how much copies to a tier slow the steps down, as the ledger's samples
tell. A sample counts as made during a copy if most of its time was, and as undisturbed if no save
and no copy touched it. The share is the difference of the two medians. Only the newest samples are
looked at; until there are ``LEAST`` of each, nothing is said. Samples are means over a second or
more, so that copies of less than that stay unmeasured: they cost next to nothing.

``tier_times`` is what copying to each tier took, in all. What a snapshot has blocked belongs to the
tiers that it was for, in equal shares; where it was for all of them, to those that the step is in.

``SampledSteps`` says how long steps took, for all who show that.

What can go wrong: batches that happen to be longer while a copy goes on. Over some copies that
evens out; a share below nothing is nothing, one above ``MOST`` is ``MOST``.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from outlast.ledger.events import Event
from outlast.ledger.goodput import number, whole

NEWEST_SAVES: Final = 20
NEWEST_STEPS: Final = 50
SLOW: Final = 0.9


class SecondsRange(NamedTuple):
    """Seconds, when it goes slowly and when it goes well."""

    slow_s: float
    fast_s: float


class Measured:
    """Take events in the order they were written; ask at any time.

    Attributes:
        newest: tier → the newest step that can be resumed from there.
        sizes: tier → bytes of the newest whole checkpoint.
        missed: the newest step since the last resume that a tier did not get, and why.
        kinds: machine → its kind, as far as that is known.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.newest: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.missed: tuple[int, str] | None = None
        self.kinds: dict[str, str] = {}
        self._saves: dict[str, collections.deque[float]] = {}
        self._steps: collections.deque[float] = collections.deque(maxlen=NEWEST_STEPS)
        self._step: tuple[int, int] | None = None  # attempt and step of the newest sample
        for event in events:
            self.take(event)

    def take(self, event: Event) -> None:
        """Learn from one event; one that does not say what it should teaches nothing."""
        if event.event == "commit" and event.get("kind", "full") == "full":
            self._saved(event, event.get("durable_s"))
        elif event.event == "tier_copied":
            self._saved(event, event.get("seconds"))
        elif event.event == "step":
            self._stepped(event)
        elif event.event == "save_skipped" and event.get("tier"):
            self._missed(event)
        elif event.event == "machine":
            self.kinds[event.node] = str(event.get("kind") or "")
        elif event.event == "resumed":
            step = event.get("step")
            self.missed = None  # what was lost before is known, and made again
            self._step = (event.attempt, step if isinstance(step, int) else 0)

    def save(self, tier: str) -> SecondsRange | None:
        """Seconds until a save is in ``tier``; None when there was none yet."""
        return _range(self._saves.get(tier, ()))

    @property
    def step(self) -> SecondsRange | None:
        """Seconds that a step takes; None before the first."""
        return _range(self._steps)

    def _saved(self, event: Event, seconds: object) -> None:
        tier, step, size = event.get("tier"), event.get("step"), event.get("bytes")
        if not isinstance(tier, str) or not tier or not isinstance(step, int):
            return
        self.newest[tier] = max(step, self.newest.get(tier, 0))
        if isinstance(size, int):
            self.sizes[tier] = size
        if isinstance(seconds, int | float):
            known = self._saves.setdefault(tier, collections.deque(maxlen=NEWEST_SAVES))
            known.append(float(seconds))

    def _missed(self, event: Event) -> None:
        step, reason = event.get("step"), event.get("reason")
        if isinstance(step, int) and isinstance(reason, str):
            self.missed = max((step, reason), self.missed or (0, ""))

    def _stepped(self, event: Event) -> None:
        step, seconds = event.get("step"), event.get("seconds")
        if not isinstance(step, int) or not isinstance(seconds, int | float):
            return
        if self._step is not None and self._step[0] == event.attempt and step > self._step[1]:
            # What a checkpoint held up is not the step's own time.
            stalled_s = event.get("stalled_s")
            own_s = max(seconds - (stalled_s if isinstance(stalled_s, int | float) else 0.0), 0.0)
            self._steps.append(own_s / (step - self._step[1]))
        self._step = (event.attempt, step)


def _range(values: Iterable[float]) -> SecondsRange | None:
    ordered = sorted(values)
    if not ordered:
        return None
    return SecondsRange(ordered[min(int(SLOW * len(ordered)), len(ordered) - 1)], ordered[0])


class TierTime(msgspec.Struct, frozen=True, kw_only=True):
    """What bringing checkpoints to one tier took.

    Attributes:
        num: checkpoints that came there.
        bytes: of them.
        seconds: from each snapshot, or each copy's beginning, until it was there; training goes on.
        slowest_s: the longest of these.
        blocked_s: training waited for snapshots that were for it.
        num_skipped: checkpoints that it did not get.
        newest_step: that is there.
    """

    num: int = 0
    bytes: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    blocked_s: float = 0.0
    num_skipped: int = 0
    newest_step: int = 0


def tier_times(events: Iterable[Event]) -> dict[str, TierTime]:
    """Tier → what it took; in the order in which they were first heard of."""
    found: dict[str, dict[str, float]] = collections.defaultdict(
        lambda: dict.fromkeys(TierTime.__struct_fields__, 0)
    )
    came: collections.defaultdict[int, set[str]] = collections.defaultdict(set)
    for_all: collections.defaultdict[int, float] = collections.defaultdict(float)  # step → seconds
    for event in events:
        name, tier = event.event, event.get("tier")
        if name in ("commit", "tier_copied"):
            seconds = number(event, "durable_s" if name == "commit" else "seconds")
            if not isinstance(tier, str) or not tier or seconds is None or seconds < 0:
                continue
            one = found[tier]
            one["num"] += 1
            one["bytes"] += whole(event, "bytes") or 0
            one["seconds"] += seconds
            one["slowest_s"] = max(one["slowest_s"], seconds)
            one["newest_step"] = max(one["newest_step"], whole(event) or 0)
            came[whole(event) or 0].add(tier)
        elif name == "snapshot":
            tiers, blocked_s = event.get("tiers"), number(event, "blocked_s")
            if blocked_s is None or blocked_s < 0:
                continue
            if not isinstance(tiers, list):
                for_all[whole(event) or 0] += blocked_s
                continue
            named = {each for each in tiers if isinstance(each, str)}
            for each in named:
                found[each]["blocked_s"] += blocked_s / len(named)
        elif name == "save_skipped" and isinstance(tier, str):
            found[tier]["num_skipped"] += 1
    for step, blocked_s in for_all.items():
        for each in came.get(step, ()):
            found[each]["blocked_s"] += blocked_s / len(came[step])
    return {tier: msgspec.convert(one, TierTime) for tier, one in found.items()}


class SampledSteps:
    """How long steps took, in the mean from one of rank 0's samples to the next of its attempt."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}  # attempt → the step of its newest sample

    def take(self, event: Event) -> tuple[float, int] | None:
        """Seconds of a step and how many there were; None where an event says nothing of it."""
        step = whole(event)
        if event.event == "resumed" and event.rank == 0:
            self._newest[event.attempt] = step or 0
        seconds = number(event, "seconds") if event.event == "step" and event.rank == 0 else None
        if seconds is None or step is None:
            return None
        since = self._newest.get(event.attempt)
        self._newest[event.attempt] = step
        return None if since is None or step <= since else (seconds / (step - since), step - since)


NEWEST_SAMPLES: Final = 200
NEWEST_COPIES: Final = 40
LEAST: Final = 5
MOST: Final = 1.0
_HALF: Final = 0.5


class _TimeSpan(NamedTuple):
    begin_t: float
    end_t: float

    def shared(self, other: _TimeSpan) -> float:
        """The share of this one that lies in the other."""
        both = min(self.end_t, other.end_t) - max(self.begin_t, other.begin_t)
        return max(both, 0.0) / max(self.end_t - self.begin_t, 1e-9)


class Interference:
    """Take events in the order they were written; ask at any time."""

    def __init__(self) -> None:
        self._samples: collections.deque[tuple[_TimeSpan, float]]
        self._samples = collections.deque(maxlen=NEWEST_SAMPLES)
        self._saves: collections.deque[_TimeSpan] = collections.deque(maxlen=NEWEST_COPIES)
        self._copies: collections.deque[tuple[str, _TimeSpan]]
        self._copies = collections.deque(maxlen=NEWEST_COPIES)
        self._newest: tuple[int, int] | None = None  # attempt and step

    def take(self, event: Event) -> None:
        """Learn from one event."""
        if event.event == "step":
            self._sampled(event)
        elif event.event == "commit":
            self._took(event, event.get("durable_s"))
        elif event.event == "tier_copied":
            self._took(event, event.get("seconds"))

    def slowed(self, tier: str) -> float | None:
        """Share by which steps are slower while something is copied there; None if unknown."""
        copies = [span for name, span in self._copies if name == tier]
        others = [*self._saves, *(span for name, span in self._copies if name != tier)]
        during, alone = [], []
        for span, step_s in self._samples:
            if any(span.shared(other) > 0 for other in others):
                continue
            shares = [span.shared(copy) for copy in copies]
            if sum(shares) > _HALF:
                during.append(step_s)
            elif not any(shares):
                alone.append(step_s)
        if min(len(during), len(alone)) < LEAST:
            return None
        usual_s = statistics.median(alone)
        if usual_s <= 0:
            return None
        return min(max(statistics.median(during) / usual_s - 1, 0.0), MOST)

    def _took(self, event: Event, seconds: object) -> None:
        if not isinstance(seconds, int | float) or seconds < 0:
            return
        span = _TimeSpan(event.t - seconds, event.t)
        if event.event == "commit":
            self._saves.append(span)
        else:
            self._copies.append((str(event.get("tier")), span))

    def _sampled(self, event: Event) -> None:
        step, seconds = event.get("step"), event.get("seconds")
        if not isinstance(step, int) or not isinstance(seconds, int | float):
            return
        last, self._newest = self._newest, (event.attempt, step)
        if last is None or last[0] != event.attempt or step <= last[1] or event.get("stalled_s"):
            return
        span = _TimeSpan(event.t - seconds, event.t)
        self._samples.append((span, seconds / (step - last[1])))
