"""Whether a failed attempt is worth another, where, and after how long.

What kind of failure it was is the business of :mod:`outlast.policy.failures`; its table says what
is done about each. Here is what bounds that, in order; the first that holds decides:

===================================================  ==================  =========================
what has happened                                    action              exit code
===================================================  ==================  =========================
a worker left on purpose (2, 77, 78, 75)             stop                that one
workers left with 76: their loss went wrong, or      stop                76
what is behind the loop was cut off, and no step is
left that would set what it needs
a notice was heard and a worker failed               stop                75
workers left with 79, and the ledger has their       restart, which is   (none)
rollback                                             not counted
a kind that may be a bug: the same traceback at the  stop                76
same step, twice in a row; a hang, three times; and
not on one machine only while there are others
``without_progress`` attempts in a row without       stop                76
progress
the budget of restarts is spent                      stop                76
the same failure twice in a row without progress,    leave the machine   (none)
or as often as this machine may fail, on one         out
machine and on no other
this machine's own failures within the window are    leave the machine   (none)
as many as it may have, and cost more than it adds   out
anything else                                        the table's         (none)
===================================================  ==================  =========================

How many failures a machine may have is the owner's number, or three; where it is not the owner's,
they are weighed against what the machine adds (:mod:`outlast.policy.attribution`). A machine with
which there is no progress at all adds nothing: that is not weighed.

What was seen on one machine only (:mod:`outlast.policy.attribution`) is that machine's: the others
go on without it. If they have the same failure then, it is the script's, and the machine is let in
again. Where they cannot go on without it, a failure that may be a bug ends the job the time after.

Progress is a new step. Of a script that does not tell its steps it is an attempt of over a minute
that has updated weights, or that somebody else ended; one that ends in the same traceback as the
one before is none. A minute alone proves nothing: imports and an index of the data take longer. A
rollback takes the job back, so what was reached before it counts no more.

Restarts with progress are bounded by ``max_restarts``, which counts all; those without it also by
``without_progress``, which counts them in a row: progress sets it to 0 again. An attempt that was
ended on the mere suspicion that a worker hung is counted in neither: it would have gone on without
us, and is given more time from then on. Nor does a hang spend a restart after ``window_s`` or more
with progress: what happens now and then in a job of months is no reason to end it.

A hang is the script's bug where it was in the same functions at the same step for the third time,
and the last was proven or had all the time that the owner gives. What the machine or a file system
may be the reason of (a process that is stopped, a read that does not come back) never is.

A wait grows with the attempts in a row without progress, twofold each, up to a limit, and a part
of it is drawn by chance: machines that wait for the same server do not ask it at once. Nobody waits
after a worker that was at work and was killed from outside: there is nothing to wait for, unless
the machine has had so many that another is to take its place.

Without a rule for bugs a typo would burn every restart; without one for progress a job that dies
during start-up would do so for ever.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from outlast.errors import Exit
from outlast.policy.attribution import (
    REMEMBERED,
    AgentView,
    Recurrence,
    Sighting,
    Stakes,
    cause_of,
    is_overshadowed,
    recurrence_of,
    weigh,
)
from outlast.policy.failures import (
    AS_SET,
    CONSEQUENCES,
    ROWS,
    THRICE,
    TWICE,
    Failure,
    Kind,
    Remedy,
    Signs,
    graver_than,
    is_echo,
    kind_of,
    most_telling,
    signal_of,
    verdict_on,
)

ROLLED_BACK: Final = "rolled back"
WITHOUT_PROGRESS_MAX: Final = 5
FAILURES: Final = 3  # fewer are no pattern
SHORT_ATTEMPT_S: Final = 60.0
BACK_OFF_S: Final = 1.0  # the first wait
REASON_MAX: Final = 300  # characters of an exception
ON_PURPOSE: Final = (Exit.USAGE, Exit.STORAGE, Exit.REFUSED)
# All workers leave so at the same step: none of them is lost.
TOGETHER: Final = (Exit.DRAINED, Exit.ROLLED_BACK, Exit.GAVE_UP)
_ADDRESS: Final = re.compile(r"0x[0-9a-f]+|\bpid \d+")
_NO_SIGNS: Final = Signs()
# Such an end, after a while, says nothing against what the workers did until then.
_ENDED_BY_OTHERS: Final = (Kind.KILLED, Kind.PEER)
_KINDS: Final = frozenset(kind.value for kind in Kind)  # a ledger may be a newer version's
_ALONE: Final = frozenset(kind.value for kind, row in ROWS.items() if row.alone)
_Bug = tuple[str, int]  # a traceback or stack; its step, or -1 - updates where no step is known
_TIMES: Final = {2: "twice", 3: "three times"}


class RestartLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner allows; times in seconds.

    Attributes:
        without_progress: attempts in a row that may end without progress.
        failures: of a machine's own, within the window, before it is left out.
        weighs: whether it then is only where that is better for the job.
        window_s: how long they count.
        exclude_for_s: how long a machine is left out.
        back_off_max_s: the longest wait before an attempt.
    """

    without_progress: int = WITHOUT_PROGRESS_MAX
    failures: int = FAILURES
    weighs: bool = False
    window_s: float = 3600.0
    exclude_for_s: float = 3600.0
    back_off_max_s: float = 300.0


class RestartVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What to do: restart, or stop with an exit code; and why, in words.

    Attributes:
        restart: whether there is another attempt.
        exit_code: what ``outlast run`` leaves with, where there is none.
        reason: why.
        kind: of the failure that decided, or None.
        action: what is done.
        own: whether it counts against this machine.
        wait_s: before the next attempt.
        without_progress: attempts in a row without progress, this one included.
        weighed: what the machine's failures cost and what it adds, in words; "" where that was
            not asked.
        sighting: what was seen where, for the agents of other machines; None where it was nobody's
            own failure.
        host: the machine that is to be left out, "" for this one.
        cleared: machines that were left out for what has turned out to be the script's.
    """

    restart: bool
    exit_code: int
    reason: str
    kind: Kind | None = None
    action: Remedy = Remedy.STOP
    own: bool = False
    wait_s: float = 0.0
    without_progress: int = 0
    weighed: str = ""
    sighting: Sighting | None = None
    host: str = ""
    cleared: tuple[str, ...] = ()


class RestartPolicy:
    """Judges one failed attempt after the other.

    Args:
        max_restarts: how many restarts the job has in all.
        without_progress_max: as in ``limits``, if given.
        limits: what the owner allows.
        own: when this machine has failed by itself before, by the clock of ``now_s``.
    """

    def __init__(
        self,
        max_restarts: int,
        without_progress_max: int | None = None,
        *,
        limits: RestartLimits | None = None,
        own: Iterable[float] = (),
    ) -> None:
        self.max_restarts = max_restarts
        self.restarts = 0
        limits = limits or RestartLimits()
        if without_progress_max is not None:
            limits = msgspec.structs.replace(limits, without_progress=without_progress_max)
        self.limits = limits
        self._own = sorted(own)
        self._without_progress = 0
        self._furthest = -1
        self._bugs: dict[_Bug, int] = {}  # of the last attempt → how many times in a row by now
        self._seen: list[Sighting] = []  # by this agent
        self._since = 0  # the attempt that made progress last: what was before does not count
        self._num_out = 0
        self._last = ""  # the failure before this one, where it was tried again

    def judge(
        self,
        failures: Sequence[Failure],
        *,
        lasted_s: float,
        leaving: bool = False,
        signs: Signs = _NO_SIGNS,
        now_s: float = 0.0,
        chance: float = 0.5,
        elsewhere: Collection[str] = (),
        echoes: bool = True,
        updates: int = 0,
        rolled_back: bool = True,
        follows: bool = False,
        alone: bool = False,
        here: AgentView | None = None,
        num_out: int = 0,
        stakes: Mapping[str, Stakes] | None = None,
    ) -> RestartVerdict:
        """Decide what follows an attempt in which ``failures`` happened.

        Args:
            failures: of this machine's workers, in any order.
            lasted_s: how long the attempt lasted.
            leaving: a notice was heard, so that this machine is not worth another attempt.
            signs: what this machine has seen.
            now_s: now, on a clock that outlives this process.
            chance: drawn evenly from 0 to 1.
            elsewhere: kinds of failures that other machines had of their own within the window.
            echoes: whether connections that broke are the echo of a loss elsewhere; False where it
                is known that nobody else has trouble.
            updates: optimizer updates that a worker here was seen to make in the attempt.
            rolled_back: whether the ledger has a rollback of this attempt; without one, workers
                that say so are not believed.
            follows: whether another machine has trouble, so that what can be the consequence of
                that is not this machine's own.
            alone: whether no other machine could take this one's place.
            here: where this is, and what was seen where; None where there is no other machine.
            num_out: how many machines have been left out so far: where it is one more, attempts
                without progress are counted anew.
            stakes: what each machine of the attempt adds, and what its failures cost; without
                them, as where the owner has set the number, failures are only counted.
        """
        codes = {failure.exit_code for failure in failures}
        for code in ON_PURPOSE:
            if code in codes:
                return _stop(code, _message(failures, code), kind=_purpose(failures, code))
        if Exit.DRAINED in codes:
            return _stop(Exit.DRAINED, "drained; start me again", kind=Kind.DRAINED)
        if Exit.GAVE_UP in codes:
            words = _message(failures, Exit.GAVE_UP)
            if words and self._last:  # what came first is what is to be mended
                words = f"{self._last}. Started again, {words}"
            return _stop(Exit.GAVE_UP, words or "the loss went wrong")
        if leaving:
            return _stop(
                Exit.DRAINED,
                "the workers ended on their way out; the newest commit, if any, stands",
            )
        if Exit.ROLLED_BACK in codes and rolled_back:  # how many there may be is decided there
            self._furthest, self._without_progress = -1, 0
            self._bugs = {}  # other batches come now
            fine = int(Exit.FINISHED)
            return RestartVerdict(
                restart=True, exit_code=fine, reason=ROLLED_BACK, action=Remedy.RESTART
            )
        case = _Case(failures, signs, echoes=echoes)
        excused = follows and case.kind in CONSEQUENCES
        if num_out > self._num_out:  # the others have not failed in what comes now
            self._num_out, self._without_progress = num_out, 0
        progress = self._progress(case, lasted_s, updates)
        where = self._where(case, None if excused else here, now_s, progress=progress)
        verdict = self._bug(case, where) or self._bounded(case, lasted_s, progress=progress)
        if not verdict.restart:
            return verdict
        self._last = case.reason
        was_at_work = updates > 0 or not verdict.without_progress
        scales = _Scales(self._seen, where, stakes or {}, self.limits, now_s)
        verdict = self._act(
            *(verdict, now_s, chance, elsewhere, scales),
            excused=excused,
            at_work=was_at_work,
            alone=alone,
            is_out=where is not None and self._is_out(where, scales, progress=progress),
        )
        verdict = msgspec.structs.replace(verdict, weighed=scales.words)
        if where is None:
            return verdict
        (host, *_), me = sorted(where.row.hosts), where.here.host
        return msgspec.structs.replace(
            verdict,
            sighting=where.sighting,
            host=host if verdict.action is Remedy.LEAVE_OUT and host != me else "",
        )

    def _progress(self, case: _Case, lasted_s: float, updates: int) -> bool:
        """Whether the attempt got further; what it ended in is remembered."""
        furthest = max((f.step for f in case.failures if f.step is not None), default=None)
        before, self._bugs = self._bugs, {}
        for bug in case.bugs(updates):
            self._bugs[bug] = before.get(bug, 0) + 1
        alike = {text for text, _ in self._bugs} & {text for text, _ in before}
        if furthest is None:
            works = updates > 0 or case.kind in _ENDED_BY_OTHERS
            progress = works and lasted_s >= SHORT_ATTEMPT_S
            progress = progress and (case.kind is Kind.HANG or not alike)
        else:
            progress = furthest > self._furthest
        # Ended on a suspicion only, an attempt says nothing about what it would have come to. Those
        # who ended it give more time from then on.
        if progress or case.is_certain:
            self._without_progress = 0 if progress else self._without_progress + 1
        self._furthest = max(furthest or 0, self._furthest)
        return progress

    def _where(
        self, case: _Case, here: AgentView | None, now_s: float, *, progress: bool
    ) -> _Located | None:
        """Where this failure was seen; None where there is no other machine, or nobody failed."""
        if here is None or case.kind is Kind.PEER:
            return None
        sighting = case.sighting(here, now_s)
        # What is news here may be none elsewhere: another machine may have seen that step fail.
        steps = [one.step for one in here.seen if one.step is not None]
        if progress and (sighting.step is None or sighting.step > max(steps, default=-1)):
            self._since = here.attempt
        window_s = self.limits.window_s
        self._seen = [one for one in self._seen[-REMEMBERED:] if now_s - one.t < window_s]
        seen = [*self._seen, *here.seen]
        row, ever = recurrence_of(sighting, seen, self._since), recurrence_of(sighting, seen, 0)
        self._seen.append(sighting)
        graver = {kind.value for kind in graver_than(case.kind)}
        shadowed = is_overshadowed(sighting, here.seen, graver)
        return _Located(here, sighting, row, ever, is_overshadowed=shadowed)

    def _bug(self, case: _Case, where: _Located | None) -> RestartVerdict | None:
        """The job's end, where the same was seen often enough and everywhere that it can be."""
        times = ROWS[case.kind].bug_after
        if not times or not case.is_certain or (where is not None and where.is_overshadowed):
            return None
        what = "hang" if case.kind is Kind.HANG else "failure"
        words = verdict_on(case.kind, case.message)
        if case.kind not in (Kind.SCRIPT, Kind.HANG):
            words += f": {case.reason}"
        again = f"the same {what} at the same step"
        if where is None or (where.is_here and not self.limits.failures):
            if max(self._bugs.values(), default=0) < times:
                return None
            return _stop(Exit.GAVE_UP, f"{again} {_TIMES[times]}: {words}", kind=case.kind)
        hosts = sorted(where.row.hosts)
        if not where.is_here and where.row.same_step >= times:
            return msgspec.structs.replace(
                _stop(Exit.GAVE_UP, f"{again} on {len(hosts)} machines: {words}", kind=case.kind),
                cleared=tuple(hosts),
            )
        if where.is_here and where.row.same_step >= THRICE:
            reason = f"always on machine {hosts[0]}, and the job cannot go on without it"
            return _stop(Exit.GAVE_UP, f"{again} three times, {reason}: {words}", kind=case.kind)
        return None

    def _is_out(self, where: _Located, scales: _Scales, *, progress: bool) -> bool:
        """Whether the machine that had this failure, and no other, is to be left out.

        Also for a hang that nobody can prove: the second time it had more time than the first.
        """
        if where.is_overshadowed or not self.limits.failures:
            return False
        if where.is_here and where.row.attempts >= TWICE and not progress:
            return True
        enough = len(where.ever.hosts) == 1 and where.ever.attempts >= self.limits.failures
        return enough and scales.say_out(*where.ever.hosts)

    def _bounded(self, case: _Case, lasted_s: float, *, progress: bool) -> RestartVerdict:
        """Another attempt, as long as there may be one."""
        is_hang, count = case.kind is Kind.HANG, self._without_progress
        if count >= self.limits.without_progress:
            reason = f"{count} attempts in a row without progress"
            if case.failures:
                reason += f"; the last one: {case.reason}"
            return _stop(Exit.GAVE_UP, reason, kind=case.kind)
        is_free = is_hang and (
            not case.is_certain or (progress and lasted_s >= self.limits.window_s)
        )
        if is_free and self.max_restarts:  # 0 is no number of restarts: it forbids them
            return _restart(case, count)
        if self.restarts >= self.max_restarts:
            reason = f"all {self.max_restarts} restarts are spent"
            return _stop(Exit.GAVE_UP, reason, kind=case.kind)
        self.restarts += 1
        return _restart(case, count)

    def _act(
        self,
        verdict: RestartVerdict,
        now_s: float,
        chance: float,
        elsewhere: Collection[str],
        scales: _Scales,
        *,
        excused: bool,
        at_work: bool,
        alone: bool,
        is_out: bool,
    ) -> RestartVerdict:
        """What the table says, with how long to wait, and whether this machine is worth it."""
        assert verdict.kind is not None  # noqa: S101 - each restart has one
        row, limits = ROWS[verdict.kind], self.limits
        action, count = row.action, verdict.without_progress
        # What fails everywhere in the same way is not this machine's fault.
        is_common = row.alone and verdict.kind.value in elsewhere
        excused = excused or is_common
        if is_common and action is Remedy.LEAVE_OUT:
            action = Remedy.RESTART
        own = row.own_after != 0 and not excused
        if own:
            self._own = [t for t in self._own if now_s - t < limits.window_s] + [now_s]
            is_for_certain = row.own_after != AS_SET
            enough = row.own_after if is_for_certain else limits.failures
            # Where it is weighed, a machine that is the only one adds all there is.
            is_weighed = limits.weighs and not is_for_certain
            if limits.failures and len(self._own) >= enough and not (is_weighed and alone):
                out = is_for_certain or scales.say_out(scales.here)
                action = Remedy.LEAVE_OUT if out else action
        if is_out:
            action = Remedy.LEAVE_OUT
        waits = action in (Remedy.BACK_OFF, Remedy.LEAVE_OUT)
        doublings = max(count - 1, 0) if waits else count - 2
        wait_s = 0.0
        is_spared = verdict.kind in (Kind.PEER, Kind.HANG) or (
            verdict.kind is Kind.KILLED and at_work and (alone or action is not Remedy.LEAVE_OUT)
        )
        if doublings >= 0 and not is_spared:
            longest_s = min(BACK_OFF_S * 2.0 ** min(doublings, 60), limits.back_off_max_s)
            wait_s = longest_s * (0.5 + 0.5 * chance)
        return msgspec.structs.replace(verdict, action=action, own=own, wait_s=wait_s)


