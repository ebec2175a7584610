"""Faults that a worker does to itself, by order: NaN, a held lock, a skipped collective, slowness.

Guarantees: ``inject`` returns when the worker has taken the order, so that what is recorded is a
fault that was, and at which step. An order that nobody takes (the worker was lost meanwhile) is
withdrawn. A worker obeys each once, so what it did is not done again in the step's second making.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Final

from outlast.drill.faults.fault import (
    FOR_GOOD,
    MayLose,
    Missed,
    Plain,
    Promise,
    Struck,
    count_of,
    seconds_of,
    struck,
    worker,
)
from outlast.drill.target import Order, Target, give_order
from outlast.health.processes import oom_kills

POLL_S: Final = 0.002
GROUPS: Final = Path("/sys/fs/cgroup")
OOM_BYTES: Final = 48 << 20  # what a worker may take once its memory is limited by the kernel
_HUNG: Final = Promise(loses=MayLose.SNAPSHOT)


class Ordered(Plain):
    """A fault that is an order.

    Args:
        name: as on the command line.
        kind: of the order (see ``outlast.drill.orders``).
        rank: whose worker.
        value: of the order.
        what: one sentence for a list.
        done: what is said of the strike, with {rank}, {value} and {step}.
        event: by which the job shows that it has noticed.
        promise: what the job must show.
        lasts_s: for a kind that goes on until an order of 0 ends it.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        rank: int,
        value: float = 0.0,
        *,
        what: str,
        done: str,
        event: str = "",
        promise: Promise = _HUNG,
        lasts_s: float = FOR_GOOD,
    ) -> None:
        self.name, self.what, self.promise, self.lasts_s = name, what, promise, lasts_s
        self.rank, self.kind, self.value = count_of("rank", rank), kind, value
        self._done, self._event = done, event
        self._ends = False

    def inject(self, target: Target) -> Struck:
        """Give the order, and wait until it is taken."""
        pid = worker(target, self.rank)  # before: whoever has obeyed may be gone at once
        order = Order(rank=self.rank, step=target.completed() + 1, kind=self.kind, value=self.value)
        path = give_order(target.run, order)
        while path.exists():
            if target.is_over() or target.workers().get(self.rank) != pid:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                    raise Missed(f"rank {self.rank} was gone before it could obey")
            time.sleep(POLL_S)
        self._ends = self.lasts_s != FOR_GOOD
        words = self._done.replace("{rank}", str(self.rank)).replace("{value}", f"{self.value:g}")
        return struck(target, words, self._noticed_by(target))

    def _noticed_by(self, target: Target) -> str:
        """The event by which the job shows that it has noticed."""
        return self._event

    def heal(self, target: Target) -> None:
        """Order the end of what goes on."""
        if self._ends and not target.is_over():
            give_order(target.run, Order(rank=self.rank, step=0, kind=self.kind, value=0.0))
        self._ends = False


class NanInBatch(Ordered):
    """A NaN in a batch.

    Args:
        rank: of whose batch.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(
            *("nan", "nan", rank),
            what="a NaN in a batch of one rank (with token ids: in what the model makes of them)",
            done="a NaN in rank {rank}'s batch of step {step}",
            event="anomaly",
            promise=Promise(
                loses=MayLose.OLDER,
                exact=False,
                exit_codes=(0, 76),
                note="seen if the script logs its loss; undone with health.anomaly = rollback",
            ),
        )

    def _noticed_by(self, target: Target) -> str:
        """Nobody sees a loss that is not logged."""
        is_logged = any(e.event == "step" and e.get("scalars") for e in target.events())
        return self._event if is_logged else ""


def hold_gil(rank: int, seconds: float) -> Ordered:
    """The interpreter's lock is held."""
    return Ordered(
        *("hold-gil", "hold_gil", rank, seconds_of("seconds", seconds, above=True)),
        what="the interpreter's lock of one rank is held, as by a C extension that never lets go",
        done="rank {rank} holds its interpreter's lock for {value} s, ahead of step {step}",
        event="hang",
    )


