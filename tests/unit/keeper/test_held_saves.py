"""Saves that are whole and must not be committed yet: held, let through, superseded, given up."""

import itertools

import msgspec
import pytest
from keeper_fakes import FakeKeeper, StepGate
from unit_names import committed, save_name

from outlast.checkpoint.load import verify
from outlast.keeper import conclude, wire
from outlast.keeper.fence import Fence
from outlast.peer.numbers import name_of
from outlast.storage import Directory


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


class Held:
    """A keeper whose gate waits for a claim."""

    def __init__(self, monkeypatch, disk, claims):
        self.disk, self.claims, self.clock = disk, claims, Clock()
        self.gate = StepGate(Fence(claims, clock=self.clock))
        self.keeper = FakeKeeper(monkeypatch, {"local": disk}, self.gate)
        self.keeper.saves._conclusions._clock = self.clock
        self.saves = self.keeper.saves
        self.gate.told(1, "ours")

    def claim(self, number=1, reign="ours"):
        data = msgspec.json.encode({"reign": reign})
        assert self.claims.put_new(name_of(number), data)

    def later(self, seconds):
        self.keeper.run()
        self.clock.now_s += seconds
        self.gate.look()
        self.saves.tick()
        self.keeper.run()

    def is_committed(self, step):
        return step in committed(self.disk)

    def events(self, name):
        return [fields for event, fields in self.keeper.events if event == name]


@pytest.fixture
def held(monkeypatch, tmp_path, disk):
    return Held(monkeypatch, disk, Directory(tmp_path / "claims"))


def test_it_is_committed_once_the_claim_is_there(held):
    worker = held.keeper.worker()
    worker.save(5, 1)
    held.later(1.0)
    assert not held.is_committed(5)
    assert not worker.ended
    assert held.keeper.books.kept == {}
    assert held.saves.arenas() == {worker.arena}  # the snapshot is there, and nobody else's
    held.claim()
    held.later(1.0)
    assert verify(held.disk, 5)
    assert worker.ended[0].error == ""
    assert save_name(5) in held.keeper.books.kept
    assert not held.events("storage_error")  # it did not take long


def test_one_that_others_have_claimed_is_refused_and_it_is_not_called_storages_fault(held):
    worker = held.keeper.worker()
    worker.save(5, 1)
    held.claim(reign="theirs")
    held.later(0.1)
    assert not held.is_committed(5)
    assert worker.ended[0].error.startswith("attempt 1 was claimed by other machines")
    assert len(held.events("save_skipped")) == 1
    assert not held.events("storage_error")
    assert held.saves.idle


def test_what_takes_long_is_put_on_record_once_and_committed_all_the_same(held):
    held.keeper.worker().save(5, 1)
    for _ in range(20):
        held.later(1.0)
    (event,) = held.events("storage_error")
    assert (event["operation"], event["step"]) == ("claim", 5)
    assert event["error"].startswith("attempt 1 is not claimed yet; the snapshot stays in memory")
    held.claim()
    held.later(1.0)
    assert held.is_committed(5)


def test_of_several_the_newest_waits_on(held):
    worker = held.keeper.worker()
    other = held.keeper.worker(peer=worker.peer).arena
    worker.save(5, 1)
    held.later(conclude.LATE_S - 1)
    worker.save(6, 2, arena=other)
    held.later(2.0)
    assert not worker.ended  # the newer one may be let through any moment
    held.later(conclude.LATE_S)
    (ended,) = worker.ended
    assert (ended.step, ended.error.split(":")[0]) == (5, "step 6 waits in its place")
    held.claim()
    held.later(1.0)
    assert [held.is_committed(step) for step in (5, 6)] == [False, True]
    assert [fields["step"] for fields in held.events("save_skipped")] == [5]


def test_one_whose_workers_are_gone_is_given_up_after_a_while(held):
    worker = held.keeper.worker()
    worker.save(5, 1)
    held.later(conclude.ALONE_S + 1)
    assert not held.saves.idle  # somebody may be waiting for it
    worker.peer.is_gone = True
    held.later(0.1)
    assert held.saves.idle
    assert not held.gate.asked
    assert "its workers have ended" in held.events("storage_error")[-1]["error"]


def test_the_next_attempt_does_not_wait_for_it_for_ever(held, monkeypatch):
    monkeypatch.setattr(conclude, "QUIET_S", 0.0)
    worker = held.keeper.worker()
    worker.save(5, 1)
    held.later(0.1)
    put = held.keeper.pool.put
    monkeypatch.setattr(held.keeper.pool, "put", lambda act: (put(act), held.keeper.pool.run()))
    held.saves.wait_for_earlier(2, 60.0)
    assert held.saves.idle
    assert worker.ended[0].error.startswith("its attempt ended before the commit: attempt 1 is not")
    held.claim()
    held.gate.look()
    held.keeper.run()
    assert not held.is_committed(5)


def test_an_answer_that_comes_after_it_was_given_up_changes_nothing(held):
    worker = held.keeper.worker()
    worker.save(5, 1)
    held.later(0.1)
    ((_, then),) = held.gate.asked.values()
    with held.saves.lock:
        held.saves._conclusions.let_go(list(held.saves._open.values()), "given up")
    then("")
    held.keeper.run()
    assert not held.is_committed(5)
    assert worker.ended[0].error.startswith("given up")


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["claim", "next", "told"])), ids="-".join
)
def test_what_is_left_is_committed_in_the_next_attempt_in_whichever_order_it_is_known(held, order):
    worker = held.keeper.worker()
    worker.save(5, 1)
    acts = {
        "claim": lambda: held.claim(1),
        "next": lambda: held.claim(2),
        "told": lambda: held.gate.told(2, "ours"),
    }
    for name in order:
        acts[name]()
        held.later(1.0)
    assert held.is_committed(5)
    assert worker.ended[0].error == ""


def test_several_machines_hear_of_it_when_it_is_let_through(held):
    one, two = held.keeper.worker(0, 2), held.keeper.worker(1, 2)
    one.save(5, 1)
    two.save(5, 1)
    held.later(1.0)
    assert not one.peer.of(wire.SaveEnded)
    held.claim()
    held.later(1.0)
    assert [worker.ended[0].error for worker in (one, two)] == ["", ""]
