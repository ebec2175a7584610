"""``outlast plan``: know before you rent.

One module a question; ``answer`` is what they share, ``facts`` where their numbers come from.
Nothing here imports torch, scipy or rich: an answer takes less than half a second from the start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from outlast.cli.group import LazyGroup
from outlast.cli.plan.answer import shown
from outlast.cli.plan.facts import cost_flags, rate_flags
from outlast.cli.quantities import BANDWIDTH, DAYS, GPUS, PARAMETERS, PRICE, SIZE, SPAN

_COMMANDS = {
    "failures": "how often will I be interrupted?",
    "interval": "how often should I save?",
    "spot": "what will it cost on spot and on demand, and where does the choice flip?",
    "budget": "what do failures cost?",
    "flush": "can I flush within the notice?",
    "memory": "does staging fit in memory?",
    "zones": "over how many zones?",
    "spares": "how many spares?",
    "restarts": "how many restarts?",
    "replicas": "should the state be replicated?",
    "deadline": "will I meet the deadline?",
    "simulate": "what would the job go through? (outlast simulate)",
}


@click.group(
    name="plan",
    cls=LazyGroup,
    package=__name__,
    listed={name: (name, text) for name, text in _COMMANDS.items()},
    noun="question",
    invoke_without_command=True,
)
@rate_flags
@cost_flags
@click.option("--days", type=DAYS, help="How long it runs.")
@click.option("--spot", "spot_price", type=PRICE, help="Price per hour.")
@click.option("--on-demand", "on_demand_price", type=PRICE, help="Price per hour.")
@click.option("--price", type=PRICE, help="Per GPU and hour.")
@click.option("--state", "state_bytes", type=SIZE, help="Of the whole job: 640GB.")
@click.option("--params", type=PARAMETERS, help="Of the model: 7B.")
@click.option("--bandwidth", type=BANDWIDTH, help="Of each machine, to storage: 1.5GB/s.")
@click.option("--notice", "notice_h", type=SPAN, help="From the platform's word to the end: 120s.")
@click.option("--nodes", type=GPUS, help="Machines that share the state.")
@click.option(
    "--save",
    "is_kept",
    is_flag=True,
    help="Keep the prediction in the job's directory; outlast report compares.",
)
@shown
@click.pass_context
def command(
    ctx: click.Context, /, *, as_json: bool, plot: Path | None, is_kept: bool, **given: Any
) -> None:
    """Know before you rent: failures, intervals, prices, room and deadlines.

    Without anything it plans the job in this directory from what that has measured, or else shows
    a worked example. With flags it answers each question that they are enough for.
    """
    if ctx.invoked_subcommand is not None:
        said = [
            parameter.opts[0]
            for parameter in ctx.command.params
            if parameter.name
            and ctx.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
        ]
        if said:
            raise click.UsageError(
                f"{said[0]} stands before {ctx.invoked_subcommand}; write outlast plan "
                f"{ctx.invoked_subcommand} {said[0]} …"
            )
        return
    from outlast.cli.plan.overview import overview

    overview(given, as_json=as_json, plot=plot, is_kept=is_kept)
