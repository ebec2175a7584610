"""The report for a terminal: lines of ``rich.text.Text``, so that the console decides on colour.

Pure functions, and ``Paper``, the console that commands print them on. ``line.plain`` is the line
without any markup. Block bars are left out with ``bar_width=0``, as where the output is not a
terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NoReturn

from rich.console import Console
from rich.text import Text

from outlast import units
from outlast.ledger.goodput import Goodput, Part
from outlast.ledger.incidents import Incident
from outlast.report.facts import GOING_ON, Facts, State, TierInterval, Untold
from outlast.report.findings import SILENCE, UNNAMED, SlowRank
from outlast.report.forecast import Forecast, Storm
from outlast.report.money import Money
from outlast.report.series import RankTimes

PART_WORDS: Final[dict[Part, tuple[str, str]]] = {
    "productive": ("productive", "green"),
    "replayed": ("replayed", "yellow"),
    "data": ("waiting for data", "cyan"),
    "stalled": ("stalled by checkpoints", "yellow"),
    "script": ("script outside steps", "blue"),
    "starting": ("starting", "blue"),
    "building": ("building the model", "blue"),
    "detecting": ("detecting", "red"),
    "restarting": ("restarting", "red"),
    "waiting": ("waiting for machines", "magenta"),
    "paused": ("paused", "dim"),
    "other": ("not known", "dim"),
}
_STATE_STYLES: Final = {
    "finished": "green",
    "running": "cyan",
    "silent": "yellow",
    "drained": "magenta",
}
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
ATTEMPTS_TOLD: Final = 5  # the newest ones
SLOW_TOLD: Final = 10  # slow ranks that the watch named
UNNAMED_TOLD: Final = 3  # and others
RANKS_NAMED: Final = 8
MACHINES_NAMED: Final = 3  # of machines that are alike


def where_time_went(
    goodput: Goodput,
    *,
    money: Money | None = None,
    bar_width: int = 20,
) -> list[Text]:
    """One line for each part that took any time, and one for the whole.

    Args:
        goodput: the job's time in worker-seconds.
        money: what it cost; adds a column.
        bar_width: cells of a bar that stands for everything; 0 for no bars.
    """
    if not goodput.total:
        return [Text("no time has passed yet")]
    parts = goodput.parts()
    percents = dict(zip(parts, units.percents(list(parts.values())), strict=True))
    lines, paid = [], money or Money()
    for part, worker_seconds in parts.items():
        if not worker_seconds:
            continue
        name, style = PART_WORDS[part]
        line = _row(percents[part], name, worker_seconds, _price(paid, paid.parts.get(part)))
        if bar_width:
            bar = _bar(worker_seconds / goodput.total, bar_width)
            line.append("  ").append(bar, style=style)
        lines.append(line)
    lines.append(_row(100.0, "worker time", goodput.total, _price(paid, paid.cost)))
    return lines


def _price(paid: Money, cost: float | None) -> str:
    return "" if cost is None else paid.amount(cost)


def _row(percent: float, name: str, worker_seconds: float, price: str) -> Text:
    row = f"{percent:5.1f} %  {name:<22}  {units.seconds(worker_seconds):>12}"
    return Text(f"{row}  {price:>10}" if price else row)


def _bar(share: float, width: int) -> str:
    """A bar in steps of an eighth of a cell; whatever is not nothing can be seen."""
    eighths = max(1, round(share * width * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def parts_of(parts: Mapping[Part, float], *, most: int = 4) -> str:
    """The largest parts of an attempt's or a machine's time, in percent, in words."""
    total = math.fsum(parts.values())
    percents = dict(zip(parts, units.percents(list(parts.values())), strict=True))
    largest = sorted((part for part in parts if parts[part]), key=lambda part: -parts[part])[:most]
    told = ", ".join(f"{percents[part]:.1f} % {PART_WORDS[part][0]}" for part in largest)
    return f"{units.seconds(total)}: {told}"


def breakdown_lines(job: Facts) -> list[Text]:
    """The time of the newest attempts, of each machine where there are several, and of tiers."""
    lines = []
    if len(job.by_attempt) > 1:
        earlier = len(job.by_attempt) - ATTEMPTS_TOLD
        if earlier > 0:
            lines.append(_line("attempts", f"{earlier} earlier ones: outlast report --json"))
        newest = list(job.by_attempt.items())[-ATTEMPTS_TOLD:]
        lines += [_line(f"attempt {number}", parts_of(parts)) for number, parts in newest]
    if len(job.by_machine) > 1:
        lines += [
            _line("machine", f"{words}, {parts}")
            for words, (parts,) in alike(
                job, ((name, [parts_of(parts)]) for name, parts in job.by_machine.items())
            )
        ]
    for tier, one in job.by_tier.items():
        mean_s = one.seconds / one.num if one.num else 0.0
        words = (
            f"{tier}, {units.count(one.num, 'checkpoint')}, {units.size(one.bytes)}, "
            f"{units.seconds(mean_s)} each, {units.seconds(one.slowest_s)} the slowest"
        )
        stood = f", training stood still for {units.seconds(one.blocked_s)}" * bool(one.blocked_s)
        skipped = f", {one.num_skipped:,} skipped" if one.num_skipped else ""
        lines.append(_line("tier", f"{words}{stood}{skipped}"))
    return lines


def alike(
    job: Facts, rows: Iterable[tuple[str, Sequence[str]]]
) -> list[tuple[str, tuple[str, ...]]]:
    """One row for all machines of a kind of which the same is said: their names, and that.

    Args:
        job: whose machines they are.
        rows: machine, and what is said of it.
    """
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, said in rows:
        found.setdefault((job.kinds.get(name, ""), tuple(said)), []).append(name)
    return [(_names_words(job, names), said) for (_, said), names in found.items()]


def _names_words(job: Facts, names: Sequence[str]) -> str:
    if len(names) == 1:
        return machine_words(job, names[0])
    kind = job.kinds.get(names[0])
    listed = ", ".join(names) if len(names) <= MACHINES_NAMED else f"{names[0]} to {names[-1]}"
    return f"{len(names):,} machines alike{f' ({kind})' if kind else ''}: {listed}"


def incident_lines(incident: Incident, job: Facts | None = None) -> list[Text]:
    """Two to four lines: what happened, what was lost, when the job was back, what that cost.

    Args:
        incident: of a job.
        job: that job; without it nothing is said of the cost.
    """
    first = Text(f"{units.when(incident.began_t)}  ", style="dim")
    first.append(incident.kind, style="bold red not dim")
    first.append(f": {incident.what}", style="not dim")
    if incident.kind == SILENCE:
        return [first]
    told = [f"on {', '.join(incident.nodes)}"] if incident.nodes else []
    if incident.detected_t > incident.began_t:
        after = units.seconds(incident.detected_t - incident.began_t)
        told.append(f"detected after {after}")
    if incident.resumed_step is not None:
        lost = incident.lost_steps
        words = "" if lost is None else f", {units.count(lost, 'step')} lost"
        told.append(f"resumed at step {incident.resumed_step}{words}")
    elif incident.lost_steps is not None:
        stands = incident.standing_step
        words = f"the commit of step {stands} stands" if stands else "nothing is committed"
        told.append(f"{words}, {units.count(incident.lost_steps, 'step')} lost")
    lines = [first, Text(f"  {'; '.join(told)}")] if told else [first]
    cost = "" if job is None else _incident_cost(incident, job)
    back = _back(incident, "running" if job is None else job.state)
    return [*lines, Text(f"  {back}"), *([Text(f"  {cost}")] if cost else [])]


def _incident_cost(incident: Incident, job: Facts) -> str:
    """Its parts, which add up, and their price; "" where it is not known or nothing."""
    cost = job.cost_of_incident(incident)
    if cost is None or not cost.total_s:
        return ""
    is_back = incident.back_t is not None
    parts = [
        f"{units.seconds(seconds)} {words[not is_back]}"
        for seconds, words in zip(cost, _COST_WORDS, strict=True)
        if seconds
    ]
    paid = _and_price(job, cost.held_s)
    so_far = "" if is_back else " so far"
    return f"cost {units.seconds(cost.total_s)} of each worker{so_far}{paid}: {', '.join(parts)}"


def _and_price(job: Facts, held_s: float) -> str:
    """What so many seconds of the job cost, behind what is said of them; "" without a price."""
    price = job.cost_of(held_s)
    if price is None or job.money is None:
        return ""
    return f" and {job.money.amount(price)}{'' if job.money.currency else ' in money'}"


# In the order of IncidentCost's parts; and of one that is not over.
_COST_WORDS: Final = (
    ("until it was noticed", "until it was noticed"),
    ("in which nobody had started it", "in which nobody had started it"),
    ("until training went on", "since then, and training stands still"),
    ("for steps made again after that", "for steps that are to be made again"),
)
INCIDENT_TERMS: Final = (
    "lost: completed steps that are made again; back after: from the first sign to the first "
    "sample behind the resume; cost: with the steps made again, each second counted once"
)


def _back(incident: Incident, state: State) -> str:
    if incident.back_t is not None:
        return f"back after {units.seconds(incident.back_t - incident.began_t)}"
    if incident.closed:
        return "over, without a new step after it"
    return "not back yet" if state in GOING_ON else f"not back: the job's end ({state})"


def summary_lines(job: Facts, *, now: float | None = None, num_unread: int = 0) -> list[Text]:
    """The job in a few lines: id and state, steps, attempts, goodput, incidents, money.

    Args:
        job: it.
        now: as of :func:`outlast.report.facts.facts`.
        num_unread: lines of the ledger that could not be read.
    """
    if job.state == "not started" and job.last_event_t is None:
        return [Text("no job has been started here: the ledger is empty")]
    done = job.workers
    steps = units.count(done.steps_done, "step")
    replayed = f", {done.steps_replayed:,} of them replayed" if done.steps_replayed else ""
    newest = "" if job.committed_step is None else f" (newest: step {job.committed_step})"
    if job.committed_step is None and done.steps_done:
        newest = ": nothing is saved, a restart begins at step 0"
    lines = [
        _headline(job, now),
        _line("steps", f"{steps}{replayed}"),
        _line("attempts", units.count(done.attempts, "attempt")),
        _line("commits", f"{units.count(done.commits, 'commit')}{newest}"),
        *([_line("every", f"checkpoint.every is {job.every}")] if job.every else []),
        *(_line("tier", every_words(name, one)) for name, one in job.tiers.items()),
        _line(
            "goodput",
            f"{done.fraction_productive * 100:.1f} % of {units.seconds(done.total)} of worker "
            f"time, in {units.seconds(done.wall_s)}, went into new steps",
        ),
        _line("incidents", _incidents_words(job.incidents, job.state)),
    ]
    if num_unread:
        words = "cannot be read (torn by a crash, or damaged): what was said there is missing here"
        lines.append(_line("ledger", f"{units.count(num_unread, 'line')} {words}"))
    if job.keepers_lost:
        lines.append(_line("keeper", _keeper_words(job.keepers_lost)))
    if job.untold is not None:
        lines.append(_line("messages", untold_words(job.untold)))
    if job.slow_ranks:
        lines.append(_line("slow", _slow_words(job)))
    if job.late is not None:
        lines.append(_line("late", job.late.words))
    lines += [
        _line("preflight", f"{machine} was left out: {why}")
        for machine, why in sorted(job.unfit.items())
    ]
    if job.verdict is not None:
        lines.append(_line("machines", job.verdict.words))
    if job.money is not None:
        lines.append(_line("cost", cost_words(job.money)))
    return lines


def warning_lines(job: Facts, place: str = "") -> list[Text]:
    """What has to be done, and the command to begin with.

    Args:
        job: it.
        place: its directory, as it is to be given to commands; "" for the usual one.
    """
    return [
        Text(f"warning: {one.what}", style="bold yellow").append(
            f"\n  Next: {' '.join(filter(None, (one.command, place)))}", style="not bold default"
        )
        for one in job.warnings
    ]


def every_words(name: str, one: TierInterval) -> str:
    """How often a tier takes a checkpoint, as it was decided and as it was."""
    told = []
    if one.interval_s is not None:
        told.append(f"every {units.seconds(one.interval_s)} in calm, as decided: {one.reason}")
    if one.was_s is not None and one.longest_s is not None:
        was = f"every {units.seconds(one.was_s)} as it was, in the middle"
        told.append(f"{was}, and {units.seconds(one.longest_s)} at the longest")
    return f"{name} {'; '.join(told)}"


def machine_words(job: Facts, name: str) -> str:
    """A machine's name, and its kind where that is known."""
    kind = job.kinds.get(name)
    return f"{name} ({kind})" if kind else name or "not known"


