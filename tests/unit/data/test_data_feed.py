"""Every kind of feed, without processes: cut anywhere, resume, compare to the bit."""

import random

import feed_gate
import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from outlast.data import Loader, open_feed, random_state
from outlast.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'")  # torchdata's

SIZE = 11


class Numbers(torch.utils.data.Dataset):
    """Item i is i, and a random number if ``noise``; counts what is loaded."""

    def __init__(self, size=SIZE, *, noise=False):
        self.size, self.noise, self.loaded = size, noise, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        self.loaded.append(index)
        if not self.noise:
            return index
        return (index, random.random(), float(np.random.rand()), float(torch.rand(())))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        order = torch.randperm(9).tolist()
        return iter(order)


class CoinSampler:
    """Draws from the global stream, index by index."""

    def __iter__(self):
        for _ in range(SIZE):
            yield int(torch.randint(SIZE, ()))


class EagerSampler:
    """Draws when asked for an iterator, not when asked for an item."""

    def __iter__(self):
        return iter(torch.randperm(SIZE).tolist())


class Buckets:
    """A batch sampler of its own kind, with batches of several sizes."""

    def __init__(self):
        self.epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(SIZE).tolist()
        yield order[: 1 + self.epoch]
        yield order[1 + self.epoch : 6]
        yield order[6:]


class Told:
    """A sampler whose order follows from the epoch that it was told, kept under any name."""

    def __init__(self, name, kind=int):
        self._name, self._kind = name, kind
        self.set_epoch(0)

    def set_epoch(self, epoch):
        vars(self)[self._name] = self._kind(epoch)

    def __len__(self):
        return SIZE

    def __iter__(self):
        seed = int(vars(self)[self._name])
        return iter(torch.randperm(SIZE, generator=torch.Generator().manual_seed(seed)).tolist())


def seeded():
    return torch.Generator().manual_seed(3)


def with_generator(sampler, **settings):
    """The sampler and the loader share one generator."""
    generator = seeded()
    return DataLoader(Numbers(), 3, sampler=sampler(generator), generator=generator, **settings)


STOCK = {
    "in order": lambda: DataLoader(Numbers(), 3),
    "shuffled": lambda: DataLoader(Numbers(), 3, shuffle=True),
    "noise": lambda: DataLoader(Numbers(noise=True), 3, shuffle=True),
    "drop last": lambda: DataLoader(Numbers(), 3, shuffle=True, drop_last=True),
    "whole batches": lambda: DataLoader(Numbers(12), 3, shuffle=True),
    "generator": lambda: DataLoader(Numbers(), 3, shuffle=True, generator=seeded()),
    "own generator": lambda: DataLoader(
        Numbers(), 3, sampler=RandomSampler(Numbers(), generator=seeded())
    ),
    "shared generator": lambda: with_generator(
        lambda g: RandomSampler(Numbers(), replacement=True, num_samples=40, generator=g)
    ),
    "weighted": lambda: DataLoader(Numbers(), 3, sampler=WeightedRandomSampler([1.0] * SIZE, SIZE)),
    "weighted, shared": lambda: with_generator(
        lambda g: WeightedRandomSampler([1.0] * SIZE, SIZE, generator=g)
    ),
    "subset": lambda: DataLoader(Numbers(), 2, sampler=SubsetRandomSampler([1, 3, 5, 7, 9])),
    "distributed": lambda: DataLoader(
        Numbers(40), 3, sampler=DistributedSampler(Numbers(40), num_replicas=4, rank=1)
    ),
    "distributed in batch sampler": lambda: DataLoader(
        Numbers(),
        batch_sampler=BatchSampler(
            DistributedSampler(Numbers(), num_replicas=2, rank=1), 2, drop_last=False
        ),
    ),
    "samples": lambda: DataLoader(Numbers(4), batch_size=None, shuffle=True),
    "buckets": lambda: DataLoader(Numbers(), batch_sampler=Buckets()),
    "coins": lambda: DataLoader(Numbers(), 3, sampler=CoinSampler()),
    "eager": lambda: DataLoader(Numbers(), 3, sampler=EagerSampler()),
}


