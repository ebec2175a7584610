"""What a worker can tell of the record of samples of one that is lost with its machine."""

import numpy as np
import pytest

from outlast.data import Loader, open_feed
from outlast.data.audit import History
from outlast.data.trail import (
    NOTHING,
    NUM_KNOWN,
    NUM_WORDS,
    Noting,
    Others,
    Trail,
    known_to,
    newest_of,
    read_record,
    words_of,
)

SIZE, BATCH = 40, 12


class Worker:
    def __init__(self, rank, world_size, plant=lambda ids: ids):
        self.trail = Trail()
        self.place = {"rank": rank, "world_size": world_size, "trail": self.trail}
        self.plant = plant
        self.open(0)

    def open(self, step, seed=1):
        loader = Loader(range(SIZE), global_batch=BATCH, seed=seed)
        self.feed = open_feed(loader, step=step, **self.place)

    def step(self):
        next(self.feed)


def step(workers, others):
    """All make a step, and say their words in it."""
    for worker in workers:
        worker.step()
    newest = [newest_of(worker.trail.uncounted()) for worker in workers]
    rows = np.array([words_of(one) for one in newest])
    for rank, one in others.items():
        one.heard(newest[rank], rows)


def crew(world_size=3):
    workers = [Worker(rank, world_size) for rank in range(world_size)]
    empty = Trail().state()
    others = {
        rank: Others(1, rank, world_size, dict.fromkeys(known_to(rank, world_size), empty))
        for rank in range(world_size)
    }
    return workers, others


def test_what_is_told_is_what_the_other_one_would_have_said():
    workers, others = crew()
    for _ in range(5):
        step(workers, others)
    told = others[0].at(5, 1)
    assert told == {rank: workers[rank].trail.state() for rank in (1, 2)}


def test_the_step_before_is_known_too_and_no_older_one():
    workers, others = crew()
    said = []
    for _ in range(4):
        step(workers, others)
        said.append(workers[2].trail.state())
    assert [others[1].at(number, 1).get(2) for number in (2, 3, 4, 5)] == [None, *said[2:], None]


def test_a_step_that_is_made_again_is_said_again():
    workers, others = crew()
    for _ in range(2):
        step(workers, others)
    before = {rank: workers[rank].trail.state() for rank in (1, 2)}
    step(workers, others)
    for worker in workers:
        worker.trail.cut(2)
        worker.open(2, seed=2)
    step(workers, others)
    told = others[0].at(3, 2)
    assert told == {rank: workers[rank].trail.state() for rank in (1, 2)}
    assert others[0].at(2, 1) == before


def test_stretches_of_one_attempt_are_all_in_it():
    workers, others = crew()
    for loop in range(3):
        for worker in workers:
            worker.open(4 * loop, seed=loop)
        for _ in range(4):
            step(workers, others)
    records = [workers[0].trail.state(), *others[0].at(12, 3).values()]
    assert History([read_record(one) for one in records], 12).verdict().proved


def test_what_was_not_heard_is_not_told():
    workers, others = crew()
    step(workers, others)
    for worker in workers:
        worker.open(1, seed=2)
        worker.step()  # without a word
        worker.open(2, seed=3)
    step(workers, others)
    assert others[0].at(3, 3) == {}


def test_another_stretch_is_not_taken_for_this_one():
    workers, others = crew()
    step(workers, others)
    assert others[0].at(1, 2) == {}


def test_without_a_record_nothing_is_said():
    assert newest_of({}) is newest_of(Trail().uncounted()) is None
    assert words_of(None) == NOTHING
    assert len(NOTHING) == NUM_WORDS
    alone = Others(1, 0, 3, {1: Trail().state()})
    alone.heard(None, np.array([NOTHING] * 3))
    assert alone.at(-1, -1) == {}


def test_where_no_machine_can_be_lost_beside_this_one_nothing_is_said():
    (worker, *_), others = crew()
    worker.step()
    noting = Noting(worker.trail.uncounted)
    assert noting.words() == NOTHING
    noting.others = others[0]
    assert noting.words() == words_of(newest_of(worker.trail.state())) != NOTHING


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8, 9, 64, 501])
def test_each_is_known_to_others_far_away(world_size):
    for rank in range(world_size):
        known = known_to(rank, world_size)
        assert len(set(known)) == len(known) == min(world_size - 1, NUM_KNOWN)
        assert rank not in known
        if world_size >= 8:  # not on a machine with less than a sixth of all
            apart = [(one - rank) % world_size for one in known]
            assert all(world_size // 6 <= one <= world_size - world_size // 6 for one in apart)
