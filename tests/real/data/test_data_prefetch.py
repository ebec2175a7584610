"""Ours with loader processes: what they loaded ahead is neither lost nor repeated."""

import functools

import crowd
import pytest

from outlast.data import Loader, Stream
from outlast.errors import ShardError


def rows(batch):
    return batch.tolist()


def shard(index):
    return range(index * 100, index * 100 + 7 * index % 11 + 3)


def document(index):
    for number in shard(index):
        yield list(range(number * 10, number * 10 + number % 7))


KINDS = {
    "loader": lambda n: Loader(range(23), global_batch=6, seed=2, num_workers=n),
    "stream": lambda n: Stream(shard, num_shards=7, global_batch=6, buffer=4, num_workers=n),
    "packed": lambda n: Stream(
        document, num_shards=7, global_batch=6, pack=5, buffer=4, num_workers=n
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_workers_and_processes_come_and_go(rng, kind):
    job = crowd.Crowd(None, rows)
    for world_size in (1, 3, 2, 1):
        job.build = functools.partial(KINDS[kind], rng.randrange(1, 3))
        job.stint(world_size, rng.randrange(1, 6), ahead=rng.randrange(3))
    calm = crowd.Crowd(lambda: KINDS[kind](0), rows)
    assert job.steps == calm.stint(1, len(job.steps)).steps
    assert job.verdict().proved


def broken(index):
    yield from shard(index)
    if index == 5:
        raise OSError("gone")


def test_a_shard_that_raises_in_a_process_is_named():
    stream = Stream(broken, num_shards=6, global_batch=6, num_workers=2, shuffle=False)
    batches = [rows(batch) for batch, _ in zip(stream, range(4), strict=False)]
    assert [batch[-1] for batch in batches] == [500, 501, 502, 503]
    with pytest.raises(ShardError, match="shard 5 raised OSError after 5 items of pass 0"):
        list(zip(stream, range(9), strict=False))
    assert stream.position == 5 * 6