class _Located(NamedTuple):
    here: AgentView
    sighting: Sighting
    row: Recurrence  # since there was progress
    ever: Recurrence
    is_overshadowed: bool

    @property
    def is_here(self) -> bool:
        """Whether one machine alone had it."""
        return len(self.row.hosts) == 1


class _Scales:
    """Of one machine after the other, whether it costs more than it adds."""

    def __init__(
        self,
        seen: Sequence[Sighting],
        where: _Located | None,
        stakes: Mapping[str, Stakes],
        limits: RestartLimits,
        now_s: float,
    ) -> None:
        elsewhere = where.here.seen if where is not None else ()
        alike = {(one.attempt, one.hosts, one.cause): one for one in [*elsewhere, *seen]}
        self.here = where.here.host if where is not None else ""
        self.words = ""
        self._seen, self._stakes = list(alike.values()), stakes
        self._limits, self._now_s = limits, now_s

    def say_out(self, host: str) -> bool:
        """Whether the job is better off without it; where nothing is at stake its count decides."""
        if host not in self._stakes:
            return True
        limits = self._limits
        weighed = weigh(
            self._failures_of(host),
            self._stakes[host],
            now_t=self._now_s,
            window_s=limits.window_s,
            least=limits.failures,
        )
        self.words = weighed.words
        return weighed.goes

    def _failures_of(self, host: str) -> list[tuple[float, str]]:
        """Its own: what another machine was the cause of, or has had too, does not count."""
        seen = [one for one in self._seen if one.kind in _KINDS]
        common = {one.kind for one in seen if set(one.hosts) - {host}} & _ALONE
        return [
            (one.t, one.kind)
            for one in seen
            if set(one.hosts) == {host}
            and one.kind not in common
            and not is_overshadowed(one, seen, {k.value for k in graver_than(Kind(one.kind))})
        ]


