"""Everything a session stands on, put together once: link, ledger, storage, writer, agreement.

The session above it knows when; this knows how. It also keeps the books: what goes into the ledger
and what the agent can see.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from outlast.attempt.agreement import Action, Agreement
from outlast.attempt.beat import Beat
from outlast.attempt.link import ATTEMPT_VARIABLE, STORE_VARIABLE, Link, open_link
from outlast.checkpoint.load import Loaded
from outlast.checkpoint.save import Captured, Saver
from outlast.checkpoint.snapshot import Arena
from outlast.checkpoint.tree import flatten
from outlast.config import Settings
from outlast.errors import ConfigError, StorageError
from outlast.ledger.events import Event
from outlast.ledger.file import Ledger, read_events
from outlast.ledger.job import JobLock, open_job, versions
from outlast.policy.cadence import cadence
from outlast.storage import Directory
from outlast.training import resume
from outlast.training.writer import Writer, Written

PART_TIMEOUT_S: Final = 1800.0
SAMPLE_FIRST_S: Final = 1.0
SAMPLE_MAX_S: Final = 30.0


class Rig:
    """What a session stands on.

    Args:
        settings: the job's settings.
        on_decision: told of each agreed action.
        on_written: told (step, error) of each save's end.

    Raises:
        ConfigError, StorageError: the job's directory cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        on_decision: Callable[[Action], None],
        on_written: Callable[[int, str], None],
    ) -> None:
        self.link: Link = open_link()
        self._settings = settings
        self._on_decision = on_decision
        self._on_written = on_written
        self._under_agent = STORE_VARIABLE in os.environ
        self._lock: JobLock | None = None
        given = os.environ.get("OUTLAST_DIR")
        if self._under_agent and given and settings.dir != Path(given):
            raise ConfigError(
                f"outlast run keeps this job in {given} and the session asks for {settings.dir}; "
                "leave dir out of outlast.session(), or give the same to outlast run --dir"
            )
        self.job = open_job(settings.dir, settings)
        if self.link.rank == 0 and not self._under_agent:
            self._lock = JobLock(settings.dir)
        past = self._past()
        attempt = self._agree_on_attempt(past)
        self._ledger = Ledger(settings.dir, job=self.job.id, attempt=attempt, rank=self.link.rank)
        self._keeps_the_books = self.link.rank == 0 and not self._under_agent
        if self._keeps_the_books:  # what the agent writes where there is one
            command = Path(sys.argv[0]).name
            self._ledger.append(
                "job_started", command=command, versions=versions(), pid=os.getpid()
            )
            self._ledger.append("attempt_formed", world_size=self.link.world_size, nodes=1)
        self._promised = {e["step"] for e in past if e.event == "commit" and e.get("step")}
        self._storage = Directory(settings.checkpoints_dir)
        self._arena = Arena()
        self._beat = Beat()
        self.writer = Writer(
            Saver(
                self._storage, self.link, job=self.job.id, attempt=attempt, timeout_s=PART_TIMEOUT_S
            ),
            self._storage,
            self._ledger,
            rank=self.link.rank,
            keep=settings.checkpoint_keep,
            on_written=self._written,
        )
        self._cadence = cadence(
            settings.checkpoint_every.steps, settings.checkpoint_every.seconds, time.monotonic()
        )
        self._asking = False
        self._skip_told = False
        self._step = self._sampled_step = self._resumed_step = 0
        self.agreement: Agreement
        self._scalars: dict[str, Any] = {}
        self._sampled_s = self._started_s = time.monotonic()
        self._stalled_s = 0.0

    # --- resuming, starting, stopping --------------------------------------------------------

    def resume(self, check: Callable[[Loaded], None]) -> resume.Outcome:
        """Find the newest valid checkpoint, with the other ranks, and put it into the ledger."""
        if self._under_agent:
            key = f"session/{self.link.rank}"
            self.link.publish(key, str(os.getpid()).encode())  # the agent sees: it drains itself
        outcome = resume.find(self._storage, self.link, self._promised, check)
        self.writer.invalid = {skipped.step for skipped in outcome.skipped}
        self.writer.committed_step = outcome.step
        if self.link.rank == 0:
            source = outcome.loaded.manifest.world_size if outcome.loaded else None
            for skipped in outcome.skipped:
                self._ledger.append("verify_failed", step=skipped.step, reason=skipped.reason)
                if not self._under_agent:
                    resume.logger.warning(
                        "step %d is not valid (%s); resuming from step %d",
                        skipped.step,
                        skipped.reason,
                        outcome.step,
                    )
            self._ledger.append(
                "resumed",
                step=outcome.step,
                source=self._storage.describe(),
                read_s=round(outcome.read_s, 6),
                skipped=[msgspec.structs.asdict(skipped) for skipped in outcome.skipped],
                from_world_size=source,
            )
        return outcome

    def start(self, step: int) -> None:
        """Begin to listen to the other ranks; training starts after ``step``."""
        self.agreement = Agreement(
            self.link, step, self._on_decision, may_save=lambda: self.writer.idle
        )
        self.agreement.start()
        self._sampled_s = self._started_s = time.monotonic()
        self._step = self._sampled_step = self._resumed_step = step
        self._beat.beat(step)

    def stop(self, timeout_s: float, exit_code: int) -> None:
        """End what was started; a save in flight has ``timeout_s`` to end."""
        self.writer.stop(timeout_s)
        self._sample(force=True)
        self.agreement.stop()
        if self._keeps_the_books:
            self._ledger.append("job_finished", exit_code=exit_code, reason="")
        self._ledger.close()
        if self._lock is not None:
            self._lock.release()

    # --- at each step ------------------------------------------------------------------------

    def completed(self, step: int) -> None:
        """A step is done: beat, and about once a second sample."""
        self._beat.beat(step)
        self._step = step
        if self.link.rank == 0:
            # The first step of an attempt says when the job is back.
            self._sample(force=self._sampled_step == self._resumed_step)

    def log(self, scalars: dict[str, Any]) -> None:
        """Keep the newest numbers of the loop."""
        for name, value in scalars.items():
            self._scalars[name] = value.detach() if isinstance(value, torch.Tensor) else value

    def save_is_due(self, step: int) -> bool:
        """On rank 0: whether to ask for a save at the boundary after the next step.

        One that comes while another is being written is skipped and counted, never queued.
        """
        if self.link.rank or self._asking:
            return False
        if not self._cadence.due(step + 1, time.monotonic()):
            return False
        if self.writer.idle:
            self._asking = True
            self._skip_told = False
        elif not self._skip_told:
            self._skip_told = True
            self.skipped(step + 1, "the save before it is still being written")
        return self._asking

    def capture(self, step: int, state: dict[str, Any], reason: str, start_s: float) -> None:
        """Copy ``state`` and let the writer have it; the loop is blocked since ``start_s``."""
        self._asking = False
        data: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        for key, value in state.items():
            data[key], found = flatten(value, key)
            tensors |= found
        snapshot = self._arena.take(tensors)
        self.writer.submit(Captured(step=step, data=data, snapshot=snapshot))
        now = time.monotonic()
        self._stalled_s += now - start_s
        self._cadence.taken(step, now, now - start_s)
        if self.link.rank == 0:
            self._ledger.append(
                "snapshot",
                durable=False,
                step=step,
                blocked_s=round(now - start_s, 6),
                bytes=snapshot.num_bytes,
                reason=reason,
            )

    # --- the books ---------------------------------------------------------------------------

    def skipped(self, step: int, reason: str) -> None:
        """A save that was due was not taken."""
        self._asking = False
        self._ledger.append("save_skipped", durable=False, step=step, reason=reason)

    def notice(self, name: str, deadline_t: float | None) -> None:
        """This process itself heard that it must go."""
        self._ledger.append(
            "notice", source=name, action="terminate", deadline_t=deadline_t, detail="signal"
        )

    def drain_agreed(self, step: int, info: dict[str, Any]) -> None:
        """All ranks stop after ``step``; the time from here on is the checkpoint's."""
        self._sample(force=True)
        if self.link.rank == 0:
            self._ledger.append("drain_agreed", durable=False, step=step, **info)

    def drained(self, step: int, committed: bool) -> None:
        """The drain's commit has ended, one way or the other."""
        if self.link.rank == 0:
            self._ledger.append("drained", step=step, committed=committed)

    def _sample(self, *, force: bool = False) -> None:
        now = time.monotonic()
        elapsed = now - self._sampled_s
        interval = min(max((now - self._started_s) / 60, SAMPLE_FIRST_S), SAMPLE_MAX_S)
        step = self._step
        if self.link.rank or step == self._sampled_step or (elapsed < interval and not force):
            return
        self._ledger.append(
            "step",
            durable=False,
            step=step,
            seconds=round(elapsed, 6),
            stalled_s=round(self._stalled_s, 6),
            scalars={name: _number(value) for name, value in self._scalars.items()},
        )
        self._sampled_s, self._sampled_step, self._stalled_s = now, step, 0.0

    def _written(self, written: Written) -> None:
        self._on_written(written.step, written.error)
        with contextlib.suppress(OSError, RuntimeError):  # the store is gone: the attempt is over
            self.agreement.poke()

    def _past(self) -> list[Event]:
        if self.link.rank:
            return []
        try:
            return list(read_events(self._settings.dir))
        except OSError as error:
            raise StorageError(
                f"the ledger in {self._settings.dir} cannot be read: {error}"
            ) from None

    def _agree_on_attempt(self, past: list[Event]) -> int:
        given = os.environ.get(ATTEMPT_VARIABLE)
        if given:
            return int(given)
        if self.link.rank == 0:
            newest = max((event.attempt for event in past), default=0)
            self.link.publish("attempt", str(newest + 1).encode())
        return int(self.link.fetch("attempt", resume.READ_TIMEOUT_S))


def _number(value: Any) -> float | str:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)[:100]
