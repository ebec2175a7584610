"""Slow ranks, from the ledger: a sentence for each finding, and what waiting for them has cost.

What it cost is an estimate: the seconds of each step that the others wait, as judged when the rank
was named, times the steps from when it began until it was over, or the newest step of the attempt.
These seconds are part of what goodput calls productive; they are shown beside it and never
subtracted. Where two ranks are slow at once, the steps wait for the slower one alone: at each step
the greater loss counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec

from outlast.ledger.events import Event
from outlast.ledger.goodput import in_order, number, whole


class Slow(msgspec.Struct, frozen=True, kw_only=True):
    """A slow rank, from its first slow step to its last.

    Attributes:
        attempt, node, ranks: who; the ranks of one machine that were found together.
        cause: "compute", "loader" or "burst".
        factor: how many times as long as the others' its work took.
        since_step, until_step: the first and the newest step it is known to have been slow in.
        lost_s: seconds that each worker has waited for it, estimated.
        over: whether it has recovered.
        action: what was done.
    """

    attempt: int
    node: str
    ranks: tuple[int, ...]
    cause: str
    factor: float
    since_step: int
    until_step: int
    lost_s: float
    over: bool
    action: str


def slow_ranks(events: Iterable[Event]) -> list[Slow]:
    """Those of a job, in the order in which they were found."""
    found: list[Slow] = []
    rates: list[float] = []
    newest: dict[int, int] = {}  # attempt → step
    for event in in_order(events):
        step = whole(event)
        if event.event == "step" and step is not None:
            newest[event.attempt] = max(step, newest.get(event.attempt, 0))
        if event.event != "straggler" or step is None:
            continue
        newest[event.attempt] = max(step, newest.get(event.attempt, 0))
        ranks = _ranks(event)
        if event.get("over") and event.get("cause") != "burst":
            for place, one in enumerate(found):
                if one.attempt == event.attempt and not one.over and set(ranks) & set(one.ranks):
                    found[place] = msgspec.structs.replace(one, over=True, until_step=step)
            continue
        since = whole(event, "since_step")
        rates.append(max(number(event, "lost_s") or 0.0, 0.0))
        found.append(
            Slow(
                attempt=event.attempt,
                node=str(event.get("node") or event.node),
                ranks=ranks,
                cause=str(event.get("cause") or "compute"),
                factor=number(event, "factor") or 1.0,
                since_step=step if since is None else min(since, step),
                until_step=step,
                lost_s=0.0,
                over=bool(event.get("over")),
                action=str(event.get("action") or "report"),
            )
        )
    return [_counted(one, rate, newest) for one, rate in zip(found, rates, strict=True)]


def lost_to_waiting_s(found: Iterable[Slow]) -> float:
    """Seconds of each worker that slow ranks have cost: of those at the same time, the worst."""
    edges: set[tuple[int, int]] = set()
    spans = []
    for one in found:
        steps = one.until_step - one.since_step + 1
        spans.append((one.attempt, one.since_step, one.until_step + 1, one.lost_s / steps))
        edges |= {(one.attempt, one.since_step), (one.attempt, one.until_step + 1)}
    total, ordered = 0.0, sorted(edges)
    for (attempt, first), (other, last) in itertools.pairwise(ordered):
        if attempt == other:
            rates = [r for a, since, until, r in spans if a == attempt and since <= first < until]
            total += max(rates, default=0.0) * (last - first)
    return total


def sentence(event: Event) -> str:
    """What a person should read of a finding."""
    ranks = _ranks(event) or (-1,)
    node = event.get("node") or event.node
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    who = f"{who} on {node}"
    one, since = len(ranks) == 1, event.get("since_step")
    if event.get("over") and event.get("cause") != "burst":
        be = "is" if one else "are"
        return f"{who} {be} as quick as the others again, at step {event.get('step')}"
    own, others = number(event, "own_s") or 0.0, number(event, "others_s") or 0.0
    factor = number(event, "factor") or 1.0
    if event.get("of") == "loader":
        how = f"{'waits' if one else 'wait'} longer for data than the others"
    else:
        how = f"{'computes' if one else 'compute'} {factor:.3g} times as long as the others"
    figures = f"({_time(own)} against {_time(others)})"
    if event.get("cause") == "burst":
        return f"{who} {how} {figures} for some steps from step {since} on; it was a burst"
    where = ", in steps with saves" if event.get("saving") else ""
    lost = _time(number(event, "lost_s") or 0.0)
    return (
        f"{who} {how} {figures} since step {since}{where}; "
        f"of each step {lost} are lost waiting for {'it' if one else 'them'}"
    )


def _ranks(event: Event) -> tuple[int, ...]:
    listed = event.get("ranks")
    ranks = listed if isinstance(listed, list | tuple) else [event.rank]
    return tuple(sorted(rank for rank in ranks if isinstance(rank, int)))


def _counted(one: Slow, rate: float, newest: dict[int, int]) -> Slow:
    until = one.until_step if one.over else max(newest.get(one.attempt, 0), one.until_step)
    steps = until - one.since_step + 1
    return msgspec.structs.replace(one, until_step=until, lost_s=rate * steps)


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
