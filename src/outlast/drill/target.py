"""A job under test as a fault sees it: from outside, by processes, files, notices and orders.

A fault is handed a ``Target``. It learns from it which machines and workers there are now, which
step is the newest, and where the job keeps its files; it acts on processes, files and cables
itself. What can only be done inside a worker (a NaN in its batch, a collective that it skips) is an
order: a small file that the worker reads ahead of the named step and removes before it obeys, so
that an attempt that makes the step again is not hit again.

Guarantees: nothing here touches the job. What is told is of the moment: a process may be gone when
it is signalled, and every fault has to stand that.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from outlast.drill import network

ORDERS: Final = "orders"  # directory below the run's
RECORDS: Final = "records"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is to do to itself.

    Attributes:
        rank: whose.
        step: ahead of the step of this number, counted from 1, or the first one behind it.
        kind: which of the orders that ``inside`` knows.
        value: how much, where that means something: seconds, mostly.
    """

    rank: int
    step: int
    kind: str
    value: float = 0.0


class JobMachine(Protocol):
    """One machine of the job: this one, or a namespace on it.

    Attributes:
        number: from 0.
        name: its hostname, as the ledger has it.
        cable: what connects it with the others, where it is a namespace; None for this machine.
    """

    number: int
    name: str
    cable: network.Machine | None

    @property
    def agent(self) -> int | None:
        """Id of its agent (``outlast run``); None while it is down."""

    @property
    def keeper(self) -> int | None:
        """Id of its keeper; None while there is none."""

    def processes(self) -> Sequence[int]:
        """Ids of all of the job's processes on it."""

    def kill(self) -> None:
        """End all of them at once, as a machine that loses its power does."""

    def start(self) -> None:
        """Start its agent anew, as a scheduler does; nothing happens where it runs."""


class Target(Protocol):
    """The job under test.

    Attributes:
        run: the run's directory: records, orders and logs.
        directory: the job's own, with its checkpoints and ledger.
        machines: in order.
        tiers: name → directory, of the tiers that are directories.
        environ: what the job has in its environment besides; a fault may add to it ahead of the
            start.
    """

    run: Path
    directory: Path
    environ: dict[str, str]

    @property
    def machines(self) -> Sequence[JobMachine]: ...  # noqa: D102 - above
    @property
    def tiers(self) -> Mapping[str, Path]: ...  # noqa: D102

    def workers(self) -> Mapping[int, int]:
        """Rank → process id, of the newest attempt."""

    def machine_of(self, rank: int) -> JobMachine:
        """Where the rank's worker runs."""

    def completed(self) -> int:
        """The newest step that some rank has completed."""

    def step_s(self) -> float:
        """A typical step's length in seconds."""

    def is_over(self) -> bool:
        """Whether the job has ended for good."""

    def events(self) -> Sequence[Any]:
        """The ledger's events until now (:class:`outlast.ledger.events.Event`)."""


def give_order(run: Path, order: Order) -> Path:
    """Leave an order for a worker; it is gone from the directory once it is obeyed."""
    place = run / ORDERS
    place.mkdir(exist_ok=True)
    path = place / f"{order.rank}-{uuid.uuid4().hex}.json"
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(msgspec.json.encode(order))
    unfinished.replace(path)
    return path


def take_orders(run: Path, rank: int, step: int) -> list[Order]:
    """The orders that a rank has ahead of ``step``; they are gone then."""
    taken = []
    for path in sorted((run / ORDERS).glob(f"{rank}-*.json")):
        order = msgspec.json.decode(path.read_bytes(), type=Order)
        if order.step <= step:
            path.unlink()
            taken.append(order)
    return taken