def skip_collective(rank: int) -> Ordered:
    """One rank leaves out a collective."""
    return Ordered(
        *("skip-collective", "skip_collective", rank),
        what="one rank leaves out a collective that all others are in, and enters another one",
        done="rank {rank} leaves out a collective in step {step}",
        event="hang",
    )


def slow_rank(rank: int, seconds: float, for_s: float = FOR_GOOD) -> Ordered:
    """One rank is slow."""
    return Ordered(
        *("slow-rank", "slow", rank, seconds_of("seconds", seconds, above=True)),
        what="each step of one rank takes longer",
        done="each step of rank {rank} takes {value} s longer, from step {step} on",
        event="straggler",
        promise=Promise(restarts=0, must_notice=False),
        lasts_s=seconds_of("for_s", for_s, for_good=True),
    )


def memory_limit(rank: int) -> Ordered:
    """A worker runs out of memory: its allocator refuses."""
    return Ordered(
        *("memory-limit", "memory", rank),
        what="the memory of one worker is limited (RLIMIT_AS) and used up: MemoryError",
        done="rank {rank} runs out of memory ahead of step {step}",
        event="worker_lost",
    )


class OomKill(Ordered):
    """The kernel's OOM killer ends a worker that leaks: a control group limits its memory.

    Args:
        rank: whose worker.

    Attributes:
        groups: the control groups that it has made, until they are removed.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(
            *("oom-kill", "leak", rank, 4.0 * OOM_BYTES),
            what="the kernel's OOM killer ends one worker that leaks (control group, as root)",
            done="rank {rank} leaks until the OOM killer ends it, ahead of step {step}",
            event="worker_lost",
        )
        self.groups: list[Path] = []

    def why_not(self, target: Target) -> str:
        """A control group has to be made."""
        if os.geteuid() != 0:
            return "control groups are made as root"
        place = _memory_groups()
        if place is None:
            return "this system has no control groups for memory"
        return "" if os.access(place, os.W_OK) else f"{place} is read-only here"

    def inject(self, target: Target) -> Struck:
        """Limit the worker's memory, and let it leak."""
        pid = worker(target, self.rank)
        place = _memory_groups()
        if place is None:
            raise Missed("this system has no control groups for memory")
        group = place / f"outlast-drill-{os.getpid()}-{pid}"
        group.mkdir(exist_ok=True)
        self.groups.append(group)
        is_old = (group / "memory.limit_in_bytes").exists()
        limit = group / ("memory.limit_in_bytes" if is_old else "memory.max")
        limit.write_text(str(OOM_BYTES))
        try:
            (group / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            self.heal(target)
            raise Missed(f"rank {self.rank} was gone: {error.strerror}") from None
        try:
            return super().inject(target)
        except Missed:
            if not _has_killed(group):
                raise
            # What the step itself takes was too much: it was ended ahead of the order.
            words = f"rank {self.rank} takes memory until the OOM killer ends it, ahead of step "
            return struck(target, words + "{step}", self._noticed_by(target))

    def heal(self, target: Target) -> None:
        """Remove the group; what still runs in it goes back to where it was."""
        self._remove_groups()

    def release(self, target: Target) -> None:
        """Remove what could not be removed while a process in it was ending."""
        self._remove_groups()

    def _remove_groups(self) -> None:
        for group in self.groups[:]:
            with contextlib.suppress(OSError):
                for pid in (group / "cgroup.procs").read_text().split():
                    with contextlib.suppress(OSError):
                        (group.parent / "cgroup.procs").write_text(pid)
                group.rmdir()
            if not group.exists():
                self.groups.remove(group)


def _has_killed(group: Path) -> bool:
    """Whether the OOM killer has ended a process of a control group."""
    return any(oom_kills(group / name) for name in ("memory.oom_control", "memory.events"))


def _memory_groups() -> Path | None:
    """The directory below which a control group with a limit of memory can be made."""
    old = GROUPS / "memory"
    if (old / "memory.limit_in_bytes").exists():
        return old
    controllers = GROUPS / "cgroup.subtree_control"
    if controllers.exists() and "memory" in controllers.read_text().split():
        return GROUPS
    return None