@pytest.mark.parametrize("own", ["stock", "stateful"])
@pytest.mark.parametrize(
    ("name", "kind"), [("_epoch", int), ("epoch", np.int64), ("_turn", int), ("epoch", str)]
)
def test_a_sampler_that_was_told_its_epoch_has_it_wherever_it_keeps_it(own, name, kind):
    sampler = Told(name, kind)
    loader = (StatefulDataLoader if own == "stateful" else DataLoader)(
        Numbers(), 3, sampler=sampler
    )
    orders = []
    for epoch in range(5):
        sampler.set_epoch(epoch)
        orders.append([batch.tolist() for batch in loader])
    assert len(set(map(str, orders))) == 5

    def loop(epochs=1, state=None, until=None):
        feed = open_feed(loader, rank=0, world_size=1)
        feed.max_epochs = epochs
        if state is not None:
            feed.restore(state)
        came = [batch.tolist() for _, batch in zip(range(until or 99), feed, strict=False)]
        found = feed.state()
        feed.leave()
        feed.close()
        return came, found

    for epoch in (1, 2, 0):  # a loop for each, as scripts have it
        sampler.set_epoch(epoch)
        assert loop()[0] == orders[epoch]
    sampler.set_epoch(3)
    begun, state = loop(until=2)
    sampler.set_epoch(3)  # another process, the same script
    assert begun + loop(state=state)[0] == orders[3]
    sampler.set_epoch(0)
    for _ in range(2):  # one that is told by us alone begins each loop anew
        assert loop(epochs=3)[0] == [*orders[0], *orders[1], *orders[2]]
    if name != "_turn" and kind is not str:
        sampler.set_epoch(2)
        assert loop(epochs=2)[0] == [*orders[2], *orders[3]]


@pytest.mark.parametrize("name", STOCK)
def test_stock(name):
    steps = feed_gate.check(STOCK[name], 11)
    assert steps[-1][0] >= 2 or name == "shared generator"
    if name != "distributed in batch sampler":  # the plain loop would not set its epoch
        assert feed_gate.plain_loop(STOCK[name], 11) == steps


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", ["shuffled", "generator", "shared generator", "noise", "buckets"])
def test_stock_restarted_again_and_again(name, every):
    steps, _ = feed_gate.undisturbed(STOCK[name], 9, save=False)
    assert feed_gate.restarted_every(STOCK[name], 9, every=every) == steps


def test_stock_over_a_long_epoch_with_replacement():
    feed_gate.check(STOCK["shared generator"], 37, cuts=[5, 11, 13, 14, 15, 27, 28])


def test_stock_loads_no_skipped_sample():
    feed = open_feed(DataLoader(Numbers(), 3, shuffle=True), rank=0, world_size=1)
    for _ in range(6):
        batch = next(feed)
    saved = feed.state()
    data = Numbers()
    again = open_feed(DataLoader(data, 3, shuffle=True), rank=0, world_size=1)
    again.restore(saved)
    assert data.loaded == []
    batch = next(again)
    assert data.loaded == batch.tolist()


def test_stock_does_not_change_the_users_loader():
    loader = DataLoader(Numbers(), 3, shuffle=True)
    before = dict(vars(loader))
    next(open_feed(loader, rank=0, world_size=1))
    assert vars(loader) == before


