"""What several ranks log is one loss; nothing of it waits, and a bad one is everybody's at once."""

import math
import queue
import threading
import time

import msgspec
import pytest
import torch
from unit_fakes import Hub

from outlast import config
from outlast.ledger.events import encode
from outlast.ledger.file import ROOM_BYTES, Ledger, keep, kept
from outlast.ledger.past import Past
from outlast.policy.rollbacks import LossJudge, LossRules
from outlast.training import anomalies as room
from outlast.training.anomalies import STEPS_MAX, LossMonitor, LossTable, word_of


class Books:
    def __init__(self, directory, *, is_full=False):
        directory.mkdir(exist_ok=True)
        self.events, self.written = queue.Queue(), []
        self.path, self.is_full = directory / "ledger.jsonl", is_full

    def append(self, event, **fields):
        self.events.put((event, fields))

    def record(self, event, **fields):
        self.append(event, **fields)
        return not self.is_full

    def write(self, entry, *, durable):
        self.written.append(entry)
        return not self.is_full

    def until(self, name):
        while True:
            event, fields = self.events.get(timeout=20)
            if event == name:
                return fields


class Asked:
    def __init__(self):
        self.asked = queue.Queue()

    def request(self, kind, **info):
        self.asked.put((kind, info))


class Crew:
    """Judgings of several ranks, each with a thread that hands it its messages."""

    def __init__(
        self, tmp_path, world_size, *, word="", at=0, there=lambda: None, is_full=False, **settings
    ):
        hub = Hub(world_size)
        given = {f"health.{name}": value for name, value in settings.items()}
        read = config.load({"dir": str(tmp_path / "job"), **given}, environ={})
        self.links = [hub.link(rank) for rank in range(world_size)]
        past = Past(tmp_path / "job", word).look()
        self.ranks = [LossMonitor(read, link, None if link.rank else past) for link in self.links]
        self.books, self.agreement, self.keepers = (
            Books(tmp_path / "job", is_full=is_full),
            Asked(),
            [[] for _ in self.links],
        )
        self._threads = [
            threading.Thread(target=self._pass_on, args=(rank,), daemon=True)
            for rank in range(world_size)
        ]
        for rank, one in enumerate(self.ranks):
            one.start(
                at, 1, self.agreement, self.books, self.keepers[rank].append, find_there=there
            )
            self._threads[rank].start()

    def _pass_on(self, rank):
        while (message := self.links[rank].receive()) is not None:
            self.ranks[rank].heard(message)

    def step(self, number, losses):
        for one, loss in zip(self.ranks, losses, strict=True):
            if loss is not None:
                one.log({"loss": loss, "other": "x"})
            one.completed(number, 1, number)

    def close(self):
        for one, link in zip(self.ranks, self.links, strict=True):
            one.stop()
            link.close()


