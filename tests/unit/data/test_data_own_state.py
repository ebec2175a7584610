"""States of other libraries' loaders: used if they give the newest batch again, else not."""

import random

import feed_gate
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from outlast.data import open_feed
from outlast.data.own_state import leaves_out

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'")  # torchdata's
SIZE = 20


class Lines:
    """Batches through a shuffle buffer, as loaders have it; counts what is read."""

    def __init__(self, *, has_all=True, fails=False):
        self.at, self.buffer, self.word, self.read = 0, [], 0, 0
        self.has_all, self.fails = has_all, fails

    def __iter__(self):
        if not self.at:
            self.word = random.randrange(1009)
        while self.at < SIZE or self.buffer:
            while self.at < SIZE and len(self.buffer) < 6:
                self.buffer.append(self.at)
                self.at += 1
                self.read += 1
            yield [self._picked(), self._picked()]
        self.at = 0

    def _picked(self):
        self.word = (31 * self.word + 7) % 1009
        return self.buffer.pop(self.word % len(self.buffer))

    def state_dict(self):
        buffer = self.buffer if self.has_all else []  # itself, which goes on changing
        return {"at": self.at, "word": self.word, "buffer": buffer}

    def load_state_dict(self, state):
        if self.fails:
            raise RuntimeError("not for this data")
        self.at, self.word, self.buffer = state["at"], state["word"], state["buffer"]


class Walk:
    """An iterator with a state of its own, as grain's; counts what is read."""

    def __init__(self, owner):
        self.at, self.owner = 0, owner

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == SIZE:
            raise StopIteration
        self.at += 1
        self.owner.read += 1
        return [self.at]

    def get_state(self):
        return {"at": self.at, "raw": b"\x00\xff", 3: [None, 1.5]}

    def set_state(self, state):
        assert (state["raw"], state[3]) == (b"\x00\xff", [None, 1.5])
        self.at = state["at"]


class Walking:
    def __init__(self):
        self.read = 0

    def __iter__(self):
        return Walk(self)


def resumed(build, num, doubts=()):
    """Cut after each of ``num`` batches; how much each resume has read, of those that count."""
    steps, saved = feed_gate.undisturbed(build, num, save=True)
    read = []
    for cut in range(1, num):
        feed_gate.seed_all(7)
        loader = build()
        feed = open_feed(loader, rank=0, world_size=1)
        feed.restore(saved[cut][0])
        read.append(getattr(loader, "read", 0))
        feed_gate.random_state.restore(saved[cut][1])
        assert feed_gate.take(feed, num, start=cut)[0] == steps[cut:], cut
        assert feed.doubts == list(doubts)
    return read


def test_a_state_that_has_all_is_gone_on_from():
    read = resumed(Lines, 23)
    assert max(read[1:10]) <= 6  # what is in front of the newest batch is not read again


@pytest.mark.parametrize("how", [{"has_all": False}, {"fails": True}])
def test_one_that_has_not_is_not_used_and_the_epoch_is_gone_through_again(how):
    read = resumed(lambda: Lines(**how), 10)
    assert max(read) >= SIZE - 2


class Standing(torch.utils.data.IterableDataset):
    """Goes on where it stands in each pass, as a text's tokens are packed; lends its list."""

    def __init__(self, *, has_all=True):
        self.at, self.left, self.has_all = 0, [], has_all

    def __iter__(self):
        while True:
            self.left.extend(range(10 * self.at, 10 * self.at + 5))
            self.at += 1
            while len(self.left) >= 3:
                sample, self.left = self.left[:3], self.left[3:]
                yield torch.tensor(sample)

    def state_dict(self):
        return {"at": self.at, "left": self.left if self.has_all else []}

    def load_state_dict(self, state):
        self.at, self.left = state["at"], state["left"]


@pytest.mark.parametrize("has_all", [True, False])
def test_a_data_set_that_goes_on_where_it_stands_in_a_stateful_loader(has_all):
    resumed(lambda: StatefulDataLoader(Standing(has_all=has_all), 2), 12)


def test_an_iterator_with_a_state():
    assert resumed(Walking, 45) == [1] * 44  # the newest batch alone, to try the state


