"""Feeds with loader processes: cut anywhere, resume, compare to the bit."""

import random
import time

import feed_gate
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from outlast.data import Loader, open_feed

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'")  # torchdata's

SIZE = 17


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index


class Noisy(Numbers):
    def __getitem__(self, index):
        return (index, random.random(), float(np.random.rand()), float(torch.rand(())))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(6))


def seeded():
    return torch.Generator().manual_seed(3)


def shared_generator(**settings):
    generator = seeded()
    sampler = RandomSampler(Numbers(), generator=generator)
    return DataLoader(Numbers(), 3, sampler=sampler, generator=generator, **settings)


STOCK = {
    "shuffled": lambda: DataLoader(Numbers(), 3, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(
        Numbers(), 3, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "shared generator": lambda: shared_generator(num_workers=1),
    "persistent, shared generator": lambda: shared_generator(
        num_workers=1, persistent_workers=True
    ),
    "persistent, distributed": lambda: DataLoader(
        Numbers(),
        2,
        sampler=DistributedSampler(Numbers(), num_replicas=2, rank=1),
        num_workers=1,
        persistent_workers=True,
    ),
    "samples": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True, num_workers=1),
}
# Six batches an epoch: within each of three epochs, at both their ends, before the start.
CUTS = [0, 1, 5, 6, 7, 12, 14]


@pytest.mark.parametrize("name", STOCK)
def test_stock(name):
    steps = feed_gate.check(STOCK[name], 16, cuts=CUTS)
    if name != "persistent, distributed":
        assert feed_gate.plain_loop(STOCK[name], 16) == steps


@pytest.mark.parametrize("name", ["shuffled", "persistent", "persistent, shared generator"])
def test_stock_restarted_again_and_again(name):
    steps, _ = feed_gate.undisturbed(STOCK[name], 16, save=False)
    assert feed_gate.restarted_every(STOCK[name], 16, every=4) == steps


STATEFUL = {
    "shuffled": lambda: StatefulDataLoader(Numbers(), 3, shuffle=True, num_workers=2),
    "persistent": lambda: StatefulDataLoader(
        Numbers(), 3, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "generator": lambda: StatefulDataLoader(
        Numbers(), 3, shuffle=True, num_workers=1, generator=seeded()
    ),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_stateful(name):
    steps = feed_gate.check(STATEFUL[name], 16, cuts=CUTS)
    assert feed_gate.plain_loop(STATEFUL[name], 16) == steps


def test_stream():
    feed_gate.check(lambda: DataLoader(Stream(), 2, num_workers=1), 8, cuts=[1, 3, 4])


def rows(batch):
    return list(zip(*(column.tolist() for column in batch), strict=True))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_ours_is_the_same_at_any_number_of_loader_processes(num_workers):
    def build(num_workers=num_workers):
        return Loader(Noisy(), global_batch=4, num_workers=num_workers)

    steps, _ = feed_gate.undisturbed(lambda: build(0), 10, save=False)
    assert feed_gate.check(build, 10, cuts=[0, 4, 5]) == steps


def test_ours_counts_what_was_yielded_not_what_was_loaded_ahead():
    loader = Loader(Numbers(), global_batch=4, num_workers=1, prefetch_factor=8)
    batches = iter(loader)
    next(batches)
    time.sleep(0.2)  # real time for the process to load ahead
    assert loader.state_dict()["position"] == 4
    batches.close()


@pytest.mark.parametrize("build", [*STOCK.values(), *STATEFUL.values()])
def test_state_survives_close(build):
    feed = open_feed(build(), rank=0, world_size=1)
    for _ in range(2):
        next(feed)
    before = str(feed_gate.through_json(feed.state()))
    feed.close()
    assert str(feed.state()) == before
