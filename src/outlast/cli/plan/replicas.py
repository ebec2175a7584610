"""``outlast plan replicas``: should the state be replicated?"""

from __future__ import annotations

from typing import Any

import click

from outlast.cli.plan.answer import Answer, answered, percent, table
from outlast.cli.quantities import GPUS
from outlast.errors import ConfigError
from outlast.plan.replicas import recovers_in_pairs


def answer(nodes: int, lost: int) -> Answer:
    """What copies in pairs survive."""
    chance = recovers_in_pairs(nodes, lost)
    several = sorted(k for k in {1, 2, 3, 4, 8, lost} if k <= nodes)
    data: dict[str, Any] = {
        "num_nodes": nodes,
        "num_lost": lost,
        "recovers_probability": chance,
        "by_num_lost": [
            {"num_lost": k, "recovers_probability": recovers_in_pairs(nodes, k)} for k in several
        ],
    }
    machines = "machine goes" if lost == 1 else f"{lost} machines go at once"
    headline = [
        (
            f"In pairs, {nodes} machines recover from memory with probability {percent(chance)} "
            f"when {'one ' * (lost == 1)}{machines}; else from storage."
        )
    ]
    rows = [(f"{k} lost", percent(recovers_in_pairs(nodes, k))) for k in several]
    lines = [
        *headline,
        *table(("at once", "recovered"), rows, [k == lost for k in several]),
        "Model: losses anywhere with equal chance. Machines that fail together (a rack, a zone)",
        "must not be one another's pair: set membership.labels, and outlast run keeps them apart.",
        "A copy costs one snapshot's memory and traffic (outlast plan memory --buffers 2).",
    ]
    return Answer(
        question="should the state be replicated?",
        data=data,
        headline=headline,
        lines=lines,
        next="outlast plan memory --params 7B --buffers 2",
    )


@click.command(name="replicas")
@click.option("--nodes", type=GPUS, required=True, help="Machines, in pairs.")
@click.option("--lost", type=GPUS, default=2, show_default=True, help="That go at once.")
@answered
def command(*, nodes: int, lost: int) -> Answer:
    """What is recovered from copies in pairs when several machines go at once."""
    if nodes % 2:
        raise ConfigError(f"--nodes {nodes}: pairs need an even number of machines")
    if lost > nodes:
        raise ConfigError(f"--lost {lost}: there are only {nodes} machines")
    return answer(nodes, lost)
