"""The end of an attempt on this machine: some workers live through it, nothing else of it does.

**Waiting.** torch's agent sleeps between two looks at its workers; a death is noticed half that
time late. Here it sleeps on what the kernel says of each process (a pidfd), for at most as long:
the agent knows within a millisecond. Where there are no pidfds it just sleeps.

**Nothing is left.** Workers are killed with their process groups, and what they have started
elsewhere is looked for (:mod:`outlast.health.processes`). Before this machine says that it is ready
it is looked for again. A process that the kernel holds (a driver that does not come back, a file
system that is away, a tracer) cannot be killed, and may hold its GPU's memory as long. It is waited
for, and that is said; after ``OUT_S`` the machine asks to be left out, so that a spare takes its
place. A notice and the job's end elsewhere end the wait at once. Where there is no other machine
the job is given up after ``ALONE_S``: a machine like that has to be restarted, and no attempt on it
would do that.

**Survivors.** A worker whose session is in a loop has a line to the agent (``attempt.over``). When
the attempt is over it is told so, and has a few seconds to end the step that it is in and a few
more to take its process groups down. A worker that is in time is kept: torch's agent, for which
every worker of an attempt ends with it, sees it as ended well, and in the next attempt's context it
stands in its old place. One that is not in time is ended, and started anew like those that were
lost. What can go wrong: a worker is told to go on and dies of it. That is a failure of the new
attempt, judged like any other; so is the death of one that stands by.

**Beside others.** A machine that comes to a job whose workers train has its own ones stand by
before it says that it is ready: the others wait for no script's beginning. They have the ranks and
sizes that they would get now. If the attempt that takes them in has others for them, or if nobody
in it has lived through the one before, they are started anew.

**Places.** Where the run is the same with any number of workers, those that are kept need not wait
for those that were lost: the next attempt begins without them, and a place stays empty for a while.
The worker that is to take it is started beside it and stands by, without a rank: it goes through
its script's beginning, says so, and then all go into an attempt with every place taken. torch's
agent knows of none but full machines: for it all places have workers, of which the ranks of those
that stand by lie behind everybody's.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

from outlast.attempt.beat import EMPTY_VARIABLE
from outlast.attempt.over import (
    STANDBY_VARIABLE,
    AgentLine,
    AttemptEnded,
    NextAttempt,
    Prepared,
    Stays,
    Unwound,
    listen,
)
from outlast.errors import Exit
from outlast.health.processes import Marks, end_group, end_leftovers, in_words
from outlast.ipc import peer_credentials, readable
from outlast.launch.machines import Machines
from outlast.launch.membership import JobOver
from outlast.ledger.file import Ledger
from outlast.ledger.narrator import say


class ProcessWait:
    """Sleeps until one of some processes ends.

    Args:
        interval_s: the longest sleep.
        news: a descriptor that is readable when there is something else to look at, or None; who
            looks at it makes it unreadable.
    """

    def __init__(self, interval_s: float, news: int | None = None) -> None:
        self._interval_s = interval_s
        self._news = () if news is None else (news,)
        self._fds: dict[int, int] = {}  # pid → pidfd

    def wait(self, processes: Iterable[Any], lines: Iterable[int] = ()) -> None:
        """Sleep until one of these ends that still run (as far as ``returncode`` knows).

        Args:
            processes: them.
            lines: descriptors that are read once they can be: that ends the sleep too.
        """
        running = {one.pid for one in processes if one.returncode is None}
        for pid in self._fds.keys() - running:
            os.close(self._fds.pop(pid))
        try:
            for pid in running - self._fds.keys():
                self._fds[pid] = os.pidfd_open(pid)
        except (OSError, AttributeError):
            time.sleep(self._interval_s)
            return
        readable([*self._fds.values(), *self._news, *lines], self._interval_s)

    def close(self) -> None:
        """Give back what it holds."""
        while self._fds:
            os.close(self._fds.popitem()[1])


ENDED_S: Final = 5.0  # for all that was killed: memory is given back meanwhile
OUT_S: Final = 15.0
ALONE_S: Final = 300.0
SAY_S: Final = 30.0
LOOK_S: Final = 0.2


class WorkerShutdown:
    """Ends an attempt's workers on one machine, and what they have started.

    Args:
        marks: of its workers.
        machines: the others.
        ledger: the job's.
        must_leave: whether this machine has had notice.
        exclude_for_s: how long this machine is left out where it cannot end its workers.
    """

    def __init__(
        self,
        marks: Marks,
        machines: Machines,
        ledger: Ledger,
        must_leave: Callable[[], bool],
        exclude_for_s: float,
    ) -> None:
        self._marks = marks
        self._machines = machines
        self._ledger = ledger
        self._must_leave = must_leave
        self._exclude_for_s = exclude_for_s
        self._held: dict[int, Any] = {}  # process id → worker that was killed and has not ended
        self._killed_s = 0.0

    def end(self, handlers: Mapping[int, Any]) -> list[int]:
        """End the workers that run, each with its process group.

        Args:
            handlers: local rank → torch's handler.

        Returns:
            Local ranks of workers that were killed and have not ended in time.
        """
        running = {rank: one.proc for rank, one in handlers.items() if one.proc.poll() is None}
        for process in running.values():
            end_group(process.pid)
        if running:
            self._killed_s = time.monotonic()
        until_s = self._killed_s + ENDED_S
        for process in running.values():
            with contextlib.suppress(Exception):
                process.wait(timeout=max(until_s - time.monotonic(), 0.01))
        held = [rank for rank, process in running.items() if process.poll() is None]
        self._held |= {running[rank].pid: running[rank] for rank in held}
        return held

    def wait(self, kept: Collection[int]) -> None:
        """End what is left of earlier attempts here, and wait until it has gone.

        Args:
            kept: process ids of workers that go on; what these have started is theirs.

        Raises:
            JobOver: this machine is to go, or cannot go on.
        """
        if not self._held:  # what is found now is killed now
            self._killed_s = time.monotonic()
        if left := self._look(max(self._left_s(ENDED_S), LOOK_S), kept):
            self._wait_for_held(left, kept)
        self._marks.forget(kept)

    def _wait_for_held(self, left: list[int], kept: Collection[int]) -> None:
        words = ", ".join(in_words(pid) for pid in left)
        self._note(words, over=False)
        say_s, is_asked = time.monotonic() + SAY_S, False
        while left:
            if self._must_leave():
                raise JobOver(
                    Exit.DRAINED,
                    f"this machine leaves, and process {words} could not be ended; start me again",
                )
            if self._machines.ends_now is not None:
                return  # the rendezvous says so
            if not is_asked and not self._left_s(OUT_S):
                is_asked = True
                reason = f"it cannot end process {words}, which was killed"
                self._machines.exclude(reason, for_s=self._exclude_for_s)
            if not self._machines.are_many and not self._left_s(ALONE_S):
                raise JobOver(
                    Exit.GAVE_UP,
                    f"process {words} was killed {ALONE_S:.0f} s ago and has not ended: restart "
                    "this machine, and run the same command again",
                )
            if time.monotonic() > say_s:
                say_s += SAY_S
                say(f"process {words} has not ended yet: the next attempt waits for it")
            time.sleep(LOOK_S)
            left = self._look(0.0, kept)
        self._note(words, over=True)

    def _look(self, limit_s: float, kept: Collection[int]) -> list[int]:
        """Process ids of what still lives of earlier attempts; it has been killed by now."""
        marks = self._marks
        sessions = set(marks.workers).difference(kept)
        left = end_leftovers(marks.stem, limit_s=limit_s, spared=marks.of(kept), sessions=sessions)
        self._held = {pid: one for pid, one in self._held.items() if one.poll() is None}
        return sorted({*left, *self._held})

    def _left_s(self, after_s: float) -> float:
        return max(self._killed_s + after_s - time.monotonic(), 0.0)

    def _note(self, words: str, *, over: bool) -> None:
        seconds = time.monotonic() - self._killed_s
        self._ledger.append("held", what=words, seconds=round(seconds, 3), over=over)


UNWIND_S: Final = 5.0  # until its step has ended
TAKE_DOWN_S: Final = 5.0  # from there until it could go on
DEATH_LOOK_S: Final = 0.05  # between two looks whether it has died
BACKLOG: Final = 1024
SLOW_S: Final = 60.0  # for a script's beginning, after which a person is told
UNHELD: Final = "it is in no session"
STUCK: Final = f"it has not ended its step within {UNWIND_S:.0f} s"
LATE: Final = f"its process groups were not taken down within {TAKE_DOWN_S:.0f} s"
_SOCKET: Final = "line"


class Kept:
    """A worker that goes on into the next attempt.

    Attributes:
        handler: torch's view of its process.
        step: that it holds the state of, or None.
        any_size: whether it is the same run with any other number of workers.
    """

    def __init__(self, handler: Any, end: AgentLine, step: int | None, *, any_size: bool) -> None:
        self.handler = handler
        self.step = step
        self.any_size = any_size
        self._line = end
        self._is_told = False

    def go(self, environ: dict[str, str], stdout: str, stderr: str) -> None:
        """Tell it its place in the next attempt, once; if it has died, the attempt will see that.

        Nobody waits for one that cannot be told: it is ended.
        """
        if self._is_told:  # the others are started in another way than was tried first
            return
        self._is_told = True
        if not self._line.send(
            NextAttempt(environ=environ, stdout=stdout or "", stderr=stderr or "")
        ):
            self.end()

    def end(self) -> None:
        """It does not go on."""
        _kill(self.handler)


class Survivors:
    """The workers of one machine that live through an attempt's end.

    Args:
        directory: the agent's private one.
        wanted: the setting ``workers.in_process``.
    """

    def __init__(self, directory: Path, wanted: bool) -> None:
        self.kept: dict[int, Kept] = {}
        self.reasons: dict[int, str] = {}  # local rank → why it was not kept, of the last attempt
        self._said_unheld = self._has_called = False
        self._stay = False
        self._lines: dict[int, AgentLine] = {}  # by process id
        self._standing: dict[int, Any] = {}  # local rank → torch's handler of one that stands by
        self._slow_from_s: dict[int, float] = {}  # by process id, of those; inf once it is told
        self._unwound: set[int] = set()  # process ids of those that have said so unasked
        self._prepared: dict[int, Prepared] = {}  # by process id, likewise
        self._path = directory / _SOCKET
        self._listener = listen(self._path, BACKLOG) if wanted else None

    @property
    def address(self) -> str:
        """Where workers find their line; "" where none is wanted."""
        return str(self._path) if self._listener is not None else ""

    def close(self) -> None:
        """End those that wait for an attempt that does not come."""
        self.end()
        for one in self._lines.values():
            one.close()
        if self._listener is not None:
            self._listener.close()

    @property
    def pids(self) -> frozenset[int]:
        """Processes that are kept for the next attempt, or stand by."""
        handlers = [one.handler for one in self.kept.values()]
        return frozenset(one.proc.pid for one in (*handlers, *self._standing.values()))

    # --- while an attempt runs -------------------------------------------------------------------

    @property
    def descriptors(self) -> list[int]:
        """Readable once a worker has something to say."""
        listeners = [] if self._listener is None else [self._listener.fileno()]
        return [*listeners, *(one.sock.fileno() for one in self._lines.values())]

    def look(self) -> None:
        """What workers say unasked is heard now."""
        if self._listener is None:
            return
        self._accept()
        by_fd = {end.sock.fileno(): pid for pid, end in self._lines.items()}
        for fd in readable(by_fd, 0.0):
            pid = by_fd[fd]
            match self._lines[pid].receive():
                case Unwound():
                    self._unwound.add(pid)
                case Prepared() as message:
                    self._prepared[pid] = message
                case _:  # its session has ended
                    self._lines.pop(pid).close()
        for rank, handler in self.standing.items():
            pid = handler.proc.pid
            if pid not in self._prepared and time.monotonic() > self._slow_from_s[pid]:
                self._slow_from_s[pid] = math.inf
                say(
                    f"the place of local rank {rank} is still empty after {SLOW_S:.0f} s: its new "
                    f"process has not come to outlast.session() yet, and the others train on "
                    f"without it. See: py-spy dump --pid {pid}"
                )

    def stand_by(self, handlers: Mapping[int, Any]) -> None:
        """These have no rank in the attempt that begins; local rank → torch's handler."""
        self._standing = dict(handlers)
        before, limit_s = self._slow_from_s, time.monotonic() + SLOW_S
        pids = (handler.proc.pid for handler in handlers.values())
        self._slow_from_s = {pid: before.get(pid, limit_s) for pid in pids}
        # What others have said was of the attempt before, or they are dead.
        self._unwound &= {handler.proc.pid for handler in handlers.values()}

    @property
    def standing(self) -> dict[int, Any]:
        """Local rank → torch's handler of a worker that lives, and stands by."""
        return {rank: one for rank, one in self._standing.items() if one.proc.poll() is None}

    @property
    def are_complete(self) -> bool:
        """Whether somebody stands by, and all of those could take their places now."""
        standing = self.standing
        return bool(standing) and self._ready().keys() == standing.keys()

    def _ready(self) -> dict[int, Kept]:
        """Those who stand by and could begin."""
        return {
            rank: Kept(handler, self._lines[pid], None, any_size=True)
            for rank, handler in self.standing.items()
            if (pid := handler.proc.pid) in self._prepared and pid in self._lines
        }

    @property
    def are_moving(self) -> bool:
        """Whether one has left the attempt, as all have agreed to."""
        return not self._unwound <= {one.proc.pid for one in self._standing.values()}

    # --- an attempt ends -------------------------------------------------------------------------

    def gather(self, running: Mapping[int, Any]) -> None:
        """The attempt is over: keep whoever of these workers can go on.

        Args:
            running: local rank → torch's handler of a worker that has not ended.
        """
        if self._listener is None or not running:
            return
        self.reasons = {}
        self._accept()
        self._forget({handler.proc.pid for handler in running.values()})
        asked: dict[int, AgentLine] = {}
        unwound: set[int] = set()
        for rank, handler in running.items():
            pid = handler.proc.pid
            end = self._lines.get(pid)
            if end is None or not end.send(AttemptEnded()):
                self.reasons[rank] = UNHELD
            elif pid in self._prepared:
                self._keep(rank, handler, end, self._prepared.pop(pid))
            else:
                asked[rank] = end
                unwound.update({rank} if pid in self._unwound else ())
            self._unwound.discard(pid)
        until_s = dict.fromkeys(asked, time.monotonic() + UNWIND_S)
        while asked:
            by_fd = {end.sock.fileno(): rank for rank, end in asked.items()}
            for fd in readable(by_fd, DEATH_LOOK_S):
                rank = by_fd[fd]
                self._hear(rank, running[rank], asked, unwound)
                if rank in unwound:
                    until_s[rank] = time.monotonic() + TAKE_DOWN_S
            for rank in list(asked):
                if running[rank].proc.poll() is not None:
                    self._not_kept(rank, asked, "it has ended")
                elif time.monotonic() > until_s[rank]:
                    self._not_kept(rank, asked, LATE if rank in unwound else STUCK)
        self._tell_if_unheld()

    def _hear(
        self, rank: int, handler: Any, asked: dict[int, AgentLine], unwound: set[int]
    ) -> None:
        match asked[rank].receive():
            case Unwound():
                unwound.add(rank)
            case Prepared() as message:
                self._keep(rank, handler, asked.pop(rank), message)
            case Stays(reason=reason):
                self._not_kept(rank, asked, reason)
            case _:
                self._not_kept(rank, asked, "its session has ended")

    def _keep(self, rank: int, handler: Any, end: AgentLine, message: Prepared) -> None:
        self.kept[rank] = Kept(handler, end, message.step, any_size=message.any_size)

    def _not_kept(self, rank: int, asked: dict[int, AgentLine], reason: str) -> None:
        self.reasons[rank] = reason
        asked.pop(rank, None)

    def _tell_if_unheld(self) -> None:
        is_known = self._said_unheld or self._has_called
        if is_known or self.kept or set(self.reasons.values()) != {UNHELD}:
            return
        self._said_unheld = True
        say("workers.in_process is on, and the script has no session: all its workers start anew")

    def _accept(self) -> None:
        """Whoever has called since."""
        listener = self._listener
        assert listener is not None  # noqa: S101 - asked where lines are wanted
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = listener.accept()
                sock.setblocking(True)
                end = AgentLine(sock)
                self._replace(peer_credentials(sock)[0], end)

    def _forget(self, running: set[int]) -> None:
        """Lines of processes that are none of these, and do not stand by."""
        standing = {handler.proc.pid for handler in self._standing.values()}
        for pid in self._lines.keys() - running - standing:
            self._lines.pop(pid).close()
        self._unwound &= running | standing
        for pid in self._prepared.keys() - running - standing:
            del self._prepared[pid]

    def _replace(self, pid: int, end: AgentLine) -> None:
        self._has_called = True
        before = self._lines.pop(pid, None)
        if before is not None:
            before.close()
        self._lines[pid] = end

    # --- between two attempts --------------------------------------------------------------------

    @contextlib.contextmanager
    def staying(self) -> Iterator[None]:
        """Within, what torch's agent does to end its workers passes those by that are kept."""
        self._stay = True
        try:
            yield
        finally:
            self._stay = False

    def end_unless_staying(self) -> None:
        """The agent ends its workers."""
        if not self._stay:
            self.end()

    def end(self) -> None:
        """There is no next attempt for those that are kept, nor for those who stand by."""
        kept, self.kept = self.kept, {}
        for one in kept.values():
            one.end()
        self.end_standing()
        for one in kept.values():
            with contextlib.suppress(Exception):
                one.handler.proc.wait(timeout=5)

    def end_standing(self) -> list[int]:
        """Nobody is to take an empty place; the local ranks of those who stood by."""
        standing, self._standing = self._standing, {}
        for handler in standing.values():
            _kill(handler)
        for handler in standing.values():
            with contextlib.suppress(Exception):
                handler.proc.wait(timeout=5)
        return list(standing)

    def seats(self, places: int) -> list[int]:
        """Local ranks that take part in the next attempt, of so many places.

        All of them, unless those that are kept can go on without the others.
        """
        goes_on = bool(self.kept) and all(one.any_size for one in self.kept.values())
        return sorted({*self.kept, *self._ready()}) if goes_on else list(range(places))

    def take(self, seats: Collection[int], *, joins: bool) -> dict[int, Kept]:
        """Those of ``seats`` that live; the next attempt's context has them from here on.

        Who stands by for one of them, and is not there yet, is ended; so are all where nobody
        was kept whom they could join.

        Args:
            seats: local ranks.
            joins: whether workers of other machines were.
        """
        if not self.kept and not joins:
            self.end_standing()
        kept, self.kept = self.kept | self._ready(), {}
        late = {rank: self._standing[rank] for rank in self._standing.keys() & set(seats)}
        for rank, handler in late.items():
            del self._standing[rank]
            self._prepared.pop(handler.proc.pid, None)
            self._unwound.discard(handler.proc.pid)
            if rank not in kept:
                _kill(handler)
        return kept


