"""Tells people what happens to the job, one line each, from the ledger alone; and our own errors.

A loss is told once, in two lines: what was lost and what is done about it, and how the job goes on.
The ledger has an event of each worker, and of each machine that restarts (:class:`Telling`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, NoReturn, TextIO

from outlast.errors import Exit, OutlastError, exit_code_of
from outlast.ledger.events import Event, back, left, raised, wrong
from outlast.ledger.file import Follower
from outlast.ledger.incidents import sentence as slow_sentence
from outlast.policy.failures import Remedy, title_of
from outlast.policy.restart import ROLLED_BACK
from outlast.units import short_seconds

POLL_S: Final = 0.2
SAID_S: Final = 0.05  # shorter waits are not worth a word
ANSWER_S: Final = 2.0  # what is done about a loss comes with the agent's next look, or not at all
BEGINNING_S: Final = 60.0  # workers import, and read a checkpoint
RANKS_MAX: Final = 8  # named in one line
_ERROR_MAX: Final = 300


class Narrator:
    """Follows a ledger in a thread and says what matters; silent about steps and snapshots.

    Args:
        directory: the job's.
        also: shown each event, those of before included.
    """

    def __init__(self, directory: Path, also: Callable[[Event], None] = lambda _: None) -> None:
        self._also = also
        self._follower = Follower(directory)
        for event in self._follower.poll():  # what happened before is told by `outlast report`
            also(event)
        self._telling = Telling()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outlast-narrator", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Say what is left to say, and end."""
        self._stopping.set()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        while not self._stopping.wait(POLL_S):
            self._tell()
        self._tell()
        for text in self._telling.rest():
            say(text)

    def _tell(self) -> None:
        try:
            events = self._follower.poll()
        except OSError:
            return  # telling that fails never stops training
        for event in events:
            self._also(event)
            for text in self._telling.take(event, time.monotonic()):
                say(text)
        for text in self._telling.overdue(time.monotonic()):
            say(text)


class Telling:
    """Makes lines of events.

    A loss waits for what is done about it, and a new attempt for where it goes on from, so that
    both are one line; each goes alone where the other half does not come. The times are monotonic
    seconds.
    """

    def __init__(self) -> None:
        self._failing = Failing()
        self._last = ""
        self._losses: list[Event] = []  # workers that were lost, or hang, and are not told yet
        self._survived = ""  # workers that were not, likewise
        self._formed: Event | None = None  # an attempt, likewise
        self._due_s = 0.0
        self._has_begun = False
        self._lost_in: int | None = None  # the attempt of the losses that were told last
        self._restarted: int | None = None  # the attempt after which a restart was told last

    def take(self, event: Event, now_s: float) -> list[str]:
        """The lines that are to be said now that ``event`` is known."""
        if event.event in ("worker_lost", "hang"):
            if sentence(event):
                self._losses.append(event)
                self._due_s = now_s + ANSWER_S
            return []
        if event.event == "restart":
            return self._restart(event)
        if event.event == "survived":
            self._survived, self._due_s = sentence(event), now_s + ANSWER_S
            return []
        if event.event == "attempt_formed" and self._has_begun:
            lines = self.rest()
            self._formed, self._due_s = event, now_s + BEGINNING_S
            return lines
        self._has_begun = self._has_begun or event.event == "attempt_formed"
        if event.event == "resumed" and self._formed is not None and not self._losses:
            formed, self._formed = self._formed, None
            return [f"{_formed(formed)}; {_resumed(event)}"]
        text = self._failing.sentence(event) or sentence(event)
        # Of a notice that Slurm sends to every process, the agent and each worker hear.
        if not text or (event.event == "notice" and text == self._last):
            return []
        self._last = text
        if event.event == "node_lost":
            text += self._and_survived()
        return [*self.rest(), text]

    def overdue(self, now_s: float) -> list[str]:
        """The lines that have waited long enough."""
        return self.rest() if now_s >= self._due_s else []

    def rest(self) -> list[str]:
        """The lines that wait."""
        if self._losses:
            return [self._lost() + self._and_survived()]
        survived, self._survived = self._survived, ""
        formed, self._formed = self._formed, None
        return [*filter(None, [survived, "" if formed is None else _formed(formed)])]

    def _and_survived(self) -> str:
        survived, self._survived = self._survived, ""
        return f"; {survived}" if survived else ""

    def _restart(self, event: Event) -> list[str]:
        is_again = event.attempt == self._restarted and not event.get("weighed")
        is_told = event.attempt == self._lost_in
        self._restarted = event.attempt
        if event.get("reason") == ROLLED_BACK:  # what is gone back to was said
            return self.rest()
        if self._losses:
            return [f"{self._lost()}{_answer(event) or '; restarting'}{self._and_survived()}"]
        if is_again:  # each machine writes one down
            return []
        return [*self.rest(), f"restarting{_answer(event)}" if is_told else sentence(event)]

    def _lost(self) -> str:
        """The losses that wait, as one line; ranks that were lost alike are named together."""
        losses, self._losses = self._losses, []
        self._lost_in = losses[-1].attempt
        alike: dict[tuple[str, str], list[Event]] = {}
        for one in losses:
            key = ("hang", sentence(one)) if one.event == "hang" else _how(one)
            alike.setdefault(key, []).append(one)
        text = "; ".join(
            how if kind == "hang" else _lost_alike([one.rank for one in ones], kind, how)
            for (kind, how), ones in alike.items()
        )
        formed, self._formed = self._formed, None
        return text if formed is None else f"attempt {formed.attempt}: {text}"


