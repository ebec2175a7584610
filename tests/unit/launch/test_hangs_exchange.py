"""What agents make of suspicions: of this attempt only, and never of a machine's first silence."""

import threading
import time
from types import SimpleNamespace

import msgspec
import pytest

from outlast.health.watched import Suspicion
from outlast.launch import symptoms as rooms
from outlast.launch.symptoms import HangReport, Hangs, HangVerdict, Places, failure_of
from outlast.ledger.file import Ledger, read_events
from outlast.policy.hang import Activity, Frame, HangSettings, Named, RankLook

BARRIER = (Frame("barrier", "/x/torch/distributed/distributed_c10d.py", 1),)
NAMED = Named(
    ranks=(0,),
    nodes=("a",),
    sentence="rank 0",
    is_proven=False,
    kind=Activity.STEP,
    given_s=2.0,
    step=8,
)


def waits(rank, **fields):
    usual = {"kind": Activity.STEP, "age_s": 3.0, "limit_s": 2.0, "frames": BARRIER, "node": "a"}
    return RankLook(rank=rank, **(usual | fields))


class Store:
    """As much of torch's store as is needed; may fail now and then."""

    def __init__(self):
        self.values = {}
        self.failures = 0

    def __call__(self, *address):
        return self

    def check(self, keys):
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the store did not answer")
        return all(key in self.values for key in keys)

    def set(self, key, value):
        self.values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key):
        return self.values[key]

    def delete_key(self, key):
        return self.values.pop(key, None) is not None


def health():
    taught = {}
    return SimpleNamespace(
        hear=lambda kind, hearer: None,
        learned=lambda name: taught.get(name, {}),
        teach=taught.__setitem__,
        tell=lambda message: False,
        taught=taught,
    )


@pytest.fixture
def ours(tmp_path, monkeypatch):
    monkeypatch.setattr(rooms, "OTHERS_S", 0.05)
    ledger = Ledger(tmp_path, job="j", attempt=5)
    beats = tmp_path / "beats"
    beats.mkdir()
    (beats / "evidence-0").write_text("stack")
    found = Hangs(
        health(), ledger, tmp_path, beats, chosen=HangSettings(), hosts=lambda: ["a", "b"]
    )
    yield found
    found.end()


def group(size):
    worker = SimpleNamespace(local_rank=0, global_rank=0)
    return SimpleNamespace(
        group_world_size=size, group_rank=0, workers=[worker], master_addr="x", master_port=1
    )


def test_a_verdict_ends_its_own_attempt_only(ours, monkeypatch):
    ours.begin(group(1))
    writing, go_on = threading.Event(), threading.Event()
    write = ours._ledger.write

    def slow(entry, *, durable):
        writing.set()
        go_on.wait(10)
        write(entry, durable=durable)

    monkeypatch.setattr(ours._ledger, "write", slow)
    monkeypatch.setattr(rooms, "WRITTEN_S", 0.01)
    thread = threading.Thread(target=lambda: ours.settle(5, NAMED, [waits(0)]))
    thread.start()
    writing.wait(10)
    assert ours.named is NAMED  # before it is written down: that may take for ever
    ours._ledger.attempt = 6
    ours.begin(group(1))
    go_on.set()
    thread.join(10)
    assert ours.named is None
    (event,) = read_events(ours._directory)
    assert (event.event, event.attempt) == ("hang", 5)
    folder = ours._directory / "hangs" / "attempt-00005"
    assert (folder / "rank-00000.txt").read_text() == "stack"
    ours.settle(5, NAMED, [waits(0)])
    assert ours.named is None


def test_what_is_not_proven_gets_more_time_and_the_ceiling_when_it_comes_again(ours):
    for attempt, least_s in ((5, 4.0), (6, 600.0)):
        ours._ledger.attempt = attempt
        ours.begin(group(1))
        ours.settle(attempt, NAMED, [waits(0)])
        assert ours._health.taught["hang"]["step"][2] == least_s


def until(what):
    deadline_s = time.monotonic() + 10
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def verdicts(store):
    found = [key for key in store.values if key.endswith("verdict")]
    return [msgspec.json.decode(store.values[key], type=HangVerdict) for key in sorted(found)]


def test_a_machine_is_silent_when_it_has_not_answered_twice(ours, monkeypatch):
    store = Store()
    monkeypatch.setattr(rooms, "connect", store)
    ours.begin(group(2))
    ours._suspected(Suspicion(attempt=5, seen=(waits(0),)))
    until(lambda: verdicts(store))
    assert verdicts(store)[0].named is None
    ours._suspected(Suspicion(attempt=5, seen=(waits(0),)))
    until(lambda: ours.named)
    assert ours.named.nodes == ("b",)


