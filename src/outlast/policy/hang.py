"""No progress: how long that may last before it is called a hang, and who is to blame for it.

The limits are learned from the job itself, one for each kind of thing that a worker does:

===========  ==========================================  =====================================
kind         what it is                                  limit, once it is known
===========  ==========================================  =====================================
step         loading a batch, and the loop's body        2 × the longest + 1.4 s
save         at a step's boundary                        3 × the longest + 30 s
evaluate     the loop's body, model in evaluation mode   3 × the longest + 30 s
start        until three steps of an attempt are done    the ceiling, or 2 × the longest
outside      before, between and after loops             the ceiling, or 2 × the longest
===========  ==========================================  =====================================

The longest is that of the gaps between two signs of progress, slowly forgotten: after 2,000 shorter
ones half of what it exceeds them by. Until a kind has been seen a few times its limit is the
ceiling: compiling, and the first evaluation, are slow by right. No limit is below the floor. A
setting of so many seconds takes the place of what is learned for step, save and evaluate.

A rank that was called hung without proof may have been about to go on: the limit of that kind is
then at least twice what it was given, for the rest of the job, and the ceiling where it comes again
in the same step.

:class:`StepTimes` tells how long steps take to whoever looks from outside now and then. It measures
the time between two looks that saw another step: the steps in between took no longer. A step in
progress counts with half of the time that it has taken so far: it may be an evaluation that was not
seen yet, or stuck.

Rejected: a mean and its spread (one step in a hundred that takes ten times as long is no outlier to
be restarted for), and one limit for everything (it would be that of the slowest).

Who is to blame: the watcher on each machine fills in a :class:`RankLook` of each of its ranks;
:func:`judge` names one, in one sentence. All ranks of a synchronous job stop together: those who
wait for the culprit look as stuck as the culprit does. These tell them apart; the first that holds
decides:

1. a process that is stopped;
2. a rank that does not wait for others: the one that has come least far, by completed steps and
   collectives begun;
3. where all ranks that were seen wait: a machine whose agent says nothing, once asked twice; the
   few that have begun fewer collectives, or are in another step: they have passed one by that the
   others wait in; a rank that has left;
4. else nobody is to blame: a message was lost.

A rank is only named once it has been given the time that is its own, and while nobody who has come
no further still has some: one that evaluates, compiles or saves while the others wait for it is
slow by right, and those who wait may spin as if they computed. Where that time is not over yet, the
answer is when to look again. A rank in a debugger is left alone, and the others with it.

A name is not a proof: a file system that answers after a minute looks like one that never does.
``is_proven`` is set only where waiting longer would not help. A hang without proof costs the job no
more than one restart (see ``HangLimits.too_soon``, and ``policy.restart``).

Looks at several machines are not of one moment: while one of them answered late, because all of
its processes were stopped, the job may have gone on. So the looks are compared once more with how
far the ranks are when all looks are in: where one that was late has gone on (``has_gone_on``),
nobody is named.

What can go wrong: a look is of one moment. A function that is called between two others is seen as
where the rank is; a loop is seen at one of its lines. An unchanged script does not say what it
does. One that computes is given an evaluation's time: a restart may cost it all since its own last
checkpoint. On GPUs a rank in ``loss.item()`` waits inside of CUDA without a frame of torch's; it is
known for one that waits only by having come further than the one it waits for.
"""

from __future__ import annotations

import enum
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

SLACK_S: Final = 1.4  # with taking and collecting evidence it comes to 3 s
SLOW_SLACK_S: Final = 30.0
FRESH_STEPS: Final = 3  # of an attempt, which may compile and build
KNOWN_AFTER: Final = 5
SLOW_KNOWN_AFTER: Final = 3
HALF_AFTER: Final = 2000.0  # gaps
BACKSTOP: Final = 1.5  # torch's own time-outs come after ours
BACKSTOP_S: Final = 60.0
STEPS_KEPT: Final = 1000  # steps back


class Activity(enum.StrEnum):
    """What a worker does, as far as limits differ."""

    STEP = "step"
    SAVE = "save"
    EVALUATE = "evaluate"
    START = "start"
    OUTSIDE = "outside"


class HangSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner has set about hangs.

    Attributes:
        fixed_s: a limit in place of what is learned, or None.
        floor_s: no limit is shorter.
        ceiling_s: the limit of what is not known.
    """

    fixed_s: float | None = None
    floor_s: float = 1.5
    ceiling_s: float = 600.0


class _Gaps(msgspec.Struct):
    longest_s: float = 0.0
    seen: float = 0.0
    least_s: float = 0.0  # after a false alarm


class HangLimits:
    """What was learned of one job, on one machine.

    Args:
        chosen: what the owner has set.
        state: what ``state`` of an earlier one has returned.
    """

    def __init__(
        self, chosen: HangSettings, state: Mapping[str, list[float]] | None = None
    ) -> None:
        self._set = chosen
        self._known = {kind: _Gaps() for kind in Activity}
        for name, numbers in (state or {}).items():
            if name in self._known and len(numbers) == 3:
                self._known[Activity(name)] = _Gaps(*numbers)

    def state(self) -> dict[str, list[float]]:
        """All of it, as numbers."""
        return {
            kind.value: [known.longest_s, known.seen, known.least_s]
            for kind, known in self._known.items()
        }

    def saw(self, kind: Activity, gap_s: float) -> None:
        """A worker showed progress after ``gap_s`` seconds without."""
        known = self._known[kind]
        known.seen += 1
        if gap_s >= known.longest_s:
            known.longest_s = gap_s
        else:
            known.longest_s -= (known.longest_s - gap_s) * (1 - 0.5 ** (1 / HALF_AFTER))

    def too_soon(self, kind: Activity, given_s: float, *, again: bool = False) -> None:
        """A worker was called hung after ``given_s`` seconds, and there is no proof of it.

        Args:
            kind: what it did.
            given_s: what it was given.
            again: whether it was in the step in which the last such one was.
        """
        known = self._known[kind]
        least_s = max(2 * given_s, self._set.ceiling_s if again else 0.0)
        known.least_s = max(known.least_s, least_s)

    def longest_s(self, kind: Activity) -> float:
        """The longest gap that is remembered; 0 before the first."""
        return self._known[kind].longest_s

    def limit_s(self, kind: Activity) -> float:
        """Seconds without progress that a worker is given."""
        known, chosen = self._known[kind], self._set
        if kind in (Activity.START, Activity.OUTSIDE):
            limit_s = max(chosen.ceiling_s, 2 * known.longest_s)
        elif chosen.fixed_s is not None:
            limit_s = chosen.fixed_s
        elif kind is Activity.STEP:
            limit_s = 2 * known.longest_s + SLACK_S
            if known.seen < KNOWN_AFTER:
                limit_s = max(limit_s, chosen.ceiling_s)
        elif known.seen < SLOW_KNOWN_AFTER:
            limit_s = max(chosen.ceiling_s, 2 * known.longest_s)
        else:
            limit_s = 3 * known.longest_s + SLOW_SLACK_S
        return max(limit_s, known.least_s, chosen.floor_s)


def collective_timeout_s(limits: HangLimits) -> float:
    """What torch's own time-out of a collective is set to: behind every limit of ours."""
    return BACKSTOP * max(limits.limit_s(kind) for kind in Activity) + BACKSTOP_S


class StepTimes:
    """What was seen; times in seconds of any one clock."""

    def __init__(self) -> None:
        self._longest: deque[tuple[int, float]] = deque()  # (count, seconds), the longest first
        self._count = 0  # of steps that were made, those made again included
        self._step: int | None = None
        self._since_s = 0.0
        self._has_moved = False

    def begin(self) -> None:
        """Other workers, of a new attempt: what their first step takes says nothing yet."""
        self._step, self._has_moved = None, False

    def seen(self, step: int, now_s: float) -> None:
        """So many steps are complete now."""
        if step == self._step:
            return
        if self._step is not None:
            self._count += max(step - self._step, 1)
            self._keep(now_s - self._since_s)
            self._has_moved = True
        self._step, self._since_s = step, now_s

    def longest_s(self, now_s: float) -> float | None:
        """The longest of the last steps; None before one of this attempt is complete."""
        if not self._has_moved:
            return None
        return max(self._longest[0][1], (now_s - self._since_s) / 2)

    def _keep(self, seconds: float) -> None:
        longest = self._longest
        while longest and longest[-1][1] <= seconds:
            longest.pop()  # shorter, and older
        longest.append((self._count, seconds))
        while longest[0][0] <= self._count - STEPS_KEPT:
            longest.popleft()


