"""Saves that do not end at once: held at the gate, or left in flight by an earlier attempt."""

import itertools

import msgspec
import pytest
from keeper_fakes import FakeKeeper, StepGate, hello
from unit_names import committed, save_name, save_of

from outlast.checkpoint.manifest import PartEntry
from outlast.keeper import conclude, protocol, saves, wire
from outlast.keeper.conclude import Fence
from outlast.keeper.flight import RankOutcome
from outlast.keeper.memory import MemoryTier
from outlast.peer.claims import name_of
from outlast.storage import Directory
from whole_reads import verify


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

    def claim(self, number=1, term="ours"):
        data = msgspec.json.encode({"reign": term})
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
    held.claim(term="theirs")
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
    monkeypatch.setattr(saves, "QUIET_S", 0.0)
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
        held.saves._conclusions.let_go(list(held.saves.table.open.values()), "given up")
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


# --- what an attempt leaves in flight: how long the next one waits, and for what ------------------


class TurnedClock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


class Left:
    """A keeper whose writers do nothing, as where a tier hangs, and a wait that takes no time."""

    def __init__(self, monkeypatch, tiers):
        self.keeper, self.clock, self.told = FakeKeeper(monkeypatch, tiers), TurnedClock(), []
        saves, self.at = self.keeper.saves, []
        saves._earlier._clock = self.clock
        saves.table.changed.wait = self._wait

    def _wait(self, timeout_s):
        self.clock.now_s += timeout_s
        for at_s, act in [one for one in self.at if one[0] <= self.clock.now_s]:
            self.at.remove((at_s, act))
            act()

    def wait(self, attempt=2, timeout_s=600.0):
        """How many seconds the next attempt waits."""
        start_s = self.clock.now_s
        self.keeper.saves.wait_for_earlier(attempt, timeout_s, self.told.append)
        return self.clock.now_s - start_s

    def later(self, seconds, act):
        self.at.append((self.clock.now_s + seconds, act))

    def in_memory(self, step):
        """Whether memory has a step, every byte of it right."""
        books = self.keeper.books
        name = save_name(step)
        return name in books.kept and bool(verify(MemoryTier(books.arenas, books.kept), step))


@pytest.fixture
def left(monkeypatch, disk):
    return Left(monkeypatch, {"local": disk})


def is_committed(disk, step):
    return step in committed(disk)


def test_a_tier_that_hangs_holds_up_nobody_who_has_the_snapshot_in_memory(left, disk):
    for rank in (0, 1):
        left.keeper.worker(rank, 2).save(5, 1)
    assert left.wait() == pytest.approx(saves.QUIET_S, abs=0.1)
    assert left.in_memory(5)
    (line,) = left.told
    assert line == (
        f"waited 5 s for {disk.root} to end attempt 1's save of step 5; going on from its "
        "snapshot in memory"
    )
    ((event, fields),) = left.keeper.events
    assert (event, fields["operation"], fields["step"]) == ("storage_error", "wait", 5)
    assert left.wait() == 0.0  # the next worker that asks
    assert len(left.told) == 1


def test_the_tier_gets_it_when_it_answers_after_all(left, disk):
    worker = left.keeper.worker()
    worker.save(5, 1)
    left.wait()
    assert left.keeper.saves.arenas() == {worker.arena}  # nobody else's
    assert not is_committed(disk, 5)
    left.keeper.run()
    assert verify(disk, 5)
    assert left.in_memory(5)
    assert left.keeper.saves.idle


def test_a_tier_that_is_slow_is_waited_for_as_long_as_memory_is_not_sure_to_be_needed(left, disk):
    left.keeper.worker().save(5, 1)
    left.later(2.0, left.keeper.run)
    assert 2.0 <= left.wait() < 2.5
    assert verify(disk, 5)
    assert left.told == []


def test_of_a_save_that_was_given_up_it_is_not_waited_for_what_a_writer_hangs_on(left):
    one, two = left.keeper.worker(0, 2), left.keeper.worker(1, 2)
    one.save(5, 1)
    two.begin(5, 1)
    assert left.wait() == pytest.approx(saves.QUIET_S, abs=0.1)
    assert not left.keeper.books.kept
    (line,) = left.told
    assert line.endswith("to end attempt 1's save of step 5; going on without it")


