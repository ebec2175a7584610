"""A long run with one fault after another: proofs of what it leaves, and curves that must be flat.

One job, one run, faults that are drawn until the time is over. Between two of them lies a calm, in
which every machine trains: an attempt that begins in it has no cause and is held against the job.
All the while the job's processes are counted: their memory, threads, file descriptors and shared
memory.

What is proved at the end does without an undisturbed run of the same length. Whatever was made
again says the same as the first time; each resume went on from the state that was recorded behind
its step; every step is there; every checkpoint verifies; the samples are audited.

Guarantees: the same seed draws the same faults in the same order. A job that does not come back
ends the soak, and is named.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from outlast.drill.compare import RunHistory, agrees
from outlast.drill.course import DrillListener, DrillSetup
from outlast.drill.faults.catalogue import FAULTS, Bounds, planned
from outlast.drill.faults.fault import FOR_GOOD, Fault, Missed, Struck, is_answered
from outlast.drill.grade import Check, audited, verify
from outlast.drill.record import LoopBegun, StateFound, StepRecord, WorkerRecord
from outlast.drill.rehearsal import Rehearsal
from outlast.drill.workplace import empty_place
from outlast.errors import ConfigError
from outlast.ledger.events import Event

CALM_S: Final = (2.0, 5.0)  # between two faults, once all train again
CALM_STEPS: Final = 10
BACK_S: Final = 180.0  # for all machines to train again
SAMPLE_S: Final = 1.0
MADE_OF: Final = 3  # plans of each kind of fault, one after the other
GROWTH_MAX: Final = 0.15  # from the middle of the soak to its end, of what is there
SPARED: Final = frozenset({"nan"})  # undone by a rollback, which is another run from there on
_COUNTED: Final = ("memory", "shared", "threads", "files")


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """What the job's processes hold at one moment, in a calm.

    Attributes:
        t: seconds since the soak's beginning.
        memory: bytes of their own (Pss, without shared memory).
        shared: bytes of shared memory.
        threads: how many.
        files: open file descriptors.
        processes: how many.
    """

    t: float
    memory: int
    shared: int
    threads: int
    files: int
    processes: int


class SoakFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of the soak.

    Attributes:
        name: its name.
        what: what it did.
        t: wall-clock time.
        back_after_s: until all machines trained again; None if they did not.
    """

    name: str
    what: str
    t: float
    back_after_s: float | None = None


class SoakResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a soak found.

    Attributes:
        faults: in order.
        steps: that were completed.
        seconds: how long it ran.
        held: what is proved, line by line.
        footprints: the job's processes, over time.
        directory: of the run.
    """

    faults: list[SoakFault]
    steps: int
    seconds: float
    held: list[Check]
    footprints: list[Footprint]
    directory: str

    @property
    def holds(self) -> bool:
        """Whether all of it holds."""
        return bool(self.faults) and all(one.holds for one in self.held)


class Soak:
    """One soak.

    Args:
        setup: as of a drill; the job has to train for longer than ``seconds``.
        seconds: how long.
        seed: draws the faults.
        listener: is told.
        names: of the faults to draw from; () for all.
    """

    def __init__(
        self,
        setup: DrillSetup,
        seconds: float,
        seed: int,
        listener: DrillListener,
        names: Sequence[str] = (),
    ) -> None:
        self._setup, self._seconds, self._seed = setup, seconds, seed
        self._listener = listener
        self._names = names or [name for name in FAULTS if name not in SPARED]
        self._rng = random.Random(f"soak {seed}")  # noqa: S311 - a draw, no secret
        self._faults: list[SoakFault] = []
        self._calms: list[tuple[float, float]] = []  # in which no attempt may begin
        self._footprints: list[Footprint] = []
        self._since_s = self._sampled_s = 0.0

    def run(self) -> SoakResult:
        """Run it.

        Raises:
            ConfigError: the job does not train, or none of the faults can be done here.
        """
        with empty_place(self._setup.root):
            return self._soaked()

    def _soaked(self) -> SoakResult:
        setup = self._setup
        with Rehearsal(
            setup.script,
            setup.root / "soak",
            settings=setup.settings,
            workers=setup.workers,
            num_machines=setup.machines,
            least_machines=1,
            environ=setup.environ,
        ) as job:
            faults: dict[str, list[Fault]] = defaultdict(list)
            try:
                self._make(job, faults)
                held = self._strike_on(job, faults)
                job.stop()
                records, events = job.look(), job.events()
                held += self._proofs(records, events, job.directory)
            finally:
                job.stop()
                for fault in _each(faults):
                    fault.heal(job)
                for fault in _each(faults):  # what one has made, others may have used
                    fault.release(job)
            return SoakResult(
                faults=self._faults,
                steps=RunHistory(records).reached(),
                seconds=time.monotonic() - self._since_s,
                held=held,
                footprints=self._footprints,
                directory=str(setup.root),
            )

    def _make(self, job: Rehearsal, made: dict[str, list[Fault]]) -> None:
        """Make the faults that can be here, and prepare each.

        Raises:
            ConfigError: none can be done here.
        """
        setup = self._setup
        bounds = Bounds(setup.workers * setup.machines, setup.machines, 1, 2)
        for name in self._names:
            for number in range(MADE_OF):
                fault = planned(name, self._seed, number, bounds).fault
                if not fault.why_not(job) and not fault.promise.refuses:
                    made[name].append(fault)
                    fault.prepare(job)
        if not made:
            raise ConfigError("none of these faults can be done here: outlast drill --list")

    def _strike_on(self, job: Rehearsal, faults: Mapping[str, Sequence[Fault]]) -> list[Check]:
        self._since_s = time.monotonic()
        job.start()
        if not self._all_train(job):
            said = job.place.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise ConfigError(f"the job does not train by itself: {' '.join(said)}")
        names, number = sorted(faults), 0
        while time.monotonic() - self._since_s < self._seconds:
            self._be_calm(job)
            name = self._rng.choice(names)
            fault = faults[name][number % len(faults[name])]
            number += 1
            try:
                struck = fault.inject(job)
            except Missed:
                continue
            self._listener.struck(struck)
            self._wait_for_end(job, fault, struck)
            self._faults.append(SoakFault(name=name, what=struck.what, t=struck.t))
            if not self._all_train(job):
                what = f"not back within {BACK_S:.0f} s of: {struck.what}"
                return [Check(holds=False, what=what)]
            self._faults[-1] = msgspec.structs.replace(
                self._faults[-1], back_after_s=time.time() - struck.t
            )
        self._be_calm(job)
        return [Check(holds=True, what=f"back after each of {len(self._faults)} faults")]

    def _wait_for_end(self, job: Rehearsal, fault: Fault, struck: Struck) -> None:
        """Until the fault is to be healed, and heal it."""
        job.before_restart = lambda: fault.heal(job)
        job.is_held = lambda: True
        limit_s = BACK_S if fault.lasts_s == FOR_GOOD else fault.lasts_s

        def is_due() -> bool:
            if any(machine.agent is None for machine in job.machines):
                return True
            return fault.until_noticed and is_answered(job, fault.promise, struck)

        job.wait(is_due, limit_s)
        fault.heal(job)
        for machine in job.machines:
            machine.start()

    def _all_train(self, job: Rehearsal) -> bool:
        """Wait until every machine's workers have made some steps together from now on."""
        since_t = time.time()
        wanted = self._setup.workers * self._setup.machines

        def is_so() -> bool:
            for machine in job.machines if self._faults else ():
                machine.start()
            done = 0
            for record in job.look():
                new = [s for s in record.steps[-2 * CALM_STEPS :] if s.t > since_t]
                done += len([s for s in new if s.world_size == wanted]) >= CALM_STEPS
            return done >= wanted

        return job.wait(is_so, BACK_S)

    def _be_calm(self, job: Rehearsal) -> None:
        begins_t = time.time()
        self._listener.progress("soak", int(time.monotonic() - self._since_s), int(self._seconds))
        ends_s = time.monotonic() + self._rng.uniform(*CALM_S)

        def is_over() -> bool:
            self._sample(job)
            return time.monotonic() > ends_s

        job.wait(is_over, BACK_S)
        self._calms.append((begins_t, time.time()))

    def _sample(self, job: Rehearsal) -> None:
        """Count what the processes hold, in a calm, where all of them are there."""
        now = time.monotonic()
        if now - self._sampled_s < SAMPLE_S:
            return
        self._sampled_s = now
        pids = [pid for machine in job.machines for pid in machine.processes()]
        self._footprints.append(footprint(pids, now - self._since_s))

    def _proofs(
        self, records: Sequence[WorkerRecord], events: Sequence[Event], directory: Path
    ) -> Iterator[Check]:
        reasons = [
            e
            for e in events
            if e.event == "attempt_formed" and any(a < e.t < b for a, b in self._calms)
        ]
        what = (
            f"{len(reasons)} attempts began without a fault"
            if reasons
            else (
                f"{len([e for e in events if e.event == 'attempt_formed'])} attempts, "
                "none without a fault"
            )
        )
        yield Check(holds=not reasons, what=what)
        yield from consistent(records)
        verified = verify(directory)
        what = "; ".join(verified.damaged) or f"{verified.checkpoints} checkpoints verify"
        yield Check(holds=not verified.damaged and verified.checkpoints > 0, what=what)
        yield audited(directory)
        for name in _COUNTED:
            yield flat(self._footprints, name)


