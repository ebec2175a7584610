"""Shares of a batch that change from a place on: what each worker is handed, and its record."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from outlast.data import Loader, Shards
from outlast.data.audit import History
from outlast.data.feed import open_feed
from outlast.data.order import Shares, ranges_of, usual_counts
from outlast.data.trail import DROPPED_MAX, Trail, read_record
from outlast.errors import ConfigError

SHARDS, BATCH, WORLD = 6, 12, 3


def made(rank, *, num_workers=0, persistent_workers=False, world=WORLD):
    loader = Loader(
        torch.arange(50),
        global_batch=BATCH,
        shards=SHARDS,
        seed=3,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
    )
    loader.set_worker(rank, world)
    return loader


def flat(batch):
    return [int(one) for part in batch.parts for one in part]


@given(
    st.integers(1, 12),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10**6)), max_size=6),
)
def test_the_newest_change_at_or_before_a_place_holds(num_shards, world, drawn):
    shares, said = Shares(num_shards, world), []
    for start, seed in sorted(drawn):
        counts = [0] * world
        for number in range(num_shards):
            counts[(seed >> number) % world] += 1
        shares.change(start, counts)
        said = [one for one in said if one[0] < start] + [(start, tuple(counts))]
    usual = usual_counts(num_shards, world)
    for place in range(41):
        expected = next((counts for start, counts in reversed(said) if start <= place), usual)
        assert (shares.at(place) or usual) == expected
        assert [*map(len, ranges_of(expected))] == list(expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_all_are_handed_is_the_batch_whoever_loads_it_and_however_far_ahead(num_workers):
    alone = iter(made(0, world=1))
    loaders = [made(rank, num_workers=num_workers) for rank in range(WORLD)]
    batches = [iter(loader) for loader in loaders]
    seen = []
    for step in range(14):
        parts = [next(one) for one in batches]
        whole = next(alone)
        assert [one for part in parts for one in flat(part)] == flat(whole)
        assert {one.position for one in parts} == {whole.position}
        assert [one.loader for one in parts] == [one.number for one in loaders]
        seen.append([len(one) for one in parts])
        changes = {1: (3, 0, 3), 3: (1, 4, 1), 6: (2, 2, 2)}
        if step in changes:
            start = max(loader.loaded_to for loader in loaders)
            for loader in loaders:
                loader.share_out(start, changes[step])
    assert [3, 0, 3] in seen
    assert [1, 4, 1] in seen
    assert (seen[0], seen[-1]) == ([2, 2, 2], [2, 2, 2])
    for one in batches:
        one.close()


def test_what_is_loaded_ahead_keeps_its_shares():
    loader = made(0, num_workers=1)
    batches = iter(loader)
    next(batches)
    assert loader.loaded_to > loader.position
    start = loader.loaded_to
    loader.share_out(start, (3, 0, 3))
    found = [next(batches) for _ in range(6)]
    batches.close()
    assert [len(one) for one in found] == [2 if one.position < start else 3 for one in found]
    assert next(one.counts for one in found if one.position >= start) == (3, 0, 3)


def test_another_number_of_workers_has_the_usual_shares_again():
    loader = made(0)
    loader.share_out(0, (4, 1, 1))
    assert len(next(iter(loader))) == 4
    loader.set_worker(0, 2)
    assert loader.has_usual_shares
    assert len(next(iter(loader))) == 3


def test_counts_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="not those of 4 shards"):
        Shards([1], of=4, first=0, position=0, counts=(1, 2))


def record(feeds, steps, changes=(), dropped=()):
    """All workers' records, through ``steps`` steps; (step, rank) → samples that are dropped."""
    dropped = dict(dropped)
    for step in range(1, steps + 1):
        for rank, (feed, trail) in enumerate(feeds):
            next(feed)
            if (step, rank) in dropped:
                trail.dropped(dropped[step, rank])
        for _, counts in (one for one in changes if one[0] == step):
            start = max(feed.loader.loaded_to for feed, _ in feeds)
            for feed, _ in feeds:
                feed.loader.share_out(start, counts)
    return [trail.state() for _, trail in feeds]


