"""What is done between two attempts, and how a wait ends."""

import threading
import types

import pytest

from outlast.config import load
from outlast.errors import StorageError
from outlast.launch import judging
from outlast.launch.judging import FailureHandler, restart_policy, worker_failure
from outlast.launch.run import left_out
from outlast.ledger.events import Event
from outlast.policy.attribution import Tolls
from outlast.policy.exclusion import Exclusion
from outlast.policy.failures import Failure, Kind, Remedy
from outlast.policy.restart import RestartPolicy, RestartVerdict
from outlast.policy.rollbacks import Rollback


class Clock:
    """Time that goes by only while somebody sleeps."""

    def __init__(self):
        self.now_s, self.then = 1000.0, {}

    def monotonic(self):
        return self.now_s

    def time(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        for at_s in [one for one in self.then if one <= self.now_s]:
            self.then.pop(at_s)()


class Others:
    """The other machines."""

    are_many = True
    ends_now = None
    hosts, workers, num_aside = ["a", "b"], [1, 1], 0

    def __init__(self, asked=True, trouble=False):
        self.asked, self.asks, self.told = asked, [], 0
        self.trouble, self.waits = trouble, []

    def have_trouble(self, wait_s):
        self.waits.append(wait_s)
        return self.trouble

    def exclude(self, reason, **more):
        self.asks.append((reason, more))
        return self.asked

    def workers_ended(self):
        self.told += 1


class Past:
    attempt, word = 3, "word"

    def __init__(self, own_failures=None, broken=False, rollbacks=()):
        self.rollbacks = list(rollbacks)
        self.sightings, self.left_out, self.went_out, self.tolls = [], {}, set(), Tolls()
        self.own_failures = {} if broken else own_failures or {}
        self._broken = broken

    def look(self):
        if self._broken:
            raise StorageError("gone")
        return self


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(judging, "time", made)
    return made


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(judging, "say", lines.append)
    return lines


def made(others, past=None, policy=None, notice=lambda: False):
    ledger = types.SimpleNamespace(append=lambda *_, **__: None, attempt=5)
    return FailureHandler(policy or RestartPolicy(9), ledger, past or Past(), others, notice)


def verdict(action, wait_s=0.0):
    return RestartVerdict(
        restart=True,
        exit_code=0,
        reason="rank 0 failed (x)",
        kind=Kind.KILLED,
        action=action,
        wait_s=wait_s,
    )


def test_a_wait_is_waited_and_told(clock, said):
    others = Others()
    since_s = clock.now_s
    assert made(others).act(verdict(Remedy.BACK_OFF, 100.0), is_first=True).restart
    assert clock.now_s - since_s == pytest.approx(100.0, abs=0.2)
    assert len(said) == 3
    assert said[0] == "the next attempt begins in 70 s"
    assert others.told == 1


def test_the_jobs_end_elsewhere_ends_a_wait(clock):
    others = Others()
    clock.then[1010.0] = lambda: setattr(others, "ends_now", object())
    made(others).act(verdict(Remedy.BACK_OFF, 100.0), is_first=True)
    assert clock.now_s < 1011


@pytest.mark.parametrize("many", [False, True])
def test_a_notice_ends_a_wait_and_this_machine_leaves(clock, many):
    others = Others()
    others.are_many = many
    notice = []
    clock.then[1010.0] = lambda: notice.append(True)
    after = made(others, notice=lambda: bool(notice)).act(
        verdict(Remedy.BACK_OFF, 100.0), is_first=True
    )
    assert clock.now_s < 1011
    # Where there are others, the rendezvous finds that this one must go and that they go on.
    assert after.restart == many
    assert many or after.exit_code == 75


def test_a_machine_asks_to_be_left_out_or_replaced(clock, said):
    others = Others()
    one = made(others)
    one.act(verdict(Remedy.LEAVE_OUT, 0.5), is_first=True)
    one.act(verdict(Remedy.ELSEWHERE), is_first=True)
    one.act(verdict(Remedy.RESTART), is_first=True)
    (out, how), (elsewhere, softly) = others.asks
    assert "rank 0 failed (x)" in out
    assert elsewhere == "rank 0 failed (x)"
    assert how == {"for_s": 120.0, "host": None}
    assert softly == {"for_s": 120.0, "spare_only": True}
    assert not said
    made(Others(asked=False)).act(verdict(Remedy.LEAVE_OUT, 0.5), is_first=True)
    assert said == ["there is no other machine that could go on: this one is tried again"]


def test_what_other_machines_had_in_the_window_counts(clock):
    failures = {
        "b": [(clock.now_s - 10, "killed"), (clock.now_s - 1e5, "crash")],
        judging.socket.gethostname(): [(clock.now_s, "abort")],
    }
    killed = Failure(rank=0, exit_code=-9, step=1)
    crashed = Failure(rank=0, exit_code=-11, step=2)
    one = made(Others(), Past(failures))
    assert not one.judge([killed], 1.0, echoes=True).own
    assert one.judge([crashed], 1.0, echoes=True).own
    assert made(Others(), Past(broken=True)).judge([killed], 1.0, echoes=True).own


@pytest.mark.parametrize("attempts", [[], [4], [4, 5]], ids=str)
def test_a_rollback_is_believed_where_the_ledger_has_it_of_this_attempt(clock, attempts):
    past = Past(rollbacks=[Rollback(attempt=one, step=1, first=2) for one in attempts])
    policy = RestartPolicy(1)
    one = made(Others(), past, policy)
    left = [Failure(rank=0, exit_code=79, step=9)]
    found = [one.judge(left, 1.0, echoes=True).restart for _ in range(3)]
    assert found == ([True] * 3 if 5 in attempts else [True, False, False])


def test_survivors_of_a_loss_elsewhere_are_not_blamed(clock):
    aborted = Failure(rank=0, exit_code=-6, message="ended by SIGABRT", step=1)
    crashed = Failure(rank=0, exit_code=-11, step=2)
    for trouble in (False, True):
        others = Others(trouble=trouble)
        one = made(others)
        assert one.judge([aborted], 1.0, echoes=True).own == (not trouble)
        assert len(others.waits) == 1
        assert one.judge([crashed], 1.0, echoes=True).own
        assert len(others.waits) == 1  # it is its own, whatever the others have


def test_a_ledger_that_hangs_is_not_waited_for(clock, monkeypatch):
    """The agent hears notices and keeps deadlines meanwhile: it is not in the read."""
    monkeypatch.setattr("outlast.ledger.past.WAIT_S", 0.01)
    goes_on = threading.Event()
    past = Past({"b": [(clock.now_s, "killed")]})
    past.look = goes_on.wait
    one = made(Others(), past)
    killed = Failure(rank=0, exit_code=-9, step=1)
    assert not one.judge([killed], 1.0, echoes=True).own  # what was known before holds
    assert (one.next_attempt(), one.word()) == (6, "word")
    threads = [each for each in threading.enumerate() if each.name == "outlast-glance"]
    assert len(threads) == 1
    past.own_failures = {}
    goes_on.set()
    threads[0].join()
    assert one.judge([killed], 1.0, echoes=True).own


def test_the_owners_limits_and_what_was_before():
    settings = load({"restart.failures": "2", "restart.window": "10 s"}, environ={})
    past = Past({judging.socket.gethostname(): [(5.0, "killed")]})
    policy = restart_policy(7, settings, past)
    assert (policy.max_restarts, policy.limits.failures, policy.limits.window_s) == (7, 2, 10.0)
    killed = Failure(rank=0, exit_code=-9, step=1)
    assert policy.judge([killed], lasted_s=1.0, now_s=6.0).action is Remedy.LEAVE_OUT
    mended = restart_policy(7, load({"restart.let_in": True}, environ={}), past)
    assert mended.judge([killed], lasted_s=1.0, now_s=6.0).action is Remedy.RESTART


def test_where_the_owner_has_set_no_number_failures_are_weighed(clock):
    """Each kill costs 60 s and comes 100 s after the last one: 3/12 of 60%."""

    def after(num_others, num_failures, chosen, num_aside=0):
        others, past = Others(), Past()
        me = judging.socket.gethostname()
        others.hosts = [me, *(f"other{one}" for one in range(num_others))]
        others.workers, others.num_aside = [1] * len(others.hosts), num_aside
        one = made(others, past, restart_policy(99, load(chosen, environ={}), past))
        for attempt in range(num_failures):
            one._ledger.attempt = attempt
            clock.now_s += 100.0
            verdict = one.judge([Failure(rank=0, exit_code=-9, step=attempt)], 99.0, echoes=True)
        one.act(verdict, is_first=True)
        return verdict, others

    few, others = after(2, 3, {})
    assert (few.action, others.asks) == (Remedy.RESTART, [])
    assert "it adds 1 (1/3 of the work)" in few.weighed
    many, others = after(15, 3, {})
    assert many.action is Remedy.LEAVE_OUT
    ((reason, _),) = others.asks
    assert reason.startswith("its failures cost the job 2.4 machine-hours an hour, and it adds 1 ")
    assert after(2, 8, {})[0].action is Remedy.LEAVE_OUT  # so often on one machine is no chance
    assert after(2, 3, {}, num_aside=1)[0].action is Remedy.LEAVE_OUT
    assert after(2, 2, {"restart.failures": 2})[0].action is Remedy.LEAVE_OUT  # the owner's
    assert after(15, 9, {"restart.failures": 0})[0].action is Remedy.RESTART


def test_what_torchs_agent_knows_of_a_worker():
    failure = types.SimpleNamespace(
        exitcode=-9, pid=7, error_file_data=None, signal_name=lambda: "SIGKILL"
    )
    found = worker_failure(3, failure, 12)
    assert found == Failure(rank=3, exit_code=-9, message="ended by SIGKILL", step=12, pid=7)


def event(**fields):
    head = {"t": 0.0, "mono": 0.0, "job": "j", "attempt": 1, "node": "b", "rank": None}
    return Event(**head, event="left_out", fields=fields)


def test_machines_that_are_still_left_out_when_an_agent_starts():
    past = types.SimpleNamespace(
        left_out={
            "b": event(reason="r", until_t=50.0, for_s=30.0, spare_only=True, goes=True),
            "c": event(reason="r", until_t=20.0, for_s=30.0, goes=True),
            "d": event(reason="r", until_t=1e9, for_s=30.0, goes=False),
            "e": event(reason="r"),
        }
    )
    assert left_out(past, 40.0) == [
        Exclusion(host="b", reason="r", for_s=10.0, spare_only=True),
        Exclusion(host="d", reason="r", for_s=30.0, spare_only=True),
    ]