def cost_words(paid: Money) -> str:
    """What a job cost, of which so much is lost, at which prices; and what has no price."""
    words = []
    if paid.cost is not None and paid.lost is not None:
        cost, lost = paid.amount(paid.cost), paid.amount(paid.lost)
        words.append(f"{cost}, of which {lost} lost: {LOST_TERM}")
        if paid.saved is not None:
            words.append(saved_words(paid))
        words[-1] += f" ({price_words(paid)})"
    unpriced = [one for one in paid.kinds if one.price is None and one.held_s]
    if unpriced:
        names = ", ".join(one.kind or "an unknown kind" for one in unpriced)
        words.append(
            f"without {units.seconds(paid.unpriced_s)} of machines of {names}: no price is set for "
            "them under [price]"
        )
    return "; ".join(words)


LOST_TERM: Final = "on other things than new steps, their data and the script's own code"
SAVED_TERM: Final = "the same work on demand, where nothing interrupts it"


def saved_words(paid: Money) -> str:
    """What was saved, and beside what; there is a sum."""
    saved = paid.saved or 0.0
    return f"{paid.amount(abs(saved))} {'less' if saved >= 0 else 'more'} than {SAVED_TERM}"


def price_words(paid: Money) -> str:
    """At which prices, in which currency."""
    priced = [one for one in paid.kinds if one.price is not None]
    named = paid.currency and f" {paid.currency}"
    if len({(one.price, one.priced_as) for one in priced}) <= 1:
        words = f"{paid.price:g}{named} per machine and hour, {paid.priced_as}"
    else:
        told = [f"{one.kind or 'others'} {one.price:g}{named} {one.priced_as}" for one in priced]
        words = f"per machine and hour: {', '.join(told)}"
    return words if named else f"{words}; in the currency of [price]"


