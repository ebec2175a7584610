"""What the loop logs of its loss, judged while it goes on: on all ranks at once, without a wait.

Each rank notes what ``session.log`` is given as ``loss`` and ``grad_norm``, and a thread of its own
brings that to rank 0 some times a second, over the attempt's link. Rank 0 puts the ranks' values
of a step together (their mean, so that one rank's NaN is everybody's), once all have told that
step, and judges the steps in their order (``policy.anomaly``). What it decides is written down
durably, and then agreed on like a drain: all ranks leave after the same step. The next attempt
finds in the ledger where to go on and what to leave out.

What it costs: a tensor on the CPU is read at once (a microsecond). One on a GPU is copied behind
what the GPU is at, into pinned memory, and read when that has happened: the step does not wait. A
loop that logs neither has no thread. A norm of the gradients is not computed here: it would read
all of them once more; ``clip_grad_norm_`` returns it.

What can go wrong: a rank that tells nothing (it hangs, or its GPU does) leaves the judgement
waiting, never the loop; who sees to hangs ends that. A sign at the very end of a loop is waited
for there, for at most ``END_S``.

Rejected: an all-reduce of the loss a step later (a process group of our own, which recovery in the
process would have to take down and build, and one more collective that can hang); judging each
rank's own value (it is noisier by the square root of their number, and they would disagree).
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import torch

from outlast.attempt.agreement import Agreement
from outlast.attempt.link import Link, Message
from outlast.config import Settings
from outlast.keeper import wire
from outlast.ledger.file import Ledger
from outlast.ledger.past import Past
from outlast.policy.anomaly import WATCHED, Decision, Judge, Reading, Rules, Sign, decide
from outlast.policy.rollbacks import Batches, Rollback

logger = logging.getLogger(__name__)

KEY: Final = "judged"
PERIOD_S: Final = 0.2
PER_RANK_S: Final = 0.002  # rank 0 is not told more than 500 times a second
END_S: Final = 30.0
FETCH_S: Final = 600.0
STOP_S: Final = 2.0
REMEMBERED: Final = 10_000  # steps of which it is known which batch they had
TOLD_MAX: Final = 100_000  # values that wait for a rank that tells nothing


class _Known(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others at the beginning."""

    rollbacks: tuple[Rollback, ...]
    healthy: tuple[int, ...]
    is_watched: bool


