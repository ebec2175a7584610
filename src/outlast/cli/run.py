"""``outlast run``."""

from __future__ import annotations

import os

import click

from outlast.errors import Exit


@click.command(
    name="run",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> int:
    """Run a script under outlast: torchrun's flags and PET_* variables, --dir, --resume."""
    from outlast.notice.signals import EarlySignals

    early = EarlySignals()
    from outlast.launch.first_look import level_to_set, refuse_other_job
    from outlast.launch.warm.client import begin

    refuse_other_job(arguments)
    os.environ.update(level_to_set(os.environ))
    server = begin(arguments)
    try:
        from outlast.launch.run import run  # torch is imported here, and meanwhile in the server

        if early.heard:
            from outlast.ledger.narrator import say

            say(f"{early.heard} came before anything had begun; start me again (exit 75)")
            return int(Exit.DRAINED)
        return run(list(arguments), server)
    finally:
        if server is not None:
            server.close()
