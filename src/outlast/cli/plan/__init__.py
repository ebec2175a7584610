"""``outlast plan``: know before you rent.

``questions`` is the table of what can be asked, ``interval`` and ``spot`` its larger rows,
``overview`` all of them at once; ``facts`` says where the numbers come from, ``answer`` how an
answer is shown. Nothing here imports torch, scipy or rich: an answer takes less than half a second
from the start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from outlast.cli import LazyGroup
from outlast.cli.plan.answer import output_flags
from outlast.cli.plan.facts import COST_FLAGS, RATE_FLAGS
from outlast.cli.plan.questions import QUESTIONS
from outlast.cli.quantities import BANDWIDTH, DAYS, GPUS, PARAMETERS, PRICE, SIZE, SPAN, flag


class _Questions(LazyGroup):
    """The questions of the table, and ``outlast simulate``, which is one too."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        asked = QUESTIONS.get(cmd_name)
        return asked.command(cmd_name) if asked else super().get_command(ctx, cmd_name)


_LISTED = {name: (name, one.listed or one.asks) for name, one in QUESTIONS.items()}


@click.group(
    name="plan",
    cls=_Questions,
    package="outlast.cli",
    listed=_LISTED
    | {"simulate": ("simulate", "what would the job go through? (outlast simulate)")},
    noun="question",
    invoke_without_command=True,
    params=[
        *RATE_FLAGS,
        *COST_FLAGS,
        flag("--days", DAYS, "How long it runs."),
        flag("--spot", PRICE, "Price per hour.", to="spot_price"),
        flag("--on-demand", PRICE, "Price per hour.", to="on_demand_price"),
        flag("--price", PRICE, "Per GPU and hour."),
        flag("--state", SIZE, "Of the whole job: 640GB."),
        flag("--params", PARAMETERS, "Of the model: 7B."),
        flag("--bandwidth", BANDWIDTH, "Of each machine, to storage: 1.5GB/s."),
        flag("--notice", SPAN, "From the platform's word to the end: 120s."),
        flag("--nodes", GPUS, "Machines that share the state."),
        click.Option(
            ["--save", "is_kept"],
            is_flag=True,
            help="Keep the prediction in the job's directory; outlast report compares.",
        ),
        *output_flags(),
    ],
)
@click.pass_context
def command(
    ctx: click.Context, /, *, as_json: bool, plot: Path | None, is_kept: bool, **given: Any
) -> None:
    """Know before you rent: failures, intervals, prices, room and deadlines.

    Without anything it plans the job in this directory from what that has measured, or else shows
    a worked example. With flags it answers each question that they are enough for.
    """
    if ctx.invoked_subcommand is None:
        from outlast.cli.plan.overview import overview

        overview(given, as_json=as_json, plot=plot, is_kept=is_kept)
        return
    for parameter in ctx.command.params:
        source = parameter.name and ctx.get_parameter_source(parameter.name)
        if source is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{parameter.opts[0]} stands before {ctx.invoked_subcommand}; write outlast plan "
                f"{ctx.invoked_subcommand} {parameter.opts[0]} …"
            )
