"""``outlast run``: put the pieces together, run the agent, and leave with the right exit code.

**Several machines** have a membership besides, and keepers that know each other.

**``--preflight``**: the doctor on every machine, before the job's first attempt. A machine that is
sick does not join: it says why and ends with exit code 1, and the others, which have heard of it at
the same meeting, go on without it as long as enough are left. Nothing of the job exists yet when
the doctor looks, so that a directory that cannot be used is a finding. The machines meet where they
would meet for the job; under another rendezvous than our own they cannot, and each is examined by
itself.

**Environment variables** of NCCL's and torch's that nobody reads are named with the ones that were
meant. The names are those that torch 2.13's ``ProcessGroupNCCL.hpp``, ``NCCLUtils.hpp`` and
``FlightRecorder.hpp`` read; what torch still reads under an old name is not warned about.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shlex
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.api import RendezvousError

from outlast import config
from outlast.attempt.trackers import JOB_VARIABLE
from outlast.checkpoint.catalog import open_job
from outlast.config import GRACE_MAX_S, Settings
from outlast.errors import ConfigError, Exit, OutlastError, StorageError
from outlast.health.doctor.examination import (
    JOB,
    MARKS,
    Examined,
    WantedMachines,
    conclusion,
    examine,
)
from outlast.health.exporter import Exporter
from outlast.keeper import wire
from outlast.keeper.process import SOCKET_VARIABLE, Supervisor, TierWaits, setup_of
from outlast.launch.agent import Agent
from outlast.launch.arguments import Launch, wait_s_of
from outlast.launch.ending import TAKE_DOWN_S, UNWIND_S
from outlast.launch.first_look import BACKEND, own_address, place_of, quieten_loggers, reached_at
from outlast.launch.health import note_gap
from outlast.launch.judging import restart_policy
from outlast.launch.machines import FreshStore, OneMachine
from outlast.launch.membership import JobOver, Membership
from outlast.launch.membership.messages import Go
from outlast.launch.warm.client import WarmServer
from outlast.launch.warm.starts import Starts
from outlast.ledger.command import settle, without_secrets
from outlast.ledger.file import Ledger, QueuedLedger, read_events
from outlast.ledger.goodput import number
from outlast.ledger.job import Job, JobLock, boot, enter_plan, process_age_s, read_job, versions
from outlast.ledger.measured import Measured
from outlast.ledger.narrator import Narrator, place, say
from outlast.ledger.past import Past
from outlast.notice import UNKNOWN_GRACE_S, Notice
from outlast.notice.desk import GraceCheck, NoticeDesk, standing
from outlast.notice.signals import EarlySignals, is_signal
from outlast.notice.slurm import requeue
from outlast.peer.claims import term_over
from outlast.peer.key import Tls
from outlast.policy.drain import IDLE_MOST, stay_s
from outlast.policy.exclusion import Exclusion
from outlast.policy.membership import MembershipRules
from outlast.policy.restart import RestartVerdict

logger = logging.getLogger(__name__)

_NEWER: Final = ("shutdown_timeout",)  # settings of torch's agent that torch 2.11 does not have
EXIT_BARRIER_S: Final = 300.0
LEAVING_S: Final = 1.0  # of the time that a notice leaves, kept for our own exit


def run(
    arguments: list[str], launch: Launch, settings: Settings, server: WarmServer | None = None
) -> int:
    """Run a script under outlast.

    Args:
        arguments: the command line after ``outlast run``.
        launch: what is to be launched.
        settings: in force; the directory's job, if there is one, is of this command.
        server: one that has been started already, for this command line; closed by the caller.

    Returns:
        The exit code (see :class:`outlast.errors.Exit`), or 1 where the doctor found this machine
        unfit.

    Raises:
        ConfigError: an address or the job's directory cannot be used.
        StorageError: the job's record cannot be read.
    """
    examined = preflight(launch, settings) if launch.preflight else None
    if examined is not None and examined.exit_code:
        return examined.exit_code
    job = open_job(settings.dir, settings)
    past = Past(settings.dir).look()
    rendezvous = None if launch.one_machine else _rendezvous(launch, settings, job, past)
    lock = JobLock(settings.dir, shared=not launch.one_machine)
    settle(settings, launch.command, is_alone=lock.is_alone)
    if rendezvous is None:
        rendezvous = _alone(launch, settings, past, is_locked=lock.is_held)
    before = _Outset(past.promised, past.idle)
    _tell_workers(settings, job)
    quieten_loggers(os.environ)
    ledger = QueuedLedger(settings.dir, job=job.id)
    _begin(ledger, arguments, settings.dir, joins=isinstance(rendezvous, Membership))
    if examined is not None:
        record(examined, ledger)
    starts = Starts(launch, settings.workers_warm, server)
    starts.open()
    grace_check = GraceCheck(settings)
    narrator = Narrator(settings.dir, also=grace_check.take)
    keeper = _start_keeper(settings, job, rendezvous, ledger)
    _tell_keeper(rendezvous, keeper, settings)
    if settings.restart_let_in:
        readmit(rendezvous, ledger)
    workers = launch.config.nproc_per_node
    say(f"job {job.id} in {place(settings.dir)}; {workers} worker{'s'[: workers > 1]} here")
    for word in unread(os.environ):
        say(word)
    narrator.start()
    desk = NoticeDesk(settings, ledger, grace_check)
    exporter = Exporter(settings, job.id, is_agent=True)
    exporter.start()
    with contextlib.closing(exporter):  # it tells how the job ended, from the ledger
        try:
            verdict = _attempts(
                *(launch, desk, ledger, rendezvous, starts),
                past=past,
                settings=settings,
                exporter=exporter,
            )
        finally:
            starts.close()
            ledger.flush()  # so that the narrator finds it
            narrator.stop()
            closing_s = time.monotonic()
            is_all_there = keeper.close(_time_left_s(desk), hurry=lambda: _time_left_s(desk))
            copying_s = time.monotonic() - closing_s
            # Not before: a signal while copies are made must not hide how the job ended.
            desk.close()
        term = rendezvous.term if isinstance(rendezvous, OneMachine) else None
        others_go_on = (isinstance(rendezvous, Membership) and rendezvous.others_go_on) or (
            term is not None and bool(term.overtaken)
        )
        idle = 0
        if not others_go_on:
            verdict, idle = _record_end(
                ledger, verdict, before, past, desk.notice, copying_s=copying_s
            )
        ledger.close()
    if term is not None:
        term.close(verdict.exit_code, verdict.reason)
    lock.release()
    _say_behind(settings, is_due=verdict.exit_code == Exit.DRAINED or not is_all_there)
    if verdict.exit_code == Exit.DRAINED:
        desk.acknowledge()
    _conclude(verdict, job, settings.dir, shlex.join(["outlast", "run", *arguments]))
    _stay(idle, desk.notice, settings.restart_back_off_s)
    if settings.notice_requeue and verdict.exit_code == Exit.DRAINED and not others_go_on:
        requeue(os.environ)
    return verdict.exit_code


class _Outset(NamedTuple):
    """How far the job was when this process began.

    Attributes:
        promised: its newest checkpoint.
        idle: drains in a row before, between which there was no new one.
    """

    promised: int
    idle: int

    def idle_after(self, past: Past, notice: Notice | None) -> int:
        """The same after one more drain.

        A signal does not count: whoever sends one knows that this job leaves, and why.
        """
        with contextlib.suppress(StorageError):
            past.look()
        if past.promised != self.promised:
            return 0
        return self.idle + (notice is None or not is_signal(notice))


def _record_end(
    ledger: Ledger,
    verdict: RestartVerdict,
    before: _Outset,
    past: Past,
    notice: Notice | None,
    *,
    copying_s: float,
) -> tuple[RestartVerdict, int]:
    """Write down how the job ended; returns that, and its drains in a row without progress."""
    idle = before.idle_after(past, notice) if verdict.exit_code == Exit.DRAINED else 0
    if idle > IDLE_MOST:
        verdict, idle = _never_ends(idle, notice), 0
    ledger.append(
        "job_finished",
        exit_code=verdict.exit_code,
        reason=verdict.reason,
        kind=verdict.kind.value if verdict.kind else None,
        idle=idle or None,
        copying_s=round(copying_s, 6),
    )
    return verdict, idle


def _never_ends(idle: int, notice: Notice | None) -> RestartVerdict:
    said = f": the notice comes back with each start ({notice.detail})" if notice else ""
    return _gave_up(
        f"drained {idle} times in a row without a new checkpoint{said}. End that notice, or start "
        "the job on another machine"
    )


def _stay(idle: int, notice: Notice | None, longest_s: float) -> None:
    """See ``stay_s``; any signal ends it."""
    if notice is None or is_signal(notice):
        return
    left_s = notice.seconds_left(time.time())
    wait_s = stay_s(idle, longest_s=longest_s, left_s=left_s)
    if wait_s <= 0:
        return
    woken = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, lambda *_: woken.set())
    say(
        f"drained {idle} times in a row without a new checkpoint: staying for {wait_s:.0f} s, so "
        f"that this machine is not taken for a good one at once ({notice.detail}). After "
        f"{IDLE_MOST} times it gives up"
    )
    woken.wait(wait_s)


def _begin(ledger: Ledger, arguments: list[str], directory: Path, *, joins: bool) -> None:
    ledger.append(
        "job_started",
        command=shlex.join(["outlast", "run", *without_secrets(arguments)]),
        versions=versions(),
        pid=os.getpid(),
        age_s=process_age_s(),
        boot=boot(),
        **({"joins": True} if joins else {}),
    )
    enter_plan(ledger, directory, say)


def _tell_workers(settings: config.Settings, job: Job) -> None:
    """Sessions in the workers read the same settings, wherever the script changes to."""
    os.environ["OUTLAST_DIR"] = str(settings.dir)
    os.environ[JOB_VARIABLE] = job.id
    if Path(config.FILE_NAME).exists() and not os.environ.get("OUTLAST_CONFIG"):
        os.environ["OUTLAST_CONFIG"] = str(Path(config.FILE_NAME).absolute())


def _say_behind(settings: config.Settings, *, is_due: bool) -> None:
    """Which tiers do not have the newest checkpoint, and what none of them has, if any."""
    with contextlib.suppress(OSError):  # the job's disk is gone: nothing can be said of it
        behind = standing(settings.tiers, Measured(read_events(settings.dir))) if is_due else ""
        if behind:
            say(behind)


def _time_left_s(desk: NoticeDesk) -> float | None:
    """How long the keeper may go on copying: until the machine goes, if it is going."""
    notice = desk.notice
    if notice is None:
        return None
    if notice.deadline_t is None:
        return UNKNOWN_GRACE_S
    return min(max(notice.deadline_t - time.time() - LEAVING_S, 0.0), GRACE_MAX_S)


def _start_keeper(
    settings: config.Settings, job: Job, rendezvous: RendezvousHandler, ledger: Ledger
) -> Supervisor:
    """The keeper of this machine; it outlives the workers, and its memory outlives it."""
    claims = ""
    if isinstance(rendezvous, Membership):
        claims = rendezvous.place
    elif isinstance(rendezvous, OneMachine):
        claims = str(settings.dir)
    setup = setup_of(settings, job.id, str(os.getpid()), claims)
    os.environ[SOCKET_VARIABLE] = setup.socket
    keeper = Supervisor(setup, TierWaits(say).tell, functools.partial(note_gap, ledger, "keeper"))
    keeper.start()
    return keeper


def _tell_keeper(
    rendezvous: RendezvousHandler, keeper: Supervisor, settings: config.Settings
) -> None:
    """The keeper has to know who takes part."""
    if isinstance(rendezvous, Membership):
        introduce(rendezvous, keeper, settings)
    elif isinstance(rendezvous, OneMachine):
        name = rendezvous.term.name
        rendezvous.term.on_claimed = lambda number: keeper.tell_members(number, [], 0, term=name)


def _attempts(
    launch: Launch,
    desk: NoticeDesk,
    ledger: Ledger,
    rendezvous: RendezvousHandler,
    starts: Starts,
    *,
    past: Past,
    settings: config.Settings,
    exporter: Exporter,
) -> RestartVerdict:
    conf = launch.config
    spec = WorkerSpec(
        role=conf.role,
        local_world_size=conf.nproc_per_node,
        entrypoint=launch.entrypoint,
        args=tuple(launch.args),
        rdzv_handler=rendezvous,
        max_restarts=max(conf.max_restarts, 1),
        monitor_interval=conf.monitor_interval,
        local_addr=conf.local_addr,
        event_log_handler=conf.event_log_handler,
        numa_options=conf.numa_options,
        duplicate_stdout_filters=conf.duplicate_stdout_filters,
        duplicate_stderr_filters=conf.duplicate_stderr_filters,
        virtual_local_rank=conf.virtual_local_rank,
    )
    agent = Agent(
        spec,
        conf.logs_specs,
        ledger=ledger,
        past=past,
        policy=restart_policy(conf.max_restarts, settings, past),
        desk=desk,
        starts=starts,
        in_process=settings.workers_in_process,
        settings=settings,
        exporter=exporter,
        start_method=conf.start_method,
        exit_barrier_timeout=EXIT_BARRIER_S,
        log_line_prefix_template=conf.log_line_prefix_template,
        **{name: getattr(conf, name) for name in _NEWER if hasattr(conf, name)},
    )
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = conf.signals_to_handle
    desk.open()
    if isinstance(rendezvous, Membership):
        rendezvous.has_notice = lambda: agent.leaves_now
        rendezvous.start(warming=True)
    try:
        result = agent.run()
    except JobOver as error:
        return RestartVerdict(restart=False, exit_code=error.exit_code, reason=error.reason)
    except RendezvousError as error:
        return _gave_up(f"the machines of this job do not come together: {error}")
    except SignalException as error:
        return _gave_up(f"ended by {error.sigval.name}")
    finally:
        with contextlib.suppress(RendezvousError):
            rendezvous.shutdown()
        agent.close()
        if not launch.keeps_logs:  # torch's agent makes a directory for error files at each start
            shutil.rmtree(conf.logs_specs.root_log_dir, ignore_errors=True)
    if not result.is_failed() and agent.signalled:
        reason = "the workers ended after they were told of the notice; start me again"
        return RestartVerdict(restart=False, exit_code=int(Exit.DRAINED), reason=reason)
    if agent.verdict is not None:
        return agent.verdict
    if not result.is_failed():
        return RestartVerdict(restart=False, exit_code=int(Exit.FINISHED), reason="")
    return _gave_up("the workers failed")


def _gave_up(reason: str) -> RestartVerdict:
    return RestartVerdict(restart=False, exit_code=int(Exit.GAVE_UP), reason=reason)


def _alone(launch: Launch, settings: config.Settings, past: Past, *, is_locked: bool) -> OneMachine:
    """The job on this machine alone, its first attempt claimed.

    Raises:
        ConfigError, StorageError: the job runs already, here or elsewhere.
    """
    term = term_over(settings.dir, say, is_locked=is_locked)
    term.open(past.attempt)
    past.look()  # whoever was waited for may have written meanwhile
    return OneMachine(launch.config.run_id, term)


def _rendezvous(
    launch: Launch, settings: config.Settings, job: Job, past: Past
) -> RendezvousHandler:
    conf = launch.config
    if conf.rdzv_backend == BACKEND:
        return membership(launch, settings, job, past)
    parameters = RendezvousParameters(
        backend=conf.rdzv_backend,
        endpoint=conf.rdzv_endpoint,
        run_id=conf.run_id,
        min_nodes=conf.min_nodes,
        max_nodes=conf.max_nodes,
        local_addr=conf.local_addr,
        **conf.rdzv_configs,
    )
    try:
        return FreshStore(registry.get_rendezvous_handler(parameters), conf.local_addr)
    except (ValueError, RendezvousError) as error:
        raise ConfigError(f"{str(error).rstrip('.?!')}. All flags: outlast run --help") from None


def _conclude(verdict: RestartVerdict, job: Job, directory: Path, command: str) -> None:
    where = place(directory)
    if verdict.exit_code == Exit.FINISHED:
        say(f"finished. Next: outlast report {where}")
    elif verdict.exit_code == Exit.DRAINED:
        say(f"{verdict.reason} (exit 75): {command}")
    elif verdict.exit_code == Exit.USAGE:
        say(verdict.reason or "the script was called wrongly (exit 2)")
    else:
        reason = verdict.reason or "a worker said why, above"
        say(f"{reason} (exit {verdict.exit_code}). See: outlast report {where}")


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
    wait_s = wait_s_of(conf.rdzv_configs)
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
            wait_s=wait_s_of(conf.rdzv_configs),
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


_INIT: Final = "torch.distributed.init_process_group(timeout=...)"
_READ: Final = frozenset(
    (
        *("ASYNC_ERROR_HANDLING", "AVOID_RECORD_STREAMS", "BCAST_UNIQUEID", "BLOCKING_WAIT"),
        *("COORD_CHECK_MILSEC", "CUDA_EVENT_CACHE", "DESYNC_DEBUG", "DUMP_ON_TIMEOUT"),
        *("ENABLE_MONITORING", "ENABLE_TIMING", "EXTRA_DUMP_ON_EXEC", "HEARTBEAT_TIMEOUT_SEC"),
        *("HIGH_PRIORITY", "LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN", "NAN_CHECK", "PROPAGATE_ERROR"),
        *("RANKS_PER_ROOT", "RETHROW_CUDA_ERRORS", "TRACE_BUFFER_SIZE", "TRACE_CPP_STACK"),
        *("USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "WAIT_TIMEOUT_DUMP_MILSEC"),
        *("DEBUG_INFO_TEMP_FILE", "USE_COMM_NONBLOCKING", "NONBLOCKING_TIMEOUT"),
    )
)
_OLD: Final = frozenset(  # read as NCCL_… too, with torch's own warning
    (
        *("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG", "ENABLE_TIMING"),
        "USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    )
)
_NOTHING: Final = {
    "NCCL_TIMEOUT": _INIT,
    "NCCL_SOCKET_TIMEOUT": _INIT,
    "TORCH_NCCL_TIMEOUT": _INIT,
    "TORCH_NCCL_SOCKET_TIMEOUT": _INIT,
    "NCCL_TIMEOUT_SEC": _INIT,
}


def unread(environ: Mapping[str, str]) -> list[str]:
    """One sentence for each variable that is set and does nothing.

    Args:
        environ: the environment.
    """
    found = []
    for name in sorted(environ):
        meant = _NOTHING.get(name)
        if name.startswith("NCCL_"):
            short = name.removeprefix("NCCL_")
            if short in _READ - _OLD:
                meant = f"TORCH_{name}"
        if meant is not None:
            found.append(f"{name} is set, and nobody reads it; what works is {meant}")
    return found
