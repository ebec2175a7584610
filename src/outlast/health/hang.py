"""The symptom of a hang: workers that show no sign of progress for longer than they are given.

A sign is any change of what a worker says: its steps, its phase, its optimizer's updates, the
collectives that it has begun. The time between two signs is what the limits are learned from
(``policy.hang``). Where one is over, all workers of the machine are looked at twice, and their
stacks are taken; who is to blame is judged by the agent, which knows of the other machines too.

What can go wrong: the watcher itself is not run for a while (the machine was suspended). Time that
it has not seen is not counted, and two looks between which it lies are taken anew.

``take`` gives the Python stacks of a process, taken from outside of it. ``py-spy`` reads them from
the process' memory, without stopping it: that works for one that is stopped, that holds the
interpreter's lock, and that the kernel does not let go. Where it is not installed or not allowed,
the process is asked by a signal that ``faulthandler`` answers without the interpreter's lock; one
that is stopped or in the kernel does not answer then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec

from outlast.attempt.beat import BeatReader, Phase
from outlast.health.processes import ProcessLook, catches, look_at, moved, state_of, tracer_of
from outlast.health.pulse import SIGNAL, ask_path, recorder_path, stacks_path
from outlast.health.watched import (
    Ask,
    Begin,
    Evidence,
    FromAgent,
    FromWatcher,
    Learned,
    Suspicion,
    Watched,
    WatchedWorker,
)
from outlast.policy.hang import (
    FRESH_STEPS,
    STOPPED_S,
    Activity,
    Frame,
    HangLimits,
    HangSettings,
    RankLook,
)

SPY_S: Final = 1.5
ANSWER_S: Final = 0.5
MAX_FRAMES: Final = 24
MAX_TEXT: Final = 50_000
_LOOK_S: Final = 0.01
_LINE: Final = re.compile(r'^\s*File "(.*)", line (\d+) in (.*)$')


class Stacks(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of a process's stacks.

    Attributes:
        frames: of the main thread, innermost first.
        holds_gil: whether that thread holds the interpreter's lock, or None.
        text: of all threads, for people.
    """

    frames: tuple[Frame, ...] = ()
    holds_gil: bool | None = None
    text: str = ""


def take(pid: int, answer: Path) -> Stacks:
    """The stacks of one process; empty where they cannot be had.

    Args:
        pid: the process.
        answer: the file that its faulthandler writes to.
    """
    spy = _spy()
    for way in (("--nonblocking",), ()) if spy else ():
        if way or state_of(pid) in ("R", "S"):  # else it would wait for the process to stop
            found = _by_spy(spy, pid, way)
            if not way and state_of(pid) == "T":  # py-spy was ended while it held it
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
            if found.frames:
                return found
    return _by_signal(pid, answer)


def _spy() -> str:
    if os.environ.get("OUTLAST_NO_SPY"):  # of tests: as if it were not installed
        return ""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.is_file() else shutil.which("py-spy") or ""


def _by_spy(spy: str, pid: int, way: tuple[str, ...]) -> Stacks:
    try:
        done = subprocess.run(
            [spy, "dump", "--pid", str(pid), "--json", *way],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SPY_S,
            check=True,
        )
        threads = json.loads(done.stdout)
        main = next(one for one in threads if one["os_thread_id"] == pid)
        return Stacks(
            frames=_frames(main),
            holds_gil=bool(main["owns_gil"]),
            text="\n".join(map(_as_text, sorted(threads, key=lambda one: one is not main))),
        )
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError, StopIteration):
        return Stacks()


def _frames(thread: dict[str, Any]) -> tuple[Frame, ...]:
    return tuple(
        Frame(str(one["name"]), str(one["filename"]), int(one["line"]))
        for one in thread["frames"][:MAX_FRAMES]
    )


def _as_text(thread: dict[str, Any]) -> str:
    does = "has the interpreter's lock" if thread["owns_gil"] else ""
    does = does or ("active" if thread["active"] else "idle")
    lines = [f'thread {thread["os_thread_id"]} "{thread["thread_name"] or ""}" ({does})']
    lines += [
        f"    {frame['name']} ({frame['filename']}:{frame['line']})" for frame in thread["frames"]
    ]
    return "\n".join(lines)[:MAX_TEXT] + "\n"