# --- who is to blame ------------------------------------------------------------------------------

_PULSE_LOST_S: Final = 1.0
_LIBRARY: Final = re.compile(
    r"site-packages/|dist-packages/|/lib/python3|^<"
    r"|outlast/(attempt|checkpoint|data|health|keeper|launch|ledger|notice|reduce|training)/"
)
_WAITS_IN: Final = re.compile(
    r"torch/distributed/(?!checkpoint/)|torch/cuda/|torch/nn/parallel/"
    r"|outlast/(attempt|training|reduce|keeper)/"
)
_SPINS_IN: Final = re.compile(  # it uses a core, and waits nevertheless
    r"torch/distributed/(distributed_c10d|c10d_logger|_functional_collectives)\.py$|torch/cuda/"
)
_DEBUGGED: Final = re.compile(r"/python3[^/]*/(pdb|bdb|code)\.py$|/(debugpy|pydevd|ipdb)/")
_COLLECTIVE: Final = re.compile(r"torch/distributed/(?!c10d_logger)")
STOPPED_S: Final = 10.0  # nobody is stopped by right for longer
LOADER_S: Final = 60.0  # a loader whose processes compute
DEBUGGED_S: Final = 60.0  # until the next look at one that a person has in a debugger
STARVED: Final = 4.0  # times as long for one that the machine does not let run
NOBODY: Final = 3.0  # times as long where nobody is to blame
AGAIN_MIN_S: Final = 0.5
_BY_RIGHT: Final = re.compile(
    r"torch/(_dynamo|_inductor|_functorch|export|serialization|distributed/checkpoint)\b"
    r"|/triton/|/safetensors/|importlib"
)
_EVALUATES: Final = re.compile(
    r"^(eval|evaluate|validate|validation|test)(_|$)|_(eval|validation)$"
)


# --- what was seen of one rank -------------------------------------------------------------------


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One frame of a stack."""

    function: str
    file: str
    line: int


class RankLook(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one rank.

    Attributes:
        rank: its rank.
        node: its machine.
        kind: what it does.
        is_session: whether it says what it does.
        step: completed steps, or None.
        age_s: seconds since its last sign of progress.
        limit_s: that it is given for what it does.
        slow_s: that an evaluation is given.
        begun: collectives begun, or -1.
        pulse_age_s: seconds since its interpreter last ran something else, or None.
        state: its process as the kernel has it: R, S, D, T, t, Z; "" when it has gone.
        tracer: who traces it, "gdb (pid 71)", or "".
        outside_s: that is given before and after loops.
        moves: whether it used a core, moved bytes, or was let run often, between two looks.
        moves_below: whether processes that it started did, and those that these have started.
        is_still: whether no thread of all these did anything worth mentioning.
        is_starved: whether it was mostly waiting for a core.
        holds_gil: whether its main thread holds the interpreter's lock, or None.
        call: the system call that its main thread is in, or "".
        frames: of its main thread, innermost first.
        recorded: its last collectives, the newest first.
    """

    rank: int
    node: str
    kind: Activity
    is_session: bool = False
    step: int | None = None
    age_s: float = 0.0
    limit_s: float = 0.0
    slow_s: float = 0.0
    outside_s: float = 0.0
    begun: int = -1
    pulse_age_s: float | None = None
    state: str = "S"
    tracer: str = ""
    moves: bool = False
    moves_below: bool = False
    is_still: bool = False
    is_starved: bool = False
    holds_gil: bool | None = None
    call: str = ""
    frames: tuple[Frame, ...] = ()
    recorded: tuple[str, ...] = ()


def waits(one: RankLook) -> bool:
    """Whether it waits for others, and has nothing to do itself."""
    if not one.frames:
        return False
    top = one.frames[:3]
    if one.moves:
        return any(_SPINS_IN.search(frame.file) for frame in top)
    if top[0].function == "_engine_run_backward":
        return True
    if any("torch/distributed/checkpoint/" in frame.file for frame in top):
        return bool(_SPINS_IN.search(top[0].file))  # else it writes or reads
    return any(_WAITS_IN.search(frame.file) for frame in top)