def say(text: str, *, is_answer: bool = False) -> None:
    """One line for people, with the time, apart from what the script prints.

    Args:
        text: the line.
        is_answer: whether it answers a command: at a terminal, to a person who has just typed it,
            it has no time. A log may be read a week later.
    """
    stream: TextIO | None = sys.stderr
    if stream is None:  # closed (2>&-): print would take standard output instead
        return
    is_dated = not (is_answer and stream.isatty())
    line = f"{log_time(time.time()) if is_dated else ''}outlast: {text}\n"
    is_collected = stream is not sys.__stderr__  # by a notebook, or a test
    with contextlib.suppress(OSError, ValueError):  # nobody reads any more: it stops nothing
        if is_collected:
            stream.write(line)
            stream.flush()
            return
        stream.flush()
        # Past its buffer: a line that cannot be written would stay there, the interpreter would try
        # it again at its end, and the exit code of the whole process would be 120.
        left = memoryview(line.encode(stream.encoding, "backslashreplace"))
        while left:
            left = left[os.write(stream.fileno(), left) :]


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Our own errors, if nobody catches them, end the process with one line and their exit code."""
    try:
        yield
    except OutlastError:
        _show_errors()
        raise


def _show_errors() -> None:
    """Replace the hook, once; other errors go to the hook that was there."""
    previous = sys.excepthook
    if getattr(previous, "shows_errors", False):
        return

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if isinstance(error, OutlastError):
            end_with(error)
        previous(kind, error, tb)

    hook.shows_errors = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def end_with(error: BaseException | None) -> NoReturn:
    """End the process with one line, and the exit code that the error stands for; 0 for None."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads, or closed
        sys.stdout.flush()
    if error is not None:
        say(str(error))
    # The interpreter would exit with 1 whatever a hook does; the exit code is a contract.
    atexit._run_exitfuncs()
    os._exit(exit_code_of(error))