def untold_words(untold: Untold) -> str:
    """How many messages people did not get, and what to do about it."""
    words = f"{units.count(untold.num, 'message')} could not be sent"
    if untold.until_t is not None:
        return f"{words} from {units.when(untold.since_t)} to {units.when(untold.until_t)}"
    return f"{words} since {units.when(untold.since_t)} ({untold.why}); try outlast tell --test"


def storm_lines(storm: Storm) -> list[Text]:
    """What a storm has cost, and what it would have cost with another cadence."""
    lasted = units.seconds(storm.end_t - storm.begin_t)
    first = Text(f"{units.clock(storm.begin_t)}  ", style="dim")
    first.append(
        f"{units.count(storm.num_failures, 'failure')} in {lasted}: "
        f"{units.seconds(storm.all_lost_s)} lost",
        style="bold not dim",
    )
    parts = [
        f"{units.seconds(lost_s)} {PART_WORDS[part][0]}"
        for part in PART_WORDS
        if (lost_s := storm.lost_s.get(part, 0.0))
    ]
    calm, best = storm.calm, storm.best
    words = (
        f"simulated: {units.seconds(calm.lost_s)} with a checkpoint each "
        f"{units.seconds(calm.interval_s or 0.0)} as in calm, "
        f"{units.seconds(best.lost_s)} with one each "
        f"{units.seconds(best.interval_s or 0.0)} (the best, in hindsight), "
        f"{units.seconds(storm.auto.lost_s)} with auto"
    )
    told = [Text(f"  {', '.join(parts)}")] if parts else []
    return [first, *told, Text(f"  {words}")]


