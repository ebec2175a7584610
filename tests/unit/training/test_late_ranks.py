"""What workers tell each other of their time, and that they act alike on it."""

import contextlib

import pytest
import torch

from outlast import config
from outlast.attempt.over import over
from outlast.data import Loader, Shards
from outlast.policy.late import LEAST, WARM_UP
from outlast.reduce import losses
from outlast.training import late
from outlast.training.late import LateRanks, _ShardTime

WORLD, SHARDS, BATCH = 3, 6, 12
ENOUGH = WARM_UP + LEAST


class Link:
    world_size = WORLD

    def __init__(self, rank):
        self.rank = rank


class Model:
    world_size, device, is_scaled = WORLD, torch.device("cpu"), False


class Bits:
    def __init__(self, *summed):
        self.summed = summed


class Ledger:
    def __init__(self):
        self.lines = []

    def append(self, event, **fields):
        self.lines.append((event, fields))


class Watch:
    """A clock that is told how long a shard takes."""

    def __init__(self, cost_s):
        self.cost_s, self.made = cost_s, 0

    def begin(self):
        self.made = 0

    def so_far_s(self):
        return self.cost_s * self.made

    def end(self, made, waited_s):
        return _ShardTime(self.cost_s * made, made)


class Position:
    def __init__(self, loader):
        self.loader, self.lost = loader, []

    def dropped(self, num):
        self.lost.append(num)


class Worker:
    """One rank with its loader, and what the sums would ask of it."""

    def __init__(self, rank, answer="move", factor=1.5, shards=SHARDS):
        settings = config.load({"workers.late": answer, "workers.late_factor": factor}, environ={})
        self.step, self.ledger, self.model = 0, Ledger(), Model()
        self.late = LateRanks(settings, Link(rank), self.ledger, lambda: self.step)
        self.loader = loader_of(rank, shards)
        self.position = Position(self.loader)
        self.batches = iter(self.loader)
        self.watch = Watch(1.0)

    def open(self, stack, *models):
        stack.enter_context(self.late.loop(self.position, Bits(*(models or (self.model,)))))
        self.late._watch = self.watch

    def make(self, batch):
        """A step's shards; how many were made."""
        self.late.begins(batch)
        while self.watch.made < len(batch) and self.late.goes_on(self.watch.made):
            self.watch.made += 1
        return self.watch.made


def loader_of(rank, shards=SHARDS):
    loader = Loader(torch.arange(99), global_batch=BATCH, shards=shards)
    loader.set_worker(rank, WORLD)
    return loader


@pytest.fixture(name="fleet")
def _fleet(monkeypatch):
    said = []
    monkeypatch.setattr(late, "say", said.append)
    with contextlib.ExitStack() as stack:

        def start(*workers, opens=True):
            for worker in workers if opens else ():
                worker.open(stack)
            return workers, said, stack

        yield start
    assert not losses.late


def go(workers, batches=None):
    """One step of all; how many shards each has made."""
    batches = batches or [next(worker.batches) for worker in workers]
    made = [worker.make(batch) for worker, batch in zip(workers, batches, strict=True)]
    rows = torch.tensor([worker.late.words() for worker in workers], dtype=torch.float64)
    held = [len(batch) for batch in batches]
    for worker in workers:
        worker.late.heard(rows)
        if made != held:
            worker.late.left_out(made, held)
        worker.step += 1
    return made


def test_all_change_their_loaders_alike_and_rank_0_writes_it(fleet):
    workers, said, _ = fleet(*map(Worker, range(WORLD)))
    workers[1].watch.cost_s = 2.5
    for _ in range(ENOUGH):
        assert go(workers) == [2, 2, 2]
    assert go(workers) == [3, 1, 2]
    (line,) = workers[0].ledger.lines
    assert line == (
        "late_moved",
        {
            "step": ENOUGH,
            "from_step": ENOUGH + 1,
            "counts": [3, 1, 2],
            "late": [1],
            "factors": [2.5],
            "back": [],
            "probes": [],
        },
    )
    assert not workers[1].ledger.lines
    assert not said