def is_debugged(one: RankLook) -> bool:
    """Whether a person has it in a debugger."""
    return bool(_debugger_of(one))


def held_by(one: RankLook) -> str:
    """What a person is told who should know that a debugger, or a tracer, is why; or ""."""
    debugger, rank = _debugger_of(one), f"rank {one.rank}"
    if debugger:
        place = place_of(one)
        at = f", in {place}" if place else ""
        return (
            f"{rank} is held by {debugger}{at}: the job waits for it, and nobody is called hung "
            "meanwhile. Let it go on, or detach"
        )
    if one.tracer:
        return (
            f"{rank} is being traced by {one.tracer}, which slows it down: it is given "
            f"{max(one.limit_s, one.outside_s):.0f} s before it is called hung. End that to go on "
            "at full speed"
        )
    return ""


def _debugger_of(one: RankLook) -> str:
    if one.state == "t":
        return one.tracer or "a debugger"
    found = (_DEBUGGED.search(frame.file) for frame in one.frames)
    return next((match[1] or match[2] for match in found if match), "")


def has_lost_its_pulse(one: RankLook) -> bool:
    """Whether one thread keeps the interpreter for itself."""
    lost = one.pulse_age_s is not None and one.pulse_age_s > _PULSE_LOST_S
    return lost and one.holds_gil is not False


def step_of(one: RankLook) -> int | None:
    """The step that it is in, where it says so."""
    return None if one.step is None or not one.is_session else one.step + 1


def in_step(one: RankLook) -> str:
    """The step that a rank is in, in words that go on."""
    number = step_of(one)
    return "" if number is None else f" in step {number}"


def where_of(one: RankLook) -> str:
    """What a rank waits in: "step 812's gradient sum"."""
    what = "a collective"
    if any(frame.function in ("backward", "_engine_run_backward") for frame in one.frames):
        what = "gradient sum"
    elif any("outlast/attempt/" in frame.file for frame in one.frames):
        what = "agreement at its end"
    else:
        ours = [frame for frame in one.frames if _COLLECTIVE.search(frame.file)]
        if ours:
            what = f"{ours[-1].function}()"
    number = step_of(one)
    if number is None:
        return f"the {what}" if what == "gradient sum" else what
    return f"step {number}'s {what.removeprefix('a ')}"


def does(one: RankLook) -> str:
    """What it is doing, and where."""
    at = place_of(one)
    place = f" in {at}" if at else ""
    if one.state in ("", "Z"):
        return "it has left"
    if one.state == "T":
        return f"it is stopped{place}"
    if one.state == "D":
        return f"the kernel does not let it go (state D){place}"
    if waits(one):
        return f"it waits in {where_of(one)}{f', {at}' if at else ''}"
    if has_lost_its_pulse(one):
        return f"it holds the interpreter's lock{place}"
    doing = {
        "lock": "it waits for a lock",
        "read": "it is blocked in a read",
        "open": "it is blocked in an open",
        "write": "it is blocked in a write",
        "sleep": "it sleeps",
    }.get("" if one.moves else one.call)
    traced = f", traced by {one.tracer}" if one.tracer else ""
    if not place and not doing:
        return f"where it is could not be seen{traced}"
    return f"{doing or 'it is'}{place}{traced}"


def place_of(one: RankLook) -> str:
    """The innermost place that is the script's own."""
    own = next((frame for frame in one.frames if not _LIBRARY.search(frame.file)), None)
    frame = own or (one.frames[0] if one.frames else None)
    if frame is None:
        return ""
    name = frame.function if frame.function.startswith("<") else f"{frame.function}()"
    return f"{name} at {frame.file.rpartition('/')[2]}:{frame.line}"


def stack_of(one: RankLook) -> str:
    """The script's functions that it is in, without lines: a loop is at another one each time."""
    if one.state in ("", "Z", "T", "D") or one.call in ("read", "write", "open") or one.tracer:
        return ""
    own = [frame for frame in one.frames if not _LIBRARY.search(frame.file)]
    return " < ".join(f"{frame.function} in {frame.file}" for frame in own)