def _kill(handler: Any) -> None:
    if handler.proc.poll() is None:
        end_group(handler.proc.pid)


class StandIn:
    """A worker that is kept, as the attempt that is over sees it: it has ended well.

    Args:
        handler: the worker's.
    """

    def __init__(self, handler: Any) -> None:
        self.local_rank_id = handler.local_rank_id
        self.proc = _EndedProcess(handler.proc.pid)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Nothing is to be ended."""


class _EndedProcess:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode = 0

    def poll(self) -> int:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode


class Beginners(NamedTuple):
    """What workers that stand by to join an attempt of other machines were started with.

    Attributes:
        group_rank: which machine this one would be.
        sizes: how many workers each machine would have, this one's included.
    """

    group_rank: int
    sizes: tuple[int, ...]


class Crew(NamedTuple):
    """Those of an attempt's processes here that are more than a worker that begins.

    Attributes:
        kept: local rank → one that goes on from the attempt before, or that stood by.
        standing: local rank → torch's handler of one that stands by already.
        environ: local rank → variables that are others than torch's agent has them.
    """

    kept: Mapping[int, Kept] = {}
    standing: Mapping[int, Any] = {}
    environ: Mapping[int, dict[str, str]] = {}


class Seats:
    """The places of one machine in one attempt.

    Args:
        taken: local ranks that have a worker in it.
        places: how many places there are.
    """

    def __init__(self, taken: Sequence[int], places: int) -> None:
        self.taken = list(taken)
        self.places = places

    @property
    def empty(self) -> list[int]:
        """Local ranks whose process stands by."""
        return [place for place in range(self.places) if place not in self.taken]

    def workers(self, group_rank: int, sizes: Sequence[int]) -> list[Worker]:
        """For torch's agent, one for each place.

        Args:
            group_rank: which machine this is.
            sizes: how many workers each machine has in the attempt.
        """
        first, world_size = sum(sizes[:group_rank]), sum(sizes)
        ranks = {place: first + number for number, place in enumerate(self.taken)}
        return [
            Worker(
                local_rank=place,
                global_rank=ranks.get(place, world_size + place),
                role_rank=ranks.get(place, world_size + place),
                world_size=world_size,
                role_world_size=world_size,
            )
            for place in range(self.places)
        ]

    def of(self, group: WorkerGroup) -> WorkerGroup:
        """The group as those see it that ask for the attempt's workers."""
        seen = copy.copy(group)
        seen.workers = [group.workers[place] for place in self.taken]
        return seen

    def environ(self, group_rank: int, sizes: Sequence[int]) -> dict[int, dict[str, str]]:
        """Local rank → what differs from what torch's agent would have them see.

        Who stands by goes through its beginning with the rank that it would have if all places of
        this machine were taken; one of the others tells what those before it have left behind.
        """
        if not self.empty:
            return {}
        first, world_size = sum(sizes[:group_rank]), sum(sizes) + len(self.empty)
        size = {"LOCAL_WORLD_SIZE": str(len(self.taken))}
        found = {place: dict(size) for place in self.taken}
        found[self.taken[0]][EMPTY_VARIABLE] = " ".join(map(str, self.empty))
        for place in self.empty:
            rank = str(first + place)
            sizes_now = dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), str(world_size))
            found[place] = {"RANK": rank, "ROLE_RANK": rank, **sizes_now, STANDBY_VARIABLE: "1"}
        return found