def forecast_lines(job: Facts) -> list[Text]:
    """What a plan would have said, what was measured, and what the intervals cost."""
    found = job.forecast
    if found is None:
        return []
    lines = [
        _line(
            "goodput",
            f"{found.productive_predicted * 100:.1f} % predicted, {found.productive * 100:.1f} % "
            "measured, of the time that machines were held, without waiting for them",
        ),
        _line(
            "failures",
            f"{_few(found.interruptions_predicted)} predicted {_rate_words(found)}, "
            f"{found.interruptions} measured",
        ),
    ]
    if found.planned is None:
        lines.append(_line("plan", "none was kept: outlast plan --save keeps one for the next run"))
    else:
        day = units.day(found.planned.planned_t)
        every = units.seconds(found.planned.interval_s)
        lines.append(_line("plan", f"of {day}, with a save every {every}"))
    paid = job.money or Money()
    predicted = found.cost_predicted(paid.cost, paid.price)
    if predicted is not None:
        words = f"{_price(paid, predicted)} predicted, {_price(paid, paid.cost)} measured"
        lines.append(_line("cost", words))
    if found.regret is not None and found.best_interval_s is not None:
        words = (
            f"{units.seconds(found.interval_s)} between checkpoints; of fixed intervals "
            f"{units.seconds(found.best_interval_s)} would have done best on these failures, by "
            f"{found.regret * 100:.1f} % of the time"
        )
        lines.append(_line("interval", words))
    return lines


