"""What was recorded elsewhere, read: spot fleets, failures, lifetimes, availability.

===========  =====================================================  ==========================
format       what a line or an object holds                         told by
===========  =====================================================  ==========================
bamboo       ``time_ms,add|remove,node``, no header                 the second column
lanl         ``t_hours,node,downtime_min``                          the header
lifetimes    a column ``lifetime_s``, one machine a line            the header
skypilot     JSON: ``gap_seconds``, ``data``: how many are there    a ``{`` first
===========  =====================================================  ==========================

Every reader refuses what it cannot take in one line that names the file and the row: times that go
back, values that are missing (a gap is no failure, and no quiet time either), a node that leaves
without having come. SkyPilot's files may hold the two under ``metadata`` and at the top. What
spreadsheets and data frames add is read over: a byte-order mark, quotes, blanks, lines at the end,
names of columns before a fleet's rows.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import msgspec

from outlast.errors import ConfigError

Kind = Literal["fleet", "failures", "lifetimes"]
SECONDS_A_HOUR: Final = 3600.0
MACHINES_MAX: Final = 100_000
LONGEST_S: Final = 1e10  # three centuries
_CHANGES: Final = ("add", "remove")


class FleetChange(msgspec.Struct, frozen=True, kw_only=True):
    """Machines that come and go at one moment; ``back_s``: how long those that go stay away."""

    at_s: float
    came: tuple[str, ...] = ()
    went: tuple[str, ...] = ()
    back_s: float = math.inf


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """One recording of failures or machines.

    Attributes:
        name: its file's.
        kind: whether it says which machines were there ("fleet"), which failed ("failures"), or
            how long each lasted ("lifetimes").
        length_s: of the recording.
        changes: in order; of lifetimes none.
        machines: most at once, or as many as are named.
        lifetimes_s: of lifetimes alone.
    """

    name: str
    kind: Kind
    length_s: float
    changes: tuple[FleetChange, ...] = ()
    machines: int = 1
    lifetimes_s: tuple[float, ...] = ()

    @property
    def losses(self) -> list[float]:
        """Moments at which at least one machine went, in seconds; each once."""
        return [change.at_s for change in self.changes if change.went]


def read(path: Path) -> Recording:
    """A trace in any of the formats above.

    Raises:
        ConfigError: it cannot be read, is of no known format, or does not make sense.
    """
    try:
        text = path.read_text(encoding="utf-8-sig").rstrip()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give a trace's file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file; give a trace in CSV or JSON") from None
    if text.lstrip().startswith("{"):
        return _skypilot(path.name, text)
    rows = list(_rows(path.name, text))
    first, second = ([row for _, row in rows[:2]] + [[], []])[:2]
    if len(second) == 3 and second[1] in _CHANGES and not first[0][:1].isdigit():
        rows, first = rows[1:], second  # names of columns
    if len(first) == 3 and first[1] in _CHANGES:
        return _bamboo(path.name, rows)
    if first[:3] == ["t_hours", "node", "downtime_min"]:
        return _lanl(path.name, rows)
    if "lifetime_s" in first:
        return _lifetimes(path.name, rows, first.index("lifetime_s"))
    begin = text[:40].splitlines()[0] if text else "an empty file"
    raise ConfigError(
        f"{path.name}: {begin!r} begins no trace; known are time_ms,add|remove,node; "
        "t_hours,node,downtime_min; a column lifetime_s; and SkyPilot's JSON with gap_seconds"
    )


def in_slots(trace: Recording) -> Iterator[tuple[float, tuple[int, ...], tuple[int, ...]]]:
    """A fleet's changes as (moment, slots that were filled, slots that became empty).

    A machine that comes takes the slot that has been empty for longest.
    """
    free, slots = list(range(trace.machines)), dict[str, int]()
    for change in trace.changes:
        came, went = [], []
        for node in change.went:
            free.append(slots[node])
            went.append(slots.pop(node))
        for node in change.came:
            slots[node] = free.pop(0)
            came.append(slots[node])
        yield change.at_s, tuple(came), tuple(went)


def _rows(name: str, text: str) -> Iterator[tuple[int, list[str]]]:
    """Each line's number and its fields."""
    lines = text.splitlines()
    for number, raw in enumerate(csv.reader(lines, skipinitialspace=True), 1):
        row = [field.strip() for field in raw]
        if not any(row):
            _refuse(name, number, "is empty; a gap in a trace is neither a failure nor quiet time")
        yield number, row


