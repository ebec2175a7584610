"""``outlast plan replicas``: should the state be replicated?"""

from __future__ import annotations

from typing import Any, Final

import click
import msgspec

from outlast.cli.plan.answer import Answer, answered, chance, number, span, table
from outlast.cli.plan.facts import Failures, failures, rate_flags
from outlast.cli.quantities import DURATION, GPUS, SPAN, Rate
from outlast.errors import ConfigError
from outlast.plan.replicas import lost_h, recovers_in_pairs


class Rewind(msgspec.Struct, frozen=True, kw_only=True):
    """What a loss costs, with the copies and without.

    Attributes:
        interval_h: useful hours between two checkpoints on storage.
        restore_h: restore and rejoin from there.
        pause_h: until the job goes on from copies.
    """

    interval_h: float = 20 / 60
    restore_h: float = 3 / 60
    pause_h: float = 1 / 3600

    @property
    def from_storage_h(self) -> float:
        """What is lost where storage is read."""
        return self.restore_h + self.interval_h / 2


_USUAL: Final = Rewind()
_OFTEN: Final = 0.5  # of such losses that are recovered, for a yes


def answer(nodes: int, lost: int, rewind: Rewind = _USUAL, known: Failures | None = None) -> Answer:
    """What copies in pairs survive, and the time that they save."""
    probability = recovers_in_pairs(nodes, lost)
    storage_h = rewind.from_storage_h
    copies_h = lost_h(probability, pause_h=rewind.pause_h, from_storage_h=storage_h)
    saved_h = storage_h - copies_h
    worth = None if known is None else known.per_h * saved_h
    several = sorted(k for k in {1, 2, 3, 4, 8, lost} if k <= nodes)
    data: dict[str, Any] = {
        "num_nodes": nodes,
        "num_lost": lost,
        "recovers_probability": probability,
        "interval_h": rewind.interval_h,
        "restore_h": rewind.restore_h,
        "pause_h": rewind.pause_h,
        "lost_with_copies_h": copies_h,
        "lost_from_storage_h": storage_h,
        "saved_per_loss_h": saved_h,
        "pays": saved_h > 0,
        **({} if known is None else known.as_json()),
        "worth_slowdown_fraction": worth,
        "by_num_lost": [
            {"num_lost": k, "recovers_probability": recovers_in_pairs(nodes, k)} for k in several
        ],
    }
    machines = "a machine goes" if lost == 1 else f"{lost:,} machines go at once"
    headline = [
        _verdict(machines, probability, saved_h, copies_h, rewind),
        (
            f"In pairs, {nodes:,} machines recover from memory with probability "
            f"{chance(probability)} when {machines}; else from storage."
        ),
    ]
    rows = [
        (
            f"{k:,} lost",
            chance(by_lost := recovers_in_pairs(nodes, k)),
            span(lost_h(by_lost, pause_h=rewind.pause_h, from_storage_h=storage_h)),
            span(storage_h),
        )
        for k in several
    ]
    lines = [
        *headline,
        _worth_words(worth, saved_h, known),
        *table(
            ("at once", "recovered", "lost with copies", "from storage"),
            rows,
            [k == lost for k in several],
        ),
        (
            f"Compared: going on from copies after {span(rewind.pause_h)} (--pause) against "
            f"storage, where a restore takes {span(rewind.restore_h)} (--restore) and half of "
            f"{span(rewind.interval_h)} (--every) is done again."
        ),
        (
            "Model: losses anywhere with equal chance. Machines that fail together (a rack, a "
            "zone) must not be one another's pair: set membership.labels, and outlast run keeps "
            "them apart."
        ),
        "A copy costs one snapshot's memory and traffic (outlast plan memory --buffers 2).",
    ]
    return Answer(
        question="should the state be replicated?",
        data=data,
        headline=headline,
        lines=lines,
        next="outlast plan memory --params 7B --buffers 2",
    )


def _verdict(
    machines: str, probability: float, saved_h: float, copies_h: float, rewind: Rewind
) -> str:
    if not probability:
        return (
            f"No: when {machines} some pair is lost whole, and the job rewinds to storage anyway."
        )
    storage = f"{span(rewind.from_storage_h)} from storage"
    if saved_h <= 0:
        return f"No: when {machines} copies save no time, {span(copies_h)} against {storage}."
    verdict = "Yes" if probability >= _OFTEN else "Hardly"
    return f"{verdict}: when {machines} copies lose {span(copies_h)} on average, against {storage}."


def _worth_words(worth: float | None, saved_h: float, known: Failures | None) -> str:
    """How much slower copying may make training before it is not worth it."""
    if saved_h <= 0:
        return "Keep the memory for something else."
    if worth is None or known is None:
        return (
            f"That is {span(saved_h)} less for each such loss; with --rate, how much copying may "
            "slow training for that."
        )
    return (
        f"At one every {span(1 / known.per_h)} it pays while copying slows training by less than "
        f"{number(100 * worth, 2)} %. The rate: {known.source}."
    )


@click.command(name="replicas")
@rate_flags
@click.option("--nodes", type=GPUS, required=True, help="Machines, in pairs.")
@click.option("--lost", type=GPUS, default=2, show_default=True, help="That go at once.")
@click.option(
    "--every", "interval_h", type=SPAN, default="20min", show_default=True, help="To storage."
)
@click.option(
    "--restore",
    "restore_h",
    type=DURATION,
    default="3min",
    show_default=True,
    help="Restore and rejoin from storage.",
)
@click.option(
    "--pause", "pause_h", type=DURATION, default="1s", show_default=True, help="From copies."
)
@answered
def command(
    *,
    rate: Rate | None,
    gpus: int | None,
    gpus_per_node: int,
    nodes: int,
    lost: int,
    interval_h: float,
    restore_h: float,
    pause_h: float,
) -> Answer:
    """Whether copies in pairs pay: what they recover, and the time that they save.

    --rate is of such losses; without it the answer is for one of them.
    """
    if nodes % 2:
        raise ConfigError(f"--nodes {nodes:,}: pairs need an even number of machines")
    if lost > nodes:
        raise ConfigError(f"--lost {lost:,}: there are only {nodes:,} machines")
    known = None
    if rate is not None or gpus is not None:
        known = failures(rate, gpus, gpus_per_node)
    rewind = Rewind(interval_h=interval_h, restore_h=restore_h, pause_h=pause_h)
    return answer(nodes, lost, rewind, known)
