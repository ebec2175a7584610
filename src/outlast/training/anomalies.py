"""What the loop logs of its loss, judged while it goes on: on all ranks at once, without a wait.

Each rank notes what ``session.log`` is given as ``loss`` and ``grad_norm``, and a thread of its own
brings that to rank 0 some times a second, over the attempt's link. Rank 0 puts the ranks' values
of a step together (their mean, so that one rank's NaN is everybody's), once all have told that
step, and judges the steps in their order (``policy.rollbacks``). What it decides is written down
durably, and then agreed on like a drain: all ranks leave after the same step. The next attempt
finds in the ledger where to go on and what to leave out.

What it costs: a tensor on the CPU is read at once (a microsecond). One on a GPU is copied behind
what the GPU is at, into pinned memory, and read when that has happened: the step does not wait. A
loop that logs neither has no thread. A norm of the gradients is not computed here: it would read
all of them once more; ``clip_grad_norm_`` returns it.

What can go wrong: a rank that tells nothing (it hangs, or its GPU does) leaves the judgement
waiting, never the loop; who sees to hangs ends that. A word that cannot be sent now is sent later.
A sign at the very end of a loop is waited for there, for at most ``END_S``, and not at each further
one where that was in vain. A rollback that cannot be written down, nor kept in the room that was
made for it (``ledger.file``), is none: the next attempt would not know of it, and go on from
behind the sign. All leave with 77 then, in words.

Rejected: an all-reduce of the loss a step later (a process group of our own, which recovery in the
process would have to take down and build, and one more collective that can hang); judging each
rank's own value (it is noisier by the square root of their number, and they would disagree).

``LossTable`` is rank 0's table of what the ranks have told; steps are judged from it, in their
order. It lives in rank 0's training process, under its interpreter's lock, so a thousand ranks must
cost next to nothing: a rank's word is a few arrays, added up by NumPy as they come, and what is
kept is a sum per step, however many ranks there are.

What can go wrong: a rank that tells nothing. The others' words are kept for ``STEPS_MAX`` steps,
and dropped behind that: those steps are judged by what is there.

Rejected: a list of (rank, value) per step: some milliseconds a step at a thousand ranks, and tens
of gigabytes while one of them is silent.
"""

from __future__ import annotations

import base64
import binascii
import collections
import contextlib
import logging
import math
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from outlast.attempt.link import Agreement, Link, Message
from outlast.attempt.over import over
from outlast.checkpoint import devices
from outlast.config import Settings
from outlast.keeper import wire
from outlast.ledger.file import Ledger, make_room
from outlast.ledger.past import Past
from outlast.policy.rollbacks import (
    WATCHED,
    Batches,
    Decision,
    LossJudge,
    LossRules,
    Rollback,
    Sign,
    StepValue,
    decide,
)

STEPS_MAX: Final = 1 << 14
WORST_MAX: Final = 64  # ranks that are named


def word_of(rank: int, until: int, values: Sequence[tuple[int, str, float]]) -> Message:
    """What a rank tells: its values (step, name, number) of the steps up to ``until``."""
    told: dict[str, tuple[list[int], list[float]]] = {}
    for step, what, number in values:
        steps, numbers = told.setdefault(what, ([], []))
        steps.append(step)
        numbers.append(number)
    of = {
        what: [
            steps[0] if steps == [*range(steps[0], steps[0] + len(steps))] else steps,
            base64.b64encode(np.array(numbers, dtype=np.float64).tobytes()).decode(),
        ]
        for what, (steps, numbers) in told.items()
    }
    return {"kind": "values", "rank": rank, "until": until, "of": of}