# --- who is to blame -----------------------------------------------------------------------------


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """The culprits, and why.

    Attributes:
        ranks: of the culprits; empty where nobody is to blame.
        nodes: their machines.
        sentence: for people, without a full stop.
        is_proven: whether it cannot just have been slow.
        kind: what it did.
        given_s: seconds that it was given.
        step: the step in which it is, or None.
        place: where it is: "f() at file.py:41", or "".
        stack: the script's functions that it is in; "" where the machine may be why.
    """

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    sentence: str
    is_proven: bool
    kind: Activity
    given_s: float
    step: int | None = None
    place: str = ""
    stack: str = ""


class NotYet(msgspec.Struct, frozen=True, kw_only=True):
    """Nobody's time is over; look again after so many seconds."""

    again_s: float


def judge(
    seen: Sequence[RankLook], silent: Sequence[str] = (), *, is_silent_for_long: bool = True
) -> Named | NotYet:
    """Judge which ranks are to blame for a hang.

    Args:
        seen: all ranks of which something was seen; some have made no progress for their limit.
        silent: machines that have not shown how their ranks look, though asked.
        is_silent_for_long: whether their agents did not answer at all, more than once in a row.
    """
    if any(is_debugged(one) for one in seen):
        return NotYet(again_s=DEBUGGED_S)
    gone = [one for one in seen if one.state in ("", "Z")]
    if gone:  # the others finish: what a script does in the end is like what it does before a loop
        seen = [_finishing(one) for one in seen]
        gone = [one for one in seen if one.state in ("", "Z")]
    stopped = [one for one in seen if one.state == "T"]
    waiting = [one for one in seen if one not in gone and one not in stopped and waits(one)]
    busy = [one for one in seen if one not in gone and one not in stopped and one not in waiting]
    late = [one for one in stopped if _is_late(one)]
    if late:
        return _name(_least_far(late), waiting, seen)
    if silent and not is_silent_for_long:
        return NotYet(again_s=AGAIN_MIN_S)
    if busy:
        return _of_busy(busy, waiting, seen)
    if not waiting:
        return _soonest(seen)
    if silent:
        late = [one for one in waiting if one.age_s >= one.limit_s]
        return _silent(seen, silent) if len(late) == len(waiting) else _soonest(waiting)
    inside = any(
        "torch/distributed/distributed_c10d.py" in f.file for w in waiting for f in w.frames[:2]
    )
    if gone and inside and all(_is_late(one) for one in waiting):
        return _name(_least_far(gone), waiting, seen)
    return _of_waiting(waiting, seen)


def has_gone_on(seen: Sequence[RankLook], now: Mapping[int, tuple[int | None, int]]) -> bool:
    """Whether a rank that was late, or stopped, has made progress since it was looked at.

    Others may: one that takes part in no collective goes on while those wait that it has left.

    Args:
        seen: the looks.
        now: rank → completed steps and collectives begun, read after the last of the looks.
    """
    return any(
        now.get(one.rank, (one.step, one.begun)) != (one.step, one.begun)
        for one in seen
        if one.age_s >= one.limit_s or one.state == "T"
    )


def _of_busy(
    busy: list[RankLook], waiting: list[RankLook], seen: Sequence[RankLook]
) -> Named | NotYet:
    late = [one for one in busy if _is_late(one)]
    if late:
        culprit = _least_far(late)
        # It may be one of these that all wait for, also those who seem to compute.
        able = [*busy, *(one for one in waiting if one.moves)]
        others = [one for one in able if not _is_late(one) and _far(one) <= _far(culprit)]
        return _soonest(others) if others else _name(culprit, waiting, seen)
    left = [one for one in waiting if one.age_s >= one.limit_s and one.step is not None]
    for one in busy:
        if left and one.step is not None and one.step > max(w.step or 0 for w in left) + 1:
            return _passed_by([one], left, seen)
    return _soonest(busy)


