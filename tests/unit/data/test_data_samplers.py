"""Orders that samplers, weights and lengths draw: the same steps at any number of workers."""

import collections
import functools
import random

import crowd
import feed_gate
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from outlast.data import Loader, open_feed
from outlast.data.feed import given_back, place
from outlast.data.loader import Slices
from outlast.errors import ConfigError
from thorough import examples

SIZE = 23
WEIGHTS = [1 + index % 5 for index in range(SIZE)]
LENGTHS = [1 + index * 7 % 11 for index in range(SIZE)]


class Noisy:
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class Buckets:
    """Batches of several sizes, another number of them in each epoch."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = np.random.permutation(SIZE)[: SIZE - self.epoch % 3].tolist()
        while order:
            size = random.randrange(6, 10)
            yield order[:size] if len(order) >= size + 6 else order
            order = order[size:] if len(order) >= size + 6 else []


def generator():
    return torch.Generator().manual_seed(3)


# What says the order and how large a step is; none has a step of fewer than six samples.
ORDERS = {
    "random": lambda: {"sampler": RandomSampler(range(SIZE)), "global_batch": 7},
    "own generator": lambda: {
        "sampler": RandomSampler(range(SIZE), generator=generator()),
        "global_batch": 7,
    },
    "subset": lambda: {"sampler": SubsetRandomSampler(range(3, 20)), "global_batch": 7},
    "list": lambda: {"sampler": [*range(0, SIZE, 2)], "global_batch": 9},
    "weighted sampler": lambda: {
        "sampler": WeightedRandomSampler(WEIGHTS, 40),
        "global_batch": 6,
    },
    "weights": lambda: {"weights": WEIGHTS, "global_batch": 8},
    "batches": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(range(SIZE)), 6, drop_last=True)
    },
    "buckets": lambda: {"batch_sampler": Buckets()},
    "tokens": lambda: {"lengths": LENGTHS, "global_tokens": 66},
    "tokens, weights": lambda: {
        "lengths": [1] * SIZE,
        "global_tokens": 6,
        "weights": torch.tensor(WEIGHTS),
    },
    "tokens, sampler": lambda: {
        "lengths": [1] * SIZE,
        "global_tokens": 7,
        "sampler": SubsetRandomSampler(range(14)),
    },
}


def build(name, seed=0, **more):
    return Loader(Noisy(), seed=seed, **ORDERS[name](), **more)


def rows(batch):
    return list(zip(*(column.tolist() for column in batch), strict=True))


def alone(name, num_steps, seed=0):
    loader = build(name, seed)
    return [rows(batch) for batch, _ in zip(loader, range(num_steps), strict=False)]


STINTS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 4), st.integers(0, 2)), min_size=6, max_size=6
)


@pytest.mark.parametrize("name", ORDERS)
@examples(10)
@given(seed=st.integers(0, 2**63 - 1), stints=STINTS)
def test_the_same_while_the_number_of_workers_changes(name, seed, stints):
    job = crowd.Crowd(functools.partial(build, name, seed), rows)
    for world_size, num_steps, ahead in stints:
        job.stint(world_size, num_steps, ahead=ahead)
    assert job.steps == alone(name, len(job.steps), seed)
    if job.steps:
        verdict = job.verdict()
        assert verdict.faults == []
        assert verdict.proved
        assert verdict.samples == sum(map(len, job.steps))


@pytest.mark.parametrize("name", ORDERS)
def test_cut_anywhere(name):
    feed_gate.check(lambda: build(name), 9)


def test_an_epoch_has_what_the_sampler_gives():
    ids = [row[0] for step in alone("random", 23) for row in step]
    epochs = [ids[start : start + SIZE] for start in range(0, 7 * SIZE, SIZE)]
    assert [sorted(one) for one in epochs] == [[*range(SIZE)]] * 7
    assert len(set(map(tuple, epochs))) == 7
    loader = build("buckets")
    assert loader.ids(0, 200)[:60] == [row[0] for step in alone("buckets", 9) for row in step][:60]


def test_own_weights_are_kept_to():
    loader = build("weights")
    counts = collections.Counter(loader.ids(0, 23_000))
    for index, weight in enumerate(WEIGHTS):
        assert counts[index] == pytest.approx(23_000 * weight / sum(WEIGHTS), rel=0.2)
    rare = Loader(range(4), weights=[0, 1, 0, 1], global_batch=4)
    assert set(rare.ids(0, 400)) == {1, 3}


@examples(30)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=8, max_size=60),
    tokens=st.integers(150, 400),
    world_size=st.integers(1, 3),
)
def test_tokens_are_kept_to_and_shared_out_evenly(lengths, tokens, world_size):
    def one(rank):
        loader = Loader(range(len(lengths)), lengths=lengths, global_tokens=tokens)
        loader.set_worker(rank, world_size)
        return iter(loader)

    feeds = [one(rank) for rank in range(world_size)]
    seen = []
    while len(seen) < 2 * len(lengths):
        parts = [next(feed).tolist() for feed in feeds]
        sums = [sum(lengths[index] for index in part) for part in parts]
        assert min(sums) > 0
        assert sum(sums) <= tokens
        assert max(sums) - min(sums) <= 2 * max(lengths)
        seen += [index for part in parts for index in part]
    assert sorted(seen[: len(lengths)]) == [*range(len(lengths))]


def test_the_random_numbers_and_generators_of_the_script_are_left_alone():
    mine = generator()
    feed_gate.seed_all(5)
    expected = [feed_gate.draw() for _ in range(9)], mine.get_state().tolist()
    feed_gate.seed_all(5)
    sampler = RandomSampler(range(SIZE), generator=mine)
    batches = iter(Loader(Noisy(), sampler=sampler, global_batch=7))
    drawn = []
    for _ in range(9):
        next(batches)
        drawn.append(feed_gate.draw())
    assert (drawn, mine.get_state().tolist()) == expected


@pytest.mark.parametrize("name", ["random", "buckets", "tokens"])
def test_a_batch_that_is_in_no_step_is_given_back(name):
    feed = open_feed(build(name), rank=0, world_size=1)
    for _ in range(7):
        newest = rows(next(feed))
        found, _ = given_back(feed_gate.through_json(place(1, feed, {}, 1)))
        again = open_feed(build(name), rank=0, world_size=1)
        again.restore(found["position"])
        assert rows(next(again)) == newest


class Other(Slices):
    """Asks the data set for another sample at one place."""

    def _fetch(self, position, ids):
        at = 30 - position
        if 0 <= at < len(ids):
            ids = [*ids[:at], (ids[at] + 1) % SIZE, *ids[at + 1 :]]
        return super()._fetch(position, ids)


class Wrong(Loader):
    def _slices(self):
        return Other(self)


@pytest.mark.parametrize("name", ["weights", "buckets", "tokens"])
def test_another_sample_than_was_drawn_is_found(name):
    job = crowd.Crowd(lambda: Wrong(Noisy(), **ORDERS[name]()), rows)
    job.stint(2, 4).stint(3, 4)
    faults = job.verdict().faults
    came = [row[0] for step in job.steps for row in step][30]
    step = next(n for n in range(9) if sum(map(len, job.steps[: n + 1])) > 30) + 1
    assert (faults[0].step, faults[0].sample, faults[0].what) == (step, came, "out of turn")


class OfRank:
    """Gives each worker another order."""

    rank = 0

    def __iter__(self):
        return iter(np.roll(np.arange(SIZE), self.rank).tolist())


def test_workers_that_have_drawn_differently_are_found():
    ranks = iter(range(9))

    def differing():
        sampler = OfRank()
        sampler.rank = next(ranks)
        return Loader(Noisy(), sampler=sampler, global_batch=6)

    job = crowd.Crowd(differing, rows).stint(2, 5)
    assert "OfRank gave the workers different orders" in job.verdict().faults[0].text
    with pytest.raises(ConfigError, match="OfRank gives another order in epoch 1"):
        job.stint(2, 1)


@pytest.mark.parametrize(
    ("saved", "here", "words"),
    [
        ({"weights": WEIGHTS}, {"weights": WEIGHTS[::-1]}, "weights gives another order"),
        ({"weights": WEIGHTS}, {}, "had an order by weights, this one has an order of its own"),
        ({}, {"sampler": [1, 2]}, "had an order of its own, this one has an order by list"),
        ({"weights": WEIGHTS}, {"weights": WEIGHTS, "seed": 1}, "seed=0, this one has seed=1"),
    ],
)
def test_another_order_is_refused(saved, here, words):
    loader = Loader(Noisy(), **{"global_batch": 4, **saved})
    next(iter(loader))
    with pytest.raises(ConfigError, match=words):
        Loader(Noisy(), **{"global_batch": 4, **here}).load_state_dict(loader.state_dict())


class Once:
    """Gives another order each time."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        return iter(self.rng.permutation(SIZE).tolist())


