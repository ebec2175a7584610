"""``outlast tell``: who is told of a job's incidents, and a message to try it.

Addresses hold secrets: only the scheme is shown, and the host where that is none.
"""

from __future__ import annotations

import socket

import click
import msgspec

from outlast import config
from outlast.config import in_public
from outlast.errors import ConfigError
from outlast.health.exporter import NO_APPRISE, has_apprise
from outlast.health.send import Delivery, Errand


@click.command(name="tell")
@click.option("--test", "is_test", is_flag=True, help="Send a message to each address.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
def command(is_test: bool, as_json: bool) -> int:
    """Check the addresses of tell.urls and tell.file, or with --test send a message to each.

    Exit code 0 if each of them is good, else 1.
    """
    urls = config.all_addresses(config.load()).urls
    if not urls:
        raise ConfigError(
            "nobody is told: set tell.urls or tell.file, such as OUTLAST_TELL_URLS=mailto://…"
        )
    if not has_apprise():
        raise ConfigError(NO_APPRISE)
    title = "Outlast can reach you" if is_test else ""
    body = f"A test from {socket.gethostname()}: incidents of jobs are told here."
    answers = Delivery(Errand(urls=urls, title=title, body=body)).wait()
    if as_json:
        found = [
            {"address": in_public(url), "problem": why or None}
            for url, why in zip(urls, answers, strict=True)
        ]
        click.echo(msgspec.json.encode({"sent": is_test, "addresses": found}))
    else:
        good = "was sent a message" if is_test else "is understood; --test sends a message"
        for url, why in zip(urls, answers, strict=True):
            click.echo(f"{in_public(url)}  {why or good}")
    return int(any(answers))