def _rate_words(found: Forecast) -> str:
    """At which rate, and between what."""
    if found.planned is None:
        return "at one in 10 h"
    low, high = found.planned.failures_low_per_h, found.planned.failures_high_per_h
    return f"({_few(low * found.ran_h)} to {_few(high * found.ran_h)})"


def _few(count: float) -> str:
    """A mean number of things, with one digit behind the point, or the first one that is not 0."""
    for digits in range(1, 7):
        if round(count, digits):
            return f"{count:.{digits}f}"
    return "0.0"


def _headline(job: Facts, now: float | None) -> Text:
    line = Text("job ").append(job.job, style="bold").append(": ")
    line.append(job.state, style=_STATE_STYLES.get(job.state, "red"))
    if job.state in GOING_ON and now is not None and job.last_event_t is not None:
        # A machine that vanished cannot say so: let the reader judge.
        age_s = max(0.0, now - job.last_event_t)
        line.append(f", last heard of {units.seconds(age_s)} ago")
    if job.state == "silent":
        line.append("; counted until then, though its machines may still be held")
    return line.append(f" ({job.reason})" if job.reason else "")


def _line(name: str, words: str) -> Text:
    return Text(f"  {name:<9} ", style="dim").append(words, style="not dim")


def slow_line(slow: SlowRank, job: Facts) -> Text:
    """One slow rank: since when, why, by how much, and what it has cost."""
    line = Text(f"{ranks_words(slow.ranks)} on {slow.node}", style="bold")
    steps = ""
    if slow.since_step is not None:
        steps = f" (steps {slow.since_step} to {slow.until_step})"
    how = f"{_SLOW_CAUSES.get(slow.cause, _SLOW_CAUSES['compute'])} {_more_words(slow.factor)}"
    return line.append(
        f": {how} the others', "
        f"{span_words(slow.from_t, slow.until_t)}{'' if slow.over else ' and on'}{steps}, "
        f"about {units.seconds(slow.lost_s)} lost waiting{_and_price(job, slow.lost_s)}",
        style="not bold",
    )