def _each(faults: Mapping[str, Sequence[Fault]]) -> Iterator[Fault]:
    for several in faults.values():
        yield from several


def footprint(pids: Sequence[int], t: float) -> Footprint:
    """What processes hold now; one that has ended meanwhile holds nothing."""
    memory = shared = threads = files = processes = 0
    for pid in pids:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            status = Path(f"/proc/{pid}/status").read_text()
            files += len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - only how many
        except OSError:
            continue
        sizes = {line.split(":")[0]: line.split()[1] for line in rollup.splitlines()[1:]}
        in_memory = int(sizes.get("Pss_Shmem", "0")) * 1024
        shared += in_memory
        memory += int(sizes.get("Pss", "0")) * 1024 - in_memory
        threads += int(status.partition("Threads:")[2].split()[0])
        processes += 1
    return Footprint(
        t=t, memory=memory, shared=shared, threads=threads, files=files, processes=processes
    )


def flat(footprints: Sequence[Footprint], name: str) -> Check:
    """Whether something did not grow from the second third of the soak to the last one."""
    values = [float(getattr(one, name)) for one in footprints]
    third = len(values) // 3
    if third < 2:
        return Check(holds=False, what=f"{name}: too few samples to say whether it is flat")
    before = statistics.median(values[third : 2 * third])
    after = statistics.median(values[2 * third :])
    growth = (after - before) / before if before else 0.0
    return Check(holds=growth <= GROWTH_MAX, what=f"{name}: {growth:+.1%} in the last third")


def consistent(records: Sequence[WorkerRecord]) -> Iterator[Check]:
    """What workers recorded agrees with itself: steps made again, resumes, no step missing."""
    history = RunHistory(records)
    again, odd = 0, []
    states: dict[tuple[int, int], StepRecord] = {}
    for rank in history.ranks:
        for step in range(1, history.last(rank) + 1):
            made = history.made(rank, step)
            again += len(made) > 1
            by_size: dict[int, StepRecord] = {}
            for one in made:
                states[rank, step] = one.record
                first = by_size.setdefault(one.record.world_size, one.record)
                same = (first.inputs, first.losses, first.state)
                if same != (one.record.inputs, one.record.losses, one.record.state):
                    odd.append(step)
    what = f"{again} steps were made again, each as it was the first time"
    yield Check(holds=not odd, what=f"made again otherwise: steps {odd[:5]}" if odd else what)
    missing = [step for step in range(1, history.reached() + 1) if not _made_by_any(history, step)]
    what = f"every step from 1 to {history.reached()} was made"
    yield Check(holds=not missing, what=f"never made: steps {missing[:5]}" if missing else what)
    resumes = [record.found for record in records if record.found is not None]
    loops = [loop for record in records for loop in record.loops.values()]
    bad = [found.step for found in resumes if not _was_recorded(found, states, loops)]
    went_on = sum(found.step > 0 for found in resumes)
    what = f"{went_on} workers went on from the state that was recorded behind its step"
    yield Check(holds=not bad, what=f"another state found at steps {bad[:5]}" if bad else what)


def _made_by_any(history: RunHistory, step: int) -> bool:
    return any(history.made(rank, step) for rank in history.ranks)


def _was_recorded(
    found: StateFound,
    states: Mapping[tuple[int, int], StepRecord],
    loops: Sequence[LoopBegun],
) -> bool:
    recorded = [one.state for (_, step), one in states.items() if step == found.step]
    if not recorded:
        return True  # killed behind the step, ahead of its line
    begun = [one.changed for one in loops if one.step == found.step]
    as_begun = [
        state | {name: digest for name, digest in one.items() if found.state.get(name) == digest}
        for state in recorded
        for one in begun
    ]
    return any(agrees(found.state, state) for state in [*recorded, *as_begun])
