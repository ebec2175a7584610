"""``outlast run``: put the pieces together, run the agent, and leave with the right exit code.

Environment variables of NCCL's and torch's that nobody reads, and the ones that were meant.

The names are those that torch 2.13's ``ProcessGroupNCCL.hpp``, ``NCCLUtils.hpp`` and
``FlightRecorder.hpp`` read; what torch still reads under an old name is not warned about.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.api import RendezvousError

from outlast import config
from outlast.attempt.trackers import JOB_VARIABLE
from outlast.checkpoint.catalog import open_job
from outlast.config import GRACE_MAX_S
from outlast.errors import ConfigError, Exit
from outlast.keeper.process import SOCKET_VARIABLE, Supervisor, TierWaits, setup_of
from outlast.launch.agent import Agent
from outlast.launch.arguments import Launch
from outlast.launch.desk import NoticeDesk
from outlast.launch.first_look import quieten_loggers
from outlast.launch.health import note_gap
from outlast.launch.judging import restart_policy
from outlast.launch.machines import FreshStore, OneMachine
from outlast.launch.membership import JobOver, Membership
from outlast.launch.place import BACKEND
from outlast.launch.requeue import requeue
from outlast.launch.together import introduce, membership, preflight, readmit, record
from outlast.launch.warm.client import WarmServer
from outlast.launch.warm.starts import Starts
from outlast.ledger.command import refuse_other, settle, without_secrets
from outlast.ledger.file import Ledger, QueuedLedger, read_events
from outlast.ledger.job import Job, JobLock, enter_plan, versions
from outlast.ledger.measured import Measured
from outlast.ledger.narrator import Narrator, place, say
from outlast.ledger.past import Past
from outlast.notice import UNKNOWN_GRACE_S
from outlast.notice.desk import GraceCheck, checked, standing
from outlast.peer.term import term_over
from outlast.policy.restart import RestartVerdict

_NEWER: Final = ("shutdown_timeout",)  # settings of torch's agent that torch 2.11 does not have
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


EXIT_BARRIER_S: Final = 300.0
LEAVING_S: Final = 1.0  # of the time that a notice leaves, kept for our own exit


def run(arguments: list[str], server: WarmServer | None = None) -> int:
    """Run a script under outlast.

    Args:
        arguments: the command line after ``outlast run``.
        server: one that has been started already, for this command line; closed by the caller.

    Returns:
        The exit code (see :class:`outlast.errors.Exit`), or 1 where the doctor found this machine
        unfit.

    Raises:
        ConfigError: the command line, a setting or the job's directory cannot be used.
        StorageError: the job's record cannot be read.
    """
    launch = Launch(arguments)
    settings = checked(config.load({"dir": launch.directory, "resume": launch.resume}))
    refuse_other(settings, launch.command)
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
    _tell_workers(settings, job)
    quieten_loggers(os.environ)
    ledger = QueuedLedger(settings.dir, job=job.id)
    _begin(ledger, arguments, settings.dir, joins=isinstance(rendezvous, Membership))
    if examined is not None:
        record(examined, ledger)
    starts = Starts(launch, settings.workers_warm, say, server)
    starts.open()
    grace_check = GraceCheck(settings, say)
    narrator = Narrator(settings.dir, also=grace_check.take)
    keeper = _start_keeper(settings, job, rendezvous, ledger)
    if isinstance(rendezvous, Membership):
        introduce(rendezvous, keeper, settings)
    elif isinstance(rendezvous, OneMachine):
        name = rendezvous.term.name
        rendezvous.term.on_claimed = lambda number: keeper.tell_members(number, [], 0, term=name)
    if settings.restart_let_in:
        readmit(rendezvous, ledger)
    workers = launch.config.nproc_per_node
    say(f"job {job.id} in {place(settings.dir)}; {workers} worker{'s'[: workers > 1]} here")
    for word in unread(os.environ):
        say(word)
    narrator.start()
    desk = NoticeDesk(settings, ledger, grace_check)
    try:
        verdict = _attempts(launch, desk, ledger, rendezvous, starts, past=past, settings=settings)
    finally:
        starts.close()
        ledger.flush()  # so that the narrator finds it
        narrator.stop()
        is_all_there = keeper.close(_time_left_s(desk), hurry=lambda: _time_left_s(desk))
        desk.close()  # not before: a signal while copies are made must not hide how the job ended
    term = rendezvous.term if isinstance(rendezvous, OneMachine) else None
    others_go_on = (isinstance(rendezvous, Membership) and rendezvous.others_go_on) or (
        term is not None and bool(term.overtaken)
    )
    if not others_go_on:
        ledger.append(
            "job_finished",
            exit_code=verdict.exit_code,
            reason=verdict.reason,
            kind=verdict.kind.value if verdict.kind else None,
        )
    ledger.close()
    if term is not None:
        term.close(verdict.exit_code, verdict.reason)
    lock.release()
    _say_behind(settings, is_due=verdict.exit_code == Exit.DRAINED or not is_all_there)
    if verdict.exit_code == Exit.DRAINED:
        desk.acknowledge()
    _conclude(verdict, job, settings.dir, shlex.join(["outlast", "run", *arguments]))
    if settings.notice_requeue and verdict.exit_code == Exit.DRAINED and not others_go_on:
        requeue(os.environ)
    return verdict.exit_code


def _begin(ledger: Ledger, arguments: list[str], directory: Path, *, joins: bool) -> None:
    ledger.append(
        "job_started",
        command=shlex.join(["outlast", "run", *without_secrets(arguments)]),
        versions=versions(),
        pid=os.getpid(),
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


def _attempts(
    launch: Launch,
    desk: NoticeDesk,
    ledger: Ledger,
    rendezvous: RendezvousHandler,
    starts: Starts,
    *,
    past: Past,
    settings: config.Settings,
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
