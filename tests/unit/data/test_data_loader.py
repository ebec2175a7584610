"""Our loader: the same global batches whatever is there to load them."""

import functools
import itertools
import random

import crowd
import feed_gate
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outlast.data import Loader, open_feed, sample_ids
from outlast.errors import ConfigError
from thorough import examples


class Noisy:
    def __init__(self, size=23):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return (
            index,
            random.random(),
            float(np.random.rand()),
            float(torch.rand(())),
        )


def rows(batch):
    """A collated batch as one tuple per sample."""
    return list(zip(*(column.tolist() for column in batch), strict=True))


def global_batches(num_steps, world_size, *, skip=None, **settings):
    """What all workers of an attempt get together, step by step."""
    feeds = [
        open_feed(Loader(Noisy(), **settings), rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for feed in feeds:
        if skip is not None:
            feed.restore(skip)
    steps = [[row for feed in feeds for row in rows(next(feed))] for _ in range(num_steps)]
    return steps, feeds[-1].state()


@examples(15)
@given(world_size=st.integers(1, 5), global_batch=st.integers(5, 30), seed=st.integers(0, 99))
def test_the_same_at_any_number_of_workers(world_size, global_batch, seed):
    settings = {"global_batch": global_batch, "seed": seed}
    alone, _ = global_batches(6, 1, **settings)
    assert global_batches(6, world_size, **settings)[0] == alone
    order = {"size": 23, "seed": seed, "shuffle": True}
    ids = [row[0] for step in alone for row in step]
    assert ids == sample_ids(0, 6 * global_batch, **order)


def test_the_number_of_workers_may_change_on_the_way():
    settings = {"global_batch": 6, "seed": 1}
    alone, _ = global_batches(9, 1, **settings)
    steps, state = [], None
    for world_size in (4, 1, 6):
        more, state = global_batches(3, world_size, skip=state, **settings)
        state = feed_gate.through_json(state)
        steps += more
    assert steps == alone


@examples(15)
@given(
    size=st.integers(1, 40),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
    stints=st.lists(
        st.tuples(st.integers(1, 6), st.integers(0, 4), st.integers(0, 2), st.integers(6, 11)),
        min_size=20,
        max_size=20,
    ),
)
def test_twenty_changes_of_the_number_of_workers_and_of_the_batch(size, shuffle, seed, stints):
    job = crowd.Crowd(None, rows)
    whole = []
    for world_size, num_steps, ahead, global_batch in stints:
        order = {"global_batch": global_batch, "seed": seed, "shuffle": shuffle}
        job.build = functools.partial(Loader, Noisy(size), **order)
        job.stint(world_size, num_steps, ahead=ahead)
        whole += [global_batch] * num_steps
    assert [len(step) for step in job.steps] == whole
    alone = Loader(Noisy(size), global_batch=max(sum(whole), 1), seed=seed, shuffle=shuffle)
    samples = [sample for step in job.steps for sample in step]
    assert samples == rows(next(iter(alone)))[: sum(whole)]
    assert [row[0] for row in samples] == sample_ids(
        0, sum(whole), size=size, seed=seed, shuffle=shuffle
    )
    verdict = job.verdict()
    assert verdict.faults == []
    assert verdict.samples == sum(whole)


def test_how_many_steps_an_epoch_has():
    assert [len(Loader(range(size), global_batch=4)) for size in (1, 8, 10)] == [1, 2, 3]
    with pytest.raises(TypeError, match="until="):
        len(Loader(range(8), global_batch=4, sampler=[3, 1]))


def test_augmentation_differs_between_epochs():
    steps, _ = global_batches(3, 1, global_batch=23, shuffle=False)
    assert len({row[1] for step in steps for row in step}) == 3 * 23
    assert len({row[3] for step in steps for row in step}) == 3 * 23


def test_training_random_numbers_are_left_alone():
    feed_gate.seed_all(5)
    expected = [feed_gate.draw() for _ in range(4)]
    feed_gate.seed_all(5)
    batches = iter(Loader(Noisy(), global_batch=4))
    drawn = []
    for _ in range(4):
        next(batches)
        drawn.append(feed_gate.draw())
    assert drawn == expected


class Cached(Noisy):
    """Draws random numbers only when it sees a sample for the first time."""

    def __init__(self):
        super().__init__(5)
        self.seen = set()

    def __getitem__(self, index):
        if index not in self.seen:
            self.seen.add(index)
            torch.rand(())
        return index


def test_collate_draws_the_same_after_a_resume():
    def collate(samples):
        return torch.tensor(samples), torch.rand(3)

    feed_gate.check(lambda: Loader(Cached(), global_batch=4, collate_fn=collate), 7)


def test_direct_iteration_counts_what_was_yielded():
    loader = Loader(Noisy(), global_batch=4)
    assert loader.state_dict()["position"] == 0
    for number, batch in enumerate(loader, start=1):
        assert loader.state_dict()["position"] == 4 * number
        assert batch[0].tolist() == loader.ids(4 * (number - 1))
        if number == 8:
            break
    assert next(iter(loader))[0].tolist() == loader.ids(32)


def test_a_global_batch_that_changed_goes_on_at_the_same_sample():
    loader = Loader(Noisy(), global_batch=4)
    next(iter(loader))
    again = Loader(Noisy(), global_batch=7)
    again.load_state_dict(loader.state_dict())
    assert next(iter(again))[0].tolist() == again.ids(4, 7)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"seed": 2}, "seed=1.*seed=2"),
        ({"shuffle": False}, "shuffle=True.*shuffle=False"),
        ({"dataset": Noisy(24)}, "size=23.*size=24"),
    ],
)
def test_a_changed_order_is_refused(changed, words):
    saved = Loader(Noisy(), global_batch=4, seed=1).state_dict()
    settings = {"dataset": Noisy(), "global_batch": 4, "seed": 1, **changed}
    with pytest.raises(ConfigError, match=words):
        Loader(settings.pop("dataset"), **settings).load_state_dict(saved)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("dataset", "settings", "words"),
    [
        ([], {}, "empty"),
        (Stream(), {}, "Stream is not one"),
        (iter([1]), {}, "__getitem__"),
        ([1], {"global_batch": 0}, "global_batch must be .* not 0"),
        ([1], {"global_batch": 1.5}, "global_batch must be"),
        ([1], {"seed": -1}, "seed must be"),
        ([1], {"seed": 1 << 63}, "seed must be"),
    ],
)
def test_settings_out_of_range(dataset, settings, words):
    with pytest.raises(ConfigError, match=words):
        Loader(dataset, **{"global_batch": 1, **settings})


def test_more_workers_than_samples():
    with pytest.raises(ConfigError, match="5 workers cannot share a global batch of 4"):
        open_feed(Loader(Noisy(), global_batch=4), rank=0, world_size=5)
    with pytest.raises(ConfigError, match="rank 2"):
        Loader(Noisy(), global_batch=4).set_worker(2, 2)


def test_two_iterators_at_once_are_refused():
    loader = Loader(Noisy(), global_batch=4)
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    with pytest.raises(ConfigError, match="iterated twice"):
        next(first)


def test_slices_differ_by_one_at_most():
    for world_size, global_batch in itertools.product(range(1, 6), range(5, 12)):
        sizes = []
        for rank in range(world_size):
            loader = Loader(Noisy(), global_batch=global_batch)
            loader.set_worker(rank, world_size)
            sizes.append(len(next(iter(loader))[0]))
        assert sum(sizes) == global_batch
        assert max(sizes) - min(sizes) <= 1