def _of_waiting(waiting: list[RankLook], seen: Sequence[RankLook]) -> Named | NotYet:
    if any(one.age_s < one.limit_s for one in waiting):
        return _soonest(waiting)
    steps = [one.step for one in waiting if one.step is not None]
    if steps and len(steps) == len(waiting) and min(steps) != max(steps):
        ahead = [one for one in waiting if one.step == max(steps)]
        behind = [one for one in waiting if one.step != max(steps)]
        # Whoever is behind has not come to where the others are, unless it waits in a collective
        # that the others have passed by.
        few, rest = (ahead, behind) if len(ahead) <= len(behind) else (behind, ahead)
        return _passed_by(few, rest, seen) if few is ahead else _name(few[0], rest, seen)
    begun = [one.begun for one in waiting]
    if min(begun) >= 0 and min(begun) != max(begun):
        few = [one for one in waiting if one.begun == min(begun)]
        rest = [one for one in waiting if one.begun != min(begun)]
        if len(few) <= len(rest):
            return _passed_by(few, rest, seen)
        few, rest = rest, few
        return _passed_by(few, rest, seen, more=True)
    last = {one.recorded[0].partition(" of ")[0] if one.recorded else "" for one in waiting}
    if len(last) > 1 and "" not in last:
        return _in_different(waiting, seen)
    longest = min(waiting, key=lambda one: one.age_s)
    if longest.age_s < NOBODY * longest.limit_s:
        return NotYet(again_s=max(NOBODY * longest.limit_s - longest.age_s, AGAIN_MIN_S))
    where = where_of(longest)
    number = "the only rank waits" if len(seen) == 1 else f"all {len(seen)} ranks wait"
    sentence = f"{number} in {where}, and none of them has not entered it: a message was lost"
    return _named((), longest, sentence, NOBODY * longest.limit_s)


# --- one rank ------------------------------------------------------------------------------------


def _finishing(one: RankLook) -> RankLook:
    most_s = max(one.limit_s, one.outside_s)
    return msgspec.structs.replace(one, limit_s=most_s, slow_s=max(one.slow_s, most_s))


def _is_proven(one: RankLook) -> bool:
    """Whether no time will mend it."""
    if one.state == "T":
        return True
    if one.moves or one.moves_below or one.is_starved or one.state == "D" or one.tracer:
        return False
    if one.call == "lock":
        return one.is_still
    return has_lost_its_pulse(one) and one.call not in ("read", "write", "open")


def _is_late(one: RankLook) -> bool:
    return one.age_s >= _given_s(one)


def _given_s(one: RankLook) -> float:
    """Seconds that it is given, seen what it does."""
    if one.state == "T":
        return min(one.limit_s, STOPPED_S)
    given_s = one.limit_s
    if one.is_starved:
        given_s *= STARVED
    if one.tracer:  # each system call may take a hundred times as long
        given_s = max(given_s, one.outside_s)
    # A disk or a network that keeps one of these waiting shows nothing that moves.
    if any(_BY_RIGHT.search(at.file) or _EVALUATES.search(at.function) for at in one.frames):
        given_s = max(given_s, one.slow_s)
    if not (one.moves or one.moves_below or one.is_starved):
        return given_s
    if one.kind in (Activity.START, Activity.OUTSIDE):
        return float("inf")
    if not one.is_session:
        return max(given_s, one.slow_s)
    return given_s if one.moves else max(given_s, LOADER_S)


def _far(one: RankLook) -> tuple[int, int]:
    return (one.step if one.step is not None else 0, one.begun)


def _least_far(some: list[RankLook]) -> RankLook:
    return min(some, key=lambda one: (*_far(one), -one.age_s, one.rank))


def _soonest(some: Sequence[RankLook]) -> NotYet:
    left_s = [_given_s(one) - one.age_s for one in some]
    return NotYet(again_s=max(min(left_s, default=1.0), AGAIN_MIN_S))


# --- words ---------------------------------------------------------------------------------------


def _name(culprit: RankLook, waiting: Sequence[RankLook], seen: Sequence[RankLook]) -> Named:
    words = [_who([culprit], seen)]
    if waiting:
        there = _least_far(list(waiting))
        if (culprit.step or 0) < (there.step or 0):
            words.append(f"has not finished step {step_of(culprit)};")
        else:
            words.append(f"has not entered {where_of(there)};")
    else:
        words.append(f"has made no progress{in_step(culprit)} for {culprit.age_s:.1f} s;")
    words.append(does(culprit))
    given_s = _given_s(culprit)
    return _named(
        [culprit],
        culprit,
        " ".join(words) + _others_wait(waiting),
        given_s if given_s < float("inf") else culprit.age_s,
        is_proven=_is_proven(culprit),
        stack=stack_of(culprit),
    )