def log_time(t: float) -> str:
    """The time ahead of a line of a log, in UTC and with a space: ``2026-11-22T03:12:44Z ``."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ ", time.gmtime(t))


def place(path: Path) -> str:
    """A path as a person would type it from here."""
    with contextlib.suppress(ValueError):
        return f"./{path.absolute().relative_to(Path.cwd())}"
    return str(path)


def sentence(event: Event) -> str:
    """What a person should read of ``event``; "" for nothing."""
    teller = _TELLERS.get(event.event)
    return teller(event) if teller else ""


def _examined(event: Event) -> str:
    """Of a machine that does not take part; those that do have said so themselves."""
    if event.get("fit", True):
        return ""
    failed = [one for one in event.get("findings") or [] if one.get("status") == "failed"]
    why = "; ".join(f"{one.get('name')}: {one.get('seen')}" for one in failed)
    return f"{event.get('machine')} does not take part: {why or 'too few machines are fit'}"


def _formed(event: Event) -> str:
    workers, nodes = event.get("world_size", 0), event.get("nodes", 1)
    where = f" on {nodes} machines" if isinstance(nodes, int) and nodes > 1 else ""
    return f"attempt {event.attempt}: {workers} worker{'s' if workers != 1 else ''}{where}"


def _machine_lost(event: Event) -> str:
    # Read from disk, the field has taken the head's place.
    why = f" (it {event.get('reason')})" if event.get("reason") else ""
    return f"machine {event.get('node') or event.node} was lost{why}"


def _left_out(event: Event) -> str:
    host, minutes = event.get("node") or event.node, event.get("for_s", 0.0) / 60
    if not event.get("goes"):
        why = "no other machine waits" if event.get("spare_only") else "too few others are there"
        return f"machine {host} takes part on, because {why}: {event.get('reason')}"
    how = "is replaced" if event.get("spare_only") else "is left out"
    return f"machine {host} {how} for {minutes:.3g} min: {event.get('reason')}"


def _resumed(event: Event) -> str:
    skipped = event.get("skipped") or []
    step, origin = event.get("step"), event.get("source")
    if not step and not skipped:
        return "no checkpoint yet: starting at step 0"
    lines = [f"step {one['step']} is not valid: {one['reason']}" for one in skipped]
    if origin == "":
        return "; ".join([*lines, f"going on at step {step}, from the framework's own checkpoint"])
    origin = str(origin)
    where = f" ({origin})" if origin.startswith("from ") else ""
    took = f"{event.get('read_s', 0.0):.2f} s"
    lines.append(f"resumed from step {step} in {took}{where}")
    return "; ".join(lines)


def _initialised(event: Event) -> str:
    remarks = [str(one) for one in event.get("remarks") or []]
    source, step = str(event.get("source")), event.get("step")
    at = f", step {step}" if step is not None and not source.endswith(f"@{step}") else ""
    return f"started from {source}{at}: {'; '.join(remarks or event.get('objects') or [])}"


def _lost(event: Event) -> str:
    if event.get("exit_code") in (Exit.USAGE, Exit.STORAGE, Exit.REFUSED):
        return ""  # it left on purpose: the last line says why, once
    return _lost_alike([event.rank], *_how(event))


def _how(event: Event) -> tuple[str, str]:
    """After which step a worker was lost, and how."""
    how = event.get("error") or f"exit code {event.get('exit_code')}"
    step = event.get("step")
    return "" if step is None else f" after step {step}", raised(str(how))[:_ERROR_MAX]


def _lost_alike(ranks: list[int | None], after: str, how: str) -> str:
    *first, last = map(str, ranks)
    if len(first) >= RANKS_MAX:
        first, last = first[:RANKS_MAX], f"{len(ranks) - RANKS_MAX} more"
    names = f"ranks {', '.join(first)} and {last} were" if first else f"rank {last} was"
    return f"{names} lost{after}: {how}"


def _restart(event: Event) -> str:
    if event.get("reason") == ROLLED_BACK:
        return ""  # what is gone back to was said
    return f"restarting: {event.get('reason')}{_answer(event)}"


def _answer(event: Event) -> str:
    """What is done about a failure of what kind, to go on from what has failed."""
    kind, action, wait_s = event.get("kind"), event.get("action"), event.get("wait_s") or 0.0
    text = "" if kind is None else f" [{title_of(kind)}: {action}]"
    if event.get("weighed") and action != Remedy.LEAVE_OUT.value:  # else what comes of it says so
        text += f"; this machine takes part on: {event.get('weighed')}"
    count = event.get("without_progress") or 0
    if wait_s >= SAID_S:
        since = f", {count} attempts in a row without progress" if count > 1 else ""
        text += f"; it waits {wait_s:.1f} s{since}"
    return text


def _survived(event: Event) -> str:
    ranks = [str(rank) for rank in event.get("ranks") or []]
    are_many = len(ranks) > 1
    how = "go on in their processes" if are_many else "goes on in its process"
    how = how if event.get("moves") else "survived"
    words = [f"rank{'s' * are_many} {', '.join(ranks)} {how}"] if ranks else []
    words += [
        f"rank {rank} starts anew, because {why}"
        for rank, why in (event.get("ended") or {}).items()
    ]
    return "; ".join(words)


def _held(event: Event) -> str:
    what, seconds = event.get("what"), event.get("seconds", 0.0)
    if event.get("over"):
        return f"process {what} has gone, {seconds:.0f} s after it was killed"
    return (
        f"process {what} was killed {seconds:.0f} s ago and has not ended: something holds it, and "
        f"it may hold a GPU's memory; the next attempt on {event.node} waits for it"
    )


def _anomaly(event: Event) -> str:
    words = wrong(event)
    return f"{words}; reported only (health.anomaly)" if event.get("action") == "report" else words


def _rolled_back(event: Event) -> str:
    return f"{back(event)} ({event.get('reason')})" if event.get("step") is not None else ""


def _notice(event: Event) -> str:
    deadline_t = event.get("deadline_t")
    when = f" in {max(deadline_t - time.time(), 0.0):.0f} s" if deadline_t else ""
    elsewhere = f" on {event.node}" if event.node != socket.gethostname() else ""
    text = f"notice from {event.get('source')}{elsewhere}: {event.get('action')}{when}"
    if event.get("early"):
        return f"early {text}; {_ANSWERS.get(str(event.get('answer')), 'noted')}"
    return f"{text}; draining"


def _cadence(event: Event) -> str:
    names = ("interval_s", "before_s", "failures_per_h", "cost_s")
    interval_s, before_s, per_h, cost_s = (event.get(name) or 0.0 for name in names)
    if event.get("tier"):
        return (
            f"tier {event.get('tier')} takes a checkpoint every {interval_s:.0f} s in calm: "
            f"{event.get('reason')} ({1 / per_h if per_h else 0:.3g} h between them, "
            f"{cost_s:.3g} s of training a copy)"
        )
    if not before_s:
        return ""  # the first of an attempt
    rate = f"{per_h:.0f}" if per_h >= 100 else f"{per_h:.3g}"
    return (
        f"saving every {short_seconds(interval_s)} in place of {short_seconds(before_s)}: "
        f"{event.get('reason')} ({rate} failures an hour, {cost_s:.3g} s a checkpoint)"
    )


def _planned(event: Event) -> str:
    share, per_h = event.get("productive_fraction"), event.get("failures_per_h")
    if not isinstance(share, float) or not isinstance(per_h, int | float) or not per_h:
        return ""
    return (
        f"planned: {100 * share:.1f} % of the time useful, a failure every {1 / per_h:.3g} h; "
        "outlast report will say how far that was off"
    )


def _to_tier(event: Event) -> str:
    return f" to {event.get('tier')}" if event.get("tier") else ""


class Failing:
    """What storage does not do at the moment: told once, and once more when it does it again.

    Not told is what others say, whether or not the ledger's storage answers: a worker, of its saves
    that fail; those who have waited, of their waits.
    """

    def __init__(self) -> None:
        self._failing: set[tuple[str, str]] = set()  # operation and tier

    def sentence(self, event: Event) -> str:
        """What a person should hear of ``event`` in this respect; "" for nothing."""
        tier = str(event.get("tier") or "")
        if event.event == "storage_error":
            operation = str(event.get("operation"))
            if operation in ("save", "wait") or (operation, tier) in self._failing:
                return ""
            self._failing.add((operation, tier))
            return (
                f"storage failed ({operation}{_to_tier(event)}): {event.get('error')}; "
                "training goes on"
            )
        done = {"tier_copied": ("copy", tier), "commit": ("claim", "")}.get(event.event)
        if done not in self._failing:
            return ""
        self._failing.discard(done)
        if event.event == "commit":
            return f"step {event.get('step')} is saved: storage answers again"
        return f"step {event.get('step')} is in tier {tier}: copies work again"


def _late_moved(event: Event) -> str:
    """Shares of the work that changed; to see how fast a worker is, is no news."""
    counts, late = event.get("counts"), event.get("late")
    factors, back = event.get("factors"), event.get("back")
    lists = (counts, late, factors, back)
    if event.get("probes") or not all(isinstance(one, list) for one in lists):
        return ""
    numbers = [one for each in lists for one in each]  # a damaged line may hold anything
    if not all(isinstance(one, int | float) for one in numbers):
        return ""
    said = [f"rank {rank} is as quick as the others again" for rank in back]
    said += [
        f"rank {rank} takes {factor:.1f} times as long as the others"
        for rank, factor in zip(late, factors, strict=False)
    ]
    if not said:
        return ""
    made = f"ranks make {', '.join(map(str, counts))} of {sum(counts)} shards"
    if len(counts) > RANKS_MAX:
        made = f"the {sum(counts)} shards are shared out anew"
    return (
        f"{'; '.join(said)}: from step {event.get('from_step')} on {made}, and each step has the "
        "samples that it would have had"
    )


def _late_dropped(event: Event) -> str:
    samples = event.get("samples")
    if not isinstance(samples, dict) or not all(isinstance(n, int) for n in samples.values()):
        return ""
    first, last = event.get("first_step"), event.get("step")
    steps = f"step {last}" if first == last else f"{event.get('steps')} of steps {first} to {last}"
    ranks = ", ".join(samples)
    return (
        f"{sum(samples.values())} samples of {steps} are in no sum: rank{'s'[: len(samples) > 1]} "
        f"{ranks} {'were' if len(samples) > 1 else 'was'} late"
    )


_ANSWERS: Final = {
    "leave": "saving, then leaving",
    "save": "saving more often",
    "ignore": "ignored, as set",
}
_TELLERS: Final[dict[str, Callable[[Event], str]]] = {
    "preflight": _examined,
    "attempt_formed": _formed,
    "cadence": _cadence,
    "planned": _planned,
    "resumed": _resumed,
    "initialised": _initialised,
    "worker_lost": _lost,
    "survived": _survived,
    "node_lost": _machine_lost,
    "left_out": _left_out,
    "let_in": lambda event: f"machine {event.get('node') or event.node} takes part again",
    "anomaly": _anomaly,
    "rollback": _rolled_back,
    "notice": _notice,
    "straggler": slow_sentence,
    "late_moved": _late_moved,
    "late_dropped": _late_dropped,
    "restart": _restart,
    "drain_agreed": left,
    "drained": lambda event: (
        f"drained after step {event.get('step')}"
        + (", committed" if event.get("committed") else ", not committed")
        if event.get("step")
        else "drained before the first step"
    ),
    "verify_failed": lambda event: (
        f"{event.get('file')} in tier {event.get('tier')} is damaged: {event.get('reason')}"
        if event.get("tier")
        else ""  # a whole step that was passed over is told by the resume
    ),
    "hang": lambda event: (
        f"{event.get('sentence') or 'a worker makes no more progress'}; "
        f"stacks of all ranks: {event.get('stacks') or 'none'}"
    ),
    "held": _held,
    "watch_gap": lambda event: (
        ""  # whoever could not write the ledger has said so
        if event.get("what") == "ledger"
        else f"the {event.get('what')} was away for {event.get('seconds', 0.0):.1f} s, because "
        f"{event.get('reason')}; another one does its work, and training went on"
    ),
    "repaired": lambda event: f"{event.get('file')} in tier {event.get('tier')} is whole again",
}
