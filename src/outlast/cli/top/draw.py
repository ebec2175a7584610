"""A view as lines that fit a terminal, as one line of a log, and the colours of both.

What a person at night looks for comes first: does it run, how far is it, what is wrong. A screen
that is too low keeps that, then the newest incidents; a narrow one drops columns from the right and
wraps what is a list. Nothing is told by colour alone.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text

from outlast import units
from outlast.cli.top.view import IncidentView, MachineView, RankView, SlowView, TierView, View
from outlast.ledger.goodput import PARTS, Part
from outlast.ledger.narrator import place
from outlast.report.facts import GOING_ON
from outlast.report.money import Money
from outlast.report.text import PART_WORDS, untold_words

WIDTH_MAX: Final = 120
INDENT: Final = 2
RANKS_TOLD: Final = 4
MACHINES_TOLD: Final = 3
SLOW_TOLD: Final = 2
PARTS_TOLD: Final = 4
_STYLES: Final = {
    "running": "bold green",
    "finished": "bold green",
    "drained": "bold magenta",
    "not started": "bold",
    "silent": "bold yellow",
}
_BAD: Final = "bold red"
# Cells of a bar: any font has them, and the legend below it says what each stands for.
_DONE, _REST = "=", "."
CLOCK_S: Final = 12 * 3600.0  # from here on a time of day needs its day
_FAILURES: Final = {"worker_lost": "worker lost", "node_lost": "machine lost", "hang": "hang"}


class ViewScreen:
    """The view, for as many cells as there are.

    Args:
        view: what is shown.
        hint: how to leave; "" for nothing.
    """

    def __init__(self, view: View, hint: str = "") -> None:
        self._view, self._hint = view, hint

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Exactly as many lines as fit."""
        height = options.height or console.height
        lines = screen(self._view, options.max_width, height, hint=self._hint)
        for i, line in enumerate(lines[:height]):
            if i:
                yield Segment.line()
            line.truncate(options.max_width, overflow="ellipsis")
            yield from line.render(console)


