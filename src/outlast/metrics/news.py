"""What people are told of a job, and the words of a message.

``NewsFold`` stands on the fold of the metrics: an incident and what it cost are the same in both.
Each incident is news when it begins, when training still stands after ``STANDS_S``, and when it is
over. Some events are news by themselves: a job's end, a slow rank, storage that fails, a machine
that is left out. News of one kind are numbered from 0, so that four numbers (:class:`NewsMarks`)
say what has been told: whoever reads the ledger anew knows it too.

Guarantees: an incident that begins and is over within one message is told once, with its cost. What
it costs is its time until the first new step, and the steps done again at the pace of this job.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from outlast import units
from outlast.config import SEVERITIES
from outlast.errors import Exit
from outlast.ledger.events import Event
from outlast.ledger.goodput import whole
from outlast.ledger.incidents import Incident
from outlast.ledger.narrator import Failing, sentence
from outlast.metrics.folded import JobFold
from outlast.prices import Prices

STANDS_S: Final = 600.0
LINES_MOST: Final = 8
TITLE_MOST: Final = 110
INFO, WARNING, CRITICAL = SEVERITIES
_ENDS: Final[dict[int, tuple[str, str]]] = {
    Exit.FINISHED: (INFO, "the job has finished"),
    Exit.USAGE: (CRITICAL, "the job was called wrongly, or its settings are wrong"),
    Exit.DRAINED: (WARNING, "the job has stopped after a notice; start it again"),
    Exit.GAVE_UP: (CRITICAL, "the job gave up; its newest checkpoint stands"),
    Exit.STORAGE: (CRITICAL, "the job ended: its storage cannot be used"),
    Exit.REFUSED: (CRITICAL, "the job refuses to resume: no valid checkpoint"),
}
_TOLD_ALONE: Final = {
    "straggler": WARNING,
    "left_out": WARNING,
    "verify_failed": WARNING,
    "held": WARNING,
    "let_in": INFO,
}


class NewsMarks(msgspec.Struct, frozen=True, kw_only=True):
    """How many news of each kind have been told."""

    began: int = 0
    stands: int = 0
    over: int = 0
    other: int = 0

    def with_told(self, news: Iterable[News]) -> NewsMarks:
        """The marks once these are told, too."""
        found = {name: getattr(self, name) for name in self.__struct_fields__}
        for one in news:
            found[one.kind] = max(found[one.kind], one.number + 1)
        found["began"] = max(found["began"], found["over"])
        return NewsMarks(**found)


class News(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to tell.

    Attributes:
        kind: "began", "stands", "over" (of an incident) or "other".
        number: its place among those of its kind.
        severity: one of ``SEVERITIES``.
        what: one sentence, without its full stop.
        more: what it cost and what was done, in lines.
        is_end: whether the job is over.
    """

    kind: str
    number: int
    severity: str
    what: str
    more: tuple[str, ...] = ()
    is_end: bool = False


