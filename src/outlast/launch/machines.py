"""What the other machines of a job mean for the workers of this one.

``exclude`` is the one way to have a machine replaced or left out, whoever asks: this machine's
own agent after a failure, or rank 0's for one that is slow. A machine that waits for a place takes
its place; where too few others would be left it stays, and that is said. What comes of it is an
event of the ledger (``left_out``), so that it outlives this agent.

The agent asks here, at each look at its workers, whether the running attempt is over for a reason
that lies elsewhere; and says here what became of its own. A job on one machine, or under one of
torch's own rendezvous, has a ``Machines`` that says no, unless a newer attempt was begun elsewhere.

``Sessions`` is what the agent of rank 0 sees of the sessions, for the other machines to know:
whether the data are tied to the number of workers (a session says so through the attempt's store),
and how long workers need to stop at a step's end (their beats, and the ledger's saves). Looking
costs two questions to a store in this process, five times a second.

Every attempt has a fresh store, whatever rendezvous decides who takes part (``OneMachine``,
``FreshStore``). torch 2.13 shares one store over all attempts, and workers of the second read the
first one's keys (pytorch#135712): most jobs never recover. Here the agent with rank 0 serves a new
store each time and tells its address through the rendezvous' own store.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from outlast.attempt.beat import read_beat
from outlast.attempt.link import DATA_KEY, PREFIX, TIED, connect, open_store
from outlast.errors import Exit
from outlast.launch.membership import Membership
from outlast.launch.membership.handler import REASON_MAX
from outlast.launch.membership.messages import Excluded, Go
from outlast.ledger.file import Ledger
from outlast.peer.claims import Term
from outlast.policy.exclusion import Exclusion
from outlast.policy.failures import Failure
from outlast.policy.hang import StepTimes
from outlast.policy.restart import ON_PURPOSE, RestartVerdict

_TIMEOUT = timedelta(minutes=5)


class OneMachine(RendezvousHandler):
    """The rendezvous of a job on one machine: nobody to wait for, all on loopback.

    Args:
        run_id: the job's id.
        term: claims the attempts.

    Attributes:
        attempt: the number of the newest; 0 before the first.
    """

    def __init__(self, run_id: str, term: Term) -> None:
        self._run_id = run_id
        self.term = term
        self.attempt = 0
        self._server: Any = None
        self._closed = False

    def get_backend(self) -> str:
        """Name of the rendezvous."""
        return "outlast-local"

    @property
    def use_agent_store(self) -> bool:
        """Workers connect to the store that the agent serves."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """An attempt of this machine alone, with a fresh store."""
        self.attempt = self.term.begin()
        self._server, port = open_store("127.0.0.1")
        return _info("127.0.0.1", port, rank=0, world_size=1)

    def is_closed(self) -> bool:
        """Whether the job is over."""
        return self._closed

    def set_closed(self) -> None:
        """The job is over."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Nobody ever waits."""
        return 0

    def get_run_id(self) -> str:
        """The job's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close it; nothing is left to clean up."""
        self._closed = True
        return True


class FreshStore(RendezvousHandler):
    """Any rendezvous of torch's, with a fresh store for the workers of each attempt."""

    def __init__(self, inner: RendezvousHandler, local_addr: str | None) -> None:
        self._inner = inner
        self._local_addr = local_addr
        self._server: Any = None
        self._attempts = 0

    @property
    def use_agent_store(self) -> bool:
        """Workers connect to the store that the agent serves."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """What the inner rendezvous decides, with a store of the attempt's own."""
        info = self._inner.next_rendezvous()
        self._attempts += 1
        # A static rendezvous keeps one store for all attempts, the others have one for each round.
        static = self._inner.get_backend() == "static"
        key = f"outlast/store/{self._attempts}" if static else "outlast/store"
        if info.rank == 0:
            self._server, port = open_store("0.0.0.0")  # noqa: S104
            host = self._local_addr or info.bootstrap_store_info.master_addr
            info.store.set(key, f"{host}:{port}")
        host, _, number = info.store.get(key).decode().rpartition(":")
        return _info(host, int(number), rank=info.rank, world_size=info.world_size)

    def get_backend(self) -> str:
        """Name of the inner rendezvous."""
        return str(self._inner.get_backend())

    def is_closed(self) -> bool:
        """Whether the job is over."""
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        """The job is over."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Machines that want to join."""
        return int(self._inner.num_nodes_waiting())

    def get_run_id(self) -> str:
        """The job's id."""
        return str(self._inner.get_run_id())

    def shutdown(self) -> bool:
        """Close the inner rendezvous: the other agents stop."""
        return bool(self._inner.shutdown())


