"""The agent where other machines decide: their stores go, their workers count."""

import os
import signal
import time
import types
from types import MappingProxyType

import msgspec
import pytest
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerState

from outlast.attempt.link import PREFIX
from outlast.health.processes import catches
from outlast.launch.agent import Agent
from outlast.launch.ending import Seats
from outlast.launch.warm.starts import ColdContext
from outlast.notice import Notice
from outlast.notice.desk import Deaf
from outlast.policy.failures import Failure


class Gone:
    """The store of an attempt whose machine has died."""

    def check(self, _):
        raise RuntimeError("Broken pipe")


class Nobody:
    """Survivors where workers are started anew."""

    descriptors = ()
    standing = MappingProxyType({})
    are_complete = are_moving = False
    address = ""
    look = end_standing = staticmethod(list)


@pytest.fixture
def agent(monkeypatch):
    made = object.__new__(Agent)
    made._told, made._told_of, made._told_early = set(), None, None
    made._in_session = set()
    made._exit_barrier_timeout = made._shutdown_timeout = 300
    made.broke = []
    made._machines = types.SimpleNamespace(
        is_broken=False, are_many=True, break_off=lambda: made.broke.append(True)
    )
    made._hangs = types.SimpleNamespace(named=None, end=lambda: None)
    made._health = types.SimpleNamespace(end=lambda: None)
    made._deaf = Deaf(made._are_deaf)
    made._seats, made._survivors = Seats([0], 1), Nobody()
    made.ended = []
    monkeypatch.setattr(made, "_end_workers", lambda: made.ended.append(True), raising=False)
    return made


def group():
    made = object.__new__(WorkerGroup)
    made.store = Gone()
    made.workers = [types.SimpleNamespace(local_rank=0, global_rank=0, id=0)]
    return made


@pytest.mark.parametrize("impatient", [False, True])
def test_a_notice_after_the_store_has_gone_is_no_crash(agent, impatient):
    notice = Notice(source="SIGTERM", action="terminate", deadline_t=None, heard_t=0.0, detail="")
    agent._desk = types.SimpleNamespace(
        notice=notice, request=lambda: None, impatient=impatient, early_request=lambda: None
    )
    agent._pass_on(group())
    assert bool(agent.ended) == impatient
    assert agent.broke == agent.ended
    agent._desk.early = notice
    agent._pass_on_early(group())
    assert agent._told_early is None  # the next attempt is told


def test_ranks_where_machines_have_different_numbers_of_workers(agent):
    agent._machines = types.SimpleNamespace(workers=[2, 3, 1], know_sizes=True)
    agent._seats = Seats(range(3), 3)
    spec = types.SimpleNamespace(local_world_size=3)
    workers = agent._assign_worker_ranks(Gone(), 1, 3, spec)
    assert [worker.global_rank for worker in workers] == [2, 3, 4]
    assert [worker.local_rank for worker in workers] == [0, 1, 2]
    assert {worker.world_size for worker in workers} == {6}


ECHO = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:41000"


def lost(rank, message):
    return (Failure(rank=rank, exit_code=1, message=message), None, None)


@pytest.mark.parametrize(
    ("messages", "elsewhere", "recorded"),
    [
        (["ended by SIGKILL", ECHO], True, [0]),
        ([ECHO, "ended by SIGKILL"], False, [1]),
        ([ECHO, ECHO], True, []),
        ([ECHO, ECHO], False, [0, 1]),
        (["a bug", "another bug"], False, [0, 1]),
        ([], False, []),
    ],
    ids=["first", "second", "another machine", "nobody knows", "both", "none"],
)
def test_survivors_whose_connections_ended_are_not_called_lost(
    agent, messages, elsewhere, recorded
):
    asked = []
    agent._machines = types.SimpleNamespace(
        have_trouble=lambda wait_s: (asked.append(wait_s), elsewhere)[1]
    )
    found = agent._causes([lost(rank, message) for rank, message in enumerate(messages)])
    assert [failure.rank for failure, _, _ in found] == recorded
    all_echo = bool(messages) and all(message == ECHO for message in messages)
    assert bool(asked) == all_echo  # nobody else is waited for in vain


class Scripted:
    """A process that is asked for its end again and again, and its handler at once."""

    def __init__(self, rank, codes):
        self.pid, self.codes, self.told = 100 + rank, codes, []
        self.proc = self

    def poll(self):
        return self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]

    def wait(self, _):
        return self.codes[-1]

    def close(self, death_sig=None):
        self.told.append(death_sig)


def watching(agent, handlers):
    """The agent of an attempt with these workers."""
    context = agent._pcontext = object.__new__(ColdContext)
    context.is_settled, context.nprocs = False, len(handlers)
    context._running_local_ranks, context._failures = set(handlers), {}
    context.subprocess_handlers = handlers
    context._tail_logs, context.entrypoint = [], "python"
    context.filtered_stdout = context.filtered_stderr = None
    context.error_files = dict.fromkeys(handlers, "/nowhere")
    context.stdouts = context.stderrs = dict.fromkeys(handlers, "")
    nothing = types.SimpleNamespace(
        wait=lambda *_: None,
        look=lambda *_: None,
        notice=None,
        early=None,
        asks_gently="",
        gives_notices=False,
    )
    nothing.ends_now = None
    agent._watch = agent._machines = agent._desk = agent._sessions = agent._judging = nothing
    agent._uninterruptible_state_timeout = 0.0
    agent._leaving_since_s = None
    found = group()
    found.spec = types.SimpleNamespace(role="")
    found.workers = [
        types.SimpleNamespace(local_rank=rank, global_rank=rank, id=one.pid)
        for rank, one in handlers.items()
    ]
    return found