def screen(view: View, width: int, height: int | None = None, *, hint: str = "") -> list[Text]:
    """The view's lines.

    Args:
        view: what is shown.
        width: cells of a line.
        height: lines that there are; None for as many as it takes.
        hint: a word at the end of the last line.
    """
    width = min(width, WIDTH_MAX)
    top = [*_head(view, width), *_progress(view, width), *_warnings(view, width)]
    goodput, tiers = _goodput(view, width), _tiers(view.tiers, width)
    machines, ranks = _machines(view.machines, width), _ranks(view.ranks, width)
    end = _next(view, hint, width)
    if height is None:
        slow = _slow_ranks(view.slow_ranks, width, sys.maxsize)
        told = _incidents(view, width, sys.maxsize)
        return [*top, *goodput, *tiers, *machines, *ranks, *slow, *told, *end]
    room = max(height - len(top) - len(end), 0)
    least = min(4, room // 2) if view.incidents else 1
    middle: list[Text] = []
    for part in (goodput[:1], tiers, machines[:1], ranks, goodput[1:]):
        middle += part[: max(room - least - len(middle), 0)]
    slow = _slow_ranks(view.slow_ranks, width, room - least - len(middle))
    middle += slow
    middle += machines[1 : 1 + max(room - least - len(middle), 0)]
    shown = {id(line) for line in middle}
    ordered = [line for line in (*goodput, *tiers, *machines, *ranks, *slow) if id(line) in shown]
    rest = room - len(ordered)
    told = _incidents(view, width, rest)[: max(rest, 0)]
    filler = [Text()] * max(rest - len(told), 0)
    return [*top, *ordered, *told, *filler, *end]


def status_line(view: View, *, with_incident: bool = False) -> str:
    """The view in one line, for a log.

    Args:
        view: what is told.
        with_incident: whether the newest incident is told as well.
    """
    words = [f"{_state_words(view)}", _steps_words(view)]
    if view.step_s is not None and view.state == "running":
        words.append(f"{units.seconds(view.step_s)} a step")
    words.append(_left_words(view))
    words.append(f"goodput {100 * view.fraction_productive:.1f} %")
    if view.tiers:
        newest = max(view.tiers, key=lambda one: one.step)
        late = [one.name for one in view.tiers if one.is_late]
        names = f" (late: {', '.join(late)})" if late else ""
        words.append(f"saved step {newest.step:,}{names}")
    words += [_machine_words(one) for one in view.machines if one.notice_left_s is not None]
    words.append(units.count(view.num_incidents, "incident"))
    if view.untold is not None and view.untold.until_t is None:
        words.append(untold_words(view.untold))
    line = "; ".join(filter(None, words))
    if with_incident and view.incidents:
        line += f"; newest: {_incident_words(view.incidents[0])}"
    return line


# --- sections -------------------------------------------------------------------------------------


def _head(view: View, width: int) -> list[Text]:
    first = Text("job ").append(view.job, style="bold")
    state, style = _state_words(view), _STYLES.get(view.state, _BAD)
    if len(first) + 2 + len(state) <= width:
        firsts = [first.append("  ").append(state, style=style)]
    else:
        firsts = [first, *_wrapped(state, width, style, most=2)]
    runs = view.state == "running"
    about = [
        f"{'' if runs else 'last '}attempt {view.attempt}" if view.attempt else "",
        units.count(view.world_size, "worker") if view.world_size else "",
        f"on {view.num_machines} machines" if view.num_machines > 1 else "",
        f"{'runs' if runs else 'ran'} for {units.seconds(view.wall_s)} in all",
    ]
    lines = [*firsts, *_flow("", [(one, "") for one in about if one], width)]
    if view.reason and view.state != "finished":
        lines += _wrapped(view.reason, width, _BAD, most=2)
    return lines


def _state_words(view: View) -> str:
    words: str = view.state
    if view.state == "gone":
        words = "DEAD"
    elif view.exit_code:
        words = f"{view.state} (exit {view.exit_code})"
    if view.state not in ("running", "not started") and view.last_event_t is not None:
        age_s = view.last_event_age_s or 0.0
        moment = _moment(view.last_event_t, view.t)
        since = " since" if view.state in ("gone", "silent") else ""
        words += f"{since} {moment}, {units.seconds(age_s)} ago"
    if view.state == "gone":
        words += ": nobody runs it"
    elif view.state == "silent":
        words += ": nobody here can tell whether it runs"
    return words


def _moment(t: float, now: float) -> str:
    """A time of day; of longer ago with its day."""
    return (units.clock if abs(now - t) < CLOCK_S else units.when)(t)


def _steps_words(view: View) -> str:
    if view.step is None:
        return "before its first step" if view.state in GOING_ON else "no step"
    until = f" of {view.until_step:,}" if view.until_step else ""
    share = f" ({_percent(view.step / view.until_step)})" if view.until_step else ""
    again = f", again up to {view.num_steps_done:,}" if view.step < view.num_steps_done else ""
    return f"step {view.step:,}{until}{share}{again}"


def _percent(share: float) -> str:
    return f"{100 * min(share, 1.0):.1f} %"


def _left_words(view: View) -> str:
    if view.left_low_s is None or view.left_high_s is None:
        return ""
    low, high = units.seconds(view.left_low_s), units.seconds(view.left_high_s)
    return f"about {low} left" if low == high else f"{low} to {high} left"


def _progress(view: View, width: int) -> list[Text]:
    words = _steps_words(view)
    first, *rest = _wrapped(words, width, "bold", most=2)
    line = Text().append(first)
    if view.step is not None and view.until_step and not rest:
        cells = width - len(words) - 2
        if cells >= 8:
            line.append("  ").append(_bar([(_DONE, "cyan", view.step / view.until_step)], cells))
    told = []
    if view.step_s is not None:
        told.append((f"{units.seconds(view.step_s)} a step", ""))
    if left := _left_words(view):
        told.append((left, "bold"))
    elif view.state == "running" and view.step is not None and not view.until_step:
        told.append(("the loop does not say where it ends", "dim"))
    if view.num_steps_replayed:
        told.append((f"{view.num_steps_replayed:,} steps done again", "yellow"))
    return [line, *rest, *_flow("", told, width)]


def _warnings(view: View, width: int) -> list[Text]:
    lines = [
        Text(f"! {_machine_words(one)}", style=_BAD)
        for one in view.machines
        if one.notice_left_s is not None and view.state in GOING_ON
    ]
    if view.untold is not None:
        mark, style = ("! ", _BAD) if view.untold.until_t is None else ("", "yellow")
        lines += _wrapped(f"{mark}{untold_words(view.untold)}", width, style, most=2)
    if view.note:
        lines += _wrapped(f"! {view.note}", width, _BAD, most=2)
    return lines


def _goodput(view: View, width: int) -> list[Text]:
    """The bar, and the legend of its cells: the largest parts have a digit each."""
    total = sum(view.workers_s.values())
    if not total:
        return []
    shares: dict[Part, float] = {
        part: view.workers_s[part] / total for part in PARTS if view.workers_s.get(part, 0.0) > 0
    }
    largest = sorted((p for p in shares if p != "productive"), key=lambda p: -shares[p])
    cells: dict[Part, str] = {part: str(i) for i, part in enumerate(largest[:PARTS_TOLD], 1)}
    cells["productive"] = _DONE
    rest = math.fsum(shares[part] for part in largest[PARTS_TOLD:])
    words = f"goodput {_percent(view.fraction_productive)}"
    line = Text(words)
    room = width - len(words) - 2
    if room >= 8:
        named = [(cells[p], PART_WORDS[p][1], shares[p]) for p in shares if p in cells]
        line.append("  ").append(_bar([*named, (_REST, "dim", rest)], room))
    told = [
        (f"{cells[part]} {PART_WORDS[part][0]} {_percent(shares[part])}", PART_WORDS[part][1])
        for part in ("productive", *largest[:PARTS_TOLD])
        if part in shares
    ]
    if rest:
        told.append((f"{_REST} others {_percent(rest)}", "dim"))
    lines = [line, *_flow("", told, width)]
    if view.cost is not None and view.cost_lost is not None:
        price = f"{view.price_per_machine_hour:g} per machine and hour, {view.priced_as}"
        paid = Money(currency=view.currency)
        lost = f"{paid.amount(view.cost_lost)} of it not for new steps"
        cost = [(f"cost {paid.amount(view.cost)}", "bold"), (lost, "")]
        lines += _flow("", [*cost, (price, "dim")], width)
    return lines


class _TopColumn(NamedTuple):
    head: str
    cells: list[tuple[str, str]]  # words and style
    is_right: bool = True


def _table(columns: Sequence[_TopColumn], width: int) -> list[Text]:
    """As many columns as fit, the first ones first; one with nothing in it is left out."""
    kept: list[tuple[_TopColumn, int]] = []
    used = 0
    for column in columns:
        if kept and not any(words for words, _ in column.cells):
            continue
        cells = max(len(column.head), *(len(words) for words, _ in column.cells))
        if kept and used + cells + 2 > width:
            break
        kept.append((column, cells))
        used += cells + 2
    lines = []
    for i in range(-1, len(columns[0].cells)):
        line = Text()
        for column, cells in kept:
            words, style = (column.head, "dim") if i < 0 else column.cells[i]
            line.append(words.rjust(cells) if column.is_right else words.ljust(cells), style=style)
            line.append("  ")
        line.rstrip()
        lines.append(line)
    return lines


def _tiers(tiers: Sequence[TierView], width: int) -> list[Text]:
    if not tiers:
        return [Text("nothing is saved yet", style="yellow")]
    late = [("LATE" if one.is_late else "", _BAD) for one in tiers]
    return _table(
        [
            _TopColumn("saved to", [(one.name, "") for one in tiers], is_right=False),
            _TopColumn("step", [(f"{one.step:,}", "bold") for one in tiers]),
            _TopColumn("age", [(units.seconds(one.age_s), "") for one in tiers]),
            _TopColumn("", late, is_right=False),
            _TopColumn("every", [(_seconds(one.interval_s), "") for one in tiers]),
            _TopColumn("takes", [(_seconds(one.took_s), "") for one in tiers]),
            _TopColumn("size", [(units.size(one.bytes) if one.bytes else "", "") for one in tiers]),
        ],
        width,
    )


def _seconds(value: float | None) -> str:
    return "" if value is None else units.seconds(value)


def _ranks(ranks: Sequence[RankView], width: int) -> list[Text]:
    if not ranks:
        return []
    told = ranks[:RANKS_TOLD]
    nodes = {one.node for one in ranks}
    slow = [(f"{one.slow_factor:.3g}x SLOW" if one.slow_factor else "", _BAD) for one in told]
    doing = [(_now_words(one), "dim" if one.age_s is not None else "") for one in told]
    lines = _table(
        [
            _TopColumn("rank", [(str(one.rank), "bold") for one in told]),
            _TopColumn("", slow, is_right=False),
            _TopColumn("a step", [(_seconds(one.step_s), "") for one in told]),
            _TopColumn("own work", [(_seconds(one.own_s), "") for one in told]),
            _TopColumn("waits", [(_seconds(one.wait_s), "") for one in told]),
            _TopColumn("now", doing, is_right=False),
            _TopColumn("data", [(_seconds(one.data_s), "") for one in told]),
            _TopColumn(
                "step", [(f"{one.step:,}" if one.step is not None else "", "") for one in told]
            ),
            _TopColumn(
                "machine", [(one.node if len(nodes) > 1 else "", "") for one in told], False
            ),
        ],
        width,
    )
    if len(ranks) > len(told):
        lines.append(Text(f"and {len(ranks) - len(told)} quicker ones", style="dim"))
    return lines


def _now_words(one: RankView) -> str:
    """What it is doing, and for how long; or how old its machine's word of it is."""
    if one.age_s is not None:
        return f"as of {units.seconds(one.age_s)} ago"
    return f"{one.doing} {_seconds(one.doing_s if (one.doing_s or 0) >= 1 else None)}".strip()


def _slow_ranks(found: Sequence[SlowView], width: int, room: int) -> list[Text]:
    """The ones that have cost most, as the report has them; first those that still are slow."""
    worst = sorted(found, key=lambda one: (one.rank.over, -one.rank.lost_s))
    lines: list[Text] = []
    for num_told, one in enumerate([*worst[:SLOW_TOLD], None]):
        left = len(found) - num_told
        style = "dim" if one is None else "yellow" if one.rank.over else _BAD
        words = f"and {left:,} more times that a rank was slow: outlast report"
        told = _wrapped(words if one is None else f"slow: {one.what}", width, style, most=3)
        if not left or len(lines) + len(told) > room:
            break
        lines += told
    return lines


def _machines(machines: Sequence[MachineView], width: int) -> list[Text]:
    bad = [one for one in machines if _is_bad(one)]
    if not bad:
        return []
    lines = []
    for one in bad[:MACHINES_TOLD]:
        lines += _wrapped(_machine_words(one), width, "yellow", most=1)
    return lines


def _is_bad(one: MachineView) -> bool:
    return bool(one.failures or one.slow_ranks or one.is_left_out or one.notice_left_s is not None)


def _machine_words(one: MachineView) -> str:
    words = [f"{_FAILURES.get(kind, kind)} {num}x" for kind, num in one.failures.items()]
    if one.slow_ranks:
        words.append(f"slow: rank {', '.join(map(str, one.slow_ranks))}")
    if one.is_left_out:
        words.append("left out")
    if one.notice_left_s is not None:
        left = one.notice_left_s
        word = f"goes in {units.seconds(left)}" if left >= 0 else "its time is over"
        words.insert(0, word)
    return f"machine {one.name or 'not known'}: {', '.join(words)}"


def _incidents(view: View, width: int, room: int) -> list[Text]:
    """The newest ones, as many as there is room for; none is cut in two but the last."""
    if room <= 0:
        return []
    if not view.incidents:
        return [Text("no incidents", style="green")]
    costs = [one.cost_s for one in view.incidents if one.cost_s is not None]
    lost = sum(one.lost_steps or 0 for one in view.incidents)
    head = [(units.count(view.num_incidents, "incident"), "bold")]
    if view.num_incidents == len(view.incidents) and costs:
        head += [(f"cost {units.seconds(sum(costs))}", ""), (f"{lost:,} steps lost", "")]
    lines = _flow("", head, width)
    for one in view.incidents:
        told = _incident(one, view.t, width)
        if len(lines) + len(told) > room and len(lines) > 1:
            break
        lines += told
    return lines


def _incident(one: IncidentView, now: float, width: int) -> list[Text]:
    lines = _wrapped(
        f"{_moment(one.began_t, now)} {one.kind}: {one.what}",
        width,
        _BAD if one.is_open else "",
        most=3,
    )
    costs = [("NOT BACK YET" if one.is_open else "over", _BAD if one.is_open else "green")]
    if one.cost_s is not None:
        costs.append((f"cost {units.seconds(one.cost_s)}{' so far' * one.is_open}", ""))
    if one.lost_steps:
        costs.append((units.count(one.lost_steps, "step") + " lost", ""))
    if one.evidence:
        costs.append((f"stacks: {place_of(one.evidence)}", ""))
    return [*lines, *_flow(" " * INDENT, costs, width)]


def _incident_words(one: IncidentView) -> str:
    cost = "" if one.cost_s is None else f", cost {units.seconds(one.cost_s)}"
    how = "not back yet" if one.is_open else "over"
    return f"{one.kind}: {one.what} ({how}{cost})"


def _next(view: View, hint: str, width: int) -> list[Text]:
    """The command that comes next, and how to leave."""
    words = f"Next: outlast report {place_of(view.directory)}"
    if view.state in ("gone", "drained"):
        stands = " (from step 0: nothing is saved)" if view.num_steps_done else ""
        if view.saved_step is not None:
            stands = f" (goes on from step {view.saved_step:,})"
        words = f"Next: {view.command or 'the same command again'}{stands}"
    *lines, last = _wrapped(words, width, "dim", most=4)
    if hint and len(last) + 2 + len(hint) <= width:
        last.append(" " * (width - len(last) - len(hint)) + hint)
    return [*lines, last]


def place_of(path: str) -> str:
    """A path as it can be typed from here."""
    return shlex.quote(place(Path(path)))


# --- lines ----------------------------------------------------------------------------------------


def _bar(parts: Sequence[tuple[str, str, float]], cells: int) -> Text:
    """Parts (cell, style, share) side by side; one that is not nothing is seen if there is room."""
    shares = [min(max(share, 0.0), 1.0) for _, _, share in parts]
    counts = [max(round(share * cells), 1) if share else 0 for share in shares]
    room = max(round(min(math.fsum(shares), 1.0) * cells), any(counts))
    while (sum(counts) > room and max(counts) > 1) or (0 < sum(counts) < room):
        counts[counts.index(max(counts))] += 1 if sum(counts) < room else -1
    bar = Text()
    for (cell, style, _), count in zip(parts, counts, strict=True):
        bar.append(cell * min(count, cells - len(bar)), style=style)
    return bar.append(_REST * (cells - len(bar)), style="dim")


def _flow(indent: str, words: Iterable[tuple[str, str]], width: int) -> list[Text]:
    """Words (and their styles) one after another, on as many lines as it takes."""
    lines: list[Text] = []
    for text, style in words:
        if lines and len(lines[-1]) + 3 + len(text) <= width:
            lines[-1].append(" · ", style="dim").append(text, style=style)
        else:
            lines.append(Text(indent).append(text, style=style))
    return lines


def _wrapped(words: str, width: int, style: str, *, most: int) -> list[Text]:
    """Words over at most so many lines, the last one cut short."""
    lines: list[str] = []
    for long in words.split():
        word = long
        while len(word) > max(width - INDENT, 1):  # a path, say: in pieces
            cells = max(width - INDENT, 1)
            lines.append(" " * INDENT * bool(lines) + word[:cells])
            word = word[cells:]
        indent = " " * INDENT if lines else ""
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(indent + word)
    if len(lines) > most:
        cut = lines[most - 1][: max(width - 2, 1)]
        lines = [*lines[: most - 1], f"{cut} …"]
    return [Text(line, style=style) for line in lines]