def _info(host: str, port: int, *, rank: int, world_size: int) -> RendezvousInfo:
    # Bare, without a prefix: agents and workers meet under the same keys (see attempt.link).
    return RendezvousInfo(
        connect(host, port, _TIMEOUT), rank, world_size, RendezvousStoreInfo(host, port)
    )


TROUBLE_S: Final = 0.5
BARRIER_S: Final = 0.5  # between two looks at what a machine that is done waits for
STAYS: Final = "another machine leaves; this one stays"
CHANGES: Final = "the machines of the job change"
LEAVES_DONE: Final = "this machine's workers had finished and it has left, the others go on"


class Machines:
    """The others, as this machine's agent sees them.

    Args:
        rendezvous: the agent's.
    """

    def __init__(self, rendezvous: RendezvousHandler) -> None:
        self._membership = rendezvous if isinstance(rendezvous, Membership) else None
        self._alone = rendezvous if isinstance(rendezvous, OneMachine) else None
        self._has_notice = False
        self._last: Go | None = None  # the attempt that ``lost`` was asked about last

    @property
    def news(self) -> int | None:
        """A descriptor that is readable once the others have said something, until ``look``."""
        return self._membership.news if self._membership is not None else None

    def look(self) -> None:
        """What the others have said is looked at now."""
        if self._membership is not None:
            self._membership.look()

    @property
    def attempt(self) -> int | None:
        """The number of the attempt, where it was claimed; None under torch's own rendezvous."""
        if self._alone is not None:
            return self._alone.attempt
        if self._membership is None or self._membership.attempt is None:
            return None
        return self._membership.attempt.attempt

    @property
    def workers(self) -> list[int]:
        """How many workers each machine of the attempt has, by rank; empty where nobody says."""
        now = self._membership.attempt if self._membership is not None else None
        return [member.workers for member in now.members] if now is not None else []

    @property
    def know_sizes(self) -> bool:
        """Whether it is said how many workers each machine has, or there is only this one."""
        return self._membership is not None or self._alone is not None

    @property
    def workers_elsewhere(self) -> tuple[int, ...]:
        """How many workers each machine has of an attempt that will take this one in, if any."""
        if self._membership is None:
            return ()
        self._membership.wait_until_known()
        return self._membership.workers_elsewhere

    @property
    def is_waited_for(self) -> bool:
        """Whether the job has too few machines, or none, so that it waits for this one."""
        return self._membership is not None and self._membership.is_waited_for

    def begin_with(self, workers: int) -> None:
        """So many of this machine's workers take part in the next attempt."""
        if self._membership is not None:
            self._membership.begin_with(workers)

    def fill(self) -> None:
        """Places of this machine that are empty in this attempt could be taken now."""
        if self._membership is not None:
            self._membership.fill()

    @property
    def hosts(self) -> list[str]:
        """Names of the attempt's machines, by rank; empty where nobody says."""
        now = self._membership.attempt if self._membership is not None else None
        return [member.host for member in now.members] if now is not None else []

    @property
    def workers_by_host(self) -> dict[str, int] | None:
        """How many workers each machine of the attempt has, by name; None where nobody says."""
        found: dict[str, int] = {}
        for host, workers in zip(self.hosts, self.workers, strict=True):
            found[host] = found.get(host, 0) + workers  # several agents may run on one machine
        return found or None

    @property
    def num_aside(self) -> int:
        """How many machines waited when the attempt began; those left out are among them."""
        now = self._membership.attempt if self._membership is not None else None
        return len(now.aside) if now is not None else 0

    def lost(self) -> list[tuple[str, str]]:
        """Names of the machines that the attempt now has lost since the last one, and how.

        One that has said that it leaves is not lost, nor one that waits aside. How: in words that
        go on from the name, "" where nobody has said. It is for one machine to tell, and so empty
        on all others: the first by rank that was in the last attempt. (Rank 0 may be the lost
        machine itself, started anew: it knows of no last attempt.)
        """
        membership = self._membership
        now, last = (membership.attempt, self._last) if membership is not None else (None, None)
        self._last = now
        if membership is None or now is None or last is None:
            return []
        there = {member.node for member in last.members}
        teller = next((member.node for member in now.members if member.node in there), None)
        if teller != membership.me.node:
            return []
        here = {member.node for member in now.members} | set(now.aside)
        words = membership.halted.split("; ")
        hows = {host: how for host, _, how in (each.partition(" ") for each in words)}
        return [
            (member.host, hows.get(member.host, ""))
            for member in last.members
            if member.node not in here and not membership.has_left(member.node)
        ]

    @property
    def ends_now(self) -> RestartVerdict | None:
        """How the job has ended elsewhere, if it has; its workers have been told, or are lost."""
        if self._alone is not None and self._alone.term.overtaken:
            reason = self._alone.term.overtaken
            return RestartVerdict(restart=False, exit_code=int(Exit.STORAGE), reason=reason)
        over = self._membership.over if self._membership is not None else None
        if over is None:
            return None
        return RestartVerdict(restart=False, exit_code=over.exit_code, reason=over.reason)

    @property
    def asks_gently(self) -> str:
        """Why workers are to stop at a step's end, or "" when nobody asks for that."""
        halt = self._membership.halt if self._membership is not None else None
        return halt.reason if halt is not None and halt.gentle else ""

    @property
    def is_broken(self) -> bool:
        """Whether the running attempt is over, so that what its store says does not matter."""
        return self._membership is not None and self._membership.halt is not None

    def have_trouble(self, wait_s: float) -> bool:
        """Whether the attempt is over for a reason that lies elsewhere; waits so long for word."""
        membership = self._membership
        return membership is not None and membership.wait_until_over_or_halted(wait_s)

    def be_patient(self, patient: bool) -> None:
        """Whether workers that are asked gently are stopping by themselves."""
        if self._membership is not None:
            self._membership.is_patient = patient

    def notice(self) -> bool | None:
        """This machine has had notice: whether the job goes on without it; None if unknown yet."""
        if self._membership is None:
            return False
        if not self._has_notice:
            self._has_notice = True
            self._membership.leaving()
        return self._membership.goes_on_without(self._membership.me.node)

    def remain(self) -> None:
        """Workers here have yet to hand over: this machine says anew, in the next attempt."""
        if self._membership is not None and self._has_notice:
            self._has_notice = False
            self._membership.remains()

    def break_off(self) -> None:
        """Workers here are ended in the midst of a step, before this machine leaves."""
        if self._membership is not None:
            self._membership.broke = True

    def data_are_tied(self, tied: bool) -> None:
        """Whether the workers' data belong to the number of machines that there are now."""
        if self._membership is not None:
            self._membership.data_are_tied(tied)

    def host_of(self, rank: int) -> str | None:
        """The name of the machine that a worker of the running attempt is on, if known."""
        membership = self._membership
        now = membership.attempt if membership is not None else None
        for member in now.members if now is not None else ():
            if rank < member.workers:
                return member.host
            rank -= member.workers
        return None

    def exclude(
        self,
        reason: str,
        *,
        for_s: float,
        host: str | None = None,
        gentle: bool = False,
        spare_only: bool = False,
    ) -> bool:
        """Ask for a machine to be left out of the attempts to come.

        Args:
            reason: in words that go on from "left out: ".
            for_s: how long; it is taken in again after that.
            host: which machine, by its name (see ``host_of``); this one by default.
            gentle: workers go on to a step's end and save there; otherwise they are ended at once.
            spare_only: only if another machine waits for a place; otherwise it stays where it is.

        Returns:
            Whether there is somebody to ask: False on one machine, and under torch's rendezvous.
        """
        membership = self._membership
        if membership is None:
            return False
        me = membership.me
        out = Exclusion(
            host=host or me.host,
            reason=reason[:REASON_MAX],
            for_s=for_s,
            spare_only=spare_only,
            asker=me.node,
        )
        membership.exclude(out, gentle=gentle)
        return True

    def write_down(self, ledger: Ledger) -> None:
        """Have what comes of this machine's asking written into the ledger."""
        membership = self._membership
        if membership is None:
            return
        me = membership.me.node

        def told(word: Excluded) -> None:
            out = word.out
            if out.asker == me:
                ledger.append(
                    "left_out",
                    durable=False,  # the hub's thread does not wait for a disk
                    node=out.host,
                    reason=out.reason,
                    until_t=time.time() + out.for_s,
                    for_s=out.for_s,
                    spare_only=out.spare_only,
                    goes=word.goes,
                )

        membership.hear_of_left_out(told)

    def workers_ended(self) -> None:
        """The workers here have ended, and this machine will be ready in a while."""
        if self._membership is not None:
            self._membership.ended()

    def need(self, seconds: float) -> None:
        """Workers that stop at a step's end were seen to need so long for it."""
        if self._membership is not None:
            self._membership.needs(seconds)

    def judged(self, failures: list[Failure]) -> RestartVerdict | None:
        """What follows for reasons that lie elsewhere; None: that is for this machine's policy."""
        membership = self._membership
        if membership is None or self._has_notice or not failures:
            return None
        codes = {failure.exit_code for failure in failures}
        if Exit.DRAINED not in codes or codes & set(ON_PURPOSE):
            return None  # whatever else ended has failed of the others' leaving
        if membership.somebody_departs:
            return RestartVerdict(restart=True, exit_code=int(Exit.FINISHED), reason=STAYS)
        # If this process hung, the word of those who asked them may not have reached it yet.
        if self.asks_gently or (self.have_trouble(TROUBLE_S) and self.ends_now is None):
            return RestartVerdict(restart=True, exit_code=int(Exit.FINISHED), reason=CHANGES)
        return None

    def stopped(self, verdict: RestartVerdict) -> None:
        """This machine's policy ends the job: so do the others, unless only we leave."""
        membership = self._membership
        if membership is None:
            return
        alone = self._has_notice and membership.goes_on_without(membership.me.node)
        if not alone:
            membership.finish(verdict.exit_code, verdict.reason)

    def wait_for_others(self, must_leave: Callable[[], bool]) -> RestartVerdict | None:
        """This machine's workers have finished: how the job ends here; None: work is to go on."""
        membership = self._membership
        assert membership is not None  # noqa: S101 - asked where ``are_many``
        membership.done()
        while not membership.wait_until_over_or_halted(BARRIER_S):
            if must_leave():
                return RestartVerdict(
                    restart=False, exit_code=int(Exit.DRAINED), reason=LEAVES_DONE
                )
        return self.ends_now

    @property
    def are_many(self) -> bool:
        """Whether there may be others that we know of."""
        return self._membership is not None


