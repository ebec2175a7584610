"""``outlast plan memory``: does staging fit in memory?"""

from __future__ import annotations

from typing import Any

import click

from outlast.cli.plan.answer import Answer, answered
from outlast.cli.quantities import GPUS, PARAMETERS, SIZE
from outlast.errors import ConfigError
from outlast.plan.memory import BYTES_PER_PARAMETER, staged_bytes, state_bytes
from outlast.report import humanise


def answer(state: float, *, nodes: int, buffers: int, memory: float | None, of: str) -> Answer:
    """Bytes on each machine, and whether they are there."""
    staged = staged_bytes(state, num_nodes=nodes, num_buffers=buffers)
    data: dict[str, Any] = {
        "state_bytes": state,
        "num_nodes": nodes,
        "num_buffers": buffers,
        "staged_bytes": staged,
        "memory_bytes": memory,
        "fits": None if memory is None else staged <= memory,
    }
    each = "each of them holds" if nodes > 1 else "the machine holds"
    many = f"{buffers:,} snapshots" if buffers > 1 else "one snapshot"
    room = ""
    if memory is not None:
        room = f", and has {humanise.size(memory)}: " + (
            "it fits" if staged <= memory else "it will not fit"
        )
        if staged > memory:
            needed = -(-buffers * state // memory)
            room += f"; {needed:,.0f} machines would do"
            data["needed_nodes"] = int(needed)
    machines = f"{nodes:,} machines" if nodes > 1 else "1 machine"
    headline = [
        (
            f"{humanise.size(state)} of state on {machines}: {each} {humanise.size(staged)} for "
            f"{many}{room}."
        )
    ]
    lines = [*headline, f"State: {of}. Gradients are not saved; activations are not either."]
    return Answer(
        question="does staging fit in memory?",
        data=data,
        headline=headline,
        lines=lines,
        next=f"outlast plan flush --state {state / 1e9:.4g}GB --bandwidth 1.5GB/s --notice 120s "
        f"--nodes {nodes}",
    )


@click.command(name="memory")
@click.option("--params", type=PARAMETERS, help="Of the model: 7B.")
@click.option("--state", "given_bytes", type=SIZE, help="In place of --params: 640GB.")
@click.option(
    "--optimizer",
    type=click.Choice(list(BYTES_PER_PARAMETER)),
    default="adam-mixed",
    show_default=True,
    help="What stands beside the weights.",
)
@click.option(
    "--nodes", type=GPUS, default=1, show_default=True, help="Machines that share the state."
)
@click.option("--buffers", type=GPUS, default=1, show_default=True, help="Snapshots held at once.")
@click.option("--memory", "memory_bytes", type=SIZE, help="That a machine has to spare: 512GB.")
@answered
def command(
    *,
    params: float | None,
    given_bytes: float | None,
    optimizer: str,
    nodes: int,
    buffers: int,
    memory_bytes: float | None,
) -> Answer:
    """Bytes of training state, and of the snapshots that each machine holds."""
    if (params is None) == (given_bytes is None):
        raise ConfigError("give one of --params 7B and --state 98GB")
    each = BYTES_PER_PARAMETER[optimizer]
    size, of = given_bytes or 0.0, "as given"
    if params is not None:
        size = state_bytes(params, each)
        of = f"{params:,.0f} parameters, {each:g} bytes each ({optimizer})"
    return answer(size, nodes=nodes, buffers=buffers, memory=memory_bytes, of=of)