def _bamboo(name: str, rows: Iterable[tuple[int, list[str]]]) -> Recording:
    moments: dict[float, tuple[list[str], list[str]]] = {}
    here: set[str] = set()
    most, before_s = 1, 0.0
    for number, row in rows:
        if len(row) != 3 or row[1] not in _CHANGES:
            _refuse(name, number, f"is {','.join(row)!r}, and not time_ms,add|remove,node")
        at_s = _number(name, number, row[0]) / 1000
        before_s = _in_order(name, number, before_s, at_s)
        came, went = moments.setdefault(at_s, ([], []))
        node = row[2]
        if (node in here) == (row[1] == "add"):
            how = "comes again without having gone" if node in here else "goes without having come"
            _refuse(name, number, f"says that {node} {how}; is a part of the trace missing?")
        (came if row[1] == "add" else went).append(node)
        (here.add if row[1] == "add" else here.discard)(node)
        most = max(most, len(here))
    changes = [
        FleetChange(at_s=at_s, came=tuple(came), went=tuple(went))
        for at_s, (came, went) in moments.items()
    ]
    return _whole(name, "fleet", changes, before_s, most)


def _lanl(name: str, rows: Iterable[tuple[int, list[str]]]) -> Recording:
    moments: dict[float, dict[str, float]] = {}
    nodes: set[str] = set()
    before_s = 0.0
    for number, row in rows:
        if number == 1:
            continue
        if len(row) != 3:
            _refuse(name, number, f"has {len(row)} values, and not t_hours,node,downtime_min")
        at_s = _number(name, number, row[0]) * SECONDS_A_HOUR
        before_s = _in_order(name, number, before_s, at_s)
        down_s = 60 * _number(name, number, row[2])
        together = moments.setdefault(at_s, {})
        together[row[1]] = max(down_s, together.get(row[1], 0.0))
        nodes.add(row[1])
    changes = [
        FleetChange(at_s=at_s, went=tuple(down), back_s=max(down.values()))
        for at_s, down in moments.items()
    ]
    return _whole(name, "failures", changes, before_s, len(nodes))


def _lifetimes(name: str, rows: Iterable[tuple[int, list[str]]], column: int) -> Recording:
    lifetimes_s = []
    for number, row in rows:
        if number == 1:
            continue
        if len(row) <= column:
            _refuse(name, number, "has no lifetime_s")
        lifetime_s = _number(name, number, row[column])
        if not 0 < lifetime_s <= LONGEST_S:
            _refuse(name, number, f"has a lifetime of {lifetime_s:g} s")
        lifetimes_s.append(lifetime_s)
    if not lifetimes_s:
        raise ConfigError(f"{name} holds no lifetime; give one machine's lifetime_s a line")
    return Recording(
        name=name,
        kind="lifetimes",
        length_s=max(lifetimes_s),
        machines=len(lifetimes_s),
        lifetimes_s=tuple(lifetimes_s),
    )


def _skypilot(name: str, text: str) -> Recording:
    try:
        raw: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    metadata = raw.get("metadata")
    gap_s = raw.get("gap_seconds", metadata.get("gap_seconds") if isinstance(metadata, dict) else 0)
    if isinstance(gap_s, bool) or not isinstance(gap_s, int | float) or not 0 < gap_s < math.inf:
        raise ConfigError(f"{name}: gap_seconds is {gap_s!r}, and not a number of seconds")
    data = raw.get("data")
    if not isinstance(data, list) or not data:
        raise ConfigError(f"{name}: data is no list of 1 (available) and 0")
    changes, before, most = [], 0, 1
    for number, value in enumerate(data):
        if not isinstance(value, int | float) or value not in range(MACHINES_MAX + 1):
            raise ConfigError(
                f"{name}: value {number + 1} of data, {number * gap_s:g} s after the start, is "
                f"{value!r} and no number of machines (1 is available, 0 is not): if that is a "
                "gap, cut the trace there"
            )
        now = int(value)
        came = tuple(f"spot {one}" for one in range(before, now))
        went = tuple(f"spot {one}" for one in range(now, before))
        if came or went:
            changes.append(FleetChange(at_s=number * gap_s, came=came, went=went))
        before, most = now, max(most, now)
    return _whole(name, "fleet", changes, len(data) * gap_s, most)


def _whole(
    name: str, kind: Kind, changes: list[FleetChange], length_s: float, machines: int
) -> Recording:
    if not changes or length_s <= 0:
        raise ConfigError(f"{name} holds no change of the fleet and no failure: nothing to replay")
    return Recording(
        name=name, kind=kind, length_s=length_s, changes=tuple(changes), machines=machines
    )


def _in_order(name: str, number: int, before_s: float, at_s: float) -> float:
    if at_s > LONGEST_S:
        _refuse(name, number, f"is at {at_s:g} s, which is no time of a recording")
    if at_s < before_s:
        _refuse(name, number, f"is at {at_s:g} s, before {before_s:g} s of the row above: sort it")
    return at_s


def _number(name: str, number: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        _refuse(name, number, f"has {text!r} where a number stands")
    if not math.isfinite(value) or value < 0:
        _refuse(name, number, f"has {text!r} where a number from 0 stands")
    return value


def _refuse(name: str, number: int, problem: str) -> NoReturn:
    raise ConfigError(f"{name}: row {number} {problem}")