class Lagging(late._HeardRows):
    """As on a GPU: what is read is a step old."""

    def __init__(self):
        super().__init__()
        self.before = []

    def read(self, rows):
        found, self.before = self.before, rows.tolist()
        return found


@pytest.mark.parametrize("passed_over", [(0, 0, 0), (2, 2, 2), (0, 3, 1)])
def test_on_a_gpu_shares_change_where_nobody_has_loaded_yet(fleet, monkeypatch, passed_over):
    """Whatever was loaded since the numbers that were read, also by one worker alone."""
    monkeypatch.setattr(late, "_HeardRows", Lagging)
    workers, said, _ = fleet(*map(Worker, range(WORLD)))
    workers[1].watch.cost_s = 2.5
    for _ in range(ENOUGH):
        go(workers)
    for worker, num in zip(workers, passed_over, strict=True):
        for _ in range(num):
            next(worker.batches)
    loaded = max(worker.loader.loaded_to for worker in workers) + BATCH  # one more is due
    go(workers)
    assert workers[0].ledger.lines[0][1]["counts"] == [3, 1, 2]
    for worker in workers:
        assert worker.loader.loaded_to <= loaded
        assert worker.loader._shares.at(loaded - BATCH) == ()
        assert worker.loader._shares.at(loaded) == (3, 1, 2)
    assert not said


def test_where_a_worker_has_no_loader_any_more_nobody_changes_anything(fleet, monkeypatch):
    monkeypatch.setattr(late, "_HeardRows", Lagging)
    workers, _, _ = fleet(*map(Worker, range(WORLD)))
    workers[1].watch.cost_s = 2.5
    for _ in range(ENOUGH):
        go(workers)
    batches = [next(worker.batches) for worker in workers]
    for worker, batch in zip(workers, batches, strict=True):
        worker.make(batch)
    rows = [worker.late.words() for worker in workers]
    rows[2] = [3.0, 1.5, *[0.0] * 4]
    for worker in workers:
        worker.late.heard(torch.tensor(rows, dtype=torch.float64))
    assert not workers[0].ledger.lines
    assert all(worker.loader.has_usual_shares for worker in workers)
    for _ in range(2 * ENOUGH):
        go(workers)
    assert workers[0].ledger.lines[0][1]["counts"] == [3, 1, 2]


def test_batches_of_another_loader_by_hand_or_of_a_void_step_count_for_nothing(fleet, monkeypatch):
    workers, said, _ = fleet(*map(Worker, range(WORLD)))
    others = [iter(loader_of(rank)) for rank in range(WORLD)]
    for worker in workers:
        worker.watch.cost_s = 9.0 if worker is workers[1] else 1.0
    for number in range(3 * ENOUGH):
        if number % 3 == 0:
            go(workers, [next(one) for one in others])
        elif number % 3 == 1:
            go(workers, [Shards([0, 1], of=6, first=2 * rank, position=9) for rank in range(3)])
        else:
            with monkeypatch.context() as patch:
                patch.setattr(over, "is_void", True)
                go(workers, [next(one) for one in others])
    assert not workers[0].ledger.lines
    assert all(worker.loader.has_usual_shares for worker in workers)
    for _ in range(ENOUGH):
        go(workers)
    assert workers[0].ledger.lines[0][1]["late"] == [1]
    (told,) = said
    assert "Shards are made by hand" in told


def test_each_loader_has_costs_of_its_own(fleet):
    """One whose shards take ten times as long is no reason to leave out those of the next."""
    workers, _, stack = fleet(
        *(Worker(rank, "drop", shards=12) for rank in range(WORLD)), opens=False
    )
    with contextlib.ExitStack() as loop:
        for worker in workers:
            worker.open(loop)
        for _ in range(2 * ENOUGH):
            assert go(workers) == [4, 4, 4]
    for rank, worker in enumerate(workers):
        worker.loader = worker.position.loader = loader_of(rank, 12)
        worker.batches, worker.watch.cost_s = iter(worker.loader), 10.0
        worker.open(stack)
    for _ in range(2 * ENOUGH):
        assert go(workers) == [4, 4, 4]
    workers[2].watch.cost_s = 100.0
    assert go(workers) == [4, 4, 1]