class Growing:
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(4 + self.epoch))


class Endless:
    def __len__(self):
        return 4

    def __iter__(self):
        while True:
            yield 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sampler": Once()}, "Once gives another order each time .* global generator"),
        ({"sampler": Growing()}, "5 indices in epoch 1 and gave 4 .* batch_sampler="),
        ({"sampler": Endless()}, "Endless does not end"),
        ({"sampler": []}, "list gives nothing"),
        ({"sampler": ["a"]}, "other than numbers of samples"),
        ({"sampler": [1, 23]}, "gives sample 23, and the data set has 23"),
        ({"sampler": [[1, 2]]}, "gives batches: hand it over as batch_sampler="),
        ({"batch_sampler": [1, 2], "global_batch": None}, "indices: hand it over as sampler="),
        ({"batch_sampler": [[1]], "global_batch": None}, "has 1 samples, and 2 workers"),
        ({"sampler": DistributedSampler(range(9), 2, 1)}, "one worker's share"),
        (
            {"batch_sampler": BatchSampler(DistributedSampler(range(9), 2, 1), 2, False)},
            "and batch_sampler= of outlast.data.Loader both say how large a step is",
        ),
        ({"sampler": [1], "weights": WEIGHTS}, "sampler= and weights= .* both say which order"),
        ({"sampler": [1], "shuffle": True}, "shuffle= and sampler= .* both say which order"),
        ({"weights": [1, 2]}, r"one number for each of the 23 samples .* list of \(2,\)"),
        ({"weights": [0] * SIZE}, "not all of them 0"),
        ({"weights": [float("nan")] * SIZE}, "finite"),
        ({"lengths": LENGTHS}, "belong together"),
        (
            {"lengths": LENGTHS, "global_tokens": 21, "global_batch": None},
            "must be 22 or more: the longest sample has 11, and each of 2 workers",
        ),
        ({"lengths": LENGTHS, "global_tokens": 9}, "both say how large a step is"),
        (
            {"lengths": [0] * SIZE, "global_tokens": 9, "global_batch": None},
            "whole numbers from 1 on",
        ),
        ({"batch_sampler": Buckets(), "global_batch": None, "shards": 2}, "give global_batch="),
    ],
)
def test_what_cannot_be_is_said_in_one_line(settings, words):
    with pytest.raises(ConfigError, match=words) as said:
        _steps(9, {"global_batch": 4, **settings})
    assert "\n" not in str(said.value)


def _steps(num, settings):
    loader = Loader(Noisy(), **settings)
    loader.set_worker(1, 2)
    return [batch for batch, _ in zip(loader, range(num), strict=False)]


def test_shards_of_a_sampler():
    def parts(world_size):
        found = []
        for rank in range(world_size):
            loader = build("weights", shards=4)
            loader.set_worker(rank, world_size)
            steps = [batch.parts for batch, _ in zip(loader, range(4), strict=False)]
            found.append([[rows(part) for part in step] for step in steps])
        return [[part for one in found for part in one[step]] for step in range(4)]

    assert parts(1) == parts(2) == parts(3)