def _by_signal(pid: int, answer: Path) -> Stacks:
    if not catches(pid, SIGNAL) or tracer_of(pid):  # it would die of it; a debugger would stop it
        return Stacks()
    with contextlib.suppress(OSError):
        os.truncate(answer, 0)  # it is in memory, and would grow for weeks; the other end appends
    before = _size(answer)
    with contextlib.suppress(OSError):
        os.kill(pid, SIGNAL)
    size, deadline_s = before, time.monotonic() + ANSWER_S
    while time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
        last, size = size, _size(answer)
        if size > before and size == last:
            break
    with contextlib.suppress(OSError):
        return _parsed(answer.read_bytes()[before:][:MAX_TEXT].decode(errors="replace"))
    return Stacks()


def _parsed(text: str) -> Stacks:
    """What faulthandler wrote; the current thread took the signal, and is the main one."""
    frames: list[Frame] = []
    is_current = False
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and is_current:
            frames.append(Frame(match[3], match[1], int(match[2])))
        elif not match:
            is_current = line.startswith("Current thread")
    return Stacks(frames=tuple(frames[:MAX_FRAMES]), text=text)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


logger = logging.getLogger(__name__)

NAME: Final = "hang"
LATE_S: Final = 1.0  # between two looks, of which there are ten a second
BETWEEN_S: Final = 0.3  # two looks at a process
AGAIN_S: Final = 1.0  # after a suspicion of which nothing came, and a fifth of its age
AGAIN_MAX_S: Final = 30.0  # what is slow by right for ten minutes is not named two minutes late
LEARNED_S: Final = 5.0
SAVED_S: Final = 1.0  # a boundary that takes less has saved nothing, or teaches nothing
RECORDED: Final = 3  # collectives
RECORDED_MAX: Final = 200  # characters of each: sizes of hundreds of tensors tell nobody anything
AT_ONCE: Final = 16
_KINDS: Final = {
    Phase.STARTING: Activity.START,
    Phase.SAVING: Activity.SAVE,
    Phase.EVALUATING: Activity.EVALUATE,
    Phase.OUTSIDE: Activity.OUTSIDE,
    Phase.ENDED: Activity.OUTSIDE,
}


class Track:
    """What one worker was last seen to do.

    Attributes:
        kind: what it does.
        changed_s: monotonic second of its last sign of progress.
        step: completed steps, or None.
        is_session: whether it says what it does.
    """

    def __init__(self, worker: WatchedWorker, now_s: float) -> None:
        self.worker = worker
        self.kind = Activity.START
        self.changed_s = now_s
        self.step: int | None = None
        self.is_session = False
        self.begun = -1
        self.pulse_s: float | None = None
        self._sign: tuple[Any, ...] | None = None

    def look(self, heard: BeatReader, now_s: float) -> tuple[Activity, float] | None:
        """See what it says; the kind of thing that it did, and how long, once it goes on."""
        beat, phase, updates, pulse = heard.beat, heard.phase, heard.updates, heard.pulse
        evaluates = pulse is not None and pulse.is_evaluating
        self.step = beat.step if beat is not None else None
        self.begun = pulse.begun if pulse is not None else -1
        self.pulse_s = pulse.last_s if pulse is not None else None
        self.is_session = phase is not None
        count = updates.updates if updates is not None else 0
        sign = (self.step, phase, count, self.begun, evaluates)
        number = count if phase is None else self.step
        first = heard.began_updates if phase is None else heard.began_step
        is_fresh = number is None or first is None or number < first + FRESH_STEPS
        kind = _kind(phase.phase if phase is not None else None, evaluates, is_fresh)
        if sign == self._sign:
            return None
        before, was_known = self.kind, self._sign is not None
        gap_s = now_s - self.changed_s
        self._sign, self.kind, self.changed_s = sign, kind, now_s
        return (before, gap_s) if was_known else None