@pytest.fixture
def crew(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "PERIOD_S", 0.005)
    made = []

    def make(world_size, **settings):
        made.append(Crew(tmp_path, world_size, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_one_ranks_nan_is_everybodys(crew):
    job = crew(3, anomaly="rollback", settle=2)
    for number in range(1, 8):
        job.step(number, [1.0, torch.tensor(2.0), 3.0])
    job.ranks[0].committed(4)
    assert job.books.until("healthy")["step"] == 4
    job.step(8, [1.0, math.nan, 3.0])
    job.step(9, [math.nan] * 3)
    sign, back = job.books.until("anomaly"), job.books.until("rollback")
    assert (sign["step"], sign["what"], sign["kind"], sign["ranks"]) == (8, "loss", "nan", (1,))
    assert sign["usual"] == 2.0
    assert (back["step"], back["first"]) == (4, 8)
    assert back["batches"] == {"loop": 1, "first": 8, "last": 8}
    assert job.agreement.asked.get(timeout=20)[0] == "rollback"
    assert job.ranks[0].at_end(9) == {"stops": False}
    for rank, told in enumerate(job.keepers):  # each machine's keeper hears of it
        for _ in range(2000):
            if told[-1].rollbacks:
                break
            threading.Event().wait(0.005)
        assert told[-1].healthy == (4,), rank
        assert told[-1].rollbacks[0].step == 4, rank


def test_a_loss_that_rank_0_alone_logs_is_enough(crew):
    job = crew(2)
    for number in range(1, 4):
        job.step(number, [1.0, None])
    job.step(4, [math.inf, None])
    sign = job.books.until("anomaly")
    assert (sign["step"], sign["kind"], sign["action"]) == (4, "infinity", "report")
    assert job.ranks[0].at_end(4) is None


def test_a_loss_that_another_rank_alone_logs_is_enough(crew):
    job = crew(2)
    job.step(1, [None, math.nan])
    assert job.books.until("anomaly")["ranks"] == (1,)


def test_who_logs_nothing_has_no_thread(crew):
    job = crew(2)
    for number in range(1, 50):
        job.step(number, [None, None])
    assert not any(one._thread.is_alive() for one in job.ranks)
    assert job.ranks[0].at_end(49) is None
    assert job.keepers[0][-1].healthy is None


def test_a_number_that_has_not_come_is_waited_for_by_nobody(crew):
    job = crew(1)
    late = threading.Event()

    class Late(room._Value):
        @property
        def is_there(self):
            return late.is_set()

    job.ranks[0].log({"loss": 1.0})
    job.ranks[0].completed(1, 1, 1)
    job.ranks[0]._logged.append((2, "loss", Late(math.nan)))
    job.ranks[0].completed(2, 1, 2)
    for number in range(3, 6):
        job.step(number, [1.0])
    with pytest.raises(queue.Empty):
        job.books.events.get(timeout=0.1)
    late.set()
    assert job.books.until("anomaly")["step"] == 2


@pytest.mark.parametrize(
    "value", ["x", None, torch.zeros(3), torch.zeros(0), object(), torch.zeros((), device="meta")]
)
def test_what_is_no_number_is_passed_by(crew, value):
    job = crew(1)
    job.ranks[0].log({"loss": value})
    assert not job.ranks[0]._logged


class Seen:
    """A judge that notes what it is shown."""

    def __init__(self):
        self.readings = {}

    def see(self, step, readings):
        self.readings[step] = readings


def told(*values, world_size=3, until=1):
    """What is shown of steps that these are of: (rank, step, what, value)."""
    seen = Seen()
    bench = LossTable(seen, 0, world_size)
    for rank in range(world_size):
        words = [(step, what, value) for one, step, what, value in values if one == rank]
        bench.take(word_of(rank, until, words))
    while bench.judge_next():
        pass
    return seen.readings


def test_several_values_are_one():
    one = told((0, 1, "loss", 1.0), (1, 1, "loss", 3.0))[1]["loss"]
    assert (one.value, one.worst) == (2.0, (1,))
    one = told((0, 1, "loss", 1.0), (2, 1, "loss", math.inf), (1, 1, "loss", math.nan))[1]["loss"]
    assert one.worst == (1, 2)
    one = told((0, 1, "loss", math.inf), (1, 1, "loss", -math.inf))[1]["loss"]
    assert math.isnan(one.value)


def test_a_value_that_is_logged_twice_counts_twice_and_the_largest_is_found():
    one = told((0, 1, "loss", 9.0), (0, 1, "loss", 1.0), (1, 1, "loss", 5.0))[1]["loss"]
    assert (one.value, one.worst) == (5.0, (0,))


def test_steps_are_kept_apart_and_a_place_is_used_again():
    losses = [(rank, step, "loss", float(step)) for step in (1, 3) for rank in range(2)]
    seen = told(*losses, (1, 2, "grad_norm", 7.0), world_size=2, until=4)
    assert {step: sorted(found) for step, found in seen.items()} == {
        1: ["loss"],
        2: ["grad_norm"],
        3: ["loss"],
        4: [],
    }
    assert seen[3]["loss"].value == 3.0
    judge = Seen()
    bench = LossTable(judge, 0, 1)
    for step in (1, 1 + STEPS_MAX):
        bench.take(word_of(0, step, [(step, "loss", float(step))]))
        while bench.judge_next():
            pass
    assert judge.readings[1 + STEPS_MAX]["loss"].value == 1 + STEPS_MAX


def test_what_a_silent_rank_holds_up_is_bounded():
    bench = LossTable(LossJudge(LossRules(), 0), 0, 2)
    for step in range(1, 3 * STEPS_MAX, 100):
        bench.take(word_of(0, step, [(step, "loss", math.nan)]))
    assert len(bench._columns["loss"]._wrong) <= STEPS_MAX // 100 + 1
    assert bench.judge_next() is None


def test_a_word_that_cannot_be_sent_is_sent_later(crew, monkeypatch):
    job = crew(2)
    link, is_down = job.links[1], threading.Event()
    send = link.send

    def failing(rank, message):
        if is_down.is_set():
            raise RuntimeError("the store does not answer")
        send(rank, message)

    monkeypatch.setattr(link, "send", failing)
    job.step(1, [1.0, 1.0])
    is_down.set()
    job.step(2, [1.0, math.nan])
    with pytest.raises(queue.Empty):
        job.books.events.get(timeout=0.2)
    is_down.clear()
    assert job.books.until("anomaly")["step"] == 2


def test_rank_0s_word_that_cannot_be_sent_is_sent_later(crew, monkeypatch):
    job = crew(2)
    link, fails = job.links[0], [True] * 3
    send = link.send

    def failing(rank, message):
        if fails:
            fails.pop()
            raise OSError("the store does not answer")
        send(rank, message)

    monkeypatch.setattr(link, "send", failing)
    job.step(1, [math.nan, None])  # rank 1 logs nothing: it tells so when it is asked
    assert job.books.until("anomaly")["step"] == 1


def test_who_is_not_judged_any_more_keeps_nothing(crew):
    job = crew(1)
    job.step(1, [1.0])
    job.ranks[0].stop()
    for number in range(2, 50):
        job.step(number, [1.0])
    assert len(job.ranks[0]._logged) <= 1


def test_nobody_waits_at_each_loops_end_for_a_rank_that_tells_nothing(crew, monkeypatch):
    monkeypatch.setattr(room, "END_S", 0.2)
    job = crew(2)
    job.ranks[0].log({"loss": 1.0})
    job.ranks[0].completed(1, 1, 1)
    job.ranks[0].at_end(1)
    assert job.ranks[0]._patience_s == 0.0
    job.ranks[1].completed(1, 1, 1)
    job.step(2, [1.0, 1.0])
    for _ in range(2000):
        if job.ranks[0].at_end(2) is None and job.ranks[0]._patience_s:
            break
        threading.Event().wait(0.005)
    assert job.ranks[0]._patience_s == 0.2, "they tell again, and are waited for again"


def test_a_rollback_that_is_not_written_down_is_none(crew):
    job = crew(1, anomaly="rollback")
    job.books.is_full = True
    job.step(1, [math.nan])
    kind, info = job.agreement.asked.get(timeout=20)
    assert kind == "rollback"
    assert f"cannot be written to {job.books.path}" in info["unknown"]
    assert not job.ranks[0].rollbacks, "nobody is told that anything was undone"


@pytest.mark.parametrize("is_full", [False, True], ids=["room", "still-full"])
def test_a_rollback_that_the_disk_did_not_take_is_made_up_for(crew, tmp_path, is_full):
    (tmp_path / "job").mkdir()
    ledger = Ledger(tmp_path / "job", job="j", attempt=1)
    rollback = ledger.entry("rollback", None, {"step": 3, "first": 4, "batches": None})
    assert keep(tmp_path / "job", encode(rollback))
    word = Past(tmp_path / "job").look().word
    job = crew(1, word=word, at=3, is_full=is_full)
    assert [one.step for one in job.ranks[0].rollbacks] == [3]
    for _ in range(2000):
        if (tmp_path / "job" / "rollbacks").stat().st_size == ROOM_BYTES:
            break
        threading.Event().wait(0.005)
    assert [event.fields for event in job.books.written] == [rollback.fields]
    assert len(kept(tmp_path / "job")) == is_full


def test_a_sign_that_began_too_far_back_stops_and_says_so(crew, monkeypatch):
    monkeypatch.setattr(room, "REMEMBERED", 2)
    job = crew(1, anomaly="rollback")
    job.step(1, [1.0])
    for number in range(2, 6):
        job.step(number, [None])
    job.step(6, [math.nan])
    assert job.books.until("anomaly")["action"] == "stop"
    found = job.books.until("rollback")
    assert (found["first"], found["batches"]) == (2, None)
    assert found["reason"].endswith("which batch its first step had is not known any more")


def test_it_goes_back_to_what_is_there(crew):
    job = crew(1, anomaly="rollback", settle=2, there=lambda: {4})
    for number in range(1, 9):
        job.step(number, [1.0])
    for step in (2, 4):
        job.ranks[0].committed(step)
        job.books.until("healthy")
    job.ranks[0].committed(6)
    assert job.books.until("healthy")["step"] == 6
    job.step(9, [math.nan])
    assert job.books.until("rollback")["step"] == 4, "6 was removed"


def test_places_that_do_not_answer_hold_nobody_up(crew, monkeypatch):
    monkeypatch.setattr(room, "LOOK_S", 0.05)
    never = threading.Event()
    job = crew(1, anomaly="rollback", there=never.wait)
    job.step(1, [math.nan])
    assert job.books.until("rollback")["step"] == 0
    never.set()


def test_the_window_outlives_the_attempt(crew):
    job = crew(1, settle=2)
    for number in range(1, 31):
        job.step(number, [2.0 + 0.01 * (number % 3)])
    job.ranks[0].committed(25)
    windows = job.books.until("healthy")["windows"]
    assert len(windows["loss"]) == 25
    known = {"offset": 0, "commits": [25], "healthy": [25], "windows": windows}
    after = crew(1, word=msgspec.json.encode(known).decode(), at=25)
    for number in (26, 27):
        after.step(number, [20.0 if number == 27 else 2.0])
    sign = after.books.until("anomaly")
    assert (sign["step"], sign["kind"]) == (27, "spike")


def test_a_thousand_ranks_cost_rank_0_little():
    """How much is printed; it is no matter of taste only where it is a list per value again."""
    bench, steps = LossTable(LossJudge(LossRules(), 0), 0, 1000), range(1, 41)
    words = [
        msgspec.json.encode(
            word_of(rank, 40, [(step, what, 2.0) for step in steps for what in room.WATCHED])
        )
        for rank in range(1000)
    ]
    begun_s = time.thread_time()
    for word in words:
        bench.take(msgspec.json.decode(word))
    while bench.judge_next():
        pass
    print(f"{1e3 * (time.thread_time() - begun_s) / len(steps):.2f} ms a step")
    assert bench.next == 41