class LossTable:
    """Rank 0's table of what the ranks have told of each step.

    Args:
        judge: it sees the steps.
        step: completed steps at the attempt's beginning.
        world_size: number of ranks.

    Attributes:
        judge: as given.
        next: the step that is judged next.
    """

    def __init__(self, judge: LossJudge, step: int, world_size: int) -> None:
        self.judge = judge
        self.next = step + 1
        self._until = np.full(world_size, step, dtype=np.int64)
        self._columns: dict[str, _Column] = {}

    def take(self, message: Message) -> None:
        """One rank's word, or that of a commit."""
        if message["kind"] == "committed":
            self.judge.committed(int(message["step"]))
            return
        rank = int(message["rank"])
        self._until[rank] = max(self._until[rank], int(message["until"]))
        for what, (steps, packed) in message["of"].items():
            values = np.frombuffer(binascii.a2b_base64(packed), np.float64)
            column = self._columns.get(what)
            if column is None:
                column = self._columns[what] = _Column()
            if isinstance(steps, int) and self.next <= steps < self.next + STEPS_MAX - len(values):
                column.add_row(rank, steps, values)
            else:
                every = (
                    np.arange(len(values)) + steps if isinstance(steps, int) else np.array(steps)
                )
                fits = (every >= self.next) & (every < self.next + STEPS_MAX)
                column.add(rank, every[fits], values[fits])

    def judge_next(self) -> Sign | bool | None:
        """Judge one step: its sign, or True for a good one; None while not all have told it."""
        if self.next > self._until.min():
            return None
        step, self.next = self.next, self.next + 1
        found = {what: column.take(step) for what, column in self._columns.items()}
        readings = {what: one for what, one in found.items() if one is not None}
        return self.judge.see(step, readings) or True


class _Column:
    """One kind of value: for each step its sum, how many there are, and where it is worst."""

    def __init__(self) -> None:
        self._count = np.zeros(STEPS_MAX, dtype=np.int64)
        self._sum = np.zeros(STEPS_MAX)
        self._largest = np.full(STEPS_MAX, -math.inf)
        self._where = np.zeros(STEPS_MAX, dtype=np.int64)
        self._wrong: dict[int, set[int]] = {}  # step → ranks whose value is no finite number

    def add_row(self, rank: int, step: int, values: Any) -> None:
        """A rank's values of steps in a row from ``step`` on: the usual, and the fastest."""
        first = step % STEPS_MAX
        row = slice(first, first + len(values))
        if row.stop > STEPS_MAX or not np.isfinite(values).all():
            self.add(rank, np.arange(step, step + len(values)), values)
            return
        self._count[row] += 1
        self._sum[row] += values
        self._note_largest(rank, row, values)

    def add(self, rank: int, steps: Any, values: Any) -> None:
        """A rank's values of any steps, of one perhaps more than one."""
        at = steps % STEPS_MAX
        np.add.at(self._count, at, 1)
        with np.errstate(invalid="ignore", over="ignore"):  # infinity and its opposite
            np.add.at(self._sum, at, values)
        is_finite = np.isfinite(values)
        for step in steps[~is_finite].tolist():
            ranks = self._wrong.setdefault(step, set())
            if len(ranks) < WORST_MAX:
                ranks.add(rank)
        for place, value in zip(at[is_finite].tolist(), values[is_finite].tolist(), strict=True):
            self._note_largest(rank, slice(place, place + 1), value)

    def _note_largest(self, rank: int, row: slice, values: Any) -> None:
        is_larger = values > self._largest[row]
        self._where[row][is_larger] = rank
        np.maximum(self._largest[row], values, out=self._largest[row])

    def take(self, step: int) -> StepValue | None:
        """What there is of ``step``, which is then forgotten."""
        at = step % STEPS_MAX
        count = int(self._count[at])
        if not count:
            return None
        wrong = self._wrong.pop(step, None)
        worst = tuple(sorted(wrong)) if wrong else (int(self._where[at]),)
        reading = StepValue(value=float(self._sum[at]) / count, worst=worst)
        self._count[at], self._sum[at], self._largest[at] = 0, 0.0, -math.inf
        return reading


