"""The rendezvous that torch's agent sees: no machine is special, nobody is waited for in vain.

    outlast run --nnodes 2:4 train.py            settings say where the job's directory is
    torchrun --rdzv-backend outlast --rdzv-endpoint DIR_OR_URL …    under torch's own agent

``next_rendezvous`` says that this machine's workers have ended and waits for the next attempt;
``num_nodes_waiting`` says that the running one is over. All else happens in the hub's thread.

``Mailbox`` is what the hub's thread tells the agent's main thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Final

import msgspec
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousStoreInfo,
)

from outlast.attempt.link import connect
from outlast.config import load
from outlast.errors import ConfigError, Exit
from outlast.launch.first_look import BACKEND, place_of, reached_at
from outlast.launch.membership.hub import Hub, lack
from outlast.launch.membership.messages import (
    Bye,
    Departs,
    Done,
    Exclude,
    Excluded,
    Fill,
    Finish,
    Fixed,
    Go,
    Halt,
    JobEnded,
    Leaving,
    Member,
    Needs,
    Readmit,
    Refused,
    Remains,
    Waits,
    Welcome,
    WorkersEnded,
)
from outlast.launch.membership.node import Node
from outlast.ledger.narrator import say
from outlast.peer.claims import FORMED_VARIABLE, Claims, Clerk
from outlast.peer.key import Tls, job_key
from outlast.policy.exclusion import Exclusion
from outlast.policy.membership import MembershipRules
from outlast.storage import open_storage


class JobOver(RendezvousClosedError):
    """The job has ended on all machines.

    Attributes:
        exit_code: what ``outlast run`` is to leave with.
        reason: why, in words.
    """

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(reason or "the job is over")
        self.exit_code = exit_code
        self.reason = reason


class Mailbox:
    """What the hub's thread tells the agent's main thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.go: Go | None = None
        self.halt: Halt | None = None
        self.halted = ""  # why the last attempt that ended here did
        self.over: JobEnded | None = None
        self.departs: dict[str, Departs] = {}
        self.members: set[str] = set()  # of the last attempt
        self.words = ""
        self.runs = False  # an attempt, without this machine
        self.workers: tuple[int, ...] = ()  # of that, where this machine is to be taken in
        self.knows = False  # whether others train
        self.lacks = False  # whether they wait for machines
        self.refused = ""  # why this machine may not take part
        self.rules: MembershipRules | None = None  # of the job, where they are not ours
        self.on_left_out: Callable[[Excluded], None] = lambda _: None
        self.failed: Exception | None = None
        self.news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def tell(self, message: Any) -> None:
        """Take a message; from the hub's thread."""
        with self.changed:
            match message:
                case Go():
                    self.go, self.halt, self.words, self.runs = message, None, "", False
                    self.workers, self.lacks = (), False
                    here = {member.node for member in message.members}
                    # One attempt longer: who is not in this one has left, and was not lost. Who is
                    # in it has said so too soon, and says it again.
                    left = self.members - here
                    self.departs = {n: word for n, word in self.departs.items() if n in left}
                    self.members = here
                case Halt():
                    self.halt, self.halted, self.runs = message, message.reason, False
                    self.workers = ()
                case JobEnded():
                    self.over = message
                case Departs():
                    self.departs[message.node] = message
                case Remains():
                    self.departs.pop(message.node, None)
                case Waits():
                    self.words, self.runs = message.words, message.runs
                    self.workers, self.knows = message.workers, True
                    self.lacks = message.lacks
                case Welcome():
                    self.knows = self.knows or not message.runs
                case Excluded():
                    self.on_left_out(message)
                case Refused():
                    self.refused = message.reason
                case MembershipRules():
                    self.rules = message
            self._notify()

    def fail(self, error: Exception) -> None:
        """The hub's thread has ended."""
        with self.changed:
            self.failed = error
            self._notify()

    def look(self) -> None:
        """There is no news until something is told."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.news)

    def _notify(self) -> None:
        self.changed.notify_all()
        os.eventfd_write(self.news, 1)


SILENCE_S: Final = 3.0
KNOWN_S: Final = 60.0  # for word whether others train
KNOWN_LOOK_S: Final = 0.2
WORDS_S: Final = 3.0  # before it is said what is waited for
STORE_S: Final = 60.0
STORE_TRY: Final = timedelta(seconds=5)
CLOSING_S: Final = 2.0
FINISH_S: Final = 15.0  # for a coordinator to hear that the job is to end, and say so
REASON_MAX: Final = 4000  # characters
_IDENTICAL: Final = "TORCH_ELASTIC_WORKER_IDENTICAL"


class Membership(RendezvousHandler):
    """One machine's membership in a job.

    Args:
        place: where attempts are claimed, a directory or a bucket's URL.
        rules: how many machines, and how long things are waited for.
        run_id: the job's id.
        host: the address that other machines reach this one at, a number.
        silence_s: how long a machine may be silent before it is taken for lost.
        attempt: the largest number of an attempt that is known here.
        workers: how many this machine runs.
        labels: zone, rack, pool, as far as known.
        timeout_s: how long to wait for an attempt to form; None for as long as it takes.
        say: told what is waited for, in words.
        out: machines that are left out, as far as is known.
        script: what the workers run, without the way to it; "" where that is not known.
        exits: end this process where the job is over, in one line: torch's own agent would show a
            traceback.
        tls: for all connections between agents.

    Raises:
        ConfigError, StorageError: the storage or the address cannot be used.
    """

    def __init__(
        self,
        place: str,
        rules: MembershipRules,
        *,
        run_id: str,
        host: str,
        silence_s: float = SILENCE_S,
        attempt: int = 0,
        workers: int = 1,
        labels: dict[str, str] | None = None,
        timeout_s: float | None = None,
        say: Callable[[str], None] = lambda _: None,
        script: str = "",
        exits: bool = False,
        out: Iterable[Exclusion] = (),
        tls: Tls | None = None,
    ) -> None:
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._say = say
        self._exits = exits
        self._is_finishing = False
        self._mail = Mailbox()
        self._is_closed = False
        self.host = host
        self.place = place
        storage = open_storage(place)
        self.key = job_key(storage)
        self.on_attempt: Callable[[Go], None] = lambda _: None  # told before workers are started
        try:
            self._hub = Hub(self.key, host, silence_s, self._mail.fail, tls=tls)
        except OSError as error:
            raise ConfigError(
                f"no other machine can reach this one at {host}: {error.strerror or error}; name "
                "an address of this machine with --local-addr"
            ) from None
        if rules.max_nodes > 1 and (words := lack(rules.max_nodes, workers)):
            say(words)
        self._clerk = Clerk(self._hub.call)
        self.me = Member(
            node=uuid.uuid4().hex[:12],
            host=socket.gethostname(),
            address=self._hub.address,
            workers=workers,
            labels=labels or {},
        )
        self._node = Node(
            self._hub,
            self._clerk,
            Claims(storage, on_doubt=say),
            rules,
            self.me,
            store_host=host,
            attempt=attempt,
            tell=self._mail.tell,
            script=script,
        )
        for one in out:
            self._node.out.put(one, time.monotonic())
        self._workers = workers
        self._past = 0  # the last attempt whose workers have ended here, or never began
        self._is_started = False
        self.is_done = False  # workers have finished, and nothing began since
        self.broke = False  # workers here were ended in the midst of a step, before it leaves
        self.is_patient = False  # workers that are asked gently are stopping by themselves
        self.has_notice: Callable[[], bool] = lambda: False  # whether this machine must go

    # --- what our agent asks and says ----------------------------------------------------------

    @property
    def news(self) -> int:
        """A descriptor that is readable once something was told, until ``look``."""
        return self._mail.news

    def look(self) -> None:
        """What was told is looked at now."""
        self._mail.look()

    @property
    def attempt(self) -> Go | None:
        """The attempt that was joined last."""
        return self._mail.go

    @property
    def halt(self) -> Halt | None:
        """Why the running attempt is over, or None while it is not."""
        return self._mail.halt

    @property
    def halted(self) -> str:
        """Why the last attempt that was ended from outside was; "" before there was one."""
        return self._mail.halted

    @property
    def over(self) -> JobEnded | None:
        """How the job has ended everywhere, or None."""
        return self._mail.over

    def goes_on_without(self, node: str) -> bool | None:
        """Whether the job goes on when ``node`` has left; None until the coordinator has said."""
        word = self._mail.departs.get(node)
        return None if word is None else word.goes_on

    def has_left(self, node: str) -> bool:
        """Whether a machine that is not in the attempt now had said that it would go."""
        return node in self._mail.departs

    @property
    def somebody_departs(self) -> bool:
        """Whether a machine has had notice and the others go on."""
        mail = self._mail
        with mail.changed:
            return any(word.goes_on for n, word in mail.departs.items() if n in mail.members)

    @property
    def others_go_on(self) -> bool:
        """Whether this machine has left a job that is not over."""
        left = self.runs_elsewhere or self.is_done or self.goes_on_without(self.me.node)
        return bool(left or self._mail.refused) and self.over is None

    @property
    def runs_elsewhere(self) -> bool:
        """Whether others train while this machine waits for a place."""
        return self._mail.runs

    @property
    def workers_elsewhere(self) -> tuple[int, ...]:
        """How many workers each machine has of an attempt that will take this one in, if any."""
        return self._mail.workers

    @property
    def is_waited_for(self) -> bool:
        """Whether the job has too few machines, or none, so that it waits for this one."""
        mail = self._mail
        return bool(mail.lacks or mail.over or mail.refused or mail.failed)

    def wait_until_known(self) -> None:
        """Wait for word whether others train, unless there is no attempt to wait for."""
        mail, until_s = self._mail, time.monotonic() + KNOWN_S
        with mail.changed:
            while not (mail.knows or self.is_waited_for or self.has_notice()):
                if time.monotonic() > until_s:
                    return
                mail.changed.wait(KNOWN_LOOK_S)

    def announce_keeper(self, host: str, port: int) -> None:
        """Where this machine's keeper talks to others; before ``start``."""
        self.me = self._node.me = msgspec.structs.replace(self.me, keeper=(host, port))

    def start(self, *, warming: bool = False) -> None:
        """Begin to look for the others; ``warming``: it will not be ready at once."""
        if not self._is_started:
            self._is_started = True
            self._hub.call(lambda: self._node.start(warming=warming))
            self._hub.start()

    def leaving(self) -> None:
        """This machine has had notice."""
        self._hub.call(lambda: self._node.say(Leaving()))

    def remains(self) -> None:
        """This machine leaves later: its workers go into the next attempt."""
        self._hub.call(self._node.remains)

    def done(self) -> None:
        """This machine's workers have finished their work."""
        self.is_done = True
        self._hub.call(lambda: self._node.say(Done()))

    def ended(self) -> None:
        """The workers here have ended, and this machine will be ready in a while."""
        number = self.attempt.attempt if self.attempt is not None else 0
        self._hub.call(lambda: self._node.say(WorkersEnded(attempt=number)))

    def exclude(self, out: Exclusion, *, gentle: bool) -> None:
        """Ask for a machine to be left out, ``gentle``: from a step's end on."""
        self._hub.call(lambda: self._node.say(Exclude(out=out, gentle=gentle)))

    def readmit(self, host: str) -> None:
        """A machine that was left out may take part again."""
        self._node.out.bring_back(host)  # before ``start``: nobody else looks at it
        self._hub.call(lambda: self._node.say(Readmit(host=host)))

    def hear_of_left_out(self, told: Callable[[Excluded], None]) -> None:
        """Have ``told`` called, in the hub's thread, for each machine that is left out."""
        self._mail.on_left_out = told

    def begin_with(self, workers: int) -> None:
        """So many workers of this machine take part in the attempts from the next one on."""
        self._workers = workers

    def fill(self) -> None:
        """This machine has more workers for the next attempt than it has in this one."""
        self._hub.call(lambda: self._node.pass_on(Fill()))

    def data_are_tied(self, tied: bool) -> None:
        """Whether the workers' data belong to the number of machines that the attempt has."""
        machines = len(self._mail.members) if tied else 0
        self._hub.call(lambda: self._node.pass_on(Fixed(machines=machines)))

    def needs(self, seconds: float) -> None:
        """Workers that are asked to stop at a step's end were seen to need so long for it."""
        self._hub.call(lambda: self._node.pass_on(Needs(seconds=seconds)))

    def finish(self, exit_code: int, reason: str) -> None:
        """The job is to end, on all machines."""
        self._is_finishing = True
        # An exception's words may be of any length, and may hold what is no UTF-8.
        words = reason[:REASON_MAX].encode(errors="backslashreplace").decode()
        self._hub.call(lambda: self._node.say(Finish(exit_code=exit_code, reason=words)))

    def wait_until_over_or_halted(self, timeout_s: float) -> bool:
        """Whether there is news for a machine that is done."""
        mail = self._mail
        with mail.changed:
            return mail.changed.wait_for(
                lambda: bool(mail.over or mail.halt or mail.failed), timeout_s
            )

    def wait_until_over(self, timeout_s: float) -> bool:
        """Whether the coordinator has said that the job is over."""
        mail = self._mail
        with mail.changed:
            return mail.changed.wait_for(lambda: bool(mail.over or mail.failed), timeout_s)

    # --- torch's protocol ----------------------------------------------------------------------

    def get_backend(self) -> str:
        """Name of the rendezvous."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Workers connect to the store of the attempt, which an agent serves."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next attempt with this machine.

        Raises:
            JobOver: there is none; SystemExit in its place where that was asked for.
            RendezvousError: it did not form in time, or membership itself failed.
        """
        try:
            return self._join()
        except JobOver as over:
            if not self._exits:
                raise
            self._say(str(over))
            raise SystemExit(over.exit_code) from None

    def _join(self) -> RendezvousInfo:
        self.start()
        until_s = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        while True:
            go = self._next_attempt(until_s)
            host, _, port = go.store.rpartition(":")
            host = host.strip("[]")
            store = self._connected(host, int(port))
            if store is None:  # it is gone already: another attempt will form
                continue
            rank = [member.node for member in go.members].index(self.me.node)
            self._ranks_from(go)
            formed = {"number": go.attempt, "reign": go.term, "claims": self.place}
            os.environ[FORMED_VARIABLE] = msgspec.json.encode(formed).decode()
            self.on_attempt(go)
            return RendezvousInfo(
                store, rank, len(go.members), RendezvousStoreInfo(host, int(port))
            )

    def _connected(self, host: str, port: int) -> Any:
        """The attempt's store; None if the attempt is over before that answers."""
        until_s = time.monotonic() + STORE_S
        while True:
            try:
                store = connect(host, port, STORE_TRY)
                store.set_timeout(timedelta(seconds=STORE_S))
                return store
            except RuntimeError:
                if self._mail.halt or self._mail.over or time.monotonic() > until_s:
                    return None

    @staticmethod
    def _ranks_from(go: Go) -> None:
        """Where all machines have as many workers, torch needs no word over the network."""
        if len({member.workers for member in go.members}) == 1:
            os.environ[_IDENTICAL] = "1"
        else:
            os.environ.pop(_IDENTICAL, None)

    def _next_attempt(self, until_s: float | None) -> Go:
        mail = self._mail
        self.is_patient = self.is_done = False
        with mail.changed:
            self._forget_attempt()
        self._hub.call(functools.partial(self._node.ready, self._past, self._workers))
        said, quiet_until_s = "", time.monotonic() + WORDS_S
        while True:
            with mail.changed:
                mail.changed.wait(0.2)
                go, halt, words = mail.go, mail.halt, mail.words
                if halt is not None:  # what formed is over before it began here
                    self._forget_attempt()
            self._end_if_over()
            if halt is not None:
                self._hub.call(functools.partial(self._node.ready, self._past, self._workers))
            elif go is not None:
                return go
            now_s = time.monotonic()
            if self.runs_elsewhere and self._timeout_s is not None:
                until_s = now_s + self._timeout_s  # a spare machine waits as long as others train
            if until_s is not None and now_s > until_s:
                hint = "look at" if words.startswith("storage") else "all machines must see"
                raise RendezvousError(
                    f"waited {self._timeout_s:.0f} s for {words or 'others'}; {hint} {self.place}"
                )
            if words and words != said and now_s > quiet_until_s:
                said = words
                self._say(f"waiting for {words}")

    def _end_if_over(self) -> None:
        """Leave if no attempt can come; say what this machine was not started with."""
        mail = self._mail
        rules, mail.rules = mail.rules, None
        if rules is not None:
            numbers = f"{rules.min_nodes}:{rules.max_nodes}"
            self._say(f"the job runs with --nnodes {numbers}, and so does this machine")
        if mail.over is not None:
            raise JobOver(mail.over.exit_code, mail.over.reason)
        if mail.refused:
            raise JobOver(Exit.USAGE, mail.refused)
        if self.has_notice():
            raise JobOver(Exit.DRAINED, "this machine has left; start me again")
        if mail.failed is not None:
            raise RendezvousError(f"membership failed: {mail.failed}")

    def _forget_attempt(self) -> None:
        """No workers run here: neither those of the last attempt nor of one that came meanwhile."""
        mail = self._mail
        if mail.go is not None:
            self._past = max(self._past, mail.go.attempt)
        mail.go, mail.halt = None, None

    def is_closed(self) -> bool:
        """Whether the job is over."""
        return self._is_closed or self._mail.over is not None

    def set_closed(self) -> None:
        """The job is over, as far as this agent knows; torch says it of a failed one."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """Above 0 once the running attempt is over and its workers are to be ended.

        Raises:
            RendezvousError: membership itself failed: this machine must not go on alone.
        """
        if self._mail.failed is not None:
            raise RendezvousError(f"membership failed: {self._mail.failed}")
        halt = self._mail.halt
        return int(halt is not None and not (halt.gentle and self.is_patient))

    def get_run_id(self) -> str:
        """The job's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Leave the job: the others go on without this machine.

        torch's own agent has no other word for having finished: it comes here without an exception.
        """
        self._is_closed = True
        if self._exits and self.attempt is not None and sys.exception() is None:
            self._is_finishing = True
            self.done()
        if self._is_started:
            if self._is_finishing:  # the one who coordinates may just be changing
                self.wait_until_over(FINISH_S)
            broke = self.broke
            self._hub.call(lambda: self._node.pass_on(Bye(broke=broke)))
            self._hub.call(self._node.stop)
        self._clerk.close(CLOSING_S)
        if self._is_started:
            self._hub.close()
        return True


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """For torchrun: ``--rdzv-backend outlast --rdzv-endpoint DIRECTORY_OR_URL``.

    Raises:
        ValueError: no endpoint is given, or one of another kind.
        ConfigError: the settings cannot be read.
    """
    if not parameters.endpoint:
        raise ValueError("--rdzv-endpoint must name a directory or bucket that all machines share")
    host = reached_at(parameters.local_addr or parameters.config.get("local_addr"), say)
    return Membership(
        place_of(str(parameters.endpoint)),
        rules_of(parameters),
        run_id=parameters.run_id,
        host=host,
        silence_s=float(parameters.get("silence", SILENCE_S)),
        timeout_s=parameters.get_as_int("join_timeout", 600),
        say=say,
        exits=True,
        tls=Tls.of(load()),
    )


def rules_of(parameters: RendezvousParameters) -> MembershipRules:
    """What torch's flags say about machines."""
    return MembershipRules(min_nodes=parameters.min_nodes, max_nodes=parameters.max_nodes)