def test_one_that_a_rank_has_never_begun_keeps_nobody(left):
    """That rank was lost before; the other one began, and has left since."""
    one = left.keeper.worker(1, 2)
    one.save(5, 1)
    left.keeper.run()
    assert not left.keeper.saves.idle
    assert left.wait() == pytest.approx(saves.QUIET_S, abs=0.1)
    (line,) = left.told
    assert line.endswith("to end attempt 1's save of step 5; going on without it")
    assert left.keeper.saves.idle, "or the keeper would never leave, and whoever waits for it"


def test_one_whose_writers_move_is_waited_for(left):
    one, two = left.keeper.worker(0, 2), left.keeper.worker(1, 2)
    one.save(5, 1)
    two.begin(5, 1)
    acts = left.keeper.pool.acts
    left.later(4.0, lambda: [acts.pop(0)() for _ in range(2)])  # the first writer lets go
    left.later(8.0, left.keeper.run)
    assert left.wait() >= 8.0
    assert left.told == []
    assert left.keeper.saves.idle


def test_what_is_in_no_memory_is_waited_for_and_it_is_said(left, disk):
    left.keeper.worker(ring_bytes=2000).save(5, 1)
    left.later(30.0, left.keeper.run)
    assert left.wait() >= 30.0
    assert verify(disk, 5)
    (line,) = left.told
    assert line.startswith("waiting for step 5, which attempt 1 has left half written to /")


def test_a_machine_that_others_ask_says_it_to_its_own_workers(left):
    left.keeper.worker().save(5, 1)
    left.keeper.saves.wait_for_earlier(2, 60.0)
    assert left.told == []
    assert left.wait() == 0.0
    assert len(left.told) == 1


def test_a_writer_of_the_attempt_before_that_still_hangs_is_in_nobodys_way(left, disk):
    left.keeper.worker().save(5, 1)
    left.wait()
    hangs, left.keeper.pool.acts[:] = list(left.keeper.pool.acts), []
    worker = left.keeper.worker(attempt=2)
    worker.save(5, 1)
    left.keeper.run()
    assert verify(disk, 5).attempt == 2
    left.keeper.pool.acts[:] = hangs
    left.keeper.run()
    assert [ended.error for ended in worker.ended] == [""]
    assert verify(disk, save_of(5, attempt=1)).attempt == 1
    assert verify(disk, 5).attempt == 2


def test_memory_alone_does_not_mind(monkeypatch, tmp_path):
    left = Left(monkeypatch, {"local": Directory(tmp_path)})
    left.keeper.worker().save(5, 1)
    left.wait()
    worker = left.keeper.worker(attempt=2)
    worker.save(5, 1, tiers=("memory",))
    left.keeper.run()
    assert worker.ended[0].error == ""


def test_replicas_that_differ_are_not_used(left):
    for rank in (0, 1):
        worker = left.keeper.worker(rank, 2)
        worker.begin(5, 1)
        worker.fill(5, 1)
        worker.complete(5, 1, digests={"x": str(rank)})
    left.wait()
    assert not left.keeper.books.kept


@pytest.mark.parametrize("machines", [1, 2])
def test_a_commit_that_hangs_is_left_too_and_used_where_all_of_it_is_here(left, disk, machines):
    left.keeper.worker(0, machines).save(5, 1)
    if machines == 2:
        disk.put(f"{save_name(5)}/rank-00001.json", b"{}")
        part = RankOutcome(entry=PartEntry(2, ("0" * 32,), 0, 2), num_files=2)
        message = protocol.PartReport(step=5, serial=1, rank=1)
        left.keeper.saves.reported(hello(1, 2), message, part, None)
    (save,) = left.keeper.saves.table.open.values()
    while not save.is_concluding:
        left.keeper.pool.acts.pop(0)()
    assert left.wait() == pytest.approx(saves.QUIET_S, abs=0.1)
    assert (save_name(5) in left.keeper.books.kept) == (machines == 1)
    left.keeper.run()
    assert is_committed(disk, 5)


def test_an_attempt_is_past_once_a_later_one_has_asked(left):
    saves = left.keeper.saves
    left.wait(attempt=2)
    assert [saves.is_past(attempt) for attempt in (1, 2, 3)] == [True, False, False]
    left.wait(attempt=1)  # another machine's question comes late
    assert saves.is_past(1)