logger = logging.getLogger(__name__)

KEY: Final = "judged"
PERIOD_S: Final = 0.2
PER_RANK_S: Final = 0.002  # rank 0 is not told more than 500 times a second
END_S: Final = 30.0
FETCH_S: Final = 600.0
STOP_S: Final = 2.0
REMEMBERED: Final = 10_000  # steps of which it is known which batch they had
_TOO_OLD: Final = "which batch its first step had is not known any more"
LOGGED_MAX: Final = 20_000  # values that wait to be told; what is logged beyond is not watched
UNSENT_MAX: Final = 10_000
LOOK_S: Final = 5.0  # for the places to say which checkpoints they have


class _KnownLosses(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others at the beginning."""

    rollbacks: tuple[Rollback, ...]
    healthy: tuple[int, ...]
    is_watched: bool


class LossMonitor:
    """One rank's part in watching the loss, and on rank 0 the judgement.

    Args:
        settings: the job's.
        link: the other ranks.
        past: what the ledger says of before; rank 0's.

    Attributes:
        rollbacks: all of the job, oldest first.
    """

    def __init__(self, settings: Settings, link: Link, past: Past | None) -> None:
        self._rules = rules_of(settings)
        self._link = link
        self._attempt = 0
        self._commits = set(past.commits if past is not None else ())
        known = self._exchange(past)
        self.rollbacks = known.rollbacks
        self._healthy = set(known.healthy)
        self._is_watched = known.is_watched
        self._windows = past.windows if past is not None else {}
        self._unwritten = past.unwritten if past is not None else []
        self._find_there: Callable[[], Collection[int] | None] = lambda: None
        self._unsent: list[tuple[int, Message]] = []
        self._patience_s = END_S
        self._logged: collections.deque[tuple[int, str, _Value]] = collections.deque()
        self._held: list[tuple[int, str, _Value]] = []  # drained from there, and not told yet
        self._completed = self._told = self._next = 0
        self._batches: dict[int, tuple[int, int]] = {}  # step → loop, number of its batch
        self._heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._bench: LossTable | None = None
        self._decided: dict[str, Any] | None = None
        self._wake = threading.Event()
        self._changed = threading.Condition()
        self._is_stopping = self._is_active = False
        self._thread = devices.Thread(target=self._run, name="outlast-judging", daemon=True)
        self._agreement: Agreement
        self._ledger: Ledger
        self._tell_keeper: Callable[[wire.Judged], None] = lambda _: None

    def _exchange(self, past: Past | None) -> _KnownLosses:
        if past is not None:
            known = _KnownLosses(
                rollbacks=tuple(past.rollbacks),
                healthy=tuple(past.healthy),
                is_watched=bool(past.healthy or past.rollbacks),
            )
            self._link.publish(KEY, msgspec.json.encode(known))
            return known
        return msgspec.json.decode(self._link.fetch(KEY, FETCH_S), type=_KnownLosses)

    def start(
        self,
        step: int,
        attempt: int,
        agreement: Agreement,
        ledger: Ledger,
        tell_keeper: Callable[[wire.Judged], None],
        *,
        find_there: Callable[[], Collection[int] | None] = lambda: None,
    ) -> None:
        """Training starts after ``step``.

        Args:
            step: completed steps.
            attempt: number of this attempt.
            agreement: by which a rollback is agreed on.
            ledger: what rank 0 writes its findings to.
            tell_keeper: tells this machine's keeper what is known of the checkpoints.
            find_there: gives the steps that lie somewhere and stand; None where that cannot be
                told. It may hang.
        """
        self._find_there = find_there
        self._attempt, self._agreement, self._ledger = attempt, agreement, ledger
        self._tell_keeper = tell_keeper
        self._completed = self._told = step
        if self._link.rank == 0:
            self._commits.add(step)
            self._bench = LossTable(
                LossJudge(self._rules, step, self._windows), step, self._link.world_size
            )
            for committed in self._commits - {0}:
                self._bench.judge.committed(committed)
            if self._unwritten or self._rules.action != "report":
                devices.Thread(target=self._make_room, name="outlast-room", daemon=True).start()
        self._tell()

    def _make_room(self) -> None:
        """For rollbacks that a full disk would not take; one that was not taken is made up for."""
        written = [self._ledger.write(event, durable=True) for event in self._unwritten]
        try:
            make_room(self._ledger.path.parent, forget=all(written))
        except OSError as error:
            logger.warning("a rollback may not be written on this disk when it is full: %s", error)

    def stop(self) -> None:
        """No more; nothing waits for a judgement."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._wake.set()
        if self._is_active:
            self._thread.join(STOP_S)

    # --- the training thread --------------------------------------------------------------------

    def log(self, scalars: Mapping[str, Any]) -> None:
        """The step in progress has these numbers."""
        for what in WATCHED:
            if what not in scalars or self._is_stopping or len(self._logged) >= LOGGED_MAX:
                continue
            value = _value_of(scalars[what])
            if value is None:
                continue
            self._logged.append((self._completed + 1, what, value))
            if not self._is_active:
                self._activate()
            elif value.is_wrong:
                self._wake.set()

    def completed(self, step: int, loop: int, batch: int) -> None:
        """A step is complete; it had this batch."""
        if self._bench is not None:
            self._batches[step] = loop, batch
            self._batches.pop(step - REMEMBERED, None)
        self._completed = step

    def hasten(self) -> None:
        """A loop is over: what is there is told now."""
        self._wake.set()

    def at_end(self, step: int) -> dict[str, Any] | None:
        """On rank 0, at a loop's end: what was decided of the steps up to ``step``, waited for."""
        bench = self._bench
        if bench is None or not self._is_active:
            return self._decided
        self._wake.set()
        with self._changed:
            is_judged = self._changed.wait_for(
                lambda: self._is_stopping or self._decided is not None or self._next > step,
                self._patience_s,
            )
        self._patience_s = END_S if is_judged else 0.0
        if not is_judged:
            logger.warning("not all ranks have told their loss of step %d", step)
        return self._decided

    def committed(self, step: int) -> None:
        """There is a checkpoint of ``step`` that can be resumed from; on rank 0 it is followed."""
        if step and step not in self._commits and self._bench is not None:
            self._commits.add(step)
            self._heard.put({"kind": "committed", "step": step})
            self._wake.set()

    # --- other threads --------------------------------------------------------------------------

    def heard(self, message: Message) -> None:
        """Another rank says something; in the answering thread."""
        kind = message["kind"]
        if kind == "values":
            self._heard.put(message)
            self._activate()
            self._wake.set()
        elif kind == "values?":
            self._activate()
        elif kind == "healthy":
            self._healthy.add(int(message["step"]))
            self._is_watched = True
            self._tell()
        elif kind == "undone":
            rollback = msgspec.convert(message["rollback"], Rollback)
            if rollback not in self.rollbacks:
                self.rollbacks = (*self.rollbacks, rollback)
            self._tell()

    def _activate(self) -> None:
        """Somebody logs a loss: all tell theirs from now on, or that they have none."""
        with self._changed:
            if self._is_active or self._is_stopping:
                return
            self._is_active = self._is_watched = True
            self._thread.start()

    def _tell(self) -> None:
        healthy = tuple(sorted(self._healthy)) if self._is_watched else None
        self._tell_keeper(wire.Judged(healthy=healthy, rollbacks=self.rollbacks))

    def _run(self) -> None:
        try:
            self._tell()
            if self._link.rank == 0:
                self._send_all({"kind": "values?"})
            period_s = max(PERIOD_S, self._link.world_size * PER_RANK_S)
            while not self._is_stopping:
                self._wake.wait(period_s)
                self._wake.clear()
                self._look()
        except Exception as error:  # noqa: BLE001 - what observes never stops training
            if not self._is_stopping:
                logger.warning("the loss is not watched any more: %s", error)
        finally:
            with self._changed:
                self._is_stopping = True
                self._changed.notify_all()

    def _look(self) -> None:
        """Tell rank 0 what is new; on rank 0, judge what all have told."""
        until = self._completed  # before the values are taken: those of its steps are all there
        with contextlib.suppress(IndexError):
            while len(self._held) < LOGGED_MAX:
                self._held.append(self._logged.popleft())
        late = next((step for step, _, value in self._held if not value.is_there), until + 1)
        until = min(until, late - 1)
        told = [entry for entry in self._held if entry[0] <= until]
        self._held = [entry for entry in self._held if entry[0] > until]
        if until > self._told:
            values = [(step, what, value.number) for step, what, value in told]
            message = word_of(self._link.rank, until, values)
            if self._bench is not None:
                self._heard.put(message)
                self._told = until
            elif self._send(0, message):
                self._told = until
            else:
                self._held = told + self._held  # it is told at the next period
        unsent, self._unsent = self._unsent, []
        for rank, message in unsent:
            self._send(rank, message, keep=True)
        if self._bench is not None:
            self._judge(self._bench)

    def _judge(self, bench: LossTable) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                bench.take(self._heard.get_nowait())
        while self._decided is None and (sign := bench.judge_next()) is not None:
            if isinstance(sign, Sign):
                self._mark(bench)  # those that had turned out to be so before the sign
                self._act(sign, bench)
        if self._decided is None:
            self._mark(bench)
        with self._changed:
            self._next = bench.next  # not before: what is decided of a step's sign takes a while
            self._changed.notify_all()

    def _mark(self, bench: LossTable) -> None:
        """Say which checkpoints have turned out to be healthy."""
        for step in bench.judge.healthy():
            self._ledger.append("healthy", step=step, windows=bench.judge.windows(step))
            self._healthy.add(step)
            self._tell()
            self._send_all({"kind": "healthy", "step": step})

    def _act(self, sign: Sign, bench: LossTable) -> None:
        """The first sign of trouble: write it down, decide, and have all ranks act."""
        decision = decide(
            self._rules,
            sign,
            commits=self._commits - {0},
            healthy=self._healthy,
            rollbacks=self.rollbacks,
            there=None if self._rules.action == "report" else self._there(),
        )
        at = self._batches.get(sign.first)
        if decision.action == "rollback" and at is None:
            decision = msgspec.structs.replace(decision, action="stop", why=_TOO_OLD)
        found = msgspec.structs.asdict(sign)
        found["value"] = sign.value if math.isfinite(sign.value) else None
        self._ledger.append("anomaly", action=decision.action, **found)
        if decision.action == "report":
            return
        batches = None
        if decision.action == "rollback" and at is not None:
            last = at[1] + decision.num_batches - 1
            batches = Batches(loop=at[0], first=at[1], last=last)
        rollback = Rollback(
            attempt=self._attempt, step=decision.step, first=sign.first, batches=batches
        )
        # Before anybody leaves: whatever dies from here on, the next attempt finds it.
        is_known = self._ledger.record(
            "rollback",
            step=rollback.step,
            first=rollback.first,
            batches=None if batches is None else msgspec.to_builtins(batches),
            reason=_reason(sign, decision),
            seen=self._completed,
            windows=bench.judge.windows(rollback.step),
        )
        info: dict[str, Any] = {"stops": batches is None}
        if is_known:
            self._send_all({"kind": "undone", "rollback": msgspec.to_builtins(rollback)})
            self.heard({"kind": "undone", "rollback": msgspec.to_builtins(rollback)})
        else:
            info["unknown"] = unwritten(self._ledger.path, rollback.step)
        with self._changed:
            self._decided = info
            self._changed.notify_all()
        self._agreement.request("rollback", not_before=0, **info)

    def _there(self) -> Collection[int] | None:
        """Steps that lie somewhere and stand; None where storage does not say so in time."""
        answer: list[Collection[int] | None] = []

        def look() -> None:
            with contextlib.suppress(OSError, RuntimeError):
                answer.append(self._find_there())

        looking = devices.Thread(target=look, name="outlast-there", daemon=True)
        looking.start()
        looking.join(LOOK_S)
        return answer[0] if answer else None

    def _send_all(self, message: Message) -> None:
        for rank in range(1, self._link.world_size):
            self._send(rank, message, keep=True)

    def _send(self, rank: int, message: Message, *, keep: bool = False) -> bool:
        """Send it, or keep it for the next period; whether it was sent."""
        try:
            self._link.send(rank, message)
        except (OSError, RuntimeError) as error:
            level = logging.DEBUG if over.is_over else logging.WARNING
            logger.log(level, "rank %d is not told now (it is tried again): %s", rank, error)
            if keep and len(self._unsent) < UNSENT_MAX:
                self._unsent.append((rank, message))
            return False
        return True


class _Value:
    """A number that was logged; of a GPU, once it has come."""

    def __init__(self, number: float = math.nan, event: Any = None, host: Any = None) -> None:
        self._number, self._event, self._host = number, event, host

    @property
    def is_there(self) -> bool:
        """Whether it can be read without waiting."""
        return self._event is None or bool(self._event.query())

    @property
    def is_wrong(self) -> bool:
        """Whether it is known not to be a finite number."""
        return self._event is None and not math.isfinite(self._number)

    @property
    def number(self) -> float:
        """It."""
        return self._number if self._host is None else float(self._host)


def rules_of(settings: Settings) -> LossRules:
    """What the owner has set about losses."""
    return LossRules(
        action=settings.health_anomaly,
        window=settings.health_window,
        factor=settings.health_factor,
        settle=settings.health_settle,
        skip=settings.health_skip,
        rollbacks=settings.health_rollbacks,
        stretch=settings.health_stretch,
    )


def _value_of(value: Any) -> _Value | None:
    """What was logged, as something that can be read later; None for what is no number."""
    try:
        if not isinstance(value, torch.Tensor):
            return _Value(float(value))
        if value.numel() != 1:
            return None
        value = value.detach()
        if hasattr(value, "placements"):  # a DTensor: reading one that is spread is a collective
            if not all(one.is_replicate() for one in value.placements):
                return None
            value = value.to_local()
        if value.device.type != "cuda":
            return _Value(float(value))
        if torch.cuda.is_current_stream_capturing():
            return None  # what would be queued here happens in replays
        with torch.cuda.device(value.device):
            host = torch.empty((), dtype=value.dtype, pin_memory=True)
            host.copy_(value.reshape(()), non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return _Value(event=event, host=host)
    except (TypeError, ValueError, RuntimeError):
        return None


def _reason(sign: Sign, decision: Decision) -> str:
    found = {"nan": "no number", "infinity": "infinite"}.get(sign.kind, f"{sign.value:.4g}")
    usual = f", usually {sign.usual:.4g}" if sign.usual is not None else ""
    ranks = f" on rank {', '.join(map(str, sign.ranks))}" if sign.ranks else ""
    words = f"{sign.what} of step {sign.step} is {found}{usual}{ranks}"
    return f"{words}; {decision.why}" if decision.why else words


def unwritten(ledger: Path, step: int) -> str:
    """What a person is told where a rollback cannot be written down."""
    behind = f"step {step}" if step else "the start"
    return (
        f"the loss went wrong, and the rollback to {behind} cannot be written to {ledger}: the "
        "next attempt would not know of it. Make the disk writable, move away the checkpoints "
        f"behind {behind}, and run the same command again"
    )
