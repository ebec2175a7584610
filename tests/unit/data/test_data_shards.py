"""Batches cut into shards: the same shards, whoever holds them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_data_loader import Noisy, rows

from outlast.data import Loader, Shards, Stream, held, open_feed
from outlast.errors import ConfigError
from thorough import examples


def noisy_collate(samples):
    columns = [torch.tensor(column) for column in zip(*samples, strict=True)]
    return [*columns, torch.rand(len(samples))]


def steps(num_steps, world_size, **settings):
    """Step by step, what all workers have: [(position, shard, rows)]."""
    feeds = [
        open_feed(
            Loader(Noisy(), collate_fn=noisy_collate, **settings), rank=rank, world_size=world_size
        )
        for rank in range(world_size)
    ]
    found = []
    for _ in range(num_steps):
        batches = [next(feed) for feed in feeds]
        found.append(
            [
                (batch.position, batch.first + number, rows(part))
                for batch in batches
                for number, part in enumerate(batch.parts)
            ]
        )
    return found


@examples(15)
@given(st.integers(1, 8), st.integers(1, 9), st.integers(1, 3), st.integers(0, 99))
def test_shards_are_the_same_at_any_number_of_workers(num_shards, world_size, size, seed):
    settings = {"global_batch": num_shards * size, "shards": num_shards, "seed": seed}
    alone = steps(4, 1, **settings)
    assert steps(4, world_size, **settings) == alone
    assert [[shard for _, shard, _ in step] for step in alone] == [list(range(num_shards))] * 4


def test_shards_hold_the_samples_of_the_uncut_batch():
    settings = {"global_batch": 12, "seed": 5}
    uncut = next(iter(Loader(Noisy(), **settings)))
    cut = next(iter(Loader(Noisy(), shards=4, **settings)))
    assert isinstance(cut, Shards)
    assert [row for part in cut.parts for row in rows(part)] == rows(uncut)


def test_a_batch_that_cannot_be_cut_evenly_is_refused():
    with pytest.raises(
        ConfigError, match="100 samples cannot be cut into 12 equal shards; one of 96 or 108"
    ):
        Loader(Noisy(), global_batch=100, shards=12)
    with pytest.raises(ConfigError, match="shards must be a whole number from 1 on"):
        Loader(Noisy(), global_batch=100, shards=0)


def test_more_workers_than_shards_leave_some_without():
    loader = Loader(Noisy(), global_batch=4, shards=2)
    loader.set_worker(0, 3)
    batch = next(iter(loader))
    assert (len(batch), batch.parts, batch.position) == (0, [], 0)


def test_the_cursor_moves_by_whole_batches():
    loader = Loader(Noisy(), global_batch=6, shards=3)
    batches = iter(loader)
    assert [next(batches).position for _ in range(3)] == [0, 6, 12]
    assert loader.state_dict()["position"] == 18


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_stream_of_as_many_lanes_is_cut_into_the_same_shards(world_size):
    def read(shard):
        yield from ([100 * shard + item] * 3 for item in range(30))

    found = []
    for rank in range(world_size):
        stream = Stream(read, num_shards=7, global_batch=10, lanes=5, pack=4, seed=1)
        feed = open_feed(stream, rank=rank, world_size=world_size)
        mine = held(5, rank, world_size)
        steps = [next(feed).chunk(len(mine)) for _ in range(6)]
        found.append([[part.tolist() for part in parts] for parts in steps])
    together = [[part for parts in step for part in parts] for step in zip(*found, strict=True)]
    if world_size == 1:
        assert {len(step) for step in together} == {5}
    alone = open_feed(
        Stream(read, num_shards=7, global_batch=10, lanes=5, pack=4, seed=1), rank=0, world_size=1
    )
    assert together == [[part.tolist() for part in next(alone).chunk(5)] for _ in range(6)]
