"""The order is a bijection, random access, even, and never changes."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.data.order import ids_at, permute, sample_ids, sample_seed
from thorough import ALL, examples

SEEDS = st.integers(0, 2**63 - 1)


@examples(150)
@given(size=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 2**40))
def test_each_epoch_is_a_permutation(size, seed, epoch):
    order = permute(np.arange(size), size=size, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(order), np.arange(size))


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 255, 256, 257, 1024, 1025, 4096, 4097])
def test_domain_edges_are_permutations(size):
    order = permute(np.arange(size), size=size, seed=5, epoch=9)
    assert sorted(order.tolist()) == list(range(size))


def test_epochs_and_seeds_differ():
    orders = {
        tuple(permute(np.arange(100), size=100, seed=seed, epoch=epoch).tolist())
        for seed, epoch in itertools.product(range(20), range(20))
    }
    assert len(orders) == 400


@pytest.mark.parametrize("size", [40, 65])
def test_each_id_comes_at_each_place_equally_often(size):
    num_epochs = (50 if ALL else 10) * size
    counts = np.zeros((size, size))
    for epoch in range(num_epochs):
        counts[np.arange(size), permute(np.arange(size), size=size, seed=1, epoch=epoch)] += 1
    expected = num_epochs / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    degrees = (size - 1) ** 2
    assert abs(chi_square - degrees) < 5 * (2 * degrees) ** 0.5


def test_all_orders_of_four_come_equally_often():
    counts: dict[tuple[int, ...], int] = {}
    num_epochs = 4800
    for epoch in range(num_epochs):
        order = tuple(permute(np.arange(4), size=4, seed=2, epoch=epoch).tolist())
        counts[order] = counts.get(order, 0) + 1
    expected = num_epochs / 24
    assert len(counts) == 24
    assert sum((n - expected) ** 2 / expected for n in counts.values()) < 55  # 23 degrees, 5 sigma


def test_neighbours_do_not_stay_neighbours():
    order = permute(np.arange(100_000), size=100_000, seed=3, epoch=0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(order.size))[0, 1]) < 0.02


def test_golden_values():
    # A change here changes the order of every job that resumes across versions.
    assert permute(np.arange(10), size=10, seed=0, epoch=0).tolist() == GOLDEN_TEN
    assert permute(np.arange(8), size=100, seed=0, epoch=0).tolist() == GOLDEN_HUNDRED
    big = permute(np.array([0, 1, 10**12]), size=10**12 + 1, seed=7, epoch=3)
    assert big.tolist() == GOLDEN_BIG
    assert sample_seed(12345, seed=7) == GOLDEN_SEED


GOLDEN_TEN = [2, 7, 1, 8, 3, 0, 6, 9, 5, 4]
GOLDEN_HUNDRED = [1, 21, 28, 39, 75, 3, 49, 68]
GOLDEN_BIG = [529878502858, 700710426937, 778828423694]
GOLDEN_SEED = 14334020041842391390


@examples(100)
@given(
    size=st.integers(1, 50),
    position=st.integers(0, 300),
    count=st.integers(0, 120),
    seed=SEEDS,
    shuffle=st.booleans(),
)
def test_random_access_equals_the_sequence(size, position, count, seed, shuffle):
    order = {"size": size, "seed": seed, "shuffle": shuffle}
    sequence = sample_ids(0, position + count, **order)
    assert sample_ids(position, count, **order) == sequence[position:]
    one_by_one = [sample_ids(p, 1, **order)[0] for p in range(position, position + min(count, 9))]
    assert one_by_one == sequence[position : position + 9]


@examples(50)
@given(size=st.integers(1, 40), batch=st.integers(1, 60), seed=SEEDS)
def test_no_sample_is_dropped_or_repeated_in_an_epoch(size, batch, seed):
    ids: list[int] = []
    position = 0
    while position < 3 * size:
        ids += sample_ids(position, batch, size=size, seed=seed, shuffle=True)
        position += batch
    for epoch in range(3):
        assert sorted(ids[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_without_shuffling_ids_count_up():
    assert sample_ids(3, 5, size=5, seed=1, shuffle=False) == [3, 4, 0, 1, 2]


def test_no_positions_have_no_samples():
    """A worker that holds no shard of a batch asks for none."""
    assert ids_at(np.empty((4, 0), dtype=np.int64), size=10, seed=1, shuffle=True).shape == (4, 0)
