"""``outlast metrics``: what a job would show on its port, and what watches it.

The rules and the dashboard come with the package, so that they fit the version that exports.
"""

from __future__ import annotations

import socket

import click

from outlast import config
from outlast.health.exporter import cadence_of
from outlast.ledger.job import read_job, settings_of


@click.command(name="metrics")
@click.argument("directory", required=False)
@click.option("--rules", is_flag=True, help="Print alerts for Prometheus: a rule file.")
@click.option("--dashboard", is_flag=True, help="Print a dashboard for Grafana, to be imported.")
def command(directory: str | None, rules: bool, dashboard: bool) -> None:
    """Print a job's metrics once, as its port does while it runs (metrics.port = 9410).

    Without a running job there is nothing of workers: only what the ledger says.
    """
    if rules and dashboard:
        raise click.UsageError("--rules and --dashboard are two files; ask for one of them")
    if (rules or dashboard) and directory is not None:
        raise click.UsageError("the rules and the dashboard are of no job; leave the directory out")
    if rules:
        from outlast.metrics.alerts import rule_file

        click.echo(rule_file(), nl=False)
        return
    if dashboard:
        from outlast.metrics.dashboard import as_json

        click.echo(as_json(), nl=False)
        return
    from outlast.metrics.exposition import Exposition

    settings = config.load({"dir": directory})
    job = read_job(settings.dir)
    settings = settings_of(directory, settings, job)
    exposition = Exposition(
        *(job.id, settings.dir, socket.gethostname(), cadence_of(settings), settings.prices)
    )
    while exposition.look():
        pass
    if not exposition.is_complete:
        raise OSError(f"the ledger in {settings.dir} cannot be read")
    click.echo(exposition.text()[0], nl=False)