class Drawing(Lines):
    """Draws for each of its batches from the stream that the loop's body draws from too."""

    def _picked(self):
        return self.buffer.pop(random.randrange(len(self.buffer)))


def test_what_the_newest_batch_draws_is_part_of_it():
    assert max(resumed(Drawing, 10)[1:]) <= 6


class Passes:
    """Its order follows from a number of the pass that it keeps itself, as Mosaic's does."""

    def __init__(self):
        self.number, self.at, self.read, self.resume = -1, 0, 0, None

    def __iter__(self):
        self.number, self.at = self.number + 1, 0
        if self.resume is not None:
            self.number, self.at = self.resume
            self.resume = None
        while self.at < 4:
            self.at += 1
            self.read += 1
            yield [100 * self.number + self.at]

    def state_dict(self):
        return {"at": [self.number, self.at]}

    def load_state_dict(self, state):
        self.resume = state["at"]


def test_a_pass_that_only_the_loader_knows_the_number_of():
    assert max(resumed(Passes, 11)) == 1


def test_the_first_batch_of_a_later_loop_over_such_a_loader():
    loader = Passes()
    first = open_feed(loader, rank=0, world_size=1)
    first.max_epochs = 1
    assert len(list(first)) == 4
    first.put_down()
    second = open_feed(loader, rank=0, world_size=1)
    second.go_on_from(first)
    assert next(second) == [101]
    again = open_feed(Passes(), rank=0, world_size=1)
    again.restore(feed_gate.through_json(second.state()))
    assert [next(again) for _ in range(4)] == [[102], [103], [104], [201]]


class Mute(Walk):
    def get_state(self):
        return {"what": object()}  # nothing that a checkpoint could hold


def test_an_iterator_whose_state_cannot_be_kept_is_gone_through_again():
    class Muted(Walking):
        def __iter__(self):
            return Mute(self)

    assert resumed(Muted, 19) == [*range(1, 19)]


def test_a_state_that_cannot_be_had_and_another_order_are_told():
    class Unlike(Lines):
        """Begins somewhere else in each process."""

        first = 0

        def __iter__(self):
            for batch in super().__iter__():
                yield [one + self.first for one in batch]

    feed = open_feed(Unlike(fails=True), rank=0, world_size=1)
    for _ in range(4):
        next(feed)
    loader = Unlike(fails=True)
    loader.first = 3
    again = open_feed(loader, rank=0, world_size=1)
    again.restore(feed.state())
    (doubt,) = again.doubts
    assert "what Unlike gives again" in doubt
    assert "\n" not in doubt


def test_nodes_of_torchdata_whose_state_does_not_have_the_samplers_order():
    def build():
        sampler = RandomSampler(range(SIZE))  # draws a seed where it is iterated
        batches = nodes.Batcher(nodes.MapStyleWrapper(range(SIZE), sampler), 3, drop_last=False)
        return nodes.Loader(nodes.Prefetcher(batches, prefetch_factor=2))

    feed_gate.check(build, 18, cuts=[0, 1, 6, 7, 8, 9, 14])


def stream(*, shuffled):
    datasets = pytest.importorskip("datasets", reason="make test-all installs it")

    def numbers(shards):
        for shard in shards:
            yield from ({"x": 10 * shard + item} for item in range(5))

    found = datasets.IterableDataset.from_generator(numbers, gen_kwargs={"shards": [0, 1, 2, 3]})
    return found.shuffle(seed=3, buffer_size=6) if shuffled else found


STREAMS = {
    "itself": lambda shuffled: stream(shuffled=shuffled).batch(3),
    "in a DataLoader": lambda shuffled: DataLoader(stream(shuffled=shuffled), 3),
    "in a stateful one": lambda shuffled: StatefulDataLoader(stream(shuffled=shuffled), 3),
}


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("name", STREAMS)
def test_hugging_faces_streams_over_several_epochs(name, shuffled, monkeypatch):
    def plain(value):
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        return value.tolist() if isinstance(value, torch.Tensor) else value

    monkeypatch.setattr(feed_gate, "plain", plain)
    assert leaves_out(stream(shuffled=shuffled)) is shuffled
    feed_gate.check(lambda: STREAMS[name](shuffled), 16)
