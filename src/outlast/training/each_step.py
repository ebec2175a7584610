"""Keep each completed step in memory, here and on another machine, before the next one begins.

Where a model is divided among machines (FSDP2, HSDP, tensor parallelism), a machine that is lost
takes its part with it, and without its part the others' are of no use. With
``checkpoint.each_step`` all ranks take a snapshot at the end of each step, in memory alone; the
keepers of all machines make one manifest of it; each machine's part is copied to the memory of one
other (``keeper.replicas``); and only then does this rank go on.

Guarantees: where a step has begun on all ranks, the one before it is whole in memory after the loss
of any one machine. Two versions are kept, and one more is in the making: nothing is written over
the newest step that was copied from every machine. A resume takes the newest step of which all
parts are somewhere, and reads no storage. Checkpoints go to storage at their own cadence.

What can go wrong: a copy is late, or its machine is gone, or there is no memory. The step waits for
``LATE_S`` and the time of its size, goes on without, and the machine whose copy it is says so; so
does the next one. A step that was not kept is in the ledger (``not_kept``). What is lost then is
what the last step that was kept, or storage, does not have.

Rejected: to wait for the copy behind the next step's forward pass, just before the optimizer (it
hides the cost, but a machine that is lost in that time costs a step that was completed); to keep
it by the cadence of ``checkpoint.every`` with an interval of one step (a commit to storage each).
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Final

from outlast.attempt.link import STORE_VARIABLE
from outlast.attempt.over import over
from outlast.config import Settings
from outlast.errors import ConfigError, OutlastError
from outlast.ledger.narrator import say
from outlast.policy.retention import num_replicas
from outlast.training.books import AttemptBooks
from outlast.training.saving import Saving, Snapshots
from outlast.training.sharing import StepKept, local_ranks

LATE_S: Final = 10.0  # that a step waits for what keeps it, at most,
SLOW_BYTES: Final = 1e8  # and a second for so many bytes of this machine's part
MAX_TRIES: Final = 4  # at a snapshot that was void
FIRST_STEPS: Final = 20  # after which people hear of the cost; the ledger does at each doubling


def _left_s(until_s: float) -> float:
    """Seconds until a monotonic time; 0 once it is over."""
    return max(until_s - time.monotonic(), 0.0)


def usable(settings: Settings) -> Settings:
    """The settings, if ``checkpoint.each_step`` can do what it says.

    Raises:
        ConfigError: it cannot; in words.
    """
    if settings.checkpoint_each_step and STORE_VARIABLE not in os.environ:
        raise ConfigError(
            "checkpoint.each_step needs outlast run: its keeper holds what is kept and outlives "
            "the workers; start with it, or take the setting away"
        )
    return settings


class EachStep:
    """One attempt's keeping of each step; for the training thread.

    Args:
        settings: the job's.
        books: the attempt's.
        snapshots: the attempt's.
        saving: what is saved.
    """

    def __init__(
        self, settings: Settings, books: AttemptBooks, snapshots: Snapshots, saving: Saving
    ) -> None:
        self._is_on = settings.checkpoint_each_step
        self._books = books
        self._engine = snapshots.engine
        self._saving = saving
        link = books.link
        local = local_ranks(link)
        self._rank = link.rank
        self._num_local = len(local)
        self._leads_machine = link.rank == local.start
        machines = -(-link.world_size // max(len(local), 1))
        self._num_copies = num_replicas(settings.peer_replicas, machines)
        self._newest: int | None = None  # the step that was kept last; survivors begin with theirs
        self._missed = 0  # the first step of those that were not kept; 0 while they are
        self._bytes = 0
        self._costs_s: list[float] = []
        self._since_s = 0.0
        self._tell_at = FIRST_STEPS

    def begin(self, step: int, *, others_live: bool) -> None:
        """An attempt goes on from ``step``; told by each worker that has just come into it.

        Who reads it back has it in no memory of this attempt: it is kept before the first step. Not
        where others live on, of whom some may be in the midst of the next step.
        """
        self._newest = step if others_live else 0

    def keep(self, step: int) -> None:
        """At a boundary: have ``step`` kept, if it is a new one.

        Raises:
            AttemptOver: the attempt is over meanwhile.
        """
        is_new = self._newest is not None and step not in (0, self._newest)
        self._newest = step
        if not (self._is_on and is_new):
            return
        start_s = time.monotonic()
        self._engine.count_from(step)
        try:
            kept = self._try(step)
        finally:
            self._engine.count_from(step + 1)
            took_s = time.monotonic() - start_s
            self._books.samples.stalled(took_s)
        self._note(step, kept)
        if not kept.error:
            self._account(step, took_s)

    def _try(self, step: int) -> StepKept:
        kept = StepKept()
        for _ in range(MAX_TRIES):  # each has its time: one that was void has cost the others' too
            start_s = time.monotonic()
            until_s = start_s + self._limit_s()
            self._engine.line.wait_for_keeper(_left_s(until_s))
            try:
                self._bytes = self._saving.keep(step, _left_s(until_s)) or self._bytes
            except (OSError, OutlastError, RuntimeError) as error:
                over.raise_if_over()  # that may be why
                return StepKept(str(error), is_own=True)
            until_s = max(until_s, start_s + self._limit_s())  # the first one's size is known now
            self._engine.before_optimizer()  # whoever waits may as well help with the copy
            over.raise_if_over()
            kept = self._engine.wait_until_kept(_left_s(until_s), copied=self._num_copies > 0)
            over.raise_if_over()
            if not kept.void:
                break
        return kept

    def _limit_s(self) -> float:
        return LATE_S + self._bytes * self._num_local / SLOW_BYTES

    def _note(self, step: int, kept: StepKept) -> None:
        """Say it where steps are not kept any more, and where they are again."""
        if not kept.error:
            if self._missed:
                says = f"step {step} is kept: each step is again (none was since {self._missed})"
                self._missed = 0
                say(says)
            return
        speaks = self._leads_machine if kept.is_own else self._rank == 0
        if not speaks:
            return
        self._books.ledger.append("not_kept", durable=False, step=step, reason=kept.error)
        if not self._missed:
            self._missed = step
            say(
                f"step {step} is not kept: {kept.error}; training goes on, a machine that is lost "
                "now costs steps, and it is said when they are kept again"
            )

    def _account(self, step: int, took_s: float) -> None:
        """What it has cost so far: for people once, for the ledger now and then; on rank 0."""
        if self._rank:
            return
        now_s = time.monotonic()
        if not self._since_s:  # the first one makes memory ready, and is no measure
            self._since_s = now_s
            return
        self._costs_s.append(took_s)
        if len(self._costs_s) < self._tell_at:
            return
        self._tell_at *= 2
        cost_s = statistics.median(self._costs_s)
        share = min(sum(self._costs_s) / (now_s - self._since_s), 1.0)
        size = self._bytes * self._num_local
        memory = self._engine.memory_bytes * self._num_local
        self._books.ledger.append(
            "each_step",
            durable=False,
            step=step,
            bytes=size,
            memory_bytes=memory,
            cost_s=round(cost_s, 6),
            share=round(share, 4),
            num=len(self._costs_s),
            copies=self._num_copies,
        )
        if len(self._costs_s) == FIRST_STEPS:
            where = f"here and on {self._num_copies} more" if self._num_copies else "here alone"
            say(
                f"each step is kept, {where}: {size / 1e6:.1f} MB a step and machine, up to "
                f"{memory / 1e6:.0f} MB of each machine's memory, {cost_s * 1e3:.1f} ms of a step "
                f"({share:.1%} of the time)"
            )