def _kind(phase: Phase | None, evaluates: bool, is_fresh: bool) -> Activity:
    if phase is None:
        return Activity.START if is_fresh else Activity.STEP
    kind = _KINDS.get(phase, Activity.STEP)
    if kind is Activity.STEP and evaluates:
        kind = Activity.EVALUATE
    return Activity.START if is_fresh and kind is not Activity.OUTSIDE else kind


class HangWatch:
    """Looks for workers that make no progress."""

    def __init__(self) -> None:
        self._watched: Watched | None = None
        self._limits = HangLimits(HangSettings())
        self._tracks: dict[int, Track] = {}
        self._gathering: Gathering | None = None
        self._again_s = self._looked_s = self._said_s = 0.0
        self._known_late: frozenset[int] = frozenset()

    def begin(self, watched: Watched) -> Iterable[FromWatcher]:
        """An attempt begins."""
        begin, now_s = watched.begin, time.monotonic()
        self._watched = watched if begin.hang is not None else None
        self._limits = HangLimits(begin.hang or HangSettings(), begin.learned.get(NAME))
        self._tracks = {one.rank: Track(one, now_s) for one in watched.workers}
        self._gathering = None
        self._again_s, self._looked_s, self._said_s = 0.0, now_s, now_s
        self._known_late = frozenset()
        return ()

    def look(self, now_s: float) -> Iterable[FromWatcher]:
        """Once."""
        if self._watched is None:
            return
        self._follow(self._watched, now_s)
        if now_s - self._said_s >= LEARNED_S:
            self._said_s = now_s
            yield self._learned(self._watched)
        yield from self._gathered(now_s)
        late = frozenset(rank for rank, one in self._tracks.items() if self._is_late(one, now_s))
        is_due = now_s >= self._again_s or late - self._known_late
        if late and is_due and self._gathering is None:
            self._known_late = late
            self._gathering = Gathering(self._watched.begin, None)

    def hear(self, message: FromAgent) -> Iterable[FromWatcher]:
        """The agent asks for evidence."""
        if isinstance(message, Ask) and self._watched is not None:
            if self._gathering is None or self._gathering.is_done:
                self._gathering = Gathering(self._watched.begin, None)
            self._gathering.number = message.number
        return ()

    def _follow(self, watched: Watched, now_s: float) -> None:
        unseen_s = now_s - self._looked_s
        self._looked_s = now_s
        if unseen_s > LATE_S and self._gathering is not None:
            self._gathering = Gathering(watched.begin, self._gathering.number)
        for rank, track in self._tracks.items():
            if unseen_s > LATE_S:
                track.changed_s += unseen_s
            if rank in watched.heard:
                gap = track.look(watched.heard[rank], now_s)
                if gap is not None and (gap[0] is not Activity.SAVE or gap[1] >= SAVED_S):
                    self._limits.saw(*gap)

    def _is_late(self, track: Track, now_s: float) -> bool:
        age_s, limit_s = now_s - track.changed_s, self._limits.limit_s(track.kind)
        if age_s >= limit_s:
            # Who has left is not late; whether others wait for it shows by their being so.
            return state_of(track.worker.pid) not in ("", "Z")
        return age_s >= STOPPED_S and state_of(track.worker.pid) == "T"

    def _gathered(self, now_s: float) -> Iterable[FromWatcher]:
        gathering = self._gathering
        if gathering is None or not gathering.is_done or self._watched is None:
            return
        self._gathering = None
        seen = tuple(
            self._seen(track, gathering, now_s)
            for rank, track in sorted(self._tracks.items())
            if rank in gathering.found
        )
        attempt = self._watched.begin.attempt
        oldest_s = max((one.age_s for one in seen), default=0.0)
        # Also where another machine has asked: else each of a thousand would raise its own.
        self._again_s = now_s + min(max(AGAIN_S, oldest_s / 5), AGAIN_MAX_S)
        if gathering.number is not None:
            yield Evidence(attempt=attempt, number=gathering.number, seen=seen)
        elif seen and any(self._is_late(track, now_s) for track in self._tracks.values()):
            yield self._learned(self._watched)
            yield Suspicion(attempt=attempt, seen=seen)

    def _learned(self, watched: Watched) -> Learned:
        return Learned(symptom=NAME, attempt=watched.begin.attempt, state=self._limits.state())

    def _seen(self, track: Track, gathering: Gathering, now_s: float) -> RankLook:
        before, after, stacks, recorded = gathering.found[track.worker.rank]
        what = moved(before, after)
        in_backward = bool(stacks.frames) and stacks.frames[0].function == "_engine_run_backward"
        assert self._watched is not None  # noqa: S101 - asked while watching
        return RankLook(
            rank=track.worker.rank,
            node=self._watched.begin.node,
            kind=track.kind,
            is_session=track.is_session,
            step=track.step,
            age_s=now_s - track.changed_s,
            limit_s=self._limits.limit_s(track.kind),
            slow_s=self._limits.limit_s(Activity.EVALUATE),
            outside_s=self._limits.limit_s(Activity.OUTSIDE),
            begun=track.begun,
            pulse_age_s=None if track.pulse_s is None else now_s - track.pulse_s,
            state=after.state,
            tracer=after.tracer,
            # The threads of the backward pass compute while the one that began it waits.
            moves=what.main or (in_backward and what.whole),
            moves_below=what.below,
            is_still=what.still,
            is_starved=what.starved,
            holds_gil=stacks.holds_gil,
            call=after.call if after.call == before.call else "",
            frames=stacks.frames,
            recorded=recorded,
        )