STATEFUL = {
    "in order": lambda: StatefulDataLoader(Numbers(), 3),
    "shuffled": lambda: StatefulDataLoader(Numbers(), 3, shuffle=True),
    "whole batches": lambda: StatefulDataLoader(Numbers(12), 3, shuffle=True),
    "drop last": lambda: StatefulDataLoader(Numbers(), 3, shuffle=True, drop_last=True),
    "shared generator": lambda: StatefulDataLoader(Numbers(), 3, shuffle=True, generator=seeded()),
    "distributed": lambda: StatefulDataLoader(
        Numbers(), 3, sampler=StatefulDistributedSampler(Numbers(), num_replicas=2, rank=1)
    ),
    "plain distributed": lambda: StatefulDataLoader(
        Numbers(), 3, sampler=DistributedSampler(Numbers(), num_replicas=2, rank=1)
    ),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_stateful(name):
    steps = feed_gate.check(STATEFUL[name], 11)
    assert feed_gate.plain_loop(STATEFUL[name], 11) == steps


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", STATEFUL)
def test_stateful_restarted_again_and_again(name, every):
    steps, _ = feed_gate.undisturbed(STATEFUL[name], 9, save=False)
    assert feed_gate.restarted_every(STATEFUL[name], 9, every=every) == steps


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_generators_come_back_before_the_first_batch(kind):
    def build(seed):
        return kind(Numbers(), 3, shuffle=True, generator=torch.Generator().manual_seed(seed))

    _, saved = feed_gate.undisturbed(lambda: build(1), 5, save=True)
    steps, _ = feed_gate.undisturbed(lambda: build(1), 5, save=False)
    assert feed_gate.resumed(lambda: build(2), saved[0], 5, start=0) == steps


class Pages:
    """A loader that is its own iterator, starts over in __iter__, and has a state."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        self.place %= 5
        return self

    def __next__(self):
        if self.place == 5:
            raise StopIteration
        self.place += 1
        return self.place

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def test_stateful_of_another_make():
    feed = open_feed(Pages(), rank=0, world_size=1)
    assert [next(feed) for _ in range(7)] == [1, 2, 3, 4, 5, 1, 2]
    again = open_feed(Pages(), rank=0, world_size=1)
    again.restore(feed_gate.through_json(feed.state()))
    assert (next(again), again.epoch) == (3, 1)


class Coins:
    """Draws between the batches, from the stream that the training draws from too."""

    def __iter__(self):
        for _ in range(4):
            yield torch.randint(1000, ())


ITERABLE = {
    "list": lambda: [1, 2, 3, 4],
    "stream": lambda: DataLoader(Stream(), 2),
    "coins": Coins,
    "once": lambda: iter(range(100)),
}


@pytest.mark.parametrize("name", ITERABLE)
def test_iterable(name):
    steps = feed_gate.check(ITERABLE[name], 11)
    assert steps[-1][0] >= 2 or name == "once"


def outlast_loader(**settings):
    return lambda: Loader(Numbers(noise=True), seed=4, **{"global_batch": 3, **settings})


@pytest.mark.parametrize(
    "build", [outlast_loader(), outlast_loader(shuffle=False), outlast_loader(global_batch=30)]
)
def test_outlast(build):
    feed_gate.check(build, 11)


@pytest.mark.parametrize("build", [STOCK["shuffled"], STATEFUL["shuffled"], ITERABLE["list"]])
def test_max_epochs_ends_the_feed_and_the_end_can_be_resumed(build):
    feed_gate.seed_all(0)
    feed = open_feed(build(), rank=0, world_size=1)
    straight, _ = feed_gate.take(feed, 12)
    feed_gate.seed_all(0)
    feed = open_feed(build(), rank=0, world_size=1)
    feed.max_epochs = 2
    steps = [(feed.epoch, feed_gate.plain(batch), feed_gate.draw()) for batch in feed]
    assert steps == straight[:8]
    saved = feed_gate.through_json((feed.state(), random_state.capture()))
    assert feed_gate.resumed(build, saved, 12, start=8) == straight[8:]
    ended = open_feed(build(), rank=0, world_size=1)
    ended.max_epochs = 2
    ended.restore(saved[0])
    assert next(ended, None) is None


def test_max_epochs_of_ours_counts_first_samples():
    feed = open_feed(Loader(Numbers(10), global_batch=4), rank=0, world_size=1)
    feed.max_epochs = 2
    assert len(list(feed)) == 5
    assert feed.epoch == 1
    feed.max_epochs = 0
    assert list(feed) == []


def test_one_shot_ends():
    feed = open_feed(iter([1, 2]), rank=0, world_size=1)
    assert list(feed) == [1, 2]
    assert feed.state()["batches"] == 2


def test_state_survives_close():
    for build in (STOCK["shuffled"], STATEFUL["shuffled"], ITERABLE["list"], outlast_loader()):
        feed = open_feed(build(), rank=0, world_size=1)
        next(feed)
        before = feed_gate.through_json(feed.state())
        feed.close()
        assert str(feed.state()) == str(before)


@pytest.mark.parametrize(
    "build",
    [
        list,
        lambda: DataLoader(Numbers(2), 3, drop_last=True),
        lambda: StatefulDataLoader(Numbers(2), 3, drop_last=True),
    ],
)
def test_no_batch_at_all(build):
    with pytest.raises(ConfigError, match="no batch in epoch 0"):
        next(open_feed(build(), rank=0, world_size=1))


def test_an_error_in_the_first_batch_of_an_epoch_can_be_resumed():
    class Broken(Numbers):
        broken = False

        def __getitem__(self, index):
            if self.broken:
                raise OSError("gone")
            return index

    build = STOCK["shuffled"]
    steps, _ = feed_gate.undisturbed(build, 8, save=False)
    feed_gate.seed_all(0)
    data = Broken()
    feed = open_feed(DataLoader(data, 3, shuffle=True), rank=0, world_size=1)
    feed_gate.take(feed, 4)
    before = random_state.capture()
    data.broken = True
    with pytest.raises(OSError, match="gone"):
        next(feed)
    saved = feed_gate.through_json((feed.state(), random_state.capture()))
    assert (saved[0]["epoch"], saved[0]["batches"]) == (1, 0)
    assert not torch.equal(before["torch"], saved[1]["torch"])
    assert feed_gate.resumed(build, saved, 8, start=4) == steps[4:]


def state_of(build, *, world_size=1):
    feed = open_feed(build(), rank=0, world_size=world_size)
    next(feed)
    next(feed)
    return feed.state()


KINDS = {
    "stock": STOCK["shuffled"],
    "stateful": STATEFUL["shuffled"],
    "iterable": ITERABLE["list"],
    "outlast": outlast_loader(),
}


@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("here", KINDS)
def test_another_kind_is_refused(saved, here):
    state = state_of(KINDS[saved])
    assert state["kind"] == saved
    assert {"epoch", "world_size"} <= state.keys()
    feed = open_feed(KINDS[here](), rank=0, world_size=1)
    if saved == here:
        feed.restore(state)
    else:
        with pytest.raises(ConfigError, match="was saved with"):
            feed.restore(state)


@pytest.mark.parametrize("kind", ["stock", "stateful", "iterable"])
def test_another_number_of_workers_is_refused(kind):
    feed = open_feed(KINDS[kind](), rank=0, world_size=3)
    with pytest.raises(ConfigError, match=r"2 workers.*3.*data\.Loader.*data\.Stream"):
        feed.restore(state_of(KINDS[kind], world_size=2))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda: DataLoader(Numbers(), 2, shuffle=True), "batch_size=3.*batch_size=2"),
        (lambda: DataLoader(Numbers(9), 3, shuffle=True), "num_indices=11.*num_indices=9"),
        (lambda: DataLoader(Numbers(), 3, shuffle=True, generator=seeded()), "0 torch generators"),
    ],
)
def test_another_stock_loader_is_refused(changed, words):
    feed = open_feed(changed(), rank=0, world_size=1)
    with pytest.raises(ConfigError, match=words):
        feed.restore(state_of(STOCK["shuffled"]))


def test_a_position_that_does_not_exist_is_refused():
    def build(n):
        return DataLoader(Numbers(), sampler=iter(range(n)))

    with pytest.raises(ConfigError, match=r"consumed 2 batches.*only 1"):
        open_feed(build(1), rank=0, world_size=1).restore(state_of(lambda: build(5)))
    with pytest.raises(ConfigError, match=r"consumed 2 batches.*only 1"):
        open_feed([1], rank=0, world_size=1).restore(state_of(lambda: [1, 2, 3]))


def test_not_a_loader():
    with pytest.raises(ConfigError, match="cannot be iterated"):
        open_feed(7, rank=0, world_size=1)


class NameAlone(DataLoader):
    """As Accelerate's wrapper: it has ``state_dict``, and no state."""

    def state_dict(self):
        return self.dl_state_dict

    def load_state_dict(self, state):
        self.dl_state_dict = state


def test_a_loader_that_has_the_name_alone_is_resumed_as_a_loader_without_a_state():
    def batches(feed, count):
        return [next(feed).tolist() for _ in range(count)]

    torch.manual_seed(1)
    feed = open_feed(NameAlone(Numbers(), 3, shuffle=True), rank=0, world_size=1)
    assert feed.kind == "stock"
    batches(feed, 6)
    state = feed.state()
    wanted = batches(feed, 2)
    again = open_feed(NameAlone(Numbers(), 3, shuffle=True), rank=0, world_size=1)
    again.restore(state)
    assert batches(again, 2) == wanted
    assert again.doubts == []


class Counting(torch.utils.data.IterableDataset):
    """Goes on where it was, and counts what is read."""

    def __init__(self):
        self.at = self.read = 0

    def __iter__(self):
        while True:
            self.at += 1
            self.read += 1
            yield self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("named_too", [False, True])
def test_a_stream_with_a_state_goes_on_behind_what_was_handed_out(named_too):
    feed = open_feed(DataLoader(Counting(), 4), rank=0, world_size=1)
    for _ in range(5):
        next(feed)
    dataset = Counting()
    again = open_feed(DataLoader(dataset, 4), rank=0, world_size=1)
    if named_too:  # the session has given it its state already
        dataset.load_state_dict({"at": 20})
    again.restore(feed.state())
    assert next(again).tolist() == [21, 22, 23, 24]
    assert dataset.read == 8  # the newest batch once more, to try the state


def test_another_batch_size_is_refused_for_a_stream_too():
    feed = open_feed(DataLoader(Stream(), 4), rank=0, world_size=1)
    next(feed)
    again = open_feed(DataLoader(Stream(), 2), rank=0, world_size=1)
    with pytest.raises(ConfigError, match="batch_size=4, this one has batch_size=2"):
        again.restore(feed.state())


def test_an_order_that_is_not_what_it_was_is_told():
    torch.manual_seed(1)
    feed = open_feed(DataLoader(Numbers(), 3, sampler=CoinSampler()), rank=0, world_size=1)
    for _ in range(3):
        next(feed)
        torch.rand(3)  # the body draws from the stream that the sampler draws from
    state = feed.state()
    again = open_feed(DataLoader(Numbers(), 3, sampler=CoinSampler()), rank=0, world_size=1)
    again.restore(state)
    assert "the sampler's order of epoch 0 is another one" in " ".join(again.doubts)