class NewsFold:
    """What there is to tell.

    Args:
        fold: of the same ledger; it has taken what is taken here.
        prices: of machines.

    Attributes:
        has_ended: whether the job is over, as its ledger says.
    """

    def __init__(self, fold: JobFold, prices: Prices) -> None:
        self._fold = fold
        self._prices = prices
        self._failing = Failing()
        self._other: list[News] = []
        self._other_t: list[float] = []
        self._num_machines = 1
        self._hosts: list[str] = []  # their names, as far as they are known
        self.has_ended = False

    def take(self, events: Iterable[Event]) -> None:
        """Take events that are settled, each once, in the order of their times."""
        for event in events:
            if event.event == "attempt_formed":
                self._num_machines = whole(event, "nodes") or 1
                hosts = event.get("hosts")
                self._hosts = list(map(str, hosts)) if isinstance(hosts, dict) else []
            elif event.event == "job_started":
                self.has_ended = False
            elif event.event == "job_finished" and not self.has_ended:
                self.has_ended = True  # each machine writes one down
                self._end(event)
            else:
                self._alone(event)

    def marks(self, until_t: float) -> NewsMarks:
        """Of all that began before this time."""
        began = [one for one in self._fold.so_far.incidents() if one.detected_t < until_t]
        over = sum(one.closed for one in began)
        other = sum(t < until_t for t in self._other_t)
        return NewsMarks(began=len(began), stands=len(began), over=over, other=other)

    def beyond(self, told: NewsMarks, now: float) -> list[News]:
        """What has not been told, at wall-clock time ``now``."""
        news = list(self._other[told.other :])
        incidents = self._fold.so_far.incidents(told.over)
        again_s = self._fold.so_far.split().workers.again_s if incidents else None
        for number, one in enumerate(incidents, told.over):
            if one.closed:
                news.append(self._over(number, one, again_s))
                continue
            if number >= told.began:
                what = one.what or one.kind
                more = (f"{_where(one)}not back yet",)
                news.append(_news("began", number, WARNING, what, *more))
            if number >= told.stands and now - one.detected_t > STANDS_S and not self.has_ended:
                stood = units.seconds(now - one.detected_t)
                what = f"training has stood still for {stood}: {one.what or one.kind}"
                news.append(_news("stands", number, CRITICAL, what))
        return sorted(news, key=lambda one: one.is_end)

    def _over(self, number: int, one: Incident, again_s: float | None) -> News:
        if one.back_t is None:
            return _news("over", number, INFO, one.what or one.kind, "over, nothing was lost")
        words = f"{_where(one)}{one.return_words()}"
        lost = one.cost(again_s)
        held_s = 0.0 if lost is None else lost.held_s
        cost = f"cost: {units.seconds(0.0 if lost is None else lost.total_s)}"
        if self._num_machines > 1:
            cost += f" of {self._num_machines} machines"
        kinds = self._fold.measured.kinds
        # Of machines that are not known by name: as those that are.
        price = self._prices.mean([kinds.get(name, "") for name in self._hosts or kinds or [""]])
        if price is not None:
            money = held_s / 3600 * self._num_machines * price
            cost += f", {money:,.2f} at {price:g} per machine and hour"
        return _news("over", number, WARNING, one.what or one.kind, words, cost)

    def _end(self, event: Event) -> None:
        code = whole(event, "exit_code")
        severity, what = _ENDS.get(code or 0, (CRITICAL, "the job has ended"))
        reason = str(event.get("reason") or "")
        words = (f"exit code {code}", *([reason] if reason else []))
        self._add(event, severity, what, *words, is_end=True)

    def _alone(self, event: Event) -> None:
        failing = self._failing.sentence(event)
        if failing:
            self._add(event, WARNING if event.event == "storage_error" else INFO, failing)
        elif event.event in _TOLD_ALONE and (what := sentence(event)):
            severity = INFO if event.get("over") else _TOLD_ALONE[event.event]
            self._add(event, severity, what)
        elif event.event == "watch_gap" and event.get("what") == "ledger":
            self._add(event, WARNING, f"{event.get('lost')} events are missing from the ledger")

    def _add(
        self, event: Event, severity: str, what: str, *more: str, is_end: bool = False
    ) -> None:
        number = len(self._other)
        self._other_t.append(event.t)
        self._other.append(_news("other", number, severity, what, *more, is_end=is_end))


def _where(one: Incident) -> str:
    names = one.nodes
    return f"on {', '.join(names[:4])}{' …' * (len(names) > 4)}; " if names else ""


def _news(
    kind: str, number: int, severity: str, what: str, *more: str, is_end: bool = False
) -> News:
    return News(kind=kind, number=number, severity=severity, what=what, more=more, is_end=is_end)


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """A message: its severity, its title in one line, its text."""

    severity: str
    title: str
    body: str


def letter(news: list[News], *, job: str, node: str, directory: str) -> Letter:
    """One message of all of these; at least one."""
    ordered = sorted(news, key=lambda one: -SEVERITIES.index(one.severity))
    first = ordered[0]
    others = f" (and {len(news) - 1} more)" if len(news) > 1 else ""
    title = f"job {job}: {first.what}"
    room = TITLE_MOST - len(others)
    title = title if len(title) <= room else f"{title[: room - 1]}…"
    shown = {id(one) for one in ordered[:LINES_MOST]}
    lines = []
    for one in news:
        if id(one) in shown:
            lines += [f"- {one.what}", *(f"  {words}" for words in one.more)]
    if len(news) > LINES_MOST:
        lines.append(f"and {len(news) - LINES_MOST} more")
    lines += ["", f"Job {job} in {directory}, told by {node}.", f"Next: outlast report {directory}"]
    return Letter(severity=first.severity, title=f"{title}{others}", body="\n".join(lines))
