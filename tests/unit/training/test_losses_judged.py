"""What several ranks log is one loss; nothing of it waits, and a bad one is everybody's at once."""

import math
import queue
import threading

import pytest
import torch
from unit_fakes import Hub

from outlast import config
from outlast.ledger.past import Past
from outlast.training import judging as room
from outlast.training.judging import Judging, reading_of


class Books:
    def __init__(self):
        self.events = queue.Queue()

    def append(self, event, **fields):
        self.events.put((event, fields))

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

    def __init__(self, tmp_path, world_size, **settings):
        hub = Hub(world_size)
        given = {f"health.{name}": value for name, value in settings.items()}
        read = config.load({"dir": str(tmp_path / "job"), **given}, environ={})
        self.links = [hub.link(rank) for rank in range(world_size)]
        past = Past(tmp_path / "job")
        self.ranks = [Judging(read, link, None if link.rank else past) for link in self.links]
        self.books, self.agreement, self.keepers = Books(), Asked(), [[] for _ in self.links]
        self._threads = [
            threading.Thread(target=self._pass_on, args=(rank,), daemon=True)
            for rank in range(world_size)
        ]
        for rank, one in enumerate(self.ranks):
            one.start(0, 1, self.agreement, self.books, self.keepers[rank].append)
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


def test_several_values_are_one():
    assert reading_of([(0, 1.0), (1, 3.0)]).value == 2.0
    assert reading_of([(0, 1.0), (1, 3.0)]).worst == (1,)
    assert reading_of([(0, 1.0), (2, math.inf), (1, math.nan)]).worst == (1, 2)
    assert math.isnan(reading_of([(0, math.inf), (1, -math.inf)]).value)
