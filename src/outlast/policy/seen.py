"""What was seen of one rank of a job that makes no progress, and how that is told.

The watcher fills it in, on each machine; :mod:`outlast.policy.blame` judges what was seen of all.

What can go wrong: it is a moment's look. A function that is called between two others is seen as
where the rank is; what a loop does is seen at one of its lines.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from outlast.policy.hang import Activity

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
    """The same, in words that go on."""
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