class _Case:
    """The failures of one attempt, whichever came first."""

    def __init__(self, failures: Sequence[Failure], signs: Signs, *, echoes: bool) -> None:
        self.failures = failures
        self._kinds = [_kind(failure, signs, echoes=echoes) for failure in failures]
        self.kind = most_telling(self._kinds) if failures else Kind.PEER
        self.is_certain = all(failure.proven for failure in failures)

    def bugs(self, updates: int) -> frozenset[_Bug]:
        """What would prove a bug, if it came again: tracebacks, stacks, and at which step."""
        if not ROWS[self.kind].bug_after:
            return frozenset()
        return frozenset(
            (
                failure.stack or _ADDRESS.sub("…", failure.traceback),
                -1 - updates if failure.step is None else failure.step,
            )
            for failure, kind in zip(self.failures, self._kinds, strict=True)
            if ROWS[kind].bug_after and (failure.stack or failure.traceback)
        )

    def sighting(self, here: AgentView, now_s: float) -> Sighting:
        """What was seen where."""
        cause = self._cause
        hosts = next((f.hosts for f in self.failures if f.hosts), (here.host,))
        words = cause.stack or cause.traceback or cause.message or str(cause.exit_code)
        return Sighting(
            attempt=here.attempt,
            hosts=hosts if self.kind is Kind.HANG else (here.host,),
            kind=self.kind.value,
            cause=cause_of(self.kind.value, words),
            step=cause.step,
            t=now_s,
        )

    @property
    def message(self) -> str:
        """What the worker said that decides."""
        return self._cause.message

    @property
    def _cause(self) -> Failure:
        found = [f for f, k in zip(self.failures, self._kinds, strict=True) if k is self.kind]
        return min(found, key=lambda failure: (failure.rank, failure.message))

    @property
    def reason(self) -> str:
        """Which worker failed, and how."""
        if self.kind is Kind.PEER:
            return "a peer was lost"
        cause = self._cause
        if self.kind is Kind.HANG:
            return f"rank {cause.rank} hung"  # the event of the hang says where, and why
        number = signal_of(cause)
        how = f"signal {number}" if number else f"exit code {cause.exit_code}"
        words = cause.message.strip().splitlines()
        return f"rank {cause.rank} failed ({words[0][:REASON_MAX] if words else how})"


def _kind(failure: Failure, signs: Signs, *, echoes: bool) -> Kind:
    if is_echo(failure):
        return Kind.PEER if echoes else Kind.NETWORK
    return kind_of(failure, signs)


def _purpose(failures: Sequence[Failure], code: int) -> Kind:
    return next(kind_of(failure) for failure in failures if failure.exit_code == code)


def _message(failures: Sequence[Failure], code: int) -> str:
    return next((f.message for f in failures if f.exit_code == code and f.message), "")


def _restart(case: _Case, without_progress: int) -> RestartVerdict:
    return RestartVerdict(
        restart=True,
        exit_code=Exit.FINISHED,
        reason=case.reason,
        kind=case.kind,
        action=ROWS[case.kind].action,
        without_progress=without_progress,
    )


def _stop(code: int, reason: str, kind: Kind | None = None) -> RestartVerdict:
    return RestartVerdict(restart=False, exit_code=int(code), reason=reason, kind=kind)
