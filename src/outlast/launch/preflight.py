"""``outlast run --preflight``: the doctor on every machine, before the job's first attempt.

A machine that is sick does not join: it says why and ends with exit code 1, and the others, who
have heard of it at the same meeting, go on without it as long as enough are left. Nothing of the
job exists yet when the doctor looks, so that a directory that cannot be used is a finding.

The machines meet where they would meet for the job; under another rendezvous than our own they
cannot, and each is examined by itself.
"""

from __future__ import annotations

import contextlib
import signal

from outlast.config import Settings
from outlast.errors import OutlastError
from outlast.health.doctor import page
from outlast.health.doctor.examination import JOB, Examined, Machines, examine
from outlast.launch.arguments import Launch
from outlast.launch.place import BACKEND, own_address, place_of
from outlast.launch.together import wait_s_of
from outlast.ledger.file import Ledger
from outlast.ledger.job import read_job
from outlast.ledger.narrator import say
from outlast.notice.signals import EarlySignals

WIDTH = 1000  # one line is one line


def preflight(launch: Launch, settings: Settings) -> Examined:
    """Examine this machine for the job that ``launch`` would start; what asks for it is said.

    Raises:
        ConfigError: an address, or a file for TLS, cannot be used.
    """
    conf = launch.config
    machines = Machines(
        min_nodes=conf.min_nodes, max_nodes=conf.max_nodes, workers=conf.nproc_per_node
    )
    if not launch.one_machine and conf.rdzv_backend == BACKEND:
        machines = Machines(
            min_nodes=conf.min_nodes,
            max_nodes=conf.max_nodes,
            workers=conf.nproc_per_node,
            place=place_of(conf.rdzv_endpoint or str(settings.dir)),
            host=conf.local_addr or own_address(),
            wait_s=wait_s_of(conf),
        )
    examined = examine(settings, machines, progress=say, heard=_heard)
    if examined.stopped:
        say(f"{examined.stopped} came before anything had begun; start me again (exit 75)")
        return examined
    for finding in examined.findings:
        if finding.status in ("warning", "failed"):
            mark = page.MARKS[finding.status]
            say(f"preflight {mark} {finding.name}: {finding.seen}; {finding.todo}")
    for machine, why in sorted(examined.others_sick.items()):
        say(f"preflight: {machine} is left out: {why}")
    say(f"preflight: {page.conclusion(examined)}")
    if examined.exit_code:
        _record_refusal(examined, settings)
    return examined


def _heard() -> str:
    """A signal that came while nobody could act on it yet."""
    handler = signal.getsignal(signal.SIGTERM)
    return handler.heard if isinstance(handler, EarlySignals) else ""


def record(examined: Examined, ledger: Ledger) -> None:
    """What came of it, for the job's record."""
    ledger.append(
        "preflight",
        machine=examined.machine,
        fit=examined.exit_code == 0,
        findings=[
            {"name": one.name, "status": one.status, "seen": one.seen}
            for one in examined.findings
            if one.status in ("warning", "failed")
        ],
        unfit=examined.others_sick,
        seconds=examined.seconds,
    )


def _record_refusal(examined: Examined, settings: Settings) -> None:
    """If the job has begun elsewhere, and its record is not what is sick."""
    if any(one.name == JOB and one.status != "ok" for one in examined.findings):
        return
    with contextlib.suppress(OutlastError, OSError):
        job = read_job(settings.dir)
        ledger = Ledger(settings.dir, job=job.id)
        record(examined, ledger)
        ledger.close()
