"""Workers that live through the end of an attempt: who is kept, and who is not, and why."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from outlast.attempt.over import (
    LINE_VARIABLE,
    AttemptEnded,
    NextAttempt,
    Prepared,
    Stays,
    Unwound,
    dial,
)
from outlast.launch import ending as module
from outlast.launch.ending import LATE, STUCK, UNHELD, Kept, StandIn, Survivors


class Process:
    """This process, as a worker of itself."""

    def __init__(self, pid=None):
        self.pid = os.getpid() if pid is None else pid
        self.code = None

    def poll(self):
        return self.code


def handler(rank=2, pid=None):
    return SimpleNamespace(local_rank_id=rank, proc=Process(pid))


@pytest.fixture(name="agent")
def _agent(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(module, "say", said.append)
    made = Survivors(tmp_path, True)
    made.said = said
    monkeypatch.setenv(LINE_VARIABLE, made.address)
    yield made
    made.kept = {}  # it is this process
    made.close()


@pytest.fixture(name="worker")
def _worker(agent):
    """A line to the agent; ``says(*messages)`` is said once the agent has said that it is over."""
    line = dial()
    heard = []

    def says(*messages):
        def act():
            heard.append(line.receive())
            for message in messages:
                line.send(message)

        threading.Thread(target=act).start()
        return heard

    yield SimpleNamespace(line=line, says=says)
    line.close()


def test_a_worker_that_unwinds_is_kept_and_told_to_go_on(agent, worker):
    heard = worker.says(Unwound(), Prepared(step=7))
    agent.gather({2: handler()})
    assert heard == [AttemptEnded()]
    assert not agent.reasons
    kept = agent.take([2], joins=False)[2]
    assert kept.step == 7
    assert not agent.kept
    kept.go({"RANK": "5"}, "", "/a")
    kept.go({"RANK": "5"}, "", "/a")  # others were started in another way
    assert worker.line.receive() == NextAttempt(environ={"RANK": "5"}, stderr="/a")
    worker.line.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        worker.line.receive()


def test_one_that_cannot_be_told_is_ended(agent, worker, monkeypatch):
    worker.says(Unwound(), Prepared(step=7))
    agent.gather({2: handler()})
    ended = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: ended.append((pid, number)))
    agent.take([2], joins=False)[2].go({"OUTLAST_PAST": "x" * 300_000}, "", "")
    assert ended == [(os.getpid(), signal.SIGKILL)]


def test_one_that_cannot_says_why(agent, worker):
    worker.says(Unwound(), Stays(reason="so it is"))
    agent.gather({2: handler()})
    assert (agent.kept, agent.reasons) == ({}, {2: "so it is"})


def test_one_that_leaves_its_function_meanwhile_is_not_kept(agent, worker):
    worker.says()
    threading.Timer(0.1, worker.line.close).start()
    agent.gather({2: handler()})
    assert list(agent.reasons) == [2]
    assert not agent.kept


@pytest.mark.parametrize(
    ("messages", "reason"), [((), STUCK), ((Unwound(),), LATE)], ids=["stuck", "half way"]
)
def test_one_that_takes_too_long_is_not_waited_for(agent, worker, monkeypatch, messages, reason):
    monkeypatch.setattr(module, "UNWIND_S", 0.3)
    monkeypatch.setattr(module, "TAKE_DOWN_S", 0.3)
    worker.says(*messages)
    agent.gather({2: handler()})
    assert agent.reasons == {2: reason}


def test_one_that_dies_of_it_is_not_waited_for(agent, worker):
    one = handler()
    threading.Timer(0.05, lambda: setattr(one.proc, "code", -9)).start()
    agent.gather({2: one})
    assert agent.reasons == {2: "it has ended"}


def test_workers_without_a_session_are_told_of_once(agent):
    for _ in range(2):
        agent.gather({0: handler(0, pid=1), 1: handler(1, pid=1)})
        assert agent.reasons == {0: UNHELD, 1: UNHELD}
    assert len(agent.said) == 1
    assert "no session" in agent.said[0]


def test_nothing_is_asked_where_it_is_not_wanted(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "say", pytest.fail)
    off = Survivors(tmp_path, False)
    assert off.address == ""
    off.gather({0: handler()})
    assert (off.kept, off.reasons) == ({}, {})
    off.close()


def test_torchs_agent_sees_one_that_is_kept_as_ended_well():
    stand_in = StandIn(handler(2, pid=77))
    assert (stand_in.proc.pid, stand_in.proc.poll(), stand_in.proc.wait(1)) == (77, 0, 0)
    assert stand_in.proc.returncode == 0
    stand_in.close()


def test_the_end_of_an_attempt_passes_those_by_that_stay(agent):
    ended = []
    agent.end = lambda: ended.append(True)
    with agent.staying():
        agent.end_unless_staying()
    assert not ended
    agent.end_unless_staying()
    assert ended == [True]


# --- places that stay empty for a while ----------------------------------------------------------


def eventually(agent, what):
    for _ in range(200):
        agent.look()
        if what():
            return
        time.sleep(0.01)
    raise AssertionError("it has not come to it")


def kept_at(agent, *ranks, any_size):
    agent.kept = {rank: Kept(handler(rank, 1), None, 3, any_size=any_size) for rank in ranks}


def test_who_is_the_same_at_any_size_does_not_wait(agent):
    kept_at(agent, 0, 2, any_size=True)
    assert agent.seats(3) == [0, 2]
    agent.kept[0].any_size = False
    assert agent.seats(3) == [0, 1, 2]
    agent.kept = {}
    assert agent.seats(3) == [0, 1, 2]


def test_one_that_stands_by_takes_its_place_once_it_says_so(agent, worker):
    agent.stand_by({1: handler(1)})
    assert not agent.are_complete
    worker.line.send(Unwound())
    worker.line.send(Prepared(any_size=True))
    eventually(agent, lambda: agent.are_complete)
    assert not agent.are_moving  # it was in no attempt
    assert os.getpid() in agent.pids
    kept_at(agent, 0, 2, any_size=True)
    assert agent.seats(3) == [0, 1, 2]
    taken = agent.take([0, 1, 2], joins=False)
    assert sorted(taken) == [0, 1, 2]
    assert (taken[1].step, agent.standing, agent.are_complete) == (None, {}, False)


def test_one_that_is_late_is_ended_where_its_place_is_wanted(agent, monkeypatch):
    ended = []
    monkeypatch.setattr(os, "killpg", lambda pid, _: ended.append(pid))
    agent.stand_by({1: handler(1, 4321)})
    kept_at(agent, 0, 2, any_size=False)
    assert sorted(agent.take([0, 1, 2], joins=False)) == [0, 2]
    assert (ended, agent.standing) == ([4321], {})


def test_nobody_stands_by_where_nobody_was_kept(agent, worker, monkeypatch):
    ended = []
    monkeypatch.setattr(os, "killpg", lambda pid, _: ended.append(pid))
    agent.stand_by({1: handler(1)})
    worker.line.send(Prepared(any_size=True))
    eventually(agent, lambda: agent.are_complete)
    assert agent.take([0, 1], joins=False) == {}
    assert (ended, agent.standing) == ([os.getpid()], {})


def test_one_that_stood_by_joins_workers_of_other_machines(agent, worker):
    agent.stand_by({1: handler(1)})
    worker.line.send(Prepared(any_size=True))
    eventually(agent, lambda: agent.are_complete)
    assert list(agent.take([0, 1], joins=True)) == [1]
    assert agent.standing == {}


def test_one_that_stood_by_and_died_is_none_that_does(agent):
    one = handler(1)
    agent.stand_by({1: one})
    one.proc.code = -9
    assert agent.standing == {}
    assert not agent.are_complete


def test_workers_that_leave_an_attempt_together_are_kept(agent, worker):
    worker.line.send(Unwound())
    eventually(agent, lambda: agent.are_moving)
    worker.line.send(Prepared(step=9, any_size=True))
    agent.gather({2: handler()})
    assert (agent.kept[2].step, agent.are_moving) == (9, False)
    assert worker.line.receive() == AttemptEnded()


def test_one_that_takes_long_to_come_is_said_once(agent, worker, monkeypatch):
    monkeypatch.setattr(module, "SLOW_S", 0.0)
    agent.stand_by({2: handler()})
    agent.look()
    agent.look()
    (said,) = agent.said
    assert "local rank 2 is still empty" in said
    assert f"--pid {os.getpid()}" in said
    agent.stand_by({2: handler()})  # in the next attempt still
    agent.look()
    assert agent.said == [said]


def test_one_that_has_come_is_not_called_late(agent, worker, monkeypatch):
    monkeypatch.setattr(module, "SLOW_S", 0.0)
    agent.stand_by({2: handler()})
    worker.line.send(Prepared(step=None))
    agent.look()
    assert not agent.said
