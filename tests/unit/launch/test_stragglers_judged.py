"""What rank 0's agent does with what all watchers tell."""

import json
import sys
import threading
import types

import numpy as np
import pytest

from outlast.health.watched import Times, Timings
from outlast.launch import symptoms as room
from outlast.launch.symptoms import StragglerMonitor

ONSET = 40


class Store:
    """An attempt's store."""

    def __init__(self):
        self.values = {}
        self.is_gone = False

    def set(self, key, value):
        if self.is_gone:
            raise RuntimeError("Broken pipe")
        self.values[key] = value

    def check(self, keys):
        return all(key in self.values for key in keys)

    def multi_get(self, keys):
        if self.is_gone:
            raise RuntimeError("Broken pipe")
        return [self.values[key] for key in keys]


class Ledger:
    attempt = 1

    def __init__(self):
        self.events = []
        self.came = threading.Event()

    def append(self, event, *, rank, **fields):
        entry = room.Ledger.entry(self, event, rank, fields)
        self.events.append(entry)
        self.came.set()
        return entry

    job, node, rank = "j", "a", None


class Machines:
    def __init__(self, asked=True):
        self.calls, self.asked = [], asked

    def exclude(self, reason, **options):
        self.calls.append((reason, options))
        return self.asked


@pytest.fixture
def store(monkeypatch):
    made = Store()
    monkeypatch.setattr(room, "connect", lambda *_: made)
    return made


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(room, "say", lines.append)
    return lines


@pytest.fixture
def judges():
    made = []

    def make(rank=0, machines=2, ranks=4, straggler="report", notify=(), others=None):
        settings = types.SimpleNamespace(health_straggler=straggler, health_notify=tuple(notify))
        judge = StragglerMonitor(Ledger(), others or Machines(), settings)
        workers = [types.SimpleNamespace(world_size=ranks)]
        judge.begin(
            types.SimpleNamespace(
                group_rank=rank,
                group_world_size=machines,
                master_addr="h",
                master_port=1,
                workers=workers,
            )
        )
        made.append(judge)
        return judge

    yield make
    for judge in made:
        judge.close()


def timings(ranks, node, slow=(), steps=80, attempt=1):
    """What a machine with these ranks tells after so many steps."""
    found = []
    for rank in ranks:
        numbers = np.arange(1, steps + 1)
        own = 0.02 * (1 + 0.01 * np.sin(numbers * (rank + 1)))
        own[ONSET:] += 0.01 * (rank in slow)
        rows = np.stack((own, 0.05 - own, 0 * own, 0 * own), axis=1).astype(np.float32)
        found.append(
            Times(
                ranks=(rank,),
                kinds=(1,),
                steps=numbers.astype(np.int64).tobytes(),
                seconds=rows.tobytes(),
            )
        )
    return Timings(attempt=attempt, node=node, ranks=tuple(found))


def test_ranks_of_all_machines_are_judged_together(judges, store):
    judge = judges()
    store.set(room._key(1), room._encoder.encode(timings([2, 3], "b", slow=[3])))
    judge.heard(timings([0, 1], "a"))
    assert judge._ledger.came.wait(10)
    (event,) = judge._ledger.events
    assert (event.rank, event["node"], event["ranks"]) == (3, "b", [3])
    assert (event["cause"], event["since_step"], event["action"]) == (
        "compute",
        ONSET + 1,
        "report",
    )


def test_another_machine_puts_its_own_under_its_key(judges, store):
    judge = judges(rank=1)
    judge.heard(timings([2, 3], "b"))
    for _ in range(1000):
        if store.values:
            break
        threading.Event().wait(0.01)
    assert list(store.values) == [room._key(1)]


def test_nobody_is_judged_while_a_machine_is_silent(judges, store):
    judge = judges()
    judge.heard(timings([0, 1], "a", slow=[1]))
    judge.close()
    assert judge._ledger.events == []


def test_ranks_of_one_machine_are_one_finding(judges, store):
    judge = judges(ranks=6)
    store.set(room._key(1), room._encoder.encode(timings([4, 5], "b", slow=[4, 5])))
    judge.heard(timings([0, 1, 2, 3], "a"))
    assert judge._ledger.came.wait(10)
    (event,) = judge._ledger.events
    assert event["ranks"] == [4, 5]


def test_what_is_left_of_another_attempt_is_not_judged(judges, store):
    judge = judges(machines=1)
    judge.heard(timings(range(4), "a", slow=[3], attempt=7))
    judge.close()
    assert judge._ledger.events == []


@pytest.mark.parametrize("straggler", ["replace", "leave out"])
def test_a_machine_is_asked_for_once(judges, store, said, straggler):
    machines = Machines()
    judge = judges(machines=1, straggler=straggler, others=machines)
    judge.heard(timings(range(4), "a", slow=[3]))
    assert judge._ledger.came.wait(10)
    judge.close()
    ((reason, options),) = machines.calls
    assert "rank 3 is slow" in reason
    assert options == {
        "for_s": room.REPLACED_S,
        "host": "a",
        "gentle": True,
        "spare_only": straggler == "replace",
    }
    assert said == []


def test_a_machine_that_was_replaced_may_be_again_once_its_time_is_over(judges, monkeypatch):
    judge = judges(machines=2, straggler="replace", others=(others := Machines()))
    found = types.SimpleNamespace(rank=1, of="compute", factor=1.5)
    for _ in range(2):
        judge._replace("b", found, spare_only=True)
    assert len(others.calls) == 1
    monkeypatch.setattr(room, "REPLACED_S", 0.0)
    judge._replace("b", found, spare_only=True)
    assert len(others.calls) == 2


def test_without_another_machine_it_is_said(judges, store, said):
    judge = judges(machines=1, straggler="replace", others=Machines(asked=False))
    judge.heard(timings(range(4), "a", slow=[3]))
    assert judge._ledger.came.wait(10)
    judge.close()
    (line,) = said
    assert "machine a cannot be replaced" in line


def test_the_command_reads_the_event(judges, store, said, tmp_path):
    code = f"import sys; open({str(tmp_path / 'out')!r}, 'w').write(sys.stdin.read())"
    judge = judges(machines=1, straggler="notify", notify=[sys.executable, "-c", code])
    judge.heard(timings(range(4), "a", slow=[2]))
    assert judge._ledger.came.wait(10)
    judge.close()
    for thread in judge._notifying:
        thread.join(30)
    event = json.loads((tmp_path / "out").read_text())
    assert (event["event"], event["rank"], event["node"]) == ("straggler", 2, "a")
    assert said == []


@pytest.mark.parametrize(
    ("notify", "words"),
    [
        (["/no/such/thing"], "No such file"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "code 3"),
    ],
    ids=["absent", "fails"],
)
def test_a_command_that_fails_is_said_once(judges, store, said, notify, words):
    judge = judges(machines=1, straggler="notify", notify=notify)
    for _ in range(2):
        judge._notify(b"{}")
    (line,) = said
    assert words in line
    assert "training goes on" in line


def test_a_store_that_is_gone_ends_the_judging_alone(judges, store):
    store.is_gone = True
    judge = judges(rank=1)
    judge.heard(timings([2, 3], "b"))
    judge._round._thread.join(10)
    assert not judge._round._thread.is_alive()


def test_a_worker_alone_is_not_judged(judges):
    assert judges(machines=1, ranks=1)._round is None