def _passed_by(
    few: Sequence[RankLook],
    rest: Sequence[RankLook],
    seen: Sequence[RankLook],
    *,
    more: bool = False,
) -> Named:
    """Some have not taken part in a collective that the others wait in, or in one too many."""
    there, one = _least_far(list(rest)), few[0]
    what = "has begun more collectives than" if more else "has passed by"
    has = what if len(few) == 1 else what.replace("has", "have", 1)
    counts = ""
    if one.begun >= 0 and there.begun >= 0 and one.begun != there.begun:
        counts = f" ({one.begun} collectives begun, {there.begun} by the others)"
    whom = "the others" if more else where_of(there)
    last = ""
    if one.recorded and there.recorded:
        last = f"; its last was {one.recorded[0]}, theirs {there.recorded[0]}"
    sentence = f"{_who(few, seen)} {has} {whom}{counts}; {does(one)}{_others_wait(rest)}{last}"
    proof = bool(counts)
    return _named(few, one, sentence, there.limit_s, is_proven=proof, stack=stack_of(one))


def _in_different(waiting: Sequence[RankLook], seen: Sequence[RankLook]) -> Named:
    """All have begun as many collectives, and not the same ones."""
    groups: dict[str, list[RankLook]] = {}
    for one in sorted(waiting, key=lambda one: one.rank):
        groups.setdefault(one.recorded[0].partition(" of ")[0], []).append(one)
    few = min(reversed(groups.values()), key=len)
    there = next(group[0] for group in groups.values() if group is not few)
    one = few[0]
    sentence = (
        f"{_who(few, seen)} {'is' if len(few) == 1 else 'are'} in {one.recorded[0]}, and "
        f"rank {there.rank} in {there.recorded[0]}{in_step(there)}: they have parted; {does(one)}"
    )
    return _named(few, one, sentence, there.limit_s)


def _named(
    few: Sequence[RankLook],
    one: RankLook,
    sentence: str,
    given_s: float,
    *,
    is_proven: bool = False,
    stack: str = "",
) -> Named:
    """Name ``few``, and tell what ``one`` did."""
    return Named(
        ranks=tuple(each.rank for each in few),
        nodes=tuple(dict.fromkeys(each.node for each in few)),
        sentence=sentence,
        is_proven=is_proven,
        kind=one.kind,
        given_s=given_s,
        step=step_of(one),
        place=place_of(one),
        stack=stack,
    )


def _silent(seen: Sequence[RankLook], silent: Sequence[str]) -> Named:
    names = " and ".join(silent)
    verb = "says" if len(silent) == 1 else "say"
    oldest = max(seen, key=lambda one: one.age_s, default=None)
    waiting = f"; the {len(seen)} ranks elsewhere wait{in_step(oldest)}" if oldest else ""
    return Named(
        ranks=(),
        nodes=tuple(silent),
        sentence=f"the agent on {names} {verb} nothing, though asked{waiting}",
        is_proven=False,
        kind=oldest.kind if oldest else Activity.OUTSIDE,
        given_s=oldest.limit_s if oldest else 0.0,
        step=step_of(oldest) if oldest else None,
    )


def _who(some: Sequence[RankLook], seen: Sequence[RankLook]) -> str:
    ranks = [str(one.rank) for one in some]
    listed = " and ".join(filter(None, (", ".join(ranks[:-1]), ranks[-1])))
    words = f"rank{'s' * (len(some) > 1)} {listed}"
    nodes = dict.fromkeys(one.node for one in some)
    return words + (f" on {' and '.join(nodes)}" if len({one.node for one in seen}) > 1 else "")


def _others_wait(waiting: Sequence[RankLook]) -> str:
    if not waiting:
        return ""
    if len(waiting) == 1:
        return f", rank {waiting[0].rank} waits for it"
    return f", the other {len(waiting)} ranks wait for it"