def test_a_machine_that_says_that_it_is_there_is_not_silent(ours, monkeypatch):
    store = Store()
    monkeypatch.setattr(rooms, "connect", store)
    for number in range(3):
        store.set(f"outlast/hang/{number}/1/here", "")
    store.set("outlast/hang/1/1", msgspec.json.encode(HangReport(node="b", seen=())))
    ours.begin(group(2))
    for number in range(3):
        ours._suspected(Suspicion(attempt=5, seen=(waits(0),)))
        until(lambda number=number: f"outlast/hang/{number}/verdict" in store.values)
    assert ours.named is None
    assert "outlast/hang/0/0" not in store.values  # nobody reads it any more


def test_a_store_that_fails_once_is_asked_again(ours, monkeypatch):
    store = Store()
    store.failures = 1
    monkeypatch.setattr(rooms, "connect", store)
    monkeypatch.setattr(rooms, "AGAIN_S", 0.01)
    store.set("outlast/hang/0/asked", "")
    ours.begin(group(2))
    until(lambda: verdicts(store))


@pytest.mark.parametrize(
    ("given_s", "chosen", "counts"),
    [(2.0, HangSettings(), False), (600.0, HangSettings(), True), (600.0, None, False)],
    ids=["early", "ceiling", "off"],
)
def test_a_suspicion_counts_as_a_failure_once_it_has_had_the_ceiling(given_s, chosen, counts):
    named = msgspec.structs.replace(NAMED, given_s=given_s, stack="f in train.py")
    failure = failure_of(named, chosen)
    assert (failure.proven, failure.stack, failure.step) == (counts, "f in train.py", 7)


def test_who_holds_a_rank_is_said_once(ours, capfd):
    ours.begin(SimpleNamespace(group_world_size=1, group_rank=0, workers=[]))
    held = waits(0, state="t", tracer="gdb (pid 71)")
    for _ in range(3):
        ours._suspected(Suspicion(attempt=5, seen=(held,)))
    assert capfd.readouterr().err.count("rank 0 is held by gdb (pid 71)") == 1
    assert ours.named is None


def test_an_attempt_ends_while_its_store_does_not_answer(ours, monkeypatch):
    """Its machine may be cut off: nobody waits for that, and what comes late is of no use."""
    monkeypatch.setattr(rooms, "JOIN_S", 60.0)
    asked, answer, late = threading.Event(), threading.Event(), threading.Event()

    class Cut(Store):
        def check(self, keys):
            if asked.is_set():
                return False
            asked.set()
            if not answer.wait(10):
                late.set()
            return True

    store = Cut()
    monkeypatch.setattr(rooms, "connect", store)
    ours.begin(group(2))
    exchange = ours._exchange
    exchange.wake.set()
    assert asked.wait(10)
    ours.end()
    assert not late.is_set()
    ours._suspected(Suspicion(attempt=5, seen=(waits(0),)))  # for the exchange that comes next
    answer.set()
    exchange.join(10)
    assert ours.suspects
    assert not store.values


LOCK = (Frame("take", "/home/a/train.py", 7),)


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_nobody_is_named_where_one_that_was_late_has_gone_on(ours, monkeypatch, where, goes_on):
    """The other machine was frozen: when its look is in, the one that waited is in other steps."""
    store = Store()
    monkeypatch.setattr(rooms, "connect", store)
    monkeypatch.setattr(rooms, "PLACES_S", 0.05)
    here, there = waits(0, step=7), waits(1, step=7, frames=LOCK, node="b")
    store.set("outlast/hang/0/1/here", "")
    store.set("outlast/hang/0/1", msgspec.json.encode(HangReport(node="b", seen=(there,))))
    now = {0: (7 + (goes_on and where == "here"), -1)}
    monkeypatch.setattr(ours, "places", lambda: Places(now=now))
    told = Places(now={1: (7 + (goes_on and where == "elsewhere"), -1)})
    store.set("outlast/hang/0/1/places", msgspec.json.encode(told))
    ours.begin(group(2))
    ours._suspected(Suspicion(attempt=5, seen=(here,)))
    until(lambda: verdicts(store))
    assert (verdicts(store)[0].named is None) == goes_on
    assert "outlast/hang/0/places" in store.values


def test_another_machine_tells_how_far_its_ranks_are_and_one_that_says_nothing_is_believed(
    ours, monkeypatch
):
    store = Store()
    monkeypatch.setattr(rooms, "connect", store)
    second = group(2)
    second.group_rank = 1
    ours.begin(second)
    ours._suspected(Suspicion(attempt=5, seen=(waits(0),)))
    until(lambda: "outlast/hang/0/1" in store.values)
    store.set("outlast/hang/0/places", "")
    until(lambda: "outlast/hang/0/1/places" in store.values)
    told = msgspec.json.decode(store.values["outlast/hang/0/1/places"], type=Places)
    assert told.now == {}  # its worker has said nothing yet
    store.set("outlast/hang/0/verdict", msgspec.json.encode(HangVerdict(named=NAMED)))
    until(lambda: ours.named)
