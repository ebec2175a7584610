"""torch's agent with our judgement: what is done when a worker ends, and when a notice comes.

``LocalElasticAgent`` starts, watches and restarts workers. Added here: the attempt's number and
store for the workers, survivors of a failed attempt ended at once (they have nothing to lose: a
snapshot is committed or it is not), a policy that says whether to restart, notices passed on, and
the ledger.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from typing import Any, Final

from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from outlast.attempt.beat import BEATS_VARIABLE, BeatsDirectory, most_updates, read_beat
from outlast.attempt.link import ATTEMPT_VARIABLE, PREFIX, STORE_VARIABLE, kept_key, post
from outlast.attempt.over import LEAVES, LINE_VARIABLE, STANDBY_VARIABLE
from outlast.config import Settings
from outlast.errors import Exit
from outlast.health.exporter import Exporter
from outlast.health.processes import AGENT_VARIABLE, catches, end_group, end_leftovers, is_dying
from outlast.health.pulse import TRACER_VARIABLE
from outlast.health.watched import Timings, leave_word
from outlast.launch.ending import (
    DEATH_LOOK_S,
    UNHELD,
    Beginners,
    Crew,
    ProcessWait,
    Seats,
    StandIn,
    Survivors,
    WorkerShutdown,
)
from outlast.launch.health import Health, begin_of
from outlast.launch.judging import FailureHandler, worker_failure
from outlast.launch.machines import TROUBLE_S, Machines, Sessions
from outlast.launch.symptoms import Hangs, StragglerMonitor, failure_of, hang_of
from outlast.launch.warm.starts import Starts
from outlast.ledger.file import Ledger
from outlast.ledger.past import VARIABLE as PAST_VARIABLE
from outlast.ledger.past import Past
from outlast.notice import Notice
from outlast.notice.desk import Deaf, NoticeDesk
from outlast.policy.failures import Failure, is_echo
from outlast.policy.hang import Named
from outlast.policy.restart import TOGETHER, RestartPolicy, RestartVerdict

OF_A_LOSS: Final = (Exit.ROLLED_BACK, Exit.STARTS_ANEW)  # who ends with one of these says why
# Workers that drain together leave one after the other; the first must not end the others.
LEAVE_TOGETHER_S: Final = 10.0
# How long a worker may take to die of what has hit it already.
DYING_S: Final = 0.05
LEFTOVERS_S: Final = 1.0  # for what workers have started, when the job has ended
# What is kept of a notice's time to end workers that did not end themselves.
MARGIN_S: Final = 1.0
DEPARTS_S: Final = 1.0  # for word whether the others go on without this machine
# How long workers that have yet to hand over wait for the next attempt, and what must be left then.
HAND_OVER_S: Final = 5.0
BESIDE_TRIES: Final = 3  # to begin beside others, who become fewer or more meanwhile
BESIDE_S: Final = 1800.0  # for that; what takes longer is done, and judged, in an attempt
JOINS_S: Final = 10.0  # until all machines of an attempt have said how many workers go on
JOINS_LOOK_S: Final = 0.002
LEAST_S: Final = 2.0  # for a drain of a notice whose time is over when it comes


class Agent(LocalElasticAgent):
    """One machine's agent.

    Args:
        spec, logs_specs, options: torch's.
        ledger: the job's ledger.
        past: what is known of it.
        policy: judges failed attempts.
        desk: hears notices.
        settings: the job's.
        starts: starts the workers, warm or cold.
        exporter: shows metrics of them.
        in_process: whether workers may live through the end of an attempt.

    Attributes:
        verdict: why the job ended, once it has.
        signalled: whether a script without a session was told of a notice, so that an exit code
            of 0 does not say that it had finished.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: Any,
        *,
        ledger: Ledger,
        past: Past,
        policy: RestartPolicy,
        desk: NoticeDesk,
        settings: Settings,
        starts: Starts,
        exporter: Exporter,
        in_process: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(spec=spec, logs_specs=logs_specs, **options)
        self._machines = Machines(spec.rdzv_handler)
        self._machines.write_down(ledger)
        self._judging = FailureHandler(policy, ledger, past, self._machines, self._must_leave)
        self._ending = WorkerShutdown(
            *(starts.marks, self._machines, ledger, self._must_leave),
            exclude_for_s=policy.limits.exclude_for_s,
        )
        self._watch = ProcessWait(spec.monitor_interval, self._machines.news)
        spec.monitor_interval = 0.0  # torch's loop sleeps through a worker's death; ours does not
        self.verdict: RestartVerdict | None = None
        self.signalled = False
        self._ledger = ledger
        self._desk = desk
        self._starts = starts
        self._exporter = exporter
        starts.has_notice = self._must_leave
        self._deaf = Deaf(self._are_deaf)
        self._told: set[int] = set()  # workers that know of the notice
        self._told_of: Notice | None = None
        self._told_early: Notice | None = None
        self._ended: set[int] = set()  # workers that we ended
        self._leaving_since_s: float | None = None
        self._formed_s = time.monotonic()
        self._beats = BeatsDirectory()
        self._health = Health(ledger, self._beats.path / "watcher.log", starts.marks.stem)
        self._hangs = Hangs(
            *(self._health, ledger, settings.dir, self._beats.path),
            chosen=hang_of(settings),
            hosts=lambda: self._machines.hosts,
        )
        self._pace = StragglerMonitor(ledger, self._machines, settings)
        self._health.hear(Timings, self._pace.heard)
        self._health.open()
        self._sessions = Sessions(self._machines, self._beats.path, desk.saving_s)
        self._survivors = Survivors(self._beats.path, in_process)
        self._seats = Seats(range(spec.local_world_size), spec.local_world_size)
        self._would_be: Beginners | None = None  # of those that stand by to join others
        self._asked: str = ""  # the reason for which workers were asked to stop gently
        self._has_asked_to_fill = False
        self._has_finished = False
        self._in_session: set[int] = set()  # workers that were kept: they have one from the start
        self._kept_s = 0.0  # when workers were kept last

    def close(self) -> None:
        """Remove what this agent left in memory, and what workers that had to end left behind."""
        if not self._has_finished:
            end_leftovers(self._starts.marks.stem, limit_s=LEFTOVERS_S)
        self._hangs.close()
        self._pace.close()
        self._health.close()
        self._survivors.close()
        self._beats.close()
        self._watch.close()
        self._judging.close()

    # --- torch's hooks -----------------------------------------------------------------------

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        while True:
            result: RunResult = super()._invoke_run(role)
            if result.is_failed() or not self._machines.are_many or self.signalled:
                self._has_finished = not result.is_failed()
                return result
            self.verdict = self._machines.wait_for_others(self._must_leave)
            if self.verdict is not None:
                self._has_finished = not self.verdict.exit_code
                return result
            # Others have lost workers after ours had finished: all go on from the last commit.

    def _exit_barrier(self) -> None:
        if not self._machines.are_many:
            super()._exit_barrier()

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Without a word over a store that may go meanwhile, where it is known who has how many."""
        if self._machines.know_sizes:
            return self._seats.workers(group_rank, self._sizes)
        ranked: list[Worker] = super()._assign_worker_ranks(
            store, group_rank, group_world_size, spec
        )
        return ranked

    @property
    def _sizes(self) -> list[int]:
        """How many workers each machine of the attempt has, where that is known."""
        return self._machines.workers or [len(self._seats.taken)]

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        places = worker_group.spec.local_world_size
        if self._machines.know_sizes:
            self._seats = Seats(self._survivors.seats(places), places)
            self._machines.begin_with(len(self._seats.taken))
        self._ending.wait(self._survivors.pids)  # the next attempt needs what the last one held
        if self._machines.are_many:
            self._starts.warm_up()  # the others go on meanwhile; then nobody waits for us
            self._begin_beside_others(worker_group)
        while True:
            try:
                super()._rendezvous(worker_group)
            except RuntimeError:  # torch's stores raise it, and what comes of RendezvousError is
                if not self._machines.is_broken:
                    raise
            else:
                return

    def _begin_beside_others(self, worker_group: WorkerGroup) -> None:
        """Where others train and take us in, our workers go through their script's beginning first.

        Returns once they could join, or it is known that they are to begin with the others.
        """
        survivors = self._survivors
        if not survivors.address or survivors.kept or survivors.standing:
            return
        for _ in range(BESIDE_TRIES):
            sizes = self._machines.workers_elsewhere
            if not sizes:
                return
            places = worker_group.spec.local_world_size
            self._would_be = Beginners(len(sizes), (*sizes, places))
            self._stand_by(worker_group, self._would_be)
            is_over = self._look_until_prepared(sizes, places)
            self._set_aside(range(places))
            with survivors.staying():  # torch's bookkeeping of them ends, not they
                super()._stop_workers(worker_group)
            self._ending.wait(survivors.pids)
            if is_over:
                return

    def _stand_by(self, worker_group: WorkerGroup, would: Beginners) -> None:
        """Start our workers, of no attempt yet, with the places that they would have."""
        worker_group.store = HashStore()
        worker_group.master_addr, worker_group.master_port = "127.0.0.1", 0
        worker_group.group_rank, worker_group.group_world_size = would.group_rank, len(would.sizes)
        worker_group.workers = self._seats.workers(*would)
        self._set_environ()
        environ = {worker.local_rank: {STANDBY_VARIABLE: "1"} for worker in worker_group.workers}
        with self._starts.in_charge(Crew(environ=environ)):
            super()._start_workers(worker_group)
        self._survivors.stand_by(self._handlers())

    def _look_until_prepared(self, sizes: tuple[int, ...], places: int) -> bool:
        """Wait for our workers, ``places``, that stand by; False: the others have become others."""
        survivors, until_s = self._survivors, time.monotonic() + BESIDE_S
        processes = [handler.proc for handler in self._handlers().values()]
        while len(survivors.standing) == places:
            if survivors.are_complete:
                return True
            self._watch.wait(processes, survivors.descriptors)
            self._machines.look()
            survivors.look()
            is_over = self._must_leave() or self._machines.ends_now is not None
            if is_over or self._machines.is_waited_for or time.monotonic() > until_s:
                break
            now = self._machines.workers_elsewhere  # none from one attempt of theirs to the next
            if now and now != sizes:
                survivors.end_standing()
                return False
        survivors.end_standing()  # one that has failed here does so in an attempt, and is judged
        return True

    def _may_join(self, worker_group: WorkerGroup) -> bool:
        """Whether our workers that stand by have the places that they were started for.

        And others in the attempt that have lived through the one before, whose state they take.
        """
        if not self._survivors.standing or self._survivors.kept:
            return False
        now = Beginners(worker_group.group_rank, tuple(self._sizes))
        store, others = worker_group.store, set(range(worker_group.group_world_size))
        keys = [kept_key(machine) for machine in others - {worker_group.group_rank}]
        until_s = time.monotonic() + JOINS_S
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the attempt
            while now == self._would_be and time.monotonic() < until_s:
                known = [int(store.get(key)) for key in keys if store.check([key])]
                if any(known) or len(known) == len(keys):
                    return any(known)
                if self._machines.is_broken:
                    break
                time.sleep(JOINS_LOOK_S)
        return False

    def _set_environ(self) -> None:
        """What the workers of this machine find in their environment, whatever the attempt."""
        os.environ[BEATS_VARIABLE] = str(self._beats.path)
        os.environ[AGENT_VARIABLE] = os.environ[TRACER_VARIABLE] = str(os.getpid())
        if self._survivors.address:
            os.environ[LINE_VARIABLE] = self._survivors.address

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._health.end()
        self._pace.end()
        self._deaf.begin()
        self._told, self._ended = set(), set()
        self._told_early, self._asked, self._has_asked_to_fill = None, "", False
        self._leaving_since_s = None
        self._formed_s = time.monotonic()
        self._beats.clear()
        self._sessions.begin()
        self._judging.begin()
        for host, how in self._machines.lost():
            self._ledger.append("node_lost", node=host, reason=how)
        self._ledger.attempt = self._agree_on_attempt(worker_group)
        os.environ[ATTEMPT_VARIABLE] = str(self._ledger.attempt)
        os.environ[PAST_VARIABLE] = "" if worker_group.group_rank else self._judging.word()
        os.environ[STORE_VARIABLE] = f"{worker_group.master_addr}:{worker_group.master_port}"
        self._set_environ()
        self._hangs.set_timeout()
        if worker_group.group_rank == 0:
            self._ledger.append(
                "attempt_formed",
                world_size=worker_group.workers[0].world_size,
                nodes=worker_group.group_world_size,
                hosts=self._machines.workers_by_host,
            )
        started = self._start_crew(worker_group)
        group = self._seats.of(worker_group)
        self._hangs.begin(group)
        self._pace.begin(group)
        chosen = self._hangs.chosen
        begin = begin_of(group, started, self._ledger, self._beats.path, chosen)
        self._health.begin(begin)
        self._exporter.begin(begin)
        leave_word(self._ledger.job, begin)
        return started

    def _start_crew(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Those that were kept go on, others are started, and who has no place yet stands by."""
        seats, survivors = self._seats, self._survivors
        environ = seats.environ(worker_group.group_rank, self._sizes)
        # Those that stand by have no state, and do not count.
        worker_group.store.set(kept_key(worker_group.group_rank), str(len(survivors.kept)))
        kept = survivors.take(seats.taken, joins=self._may_join(worker_group))
        self._would_be = None
        self._in_session = set(kept)
        with self._starts.in_charge(Crew(kept, survivors.standing, environ)):
            started: dict[int, Any] = super()._start_workers(worker_group)
        handlers = self._handlers()
        survivors.stand_by({place: handlers[place] for place in seats.empty})
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        processes = [handler.proc for handler in self._handlers().values()]
        self._watch.wait(processes, self._survivors.descriptors)
        self._machines.look()
        self._survivors.look()
        if self._hangs.named is not None:
            return self._end_hung(worker_group, self._hangs.named)
        if self._leaves_at_once():
            return RunResult(state=WorkerState.FAILED)
        self._look_for_notices(worker_group)
        self._look_on(worker_group)
        codes = self._exit_codes()
        failed = [rank for rank, code in codes.items() if code]
        if not failed and self._survivors.are_moving:
            self._keep_or_end(moves=True)
            self._remaining_restarts += 1  # nobody has failed
            return RunResult(state=WorkerState.FAILED)
        if failed and any(code is None for code in codes.values()):
            if self._are_leaving_together(codes):
                return RunResult(state=WorkerState.HEALTHY)
            self._keep_or_end()
        over = self._machines.ends_now
        if over is not None and over.exit_code and not failed:
            if over.exit_code == Exit.DRAINED and self._are_leaving_together(codes):
                return RunResult(state=WorkerState.HEALTHY)
            return self._give_up(over)
        if None not in codes.values():
            self._set_aside(self._survivors.end_standing())
        self._pcontext.is_settled = bool(failed) or None not in codes.values()
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._judge(worker_group, result)
        return result

    def _look_on(self, worker_group: WorkerGroup) -> None:
        self._sessions.look(worker_group)
        self._judging.look()
        if self._machines.asks_gently:
            self._ask_gently(worker_group)
        if self._survivors.are_complete:
            self._ask_to_fill(worker_group)

    def _end_hung(self, worker_group: WorkerGroup, named: Named) -> RunResult:
        """Those that hang are ended first: whoever can go on has nothing to wait for then."""
        handlers = self._handlers()
        for worker in worker_group.workers:
            if worker.global_rank in named.ranks:
                self._ended.add(worker.local_rank)
                end_group(handlers[worker.local_rank].proc.pid)
        self._keep_or_end()
        result = RunResult(state=WorkerState.FAILED)
        self._judge(worker_group, result, hung=named)
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._keep_or_end()
        with self._survivors.staying():
            super()._stop_workers(worker_group)

    def _shutdown(self, *args: Any, **options: Any) -> None:
        self._survivors.end_unless_staying()
        super()._shutdown(*args, **options)

    # --- failures ----------------------------------------------------------------------------

    def _judge(
        self, worker_group: WorkerGroup, result: RunResult, hung: Named | None = None
    ) -> None:
        failures, lost = [], []
        for rank, failure in sorted(result.failures.items(), key=lambda item: item[1].timestamp):
            local_rank = failure.local_rank
            if local_rank in self._ended:
                continue
            seen = read_beat(self._beats.path, local_rank)
            one = worker_failure(rank, failure, seen.step if seen else None)
            failures.append(one)
            if one.exit_code not in TOGETHER:
                lost.append((one, failure, seen))
        causes = self._causes(lost)
        self._judging.note_lost(causes)
        by_themselves = [f.exit_code for f in failures if f.exit_code not in OF_A_LOSS]
        self._starts.ended(by_themselves)
        if hung is not None:
            hosts = {self._machines.host_of(rank) for rank in hung.ranks} - {None}
            failures.append(failure_of(hung, self._hangs.chosen, tuple(sorted(map(str, hosts)))))
        verdict = self._machines.judged(failures)
        is_first = not worker_group.group_rank  # what all have alike is written down once
        if verdict is None:
            lasted_s = time.monotonic() - self._formed_s
            updates = most_updates(self._beats.path, self._handlers())
            verdict = self._judging.judge(
                failures, lasted_s, echoes=causes != lost, updates=updates
            )
            if verdict.restart:
                if hung is None or is_first:
                    self._judging.write_down(verdict)
                verdict = self._judging.act(verdict, is_first=is_first)
        elif verdict.restart and is_first:
            self._judging.write_down(verdict)
        if verdict.restart:
            self._remaining_restarts += 1  # the policy counts them, not torch
        else:
            self._machines.stopped(verdict)
            self._give_up(verdict)

    def _causes(self, lost: list[tuple[Failure, Any, Any]]) -> list[tuple[Failure, Any, Any]]:
        """Those that were lost by themselves: a survivor whose connections ended was not.

        Where all are such, the cause is on another machine if one has trouble: its agent has it on
        record, or rank 0's has the loss of the machine.
        """
        causes = [one for one in lost if not is_echo(one[0])]
        if causes or not lost:
            return causes
        return [] if self._machines.have_trouble(TROUBLE_S) else lost

    def _give_up(self, verdict: RestartVerdict) -> RunResult:
        """End the job here: torch's loop then stops instead of restarting."""
        self.verdict = verdict
        self._remaining_restarts = 0
        self._survivors.end()
        self._end_workers()
        return RunResult(state=WorkerState.FAILED)

    def _must_leave(self) -> bool:
        """Whether this machine has had notice."""
        return self._desk.notice is not None

    @property
    def leaves_now(self) -> bool:
        """Whether this machine must leave, and its workers have not to hand over before."""
        waits = bool(self._survivors.kept) and time.monotonic() - self._kept_s < HAND_OVER_S
        return self._must_leave() and not (waits and self._may_hand_over)

    @property
    def _may_hand_over(self) -> bool:
        """Whether workers whose attempt is over may go into another one."""
        notice = self._desk.notice
        if notice is None:
            return True
        left_s = notice.seconds_left(time.time())
        return self._machines.are_many and (left_s is None or left_s > HAND_OVER_S)

    def _exit_codes(self) -> dict[int, int | None]:
        """Local rank → exit code; who stands by counts once it has ended."""
        standing = self._survivors.standing
        codes = {rank: handler.proc.poll() for rank, handler in self._handlers().items()}
        return {rank: code for rank, code in codes.items() if rank not in standing}

    def _set_aside(self, ranks: Iterable[int]) -> None:
        """Processes that torch's agent is not to end with the attempt."""
        handlers = self._handlers()
        for rank in ranks:
            self._pcontext.subprocess_handlers[rank] = StandIn(handlers[rank])

    def _handlers(self) -> dict[int, Any]:
        return dict(getattr(self._pcontext, "subprocess_handlers", {}))

    def _keep_or_end(self, *, moves: bool = False) -> None:
        """The attempt is over: whoever of the workers can go on is kept, the others are ended.

        Args:
            moves: nobody was lost: workers have agreed on it.
        """
        self._hangs.end()
        self._health.end()
        self._pace.end()
        self._let_the_dying_die()
        handlers = self._handlers()
        standing = self._survivors.standing
        running = {
            rank: one
            for rank, one in handlers.items()
            if rank not in standing and one.proc.poll() is None
        }
        if running and self._may_hand_over and self.verdict is None:
            begun_s = time.monotonic()
            self._survivors.gather(running)
            self._set_aside([*self._survivors.kept, *standing])
            self._kept_s = time.monotonic()
            self._note_kept(self._kept_s - begun_s, moves=moves)
            self._let_leavers_go(running)
            if self._survivors.kept:
                self._machines.remain()
        self._end_workers()

    def _let_leavers_go(self, running: dict[int, Any]) -> None:
        """Workers on their way out have a session to close."""
        leavers = [rank for rank, why in self._survivors.reasons.items() if why == LEAVES]
        left_s = None if self._desk.notice is None else self._desk.notice.seconds_left(time.time())
        limit_s = LEAVE_TOGETHER_S if left_s is None else min(left_s - MARGIN_S, LEAVE_TOGETHER_S)
        until_s = time.monotonic() + limit_s
        while any(running[rank].proc.poll() is None for rank in leavers):
            if time.monotonic() > until_s:
                return
            time.sleep(DEATH_LOOK_S)

    def _note_kept(self, seconds: float, *, moves: bool) -> None:
        survivors = self._survivors
        if not survivors.kept and set(survivors.reasons.values()) <= {UNHELD, LEAVES}:
            return
        ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        self._ledger.append(
            "survived",
            ranks=sorted(ranks[one] for one in survivors.kept),
            ended={str(ranks[one]): reason for one, reason in survivors.reasons.items()},
            seconds=round(seconds, 6),
            moves=moves,
        )

    def _end_workers(self) -> None:
        """SIGKILL for all that is left of the attempt: it only waits."""
        self._let_the_dying_die()
        handlers = self._handlers()
        self._ended |= {rank for rank, one in handlers.items() if one.proc.poll() is None}
        # torch would wait for those, and hear no notice meanwhile; our rendezvous does.
        self._set_aside(self._ending.end(handlers))

    def _let_the_dying_die(self) -> None:
        # Workers that were killed together do not vanish together: one whose memory is still being
        # torn down must not be taken for a survivor that we ended.
        deadline = time.monotonic() + DYING_S
        while time.monotonic() < deadline:
            codes = self._exit_codes()
            left = [self._handlers()[rank].proc.pid for rank, code in codes.items() if code is None]
            # What fails by itself may fail everywhere; a kill has hit the others already or not.
            killed = all(code in (None, -signal.SIGKILL) for code in codes.values())
            if not left or (killed and not any(is_dying(pid) for pid in left)):
                return
            time.sleep(0.002)

    # --- notices -----------------------------------------------------------------------------

    def _look_for_notices(self, worker_group: WorkerGroup) -> None:
        if self._survivors.are_moving:
            return  # who has had notice hands over in the next attempt
        if self._desk.notice is not None:
            self._pass_on(worker_group)
        elif self._desk.early is not self._told_early:
            self._pass_on_early(worker_group)
        else:
            self._deaf.look(gives_notices=self._desk.gives_notices)

    def _pass_on(self, worker_group: WorkerGroup) -> None:
        """Tell the workers once; end them when the time is over."""
        notice, info = self._desk.notice, self._desk.request()
        assert notice is not None  # noqa: S101 - the caller saw it, and it is never taken back
        if notice is not self._told_of:  # the first, or one that leaves less time
            self._told_of = notice
            self._told.clear()
        self._hurry_torch(notice)
        goes_on = self._machines.notice() if self._survivors.address else False
        knows = goes_on is not None or time.time() - notice.heard_t > DEPARTS_S
        if knows and not self._machines.is_broken:
            ranks = [worker.global_rank for worker in self._seats.of(worker_group).workers]
            leaves = {"leaves": ranks} if goes_on else {}
            with contextlib.suppress(RuntimeError):  # the store is gone: so is the attempt
                self._tell_workers(worker_group, {**(info or {}), **leaves})
        self._deaf.at_notice(notice, left_s=notice.seconds_left(time.time()))
        over = notice.deadline_t is not None and time.time() > max(
            notice.deadline_t - MARGIN_S, notice.heard_t + LEAST_S
        )
        if over or self._desk.impatient:
            self._machines.break_off()
            self._end_workers()

    def _tell_workers(self, worker_group: WorkerGroup, info: dict[str, Any] | None) -> None:
        store = worker_group.store
        for worker in self._seats.of(worker_group).workers:
            if worker.local_rank in self._told:
                continue
            if store.check([f"{PREFIX}/session/{worker.global_rank}"]):
                post(store, 0, {"kind": "ask", "action": "drain", "at": 0, "info": info})
                self._told.update(one.local_rank for one in worker_group.workers)
            elif worker.local_rank in self._in_session:
                continue  # it is about to say so
            elif catches(worker.id, signal.SIGTERM):
                # An unchanged script that wants to hear of it; one that does not goes on.
                os.kill(worker.id, signal.SIGTERM)
                self.signalled = True
                self._told.add(worker.local_rank)

    def _are_deaf(self) -> bool:
        """Whether no worker of this machine would hear of a notice now."""
        group = self._worker_group
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the attempt
            return not any(
                catches(worker.id, signal.SIGTERM)
                or group.store.check([f"{PREFIX}/session/{worker.global_rank}"])
                for worker in group.workers
            )
        return False

    def _leaves_at_once(self) -> bool:
        """Whether the others go on without this machine, and nothing here could be saved before."""
        if not self._must_leave() or self._survivors.are_moving or not self._machines.notice():
            return False
        group = self._worker_group
        if self._told or any(catches(worker.id, signal.SIGTERM) for worker in group.workers):
            return False  # a session (on its way out it is deaf), or a script that wants to hear
        self._give_up(
            RestartVerdict(
                restart=False,
                exit_code=int(Exit.DRAINED),
                reason="this machine has left, the others go on",
            )
        )
        return True

    def _ask_gently(self, worker_group: WorkerGroup) -> None:
        """The machines of the job change: workers with a session stop at a step's end."""
        reason = self._machines.asks_gently
        if self._asked == reason:
            return
        self._asked = reason
        has_session = False
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the attempt
            store = worker_group.store
            has_session = store.check([f"{PREFIX}/session/0"])
            if has_session and worker_group.group_rank == 0:
                info = {"reason": reason, "left_s": None}
                post(store, 0, {"kind": "ask", "action": self._ends_by, "at": 0, "info": info})
                self._sessions.tell_needs()
        self._machines.be_patient(has_session)

    @property
    def _ends_by(self) -> str:
        """How workers leave an attempt at a step's end, whose machines are others then."""
        return "move" if self._survivors.address else "drain"

    def _ask_to_fill(self, worker_group: WorkerGroup) -> None:
        """Who stood by could begin: all go into an attempt with every place of ours taken."""
        if self._has_asked_to_fill:
            return
        if self._machines.are_many:
            self._has_asked_to_fill = True
            self._machines.fill()
            return
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the attempt
            if worker_group.store.check([f"{PREFIX}/session/0"]):
                self._has_asked_to_fill = True
                info = {"reason": "a worker is back", "left_s": None}
                ask = {"kind": "ask", "action": "move", "at": 0, "info": info}
                post(worker_group.store, 0, ask)

    def _pass_on_early(self, worker_group: WorkerGroup) -> None:
        """Rank 0 says when to save; it is told once it listens. Only sessions can be told."""
        store = worker_group.store
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the attempt
            if store.check([f"{PREFIX}/session/0"]):
                post(store, 0, {"kind": "hurry", "info": self._desk.early_request()})
                self._told_early = self._desk.early

    def _hurry_torch(self, notice: Notice) -> None:
        """The waits of torch's agent must not be longer than the machine has."""
        left_s = notice.seconds_left(time.time())
        if left_s is not None:
            for name in ("_exit_barrier_timeout", "_shutdown_timeout"):
                if hasattr(self, name):  # torch 2.11 has no such time limit
                    setattr(self, name, min(getattr(self, name), max(int(left_s), 1)))

    def _are_leaving_together(self, codes: dict[int, int | None]) -> bool:
        """Whether workers that still run are to be given time to leave, as the first ones did."""
        if any(code not in (None, 0, *TOGETHER) for code in codes.values()):
            return False
        now = time.monotonic()
        self._leaving_since_s = self._leaving_since_s or now
        return now - self._leaving_since_s < LEAVE_TOGETHER_S

    # --- the attempt's number ----------------------------------------------------------------

    def _agree_on_attempt(self, worker_group: WorkerGroup) -> int:
        if self._machines.attempt is not None:
            return self._machines.attempt
        store = worker_group.store
        if worker_group.group_rank == 0:
            store.set(f"{PREFIX}/attempt", str(self._judging.next_attempt()))
        return int(store.get(f"{PREFIX}/attempt"))