def test_what_fails_between_our_look_and_torchs_is_left_to_our_next_one(agent, monkeypatch):
    """torch would send the others SIGTERM at once, and nobody would be asked to go on."""
    handlers = {0: Scripted(0, [None]), 1: Scripted(1, [None, -9])}
    workers = watching(agent, handlers)
    done = []

    def keep_or_end():
        done.append("kept")
        handlers[0].codes = [0]

    monkeypatch.setattr(agent, "_keep_or_end", keep_or_end, raising=False)
    monkeypatch.setattr(agent, "_judge", lambda *_: done.append("judged"), raising=False)
    assert agent._monitor_workers(workers).state == WorkerState.HEALTHY
    assert (done, handlers[0].told) == ([], [])
    assert agent._monitor_workers(workers).is_failed()
    assert (done, handlers[0].told) == (["kept", "judged"], [])


def test_workers_that_have_all_ended_well_are_seen_at_once(agent):
    workers = watching(agent, {rank: Scripted(rank, [0]) for rank in range(2)})
    assert agent._monitor_workers(workers).state == WorkerState.SUCCEEDED


class Store:
    """An attempt's, in which some sessions have said that they are there."""

    def __init__(self, *ranks):
        self.keys, self.asked = {f"{PREFIX}/session/{rank}" for rank in ranks}, []

    def check(self, keys):
        return set(keys) <= self.keys

    def queue_push(self, key, data):
        self.asked.append(msgspec.json.decode(data)["info"])


def has_notice(agent, goes_on, *, in_process=True, left_s=60.0):
    now_t = time.time()
    notice = Notice(
        source="SIGTERM",
        action="terminate",
        deadline_t=None if left_s is None else now_t + left_s,
        heard_t=now_t,
        detail="",
    )
    agent._desk = types.SimpleNamespace(
        notice=notice, request=lambda: {"reason": "a notice", "left_s": left_s}, impatient=False
    )
    agent._machines.notice = lambda: goes_on
    agent._survivors.address = "line" if in_process else ""
    found = group()
    found.workers = [types.SimpleNamespace(local_rank=0, global_rank=4, id=os.getpid())]
    return found


@pytest.mark.parametrize(
    ("goes_on", "in_process", "leaves"),
    [(True, True, [4]), (False, True, None), (True, False, None)],
    ids=["others go on", "nobody does", "all start anew"],
)
def test_workers_are_told_who_leaves_where_the_others_go_on(agent, goes_on, in_process, leaves):
    workers = has_notice(agent, goes_on, in_process=in_process)
    workers.store = Store(4)
    agent._pass_on(workers)
    agent._pass_on(workers)
    assert [info.get("leaves") for info in workers.store.asked] == [leaves]


def test_it_is_known_first_whether_the_others_go_on(agent):
    workers = has_notice(agent, None)
    workers.store = Store(4)
    agent._pass_on(workers)
    assert workers.store.asked == []
    agent._machines.notice = lambda: True
    agent._pass_on(workers)
    assert [info["leaves"] for info in workers.store.asked] == [[4]]


def test_a_worker_that_was_kept_gets_no_signal_before_its_session_says_that_it_is_there(
    agent, monkeypatch
):
    signalled = []
    monkeypatch.setattr("outlast.launch.agent.catches", lambda *_: True)
    monkeypatch.setattr("os.kill", lambda *one: signalled.append(one))
    workers = has_notice(agent, True)
    workers.store = Store()
    agent._in_session = {0}
    agent._pass_on(workers)
    assert (agent._told, workers.store.asked, signalled) == (set(), [], [])
    agent._in_session = set()
    agent._pass_on(workers)
    assert (agent._told, signalled) == ({0}, [(os.getpid(), signal.SIGTERM)])


def test_one_that_was_told_leaves_by_itself(agent):
    """It is deaf on its way out, and was killed for it."""
    workers = agent._worker_group = has_notice(agent, True)
    assert not catches(os.getpid(), signal.SIGTERM)
    given_up = []
    agent._give_up = given_up.append
    agent._told = {0}
    assert not agent._leaves_at_once()
    agent._told = set()
    assert agent._leaves_at_once()
    assert len(given_up) == len(workers.workers)


@pytest.mark.parametrize(
    ("left_s", "kept", "since_s", "waits"),
    [
        (None, True, 0.0, True),
        (60.0, True, 0.0, True),
        (60.0, False, 0.0, False),
        (60.0, True, 60.0, False),
        (2.0, True, 0.0, False),
    ],
    ids=["no deadline", "in time", "nobody was kept", "no attempt comes", "no time"],
)
def test_a_machine_with_notice_waits_for_an_attempt_to_hand_over_in(
    agent, left_s, kept, since_s, waits
):
    has_notice(agent, True, left_s=left_s)
    agent._survivors.kept = {0: None} if kept else {}
    agent._kept_s = time.monotonic() - since_s
    assert agent.leaves_now != waits
