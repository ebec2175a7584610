"""Hold the workers of one attempt as a watcher sees them; say what a watcher and its agent say.

Messages pass over a socket that keeps them apart. Every message is a struct whose class's name is
its tag; unknown ones are refused.

=========  ==============  =====================================================================
from       message         meaning
=========  ==============  =====================================================================
agent      ``Begin``       workers have started: watch them
agent      ``End``         the attempt is over, or is being ended: look away
watcher    ``Alive``       about once a second; without it for long the watcher is replaced
watcher    ``Learned``     what a symptom knows and a successor must not lose
watcher    ``Suspicion``   workers have made no progress for their limit, and this is how they look
agent      ``Ask``         another machine suspects: how do the workers here look?
watcher    ``Evidence``    so
watcher    ``Timings``     what this machine's workers' newest steps were spent on
watcher    ``RankSteps``   what all their steps were spent on since it said so last, in the middle
watcher    ``Gap``         a symptom has failed, and was not looked for
=========  ==============  =====================================================================

``Pace`` reads what the steps were spent on from the workers' memory, and tells the agent. It says
the newest steps each time, ``KEPT`` at most, also those that it has said before: a reader that
passes them on overwrites what was there, and nothing is lost if a word is. In a job of many
machines it speaks less often, so that all of them together say no more than ``WORDS_S`` a second;
where so many steps go by in between that ``KEPT`` would not overlap with those of the other
machines, it tells every second, fourth, eighth … step, by their numbers: machines that choose
different strides still have steps in common.

The ledger has less: one line of a machine tells all of its ranks, about once a minute
(``telling_s``). All machines together tell of ``RANKS_MINUTE`` ranks a minute at most, each attempt
ever more seldom, as ``LINES`` in the time that it has run are enough to see since when a rank is
slow. So a job of a month comes to some thousand lines a machine. The last of an attempt are missing
where it ends in between.
"""

from __future__ import annotations

import contextlib
import math
import socket
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Final

import msgspec

from outlast import ipc
from outlast.attempt.beat import BEATS_PREFIX, BeatReader, Timing, beats_root
from outlast.policy.hang import HangSettings, RankLook

MAX_BYTES: Final = 1 << 20  # as they come; the kernel takes some 400 KiB at once
PACK_BYTES: Final = 1 << 14  # from here on they are packed: stacks of many ranks are much alike
_PACKED: Final = b"z"  # no struct's encoding begins so
SEND_BUFFER_BYTES: Final = 1 << 20
State = dict[str, list[float]]


class WatchedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of this machine."""

    local_rank: int
    rank: int
    pid: int


class Begin(ipc.Message):
    """From the agent: workers have started.

    Attributes:
        attempt: its number.
        node: the machine's name.
        beats: the agent's private directory.
        world_size: workers of all machines.
        workers: of this machine.
        hang: how long workers may be without progress; None where nobody wants to know.
        learned: symptom → what it said last.
    """

    attempt: int
    node: str
    beats: str
    world_size: int
    workers: tuple[WatchedWorker, ...]
    hang: HangSettings | None = None
    learned: dict[str, State] = msgspec.field(default_factory=dict)


class End(ipc.Message):
    """From the agent: nothing is to be watched until the next ``Begin``."""


class Alive(ipc.Message):
    """From the watcher: it runs."""


class Learned(ipc.Message):
    """What ``symptom`` has learned so far, of the attempt with this number."""

    symptom: str
    attempt: int
    state: State


class Suspicion(ipc.Message):
    """All workers of this machine, of which some have made no progress for their limit."""

    attempt: int
    seen: tuple[RankLook, ...]


class Ask(ipc.Message):
    """How do the workers look now? ``number`` comes back in the answer."""

    number: int


class Evidence(ipc.Message):
    """From the watcher: how all workers of this machine look."""

    attempt: int
    number: int
    seen: tuple[RankLook, ...]


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """The newest steps of some workers, who tell the same ones: in thousands, one word is cheaper.

    Attributes:
        ranks: whose.
        kinds: of each the number of its kind of work.
        steps: their numbers, ascending: 8 bytes each, in this machine's order.
        seconds: of each rank, of each step its compute, wait, data and stall: 4 bytes each.
    """

    ranks: tuple[int, ...]
    kinds: tuple[int, ...]
    steps: bytes
    seconds: bytes


class Timings(ipc.Message):
    """The newest steps of this machine's workers, those that were told before included.

    Attributes:
        attempt: its number.
        node: the machine's name.
        ranks: of the workers that have said something, each once.
    """

    attempt: int
    node: str
    ranks: tuple[Times, ...]


class RankSteps(ipc.Message):
    """What this machine's workers' steps were spent on since this was said last.

    Attributes:
        attempt: its number.
        seconds: since then, or since the first look at the attempt.
        ranks: of the workers that have completed steps in this time.
        kinds: of each the number of its kind of work.
        num: steps of each.
        step_s: of each, the median from boundary to boundary.
        own_s, wait_s, data_s: medians of its own work, and of its waits for others and for batches.
        longest_s: of each, its longest step.
    """

    attempt: int
    seconds: float
    ranks: tuple[int, ...]
    kinds: tuple[int, ...]
    num: tuple[int, ...]
    step_s: tuple[float, ...]
    own_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    data_s: tuple[float, ...]
    longest_s: tuple[float, ...]


class Gap(ipc.Message):
    """For so long, up to now, nobody has looked for ``symptom``."""

    symptom: str
    reason: str
    seconds: float


FromAgent = Begin | End | Ask
FromWatcher = Alive | Learned | Suspicion | Evidence | Timings | RankSteps | Gap


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends, for the agent and for its watcher."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return ends


class Voice(ipc.PacketSocket):
    """One end of the socket between an agent and its watcher."""

    codec = ipc.Codec(
        FromAgent | FromWatcher, msgspec.msgpack, pack_over=PACK_BYTES - 1, mark=_PACKED
    )
    max_bytes = MAX_BYTES
    waits = False


_WORD: Final = "begin"  # in the agent's private directory


class _Word(msgspec.Struct, frozen=True):
    job: str
    begin: Begin


def leave_word(job: str, begin: Begin) -> None:
    """Leave, beside what workers say, who they are: for whoever looks on. Never raises.

    Args:
        job: the job's id.
        begin: of its attempt, on this machine.
    """
    path = Path(begin.beats) / _WORD
    with contextlib.suppress(OSError):  # to be looked at is nothing that a job needs
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(_Word(job, begin)))
        part.rename(path)


def find_words(job: str) -> list[Begin]:
    """What agents of this job have left on this machine; only its owner can read it."""
    found = []
    for path in beats_root().glob(f"{BEATS_PREFIX}*/{_WORD}"):
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            word = msgspec.json.decode(path.read_bytes(), type=_Word)
            if word.job == job:
                found.append(word.begin)
    return found


class Watched:
    """Opens what workers say, as they begin to say it.

    Args:
        begin: as the agent said it.

    Attributes:
        begin: the same.
        heard: rank → what that worker says; those that have not begun to are missing.
    """

    def __init__(self, begin: Begin) -> None:
        self.begin = begin
        self.heard: dict[int, BeatReader] = {}
        self._beats = Path(begin.beats)

    @property
    def workers(self) -> tuple[WatchedWorker, ...]:
        """Those of this machine."""
        return self.begin.workers

    def look(self) -> None:
        """Open what is there by now."""
        for worker in self.workers:
            if worker.rank not in self.heard:
                try:
                    self.heard[worker.rank] = BeatReader(self._beats, worker.local_rank)
                except (OSError, ValueError):
                    continue  # it has not begun to speak

    def close(self) -> None:
        """Let go of the memory."""
        for heard in self.heard.values():
            heard.close()
        self.heard.clear()


KEPT: Final = 64
LEAST: Final = 16  # steps in a word, if there were so many
EVERY_S: Final = 0.25
WORDS_S: Final = 200.0  # of all machines
READ: Final = 4096  # steps that are remembered
OVERLAP: Final = 3  # words that have a step in common
LINE_S: Final = 60.0  # between two lines of the ledger
FIRST_LINE: Final = 12  # so much sooner the first one comes; then twice as late each time
RANKS_MINUTE: Final = 40
LINES: Final = 500
COUNTED: Final = 512  # steps, evenly taken, that a median is of


def interval_s(machines: float) -> float:
    """Seconds between two words of each of so many machines."""
    return max(EVERY_S, machines / WORDS_S)


def telling_s(world_size: int, age_s: float) -> float:
    """Seconds from a line of the ledger to the same machine's next one.

    Args:
        world_size: workers of all machines.
        age_s: of the attempt when the line was told; 0 before the first.
    """
    usual_s = max(LINE_S, world_size * LINE_S / RANKS_MINUTE)
    return max(min(max(age_s, usual_s / FIRST_LINE), usual_s), age_s / LINES)


class Pace:
    """Tells the agent what steps were spent on."""

    def __init__(self) -> None:
        self._watched: Watched | None = None
        self._interval_s = EVERY_S
        self._read_s = self._say_s = 0.0  # when it is time again
        self._read: dict[int, deque[Timing]] = {}
        self._has_news = False
        self._began_s: float | None = None  # the first look at the attempt
        self._line_s = 0.0  # when the newest line of the ledger was told
        self._untold: dict[int, tuple[int, float]] = {}  # rank → steps since then, the longest

    def begin(self, watched: Watched) -> Iterable[FromWatcher]:
        """An attempt begins."""
        self._watched, self._read, self._has_news = watched, {}, False
        self._interval_s = interval_s(watched.begin.world_size / max(len(watched.workers), 1))
        self._read_s = self._say_s = 0.0
        self._began_s, self._untold = None, {}
        return ()

    def hear(self, message: FromAgent) -> Iterable[FromWatcher]:
        """Nothing is asked."""
        return ()

    def look(self, now_s: float) -> Iterable[FromWatcher]:
        """The newest steps, and a line of the ledger: where there are steps to tell, in time."""
        watched = self._watched
        if watched is None or now_s < self._read_s:
            return
        self._read_s = now_s + EVERY_S
        if self._began_s is None:
            self._began_s = self._line_s = now_s
        for rank, heard in watched.heard.items():
            read = self._read.setdefault(rank, deque(maxlen=READ))
            news = heard.timings(read[-1].step if read else -1)
            read.extend(news)
            if news:
                num, longest_s = self._untold.get(rank, (0, 0.0))
                longest_s = max(longest_s, *(one.whole_s for one in news))
                self._untold[rank] = num + len(news), longest_s
                self._has_news = watched.begin.world_size > 1  # else nobody is compared with it
        if self._has_news and now_s >= self._say_s:
            self._say_s, self._has_news = now_s + self._interval_s, False
            kinds = {rank: watched.heard[rank].kind for rank, read in self._read.items() if read}
            ranks = tuple(times_of(self._read, kinds, self._interval_s))
            yield Timings(attempt=watched.begin.attempt, node=watched.begin.node, ranks=ranks)
        age_s = self._line_s - self._began_s
        if self._untold and now_s - self._line_s >= telling_s(watched.begin.world_size, age_s):
            yield self._line(watched, now_s)

    def _line(self, watched: Watched, now_s: float) -> RankSteps:
        """Of steps that are not remembered any more the longest counts, and their number."""
        untold, self._untold = dict(sorted(self._untold.items())), {}
        seconds, self._line_s = now_s - self._line_s, now_s
        newest = [list(self._read[rank])[-num:] for rank, (num, _) in untold.items()]
        counted = [steps[:: -(-len(steps) // COUNTED)] for steps in newest]
        return RankSteps(
            attempt=watched.begin.attempt,
            seconds=seconds,
            ranks=tuple(untold),
            kinds=tuple(watched.heard[rank].kind for rank in untold),
            num=tuple(num for num, _ in untold.values()),
            step_s=tuple(median_low(one.whole_s for one in steps) for steps in counted),
            own_s=tuple(median_low(one.compute_s for one in steps) for steps in counted),
            wait_s=tuple(median_low(one.wait_s for one in steps) for steps in counted),
            data_s=tuple(median_low(one.data_s for one in steps) for steps in counted),
            longest_s=tuple(longest_s for _, longest_s in untold.values()),
        )


def times_of(
    read: Mapping[int, Sequence[Timing]], kinds: Mapping[int, int], word_s: float
) -> Iterable[Times]:
    """What is said of workers' newest steps: together of those that tell the same ones."""
    alike: dict[bytes, list[tuple[int, bytes]]] = {}
    for rank in sorted(kinds):
        kept = told(read[rank], word_s)
        steps = array("q", [one.step for one in kept]).tobytes()
        seconds = array(
            "f",
            [x for one in kept for x in (one.compute_s, one.wait_s, one.data_s, one.stall_s)],
        ).tobytes()
        alike.setdefault(steps, []).append((rank, seconds))
    for steps, said in alike.items():
        yield Times(
            ranks=tuple(rank for rank, _ in said),
            kinds=tuple(kinds[rank] for rank, _ in said),
            steps=steps,
            seconds=b"".join(seconds for _, seconds in said),
        )


def told(read: Sequence[Timing], word_s: float) -> list[Timing]:
    """Those that are told: of the time of ``OVERLAP`` words."""
    step_s = _step_s(read)
    each = stride(step_s, word_s)
    count = min(max(math.ceil(OVERLAP * word_s / (step_s * each)), LEAST), KEPT)
    return [one for one in read if one.step % each == 0][-count:]


def _step_s(read: Sequence[Timing]) -> float:
    return max(sum(one.whole_s for one in read) / len(read), 1e-6)


def stride(step_s: float, word_s: float) -> int:
    """Every how many steps one is told, a power of two."""
    each = 1
    while OVERLAP * word_s / step_s > KEPT * each:
        each *= 2
    return each