def feeds_of(world=WORLD):
    made_ones = []
    for rank in range(world):
        trail = Trail()
        loader = made(rank, world=world)
        made_ones.append((open_feed(loader, rank=rank, world_size=world, trail=trail), trail))
    return made_ones


def history(states, steps):
    return History([read_record(state) for state in states], steps)


def test_the_audit_proves_steps_whose_shares_have_moved():
    feeds = feeds_of()
    found = history(record(feeds, 9, [(2, (4, 0, 2)), (5, (2, 2, 2))]), 9)
    verdict = found.verdict()
    assert (verdict.proved, verdict.samples, verdict.num_dropped) == (True, 9 * BATCH, 0)


def test_what_is_dropped_is_in_the_record_and_not_among_the_steps_ids():
    whole = history(record(feeds_of(1), 6), 6)
    found = history(record(feeds_of(), 6, dropped={(3, 1): 2, (5, 0): 2, (5, 2): 4}.items()), 6)
    verdict = found.verdict()
    assert verdict.proved
    assert [(one.step, one.last_step, one.offset, one.num) for one in verdict.dropped] == [
        (3, 3, 6, 2),
        (5, 5, 2, 2),
        (5, 5, 8, 4),
    ]
    assert verdict.num_dropped == 8
    ids = whole.ids(3)
    assert found.ids(3) == ids[:6] + ids[8:]
    assert found.ids(5) == [*whole.ids(5)[:2], *whole.ids(5)[4:8]]
    assert found.ids(4) == whole.ids(4)


def test_what_a_step_that_is_not_completed_has_dropped_is_forgotten():
    feeds = feeds_of(1)
    _, trail = feeds[0]
    record(feeds, 3, dropped={(2, 0): 2, (3, 0): 4}.items())
    trail.cut(2)
    assert [one.step for one in read_record(trail.state()).dropped] == [2]
    other = Trail()
    other.restore(trail.state(), [trail.state()])
    assert [one.num for one in read_record(other.state()).dropped] == [2]


def test_more_runs_than_can_be_listed_are_counted():
    steps = 2 * DROPPED_MAX + 5
    dropped = [((n + 1, 0), 2) for n in range(0, steps, 2)]  # none follows another
    found = history(record(feeds_of(1), steps, dropped=dropped), steps)
    verdict = found.verdict()
    assert verdict.proved
    assert len(verdict.dropped) == DROPPED_MAX
    assert verdict.num_dropped == 2 * len(dropped)
    assert len(found.ids(2 * DROPPED_MAX - 1)) == BATCH - 2
    with pytest.raises(ValueError, match="too many samples of late workers"):
        found.ids(2 * DROPPED_MAX + 1)


def test_a_worker_that_is_late_for_long_is_one_entry():
    """Also where its record went through a checkpoint meanwhile."""
    steps, shard = DROPPED_MAX + 9, BATCH // SHARDS
    feeds = feeds_of()
    late = {(n, 1): shard for n in range(3, steps)}
    late |= {(steps, 1): 2 * shard}
    states = record(feeds, steps, dropped=late.items())
    whole = history(record(feeds_of(1), steps), steps)
    found = history(states, steps)
    assert [(one.step, one.last_step, one.num) for one in found.verdict().dropped] == [
        (3, steps - 1, shard),
        (steps, steps, 2 * shard),
    ]
    assert found.verdict().num_dropped == shard * (steps - 1)
    part = BATCH // WORLD
    for step, num in ((2, 0), (3, shard), (steps - 1, shard), (steps, 2 * shard)):
        ids = whole.ids(step)
        assert found.ids(step) == ids[: 2 * part - num] + ids[2 * part :]
    other = Trail()
    other.restore(states[0], states)
    assert read_record(other.state()).dropped == found.verdict().dropped


def test_another_pass_over_the_same_batch_counts_once():
    feeds = feeds_of(1)
    (feed, trail) = feeds[0]
    next(feed)
    trail.dropped(2)
    trail.dropped(4)
    assert history([trail.state()], 1).verdict().num_dropped == 4