def test_what_is_dropped_is_noted_by_whose_it_is_and_written_by_rank_0(fleet):
    workers, _, _ = fleet(*(Worker(rank, "drop", shards=12) for rank in range(WORLD)), opens=False)
    with contextlib.ExitStack() as loop:
        for worker in workers:
            worker.open(loop)
        for _ in range(ENOUGH):
            go(workers)
        workers[1].watch.cost_s = 2.9  # a wait for the batch comes to it
        assert go(workers) == [4, 2, 4]
        workers[2].watch.cost_s = 5.0
        assert go(workers) == [4, 2, 1]  # whoever was late before
    assert [worker.position.lost for worker in workers] == [[], [2, 2], [3]]
    assert [line for worker in workers[1:] for line in worker.ledger.lines] == []
    first, rest = (fields for _, fields in workers[0].ledger.lines)
    step = ENOUGH + 1
    assert first == {"first_step": step, "step": step, "steps": 1, "samples": {"1": 2}}
    assert rest["samples"] == {"1": 2, "2": 3}


@pytest.mark.parametrize("other", [{"answer": "drop"}, {"factor": 2.0}, {"answer": "wait"}])
def test_other_settings_on_one_worker_have_all_wait_and_rank_0_names_it(fleet, other):
    workers, said, _ = fleet(Worker(0), Worker(1), Worker(2, **other))
    workers[1].watch.cost_s = 9.0
    for _ in range(3 * ENOUGH):
        rows = [
            losses.NO_TIME if other.get("answer") == "wait" and worker is workers[2] else None
            for worker in workers
        ]
        batches = [next(worker.batches) for worker in workers]
        for worker, batch in zip(workers, batches, strict=True):
            worker.make(batch)
        told = [row or worker.late.words() for row, worker in zip(rows, workers, strict=True)]
        for worker in workers:
            worker.late.heard(torch.tensor(told, dtype=torch.float64))
    assert said[0].startswith('workers.late is "move", and late workers are waited for: rank 2 has')
    assert len(said) == 1
    assert not workers[0].ledger.lines
    assert all(worker.loader.has_usual_shares for worker in workers)


def test_whoever_has_another_loader_says_so_itself(fleet):
    workers, said, stack = fleet(*map(Worker, range(WORLD)), opens=False)
    workers[2].position.loader = [1, 2, 3]
    for worker in workers:
        worker.open(stack)
    assert said == []
    go(workers)
    assert len(said) == 2
    assert "rank 2 has another loader or other settings of workers.late than rank 0" in said[0]
    assert said[1].startswith('rank 2: workers.late is "move", and late workers are waited for: ')


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda worker: ((), worker.loader), "this takes outlast.SameBits"),
        (lambda worker: ((worker.model,), iter([])), "this takes outlast.SameBits"),
        (lambda worker: ((Model(), Model()), worker.loader), "several outlast.SameBits"),
        (
            lambda worker: ((Model(),), Loader(range(9), global_batch=3)),
            "outlast.data.Loader(dataset, global_batch=B, shards=V)",
        ),
        (lambda worker: ((Model(),), loader_of(0, 3)), "give the loader and the model 6 shards"),
    ],
)
def test_what_is_missing_is_said_once_by_rank_0(fleet, change, says):
    (worker, other), said, stack = fleet(Worker(0, "drop"), Worker(1, "drop"), opens=False)
    for one in (worker, other):
        summed, one.position.loader = change(one)
        for _ in range(2):
            stack.enter_context(one.late.loop(one.position, Bits(*summed)))
    assert len(said) == 1
    assert says in said[0]


def test_to_wait_asks_nothing_of_the_sums(fleet):
    (worker,), said, stack = fleet(Worker(0, "wait"), opens=False)
    stack.enter_context(worker.late.loop(worker.position, Bits()))
    assert not losses.late
    assert not said
