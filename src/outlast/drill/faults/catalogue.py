"""All faults by name: how each is drawn, and draws that can be replayed.

``FAULTS`` is what ``outlast drill --list`` shows. Each entry makes a planned fault from a random
generator and the bounds of the job, and from nothing else, so the same seed gives the same plans on
the same job: victims, moments, and how much of it. How many numbers one entry draws changes nothing
for the others (each has a generator of its own).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from outlast.drill.faults.aim import Aim, PlannedFault, at, during
from outlast.drill.faults.damage import FILES
from outlast.drill.faults.fault import Promise
from outlast.drill.target import Target

Draw = random.Random


class Bounds(NamedTuple):
    """What of a job a draw depends on.

    Attributes:
        num_ranks: workers.
        num_machines: machines.
        first_step: the first step after which a fault may strike.
        last_step: the last one.
    """

    num_ranks: int
    num_machines: int
    first_step: int
    last_step: int


class CatalogueEntry(NamedTuple):
    """One fault of the catalogue.

    Attributes:
        name: as on the command line.
        make: plans one.
    """

    name: str
    make: Callable[[Draw, Bounds], PlannedFault]

    @property
    def what(self) -> str:
        """One sentence for a list."""
        return self._example().fault.what

    @property
    def promise(self) -> Promise:
        """What a job must show after one as it is typically drawn."""
        return self._example().fault.promise

    def _example(self) -> PlannedFault:
        return self.make(random.Random(0), Bounds(2, 2, 1, 2))  # noqa: S311 - a draw, no secret


def _moment(rng: Draw, bounds: Bounds) -> Aim:
    step = rng.randint(bounds.first_step, max(bounds.first_step, bounds.last_step))
    return at(step=step, fraction=round(rng.random(), 3))


def _on_rank(rng: Draw, bounds: Bounds) -> Aim:
    return _moment(rng, bounds).on(rank=rng.randrange(bounds.num_ranks))


def _on_machine(rng: Draw, bounds: Bounds) -> Aim:
    return _moment(rng, bounds).on(machine=rng.randrange(bounds.num_machines))


def _in_save(rng: Draw, bounds: Bounds) -> PlannedFault:
    last = max(bounds.first_step, bounds.last_step)
    return during("save", after=rng.randint(bounds.first_step, last)).kill("workers")


def _files(rng: Draw) -> str:
    return rng.choice(FILES)


def _between(rng: Draw, low: float, high: float) -> float:
    return round(rng.uniform(low, high), 3)


# What the job has to name is healed once it has: there must be time for a save to fail.
_ENTRIES: Final = (
    CatalogueEntry("kill-worker", lambda rng, job: _on_rank(rng, job).kill()),
    CatalogueEntry("kill-workers", _in_save),
    CatalogueEntry("kill-agent", lambda rng, job: _on_machine(rng, job).kill("agent")),
    CatalogueEntry("kill-keeper", lambda rng, job: _on_machine(rng, job).kill("keeper")),
    CatalogueEntry("kill-machine", lambda rng, job: _on_machine(rng, job).kill()),
    CatalogueEntry("kill-leader", lambda rng, job: _moment(rng, job).kill("leader")),
    CatalogueEntry("stop-worker", lambda rng, job: _on_rank(rng, job).stop()),
    CatalogueEntry(
        "stop-agent",
        lambda rng, job: _on_machine(rng, job).stop("agent", for_s=_between(rng, 1, 4)),
    ),
    CatalogueEntry(
        "stop-keeper",
        lambda rng, job: _on_machine(rng, job).stop("keeper", for_s=_between(rng, 1, 4)),
    ),
    CatalogueEntry(
        "stop-machine", lambda rng, job: _on_machine(rng, job).stop(for_s=_between(rng, 1, 4))
    ),
    CatalogueEntry("hold-gil", lambda rng, job: _on_rank(rng, job).hold_gil(600.0)),
    CatalogueEntry("skip-collective", lambda rng, job: _on_rank(rng, job).skip_collective()),
    CatalogueEntry(
        "slow-rank",
        lambda rng, job: _on_rank(rng, job).slow(_between(rng, 0.05, 0.3), _between(rng, 3, 8)),
    ),
    CatalogueEntry("nan", lambda rng, job: _on_rank(rng, job).nan()),
    CatalogueEntry("memory-limit", lambda rng, job: _on_rank(rng, job).limit_memory()),
    CatalogueEntry("oom-kill", lambda rng, job: _on_rank(rng, job).oom_kill()),
    CatalogueEntry(
        "slow-storage",
        lambda rng, job: _moment(rng, job).slow_storage(
            _between(rng, 0.01, 0.2), _between(rng, 3, 8)
        ),
    ),
    CatalogueEntry(
        "break-storage", lambda rng, job: _moment(rng, job).break_storage(_between(rng, 30, 90))
    ),
    CatalogueEntry(
        "fill-storage", lambda rng, job: _moment(rng, job).fill_storage(_between(rng, 2, 6))
    ),
    CatalogueEntry(
        "read-only-storage",
        lambda rng, job: _moment(rng, job).read_only_storage(_between(rng, 30, 90)),
    ),
    CatalogueEntry(
        "flip-bit", lambda rng, job: _moment(rng, job).flip_bit(_files(rng), rng.random())
    ),
    CatalogueEntry(
        "truncate-file", lambda rng, job: _moment(rng, job).truncate(_files(rng), rng.random())
    ),
    CatalogueEntry(
        "delete-file", lambda rng, job: _moment(rng, job).delete(_files(rng), rng.random())
    ),
    CatalogueEntry(
        "cut-network",
        lambda rng, job: _on_machine(rng, job).cable("cut-network", for_s=_between(rng, 1, 6)),
    ),
    CatalogueEntry(
        "black-hole",
        lambda rng, job: _on_machine(rng, job).cable("black-hole", for_s=_between(rng, 1, 6)),
    ),
    CatalogueEntry(
        "reset-network",
        lambda rng, job: _on_machine(rng, job).cable("reset-network", for_s=_between(rng, 0.2, 2)),
    ),
    CatalogueEntry(
        "lose-packets",
        lambda rng, job: _on_machine(rng, job).cable(
            "lose-packets", rng.randint(1, 5), for_s=_between(rng, 2, 6)
        ),
    ),
    CatalogueEntry(
        "delay-network",
        lambda rng, job: _on_machine(rng, job).cable(
            "delay-network", _between(rng, 0.005, 0.1), for_s=_between(rng, 2, 6)
        ),
    ),
    CatalogueEntry(
        "throttle-network",
        lambda rng, job: _on_machine(rng, job).cable(
            "throttle-network", _between(rng, 1, 20), for_s=_between(rng, 2, 6)
        ),
    ),
    CatalogueEntry("notice", lambda rng, job: _on_machine(rng, job).notice(_between(rng, 20, 120))),
    CatalogueEntry(
        "sigterm", lambda rng, job: _on_machine(rng, job).sigterm(_between(rng, 20, 60))
    ),
    CatalogueEntry(
        "clock-jump",
        lambda rng, job: _moment(rng, job).jump_clock(
            rng.choice((-1, 1)) * _between(rng, 10, 7200), _between(rng, 2, 8)
        ),
    ),
)
FAULTS: Final[dict[str, CatalogueEntry]] = {entry.name: entry for entry in _ENTRIES}


def planned(name: str, seed: int, number: int, bounds: Bounds) -> PlannedFault:
    """The fault of this name as seed and number draw it; the same ones, the same fault.

    Raises:
        KeyError: there is no such fault.
    """
    return FAULTS[name].make(_generator(seed, number, name), bounds)


def draw(
    seed: int, count: int, bounds: Bounds, target: Target, names: Sequence[str] = ()
) -> list[PlannedFault]:
    """``count`` faults that can be done here, one after the other, as ``seed`` has it.

    Args:
        seed: the same one gives the same plans, where the same faults can be done.
        count: how many.
        bounds: of the job.
        target: the job, to ask what can be done.
        names: which to draw from; () for all.

    Raises:
        ValueError: none of them can be done here.
    """
    can_be = [
        name
        for name in sorted(names or FAULTS)
        if not planned(name, seed, 0, bounds).fault.why_not(target)
    ]
    if not can_be:
        raise ValueError("none of these faults can be done here; see what each says")
    chosen = [_generator(seed, number, "").choice(can_be) for number in range(count)]
    return [planned(name, seed, number, bounds) for number, name in enumerate(chosen)]


def _generator(seed: int, number: int, name: str) -> Draw:
    return random.Random(f"{seed} {number} {name}")  # noqa: S311 - a draw, no secret
