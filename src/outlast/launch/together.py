"""What a job on several machines has besides: membership, and keepers that know each other.

``outlast run --preflight``: the doctor on every machine, before the job's first attempt.

A machine that is sick does not join: it says why and ends with exit code 1, and the others, who
have heard of it at the same meeting, go on without it as long as enough are left. Nothing of the
job exists yet when the doctor looks, so that a directory that cannot be used is a finding.

The machines meet where they would meet for the job; under another rendezvous than our own they
cannot, and each is examined by itself.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable
from typing import Final

import msgspec
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.launcher.api import LaunchConfig

from outlast import config
from outlast.config import Settings
from outlast.errors import ConfigError, OutlastError, StorageError
from outlast.health.doctor.examination import (
    JOB,
    MARKS,
    Examined,
    WantedMachines,
    conclusion,
    examine,
)
from outlast.keeper import wire
from outlast.keeper.process import Supervisor
from outlast.launch.arguments import Launch
from outlast.launch.membership import Membership
from outlast.launch.membership.messages import Go
from outlast.launch.place import BACKEND, own_address, place_of, reached_at
from outlast.launch.survivors import TAKE_DOWN_S, UNWIND_S
from outlast.ledger.file import Ledger
from outlast.ledger.goodput import number
from outlast.ledger.job import Job, read_job
from outlast.ledger.narrator import say
from outlast.ledger.past import Past
from outlast.notice.signals import EarlySignals
from outlast.peer.tls import Tls
from outlast.policy.exclusion import Exclusion
from outlast.policy.membership import MembershipRules

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S: Final = 1800.0  # that machines wait for enough others


def membership(launch: Launch, settings: config.Settings, job: Job, past: Past) -> Membership:
    """This machine's membership, as the command line and the settings ask for it.

    Of the past it has the largest number of an attempt, and the machines that are left out.

    Raises:
        ConfigError, StorageError: an address or the storage cannot be used.
    """
    conf = launch.config
    tls = Tls.of(settings)
    if tls is not None:
        tls.client()  # files that cannot be used are said before anything is started
    wait_s = wait_s_of(conf)
    rules = MembershipRules(min_nodes=conf.min_nodes, max_nodes=conf.max_nodes)
    if settings.workers_in_process:  # a machine is ready when its survivors are
        stop_s = rules.stop_s + UNWIND_S + TAKE_DOWN_S
        rules = msgspec.structs.replace(rules, stop_s=stop_s)
    return Membership(
        place_of(conf.rdzv_endpoint or str(settings.dir)),
        rules,
        run_id=job.id,
        host=reached_at(conf.local_addr, say),
        silence_s=settings.membership_silence_s,
        tls=tls,
        attempt=past.attempt,
        workers=conf.nproc_per_node,
        labels=settings.membership_labels,
        timeout_s=wait_s,
        say=say,
        script=launch.script,
        out=left_out(past, time.time()),
    )


def wait_s_of(conf: LaunchConfig) -> float:
    """How long machines wait for enough others.

    Raises:
        ConfigError: what was set is no such time.
    """
    try:
        wait_s = float(conf.rdzv_configs.get("join_timeout", JOIN_TIMEOUT_S))
    except ValueError:
        wait_s = 0.0
    if not wait_s > 0:
        raise ConfigError("--rdzv-conf join_timeout is not a number of seconds above 0")
    return wait_s


def left_out(past: Past, now_t: float) -> list[Exclusion]:
    """Machines that are still left out, or would be if they were not needed, as the ledger says."""
    found = []
    for host, word in past.left_out.items():
        until_t, for_s = number(word, "until_t"), number(word, "for_s")
        if until_t is None or for_s is None or now_t >= until_t:
            continue
        found.append(
            Exclusion(
                host=host,
                reason=str(word.get("reason")),
                for_s=min(until_t - now_t, for_s),  # another machine's clock may be wrong
                spare_only=bool(word.get("spare_only")) or not word.get("goes", True),
            )
        )
    return found


def readmit(rendezvous: RendezvousHandler, ledger: Ledger) -> None:
    """The owner's word: this machine takes part again, whatever was before."""
    host = socket.gethostname()
    ledger.append("let_in", node=host)
    if isinstance(rendezvous, Membership):
        rendezvous.readmit(host)


def introduce(member: Membership, keeper: Supervisor, settings: config.Settings) -> None:
    """Let this machine's keeper talk to the others' keepers, and hear of each attempt.

    One that cannot talk to others costs the replicas, and nothing else.

    Raises:
        ConfigError: the files for TLS are not all named.
    """
    try:
        host, port = keeper.serve(
            member.host, member.key, node=member.me.node, tls=Tls.of(settings)
        )
    except StorageError as error:
        say(f"no snapshots are kept for other machines: {error}")
        is_alone = True
    else:
        member.announce_keeper(host, port)
        is_alone = False

    last: Go | None = None

    def tell(go: Go) -> None:
        nonlocal last
        lost = () if last is None else lost_ranks(last, go, member.has_left)
        last = go
        members = [
            wire.PeerMachine(
                node=one.node, host=one.keeper[0], port=one.keeper[1], labels=one.labels
            )
            for one in go.members
            if one.keeper is not None and not is_alone
        ]
        if not keeper.tell_members(go.attempt, members, term=go.term, lost=lost):
            logger.warning("the keeper has not heard of attempt %d in time", go.attempt)

    member.on_attempt = tell


def lost_ranks(last: Go, now: Go, has_left: Callable[[str], bool]) -> tuple[wire.Lost, ...]:
    """What machines had in ``last`` that are lost: not here, without a word that they go."""
    here = {member.node for member in now.members} | set(now.aside)
    first, found = 0, []
    for member in last.members:
        if member.node not in here and not has_left(member.node):
            found.append(wire.Lost(attempt=last.attempt, first=first, count=member.workers))
        first += member.workers
    return tuple(found)


WIDTH = 1000  # one line is one line


def preflight(launch: Launch, settings: Settings) -> Examined:
    """Examine this machine for the job that ``launch`` would start; what asks for it is said.

    Raises:
        ConfigError: an address, or a file for TLS, cannot be used.
    """
    conf = launch.config
    machines = WantedMachines(
        min_nodes=conf.min_nodes, max_nodes=conf.max_nodes, workers=conf.nproc_per_node
    )
    if not launch.one_machine and conf.rdzv_backend == BACKEND:
        machines = WantedMachines(
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
            mark = MARKS[finding.status]
            say(f"preflight {mark} {finding.name}: {finding.seen}; {finding.todo}")
    for machine, why in sorted(examined.others_sick.items()):
        say(f"preflight: {machine} is left out: {why}")
    say(f"preflight: {conclusion(examined)}")
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