class Gathering:
    """Evidence of all workers of a machine, taken in threads: it takes some tenths of a second.

    Args:
        begin: which workers.
        number: of who has asked, or None.

    Attributes:
        number: the same.
        found: rank → two looks, stacks, and names of its last collectives; once it is done.
    """

    def __init__(self, begin: Begin, number: int | None) -> None:
        self.number = number
        self.found: dict[int, tuple[ProcessLook, ProcessLook, Stacks, tuple[str, ...]]] = {}
        self._begin = begin
        self._beats = Path(begin.beats)
        self._thread = threading.Thread(target=self._run, name="outlast-evidence", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it is all there."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._gather()
        except Exception:  # no thread can be started, say: it is tried again, with the next look
            logger.exception("evidence was not taken")

    def _gather(self) -> None:
        workers = self._begin.workers
        before = {one.rank: look_at(one.pid) for one in workers}
        with contextlib.suppress(OSError):
            for one in workers:  # what an earlier look has left is not of now
                recorder_path(self._beats, one.local_rank).unlink(missing_ok=True)
            ask_path(self._beats).touch()
        time.sleep(BETWEEN_S)
        with ThreadPoolExecutor(min(len(workers), AT_ONCE) or 1, "outlast-stacks") as pool:
            found = pool.map(self._of_one, workers)
            self.found = {
                one.rank: (before[one.rank], *rest)
                for one, rest in zip(workers, found, strict=True)
            }

    def _of_one(self, worker: WatchedWorker) -> tuple[ProcessLook, Stacks, tuple[str, ...]]:
        after = look_at(worker.pid)
        is_there = after.state not in ("", "Z")
        answer = stacks_path(self._beats, worker.local_rank)
        stacks = take(worker.pid, answer) if is_there else Stacks()
        with contextlib.suppress(OSError):
            text = stacks.text or "no stack could be taken\n"
            text_path(self._beats, worker.local_rank).write_text(
                text, encoding="utf-8", errors="replace"
            )
        return after, stacks, _recorded(recorder_path(self._beats, worker.local_rank))


def text_path(directory: Path, local_rank: int) -> Path:
    """Where a worker's stacks are left for people."""
    return directory / f"evidence-{local_rank}"


def _recorded(path: Path) -> tuple[str, ...]:
    """The last collectives that a worker's flight recorder has, the newest first."""
    try:
        entries = json.loads(path.read_bytes())["entries"][-RECORDED:]
        return tuple(
            f"{one['profiling_name']} #{one['collective_seq_id']} of {one['input_sizes']}"[
                :RECORDED_MAX
            ]
            for one in reversed(entries)
        )
    except (OSError, ValueError, KeyError, TypeError):
        return ()