def _more_words(factor: float) -> str:
    if factor < 2:
        return f"{100 * (factor - 1):.0f} % longer than"
    return f"{factor:.3g} times as long as"


_SLOW_CAUSES: Final = {
    "compute": "slow, its steps",
    "loader": "slow to get data, its steps",
    "burst": "slow for some steps, these",
    UNNAMED: "slow by each minute's figures, steps up to",
}


def slow_lines(job: Facts) -> list[Text]:
    """The slow ranks; of many those that have cost most, and how many more there are.

    Of machines that the watch did not name there are few: where slowness goes from one to the next,
    none of them is to blame.
    """
    kept: list[SlowRank] = []
    for most, are_named in ((SLOW_TOLD, True), (UNNAMED_TOLD, False)):
        told = [one for one in job.slow_ranks if (one.cause != UNNAMED) is are_named]
        kept += sorted(told, key=lambda one: -one.lost_s)[:most]
    lines = [slow_line(one, job) for one in sorted(kept, key=lambda one: one.from_t)]
    if left := len(job.slow_ranks) - len(kept):
        lines.append(Text(f"and {left:,} more that have cost less: outlast report --json"))
    if job.late is not None:
        lines.append(Text(job.late.words))
    return lines


def ranks_words(ranks: Sequence[int]) -> str:
    """Numbers of workers; of many the first ones."""
    listed = ", ".join(map(str, ranks[:RANKS_NAMED])) + ", …" * (len(ranks) > RANKS_NAMED)
    return f"rank{'s' * (len(ranks) > 1)} {listed}"


def span_words(from_t: float, until_t: float) -> str:
    """From when to when, with the day where it is another one."""
    is_one_day = units.day(from_t) == units.day(until_t)
    since = units.when(from_t).removesuffix(" UTC")
    return f"{since} to {(units.clock if is_one_day else units.when)(until_t)}"


def slow_words(one: RankTimes) -> str:
    """How slow a worker was by its minutes' figures, and when; "" where it was not."""
    if one.slow_factor is None or one.slow_from_t is None or one.slow_until_t is None:
        return ""
    when = span_words(one.slow_from_t, one.slow_until_t)
    return f"up to {one.slow_factor:.3g} times the others' work in a step, {when}"


def _slow_words(job: Facts) -> str:
    lasting = [one for one in job.slow_ranks if one.cause != "burst"]
    bursts = len(job.slow_ranks) - len(lasting)
    words = [units.count(len(lasting), "slow rank")] if lasting else []
    words += [units.count(bursts, "burst")] if bursts else []
    return (
        f"{' and '.join(words)}; about {units.seconds(job.waited_s)} of the job's "
        f"{units.seconds(job.held_s)} were lost waiting for them (an estimate, part of the "
        "productive time; those at the same time counted once)"
    )


def _keeper_words(count: int) -> str:
    times = "once" if count == 1 else f"{count} times"
    return f"ended {times}, and another was started; what it had in memory alone went with it"


def _incidents_words(found: list[Incident], state: State) -> str:
    lost = sum(incident.lost_steps or 0 for incident in found)
    still_open = sum(not incident.closed for incident in found) if state in GOING_ON else 0
    words = units.count(len(found), "incident")
    if found:
        so_far = " so far" if still_open else ""
        words += f", {units.count(lost, 'step')} lost{so_far}"
    return f"{words}, {still_open} not over" if still_open else words


class Paper(Console):
    """Standard output; whoever reads it may leave.

    Rich's own answer is exit code 1, which says that something failed, and in any other thread
    than the main one it stays silent from then on.
    """

    def on_broken_pipe(self) -> NoReturn:
        """Let the command line answer as it does for what is printed without rich."""
        raise BrokenPipeError