class Judging:
    """One rank's part in it, and on rank 0 the judgement.

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
        self._logged: collections.deque[tuple[int, str, _Value]] = collections.deque()
        self._held: list[tuple[int, str, _Value]] = []  # drained from there, and not told yet
        self._completed = self._told = 0
        self._batches: dict[int, tuple[int, int]] = {}  # step → loop, number of its batch
        self._heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._bench: _Bench | None = None
        self._decided: dict[str, Any] | None = None
        self._wake = threading.Event()
        self._changed = threading.Condition()
        self._is_stopping = self._is_active = False
        self._thread = threading.Thread(target=self._run, name="outlast-judging", daemon=True)
        self._agreement: Agreement
        self._ledger: Ledger
        self._tell_keeper: Callable[[wire.Judged], None] = lambda _: None

    def _exchange(self, past: Past | None) -> _Known:
        if past is not None:
            known = _Known(
                rollbacks=tuple(past.rollbacks),
                healthy=tuple(past.healthy),
                is_watched=bool(past.healthy or past.rollbacks),
            )
            self._link.publish(KEY, msgspec.json.encode(known))
            return known
        return msgspec.json.decode(self._link.fetch(KEY, FETCH_S), type=_Known)

    def start(
        self,
        step: int,
        attempt: int,
        agreement: Agreement,
        ledger: Ledger,
        tell_keeper: Callable[[wire.Judged], None],
    ) -> None:
        """Training starts after ``step``.

        Args:
            step: completed steps.
            attempt: number of this attempt.
            agreement: by which a rollback is agreed on.
            ledger: what rank 0 writes its findings to.
            tell_keeper: tells this machine's keeper what is known of the checkpoints.
        """
        self._attempt, self._agreement, self._ledger = attempt, agreement, ledger
        self._tell_keeper = tell_keeper
        self._completed = self._told = step
        if self._link.rank == 0:
            self._commits.add(step)
            self._bench = _Bench(Judge(self._rules, step), step, self._link.world_size)
            for committed in self._commits - {0}:
                self._bench.judge.committed(committed)
        self._tell()

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
            if what not in scalars:
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
                lambda: self._is_stopping or self._decided is not None or bench.next > step, END_S
            )
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
            while True:
                self._held.append(self._logged.popleft())
        late = next((step for step, _, value in self._held if not value.is_there), until + 1)
        until = min(until, late - 1)
        told = [entry for entry in self._held if entry[0] <= until]
        self._held = [entry for entry in self._held if entry[0] > until]
        if until > self._told:
            self._told = until
            values = [[step, what, repr(value.number)] for step, what, value in told]
            message = {"kind": "values", "rank": self._link.rank, "until": until, "of": values}
            if self._bench is None:
                self._link.send(0, message)
            else:
                self._heard.put(message)
        if self._bench is not None:
            self._judge(self._bench)

    def _judge(self, bench: _Bench) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                bench.take(self._heard.get_nowait())
        while self._decided is None and (sign := bench.judge_next()) is not None:
            if isinstance(sign, Sign):
                self._mark(bench)  # those that had turned out to be so before the sign
                self._act(sign)
        if self._decided is None:
            self._mark(bench)
        with self._changed:
            self._changed.notify_all()

    def _mark(self, bench: _Bench) -> None:
        """Say which checkpoints have turned out to be healthy."""
        for step in bench.judge.healthy():
            self._ledger.append("healthy", step=step)
            self._healthy.add(step)
            self._tell()
            self._send_all({"kind": "healthy", "step": step})

    def _act(self, sign: Sign) -> None:
        """The first sign of trouble: write it down, decide, and have all ranks act."""
        decision = decide(
            self._rules,
            sign,
            commits=self._commits - {0},
            healthy=self._healthy,
            rollbacks=self.rollbacks,
        )
        found = msgspec.structs.asdict(sign)
        found["value"] = sign.value if math.isfinite(sign.value) else None
        self._ledger.append("anomaly", action=decision.action, **found)
        if decision.action == "report":
            return
        at = self._batches.get(sign.first)
        batches = None
        if decision.action == "rollback" and at is not None:
            last = at[1] + decision.num_batches - 1
            batches = Batches(loop=at[0], first=at[1], last=last)
        rollback = Rollback(
            attempt=self._attempt, step=decision.step, first=sign.first, batches=batches
        )
        # Before anybody leaves: whatever dies from here on, the next attempt finds it.
        self._ledger.append(
            "rollback",
            step=rollback.step,
            first=rollback.first,
            batches=None if batches is None else msgspec.to_builtins(batches),
            reason=_reason(sign, decision),
            seen=self._completed,
        )
        info = {"stops": batches is None}
        self._send_all({"kind": "undone", "rollback": msgspec.to_builtins(rollback)})
        self.heard({"kind": "undone", "rollback": msgspec.to_builtins(rollback)})
        with self._changed:
            self._decided = info
            self._changed.notify_all()
        self._agreement.request("rollback", not_before=0, **info)

    def _send_all(self, message: Message) -> None:
        for rank in range(1, self._link.world_size):
            self._link.send(rank, message)


class _Bench:
    """Rank 0's table of what the ranks have told.

    Attributes:
        next: the step that is judged next.
    """

    def __init__(self, judge: Judge, step: int, world_size: int) -> None:
        self.judge = judge
        self.next = step + 1
        self._until = [step] * world_size
        self._told: dict[int, dict[str, list[tuple[int, float]]]] = {}

    def take(self, message: Message) -> None:
        """One rank's word, or that of a commit."""
        if message["kind"] == "committed":
            self.judge.committed(int(message["step"]))
            return
        rank = int(message["rank"])
        self._until[rank] = max(self._until[rank], int(message["until"]))
        for step, what, value in message["of"]:
            if step >= self.next and len(self._told) < TOLD_MAX:
                self._told.setdefault(step, {}).setdefault(what, []).append((rank, float(value)))

    def judge_next(self) -> Sign | bool | None:
        """Judge one step: its sign, or True for a good one; None while not all have told it."""
        if self.next > min(self._until):
            return None
        step, self.next = self.next, self.next + 1
        found = self._told.pop(step, {})
        return self.judge.see(step, {w: reading_of(values) for w, values in found.items()}) or True


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


def rules_of(settings: Settings) -> Rules:
    """What the owner has set about losses."""
    return Rules(
        action=settings.health_anomaly,
        window=settings.health_window,
        factor=settings.health_factor,
        settle=settings.health_settle,
        skip=settings.health_skip,
        rollbacks=settings.health_rollbacks,
        stretch=settings.health_stretch,
    )


def reading_of(values: list[tuple[int, float]]) -> Reading:
    """What several ranks have logged as one: (rank, value), a rank perhaps more than once."""
    wrong = tuple(sorted({rank for rank, value in values if not math.isfinite(value)}))
    mean = sum(value for _, value in values) / len(values)
    largest = max(values, key=lambda one: -math.inf if math.isnan(one[1]) else one[1])[0]
    return Reading(value=mean, worst=wrong or (largest,))


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