LOOK_S: Final = 0.2


class Sessions:
    """The sessions of this machine's workers, in one attempt after the other.

    Args:
        machines: to be told.
        beats: directory of this machine's workers' beats.
        saving_s: how long a save takes, when it goes slowly; None before the first.
    """

    def __init__(
        self, machines: Machines, beats: Path, saving_s: Callable[[], float | None]
    ) -> None:
        self._machines = machines
        self._beats = beats
        self._saving_s = saving_s
        self._steps = StepTimes()
        self._are_tied: bool | None = None
        self._looked_s = 0.0

    def begin(self) -> None:
        """Another attempt starts."""
        self._steps.begin()
        self._are_tied = None

    def look(self, group: Any) -> None:
        """At each look at the workers ``group``; only rank 0's machine has something to say."""
        now_s = time.monotonic()
        if group.group_rank or not self._machines.are_many or now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        beat = read_beat(self._beats, 0)
        if beat is not None:
            self._steps.seen(beat.step, now_s)
        key = f"{PREFIX}/{DATA_KEY}"
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the attempt
            if group.store.check([key]):
                are_tied = group.store.get(key) == TIED
                if are_tied != self._are_tied:
                    self._are_tied = are_tied
                    self._machines.data_are_tied(are_tied)

    def tell_needs(self) -> None:
        """Workers are asked to stop at a step's end: how long that may take, once it is known."""
        longest_s, saving_s = self._steps.longest_s(time.monotonic()), self._saving_s()
        if longest_s is not None and saving_s is not None:
            self._machines.need(longest_s + saving_s)
