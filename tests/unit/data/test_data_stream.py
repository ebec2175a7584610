"""Streams: the same batches through any changes of the number of workers, nothing lost or twice."""

import collections
import itertools
import random

import crowd
import feed_gate
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outlast.data import Loader, Stream, open_feed
from outlast.data.trail import fingerprint
from outlast.errors import ConfigError, ShardError
from thorough import examples

EITHER, NEVER = st.booleans(), st.just(False)
MANY = examples(30)
CHANGES = 20


class Opener:
    """Shard ``i`` has the items ``i*1000 + 0, 1, …``; counts what is read of it."""

    def __init__(self, sizes, *, how="plain"):
        self.sizes, self.how, self.read = sizes, how, collections.Counter()

    def __call__(self, shard):
        items = Counted(shard, self.sizes[shard], self.read)
        return {"plain": iter, "state": Remembering, "skip": Skipping, "both": Both}[self.how](
            items
        )


class Counted:
    def __init__(self, shard, size, read):
        self.shard, self.size, self.counter = shard, size, read

    def item(self, number):
        self.counter[self.shard] += 1
        return self.shard * 1000 + number

    def __iter__(self):
        return map(self.item, range(self.size))


class Remembering:
    """An iterator with a state."""

    def __init__(self, items):
        self.items, self.place = items, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place >= self.items.size:
            raise StopIteration
        self.place += 1
        return self.items.item(self.place - 1)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Both(Remembering):
    """Has a state, which belongs to what was not skipped."""

    def skip(self, number):
        return Skipping(self.items).skip(number)


class Skipping:
    def __init__(self, items):
        self.items, self.first = items, 0

    def skip(self, number):
        self.first += number
        return self

    def __iter__(self):
        return map(self.items.item, range(self.first, self.items.size))


class Documents:
    """Shard ``i`` has documents of several lengths, whose tokens are all different."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __call__(self, shard):
        first = shard * 10_000
        for length in self.lengths[shard]:
            yield list(range(first, first + length))
            first += length

    def tokens(self, shard):
        return range(shard * 10_000, shard * 10_000 + sum(self.lengths[shard]))


def rows(batch):
    return batch.tolist()


def flat(steps):
    return [row for step in steps for row in step]


def undisturbed(build, num_steps):
    return crowd.Crowd(build, rows).stint(1, num_steps).steps


@st.composite
def streams(draw, *, sized=EITHER, packed=NEVER):
    """Settings of a stream, as keywords, and its sizes in items or its documents' lengths."""
    lanes = draw(st.integers(1, 6))
    found = {
        "lanes": lanes,
        "global_batch": lanes * draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 99)),
        "shuffle": draw(st.booleans()),
        "buffer": draw(st.sampled_from([1, 2, 5, 17])),
    }
    is_sized = draw(sized)
    num_shards = draw(st.integers(1 if is_sized else lanes, 9))
    length = st.integers(0, 12)
    if draw(packed):
        found["pack"] = draw(st.integers(1, 9))
        its = draw(st.lists(st.lists(length, max_size=6), min_size=num_shards, max_size=num_shards))
        its[0] = [*its[0], 5]  # something to read, in one shard at least
        if not is_sized:
            its = [[*one, 3] for one in its]
        amounts = [sum(one) for one in its]
    else:
        its = draw(st.lists(length, min_size=num_shards, max_size=num_shards))
        its[0] += 1
        if not is_sized:
            its = [one + 1 for one in its]
        amounts = its
    found["num_shards"] = num_shards
    found["sizes"] = amounts if is_sized else None
    return found, its


def changes(draw, lanes):
    """(workers, steps, steps that are lost with the workers), again and again."""
    one = st.tuples(st.integers(1, lanes), st.integers(0, 3), st.integers(0, 2))
    return draw(st.lists(one, min_size=CHANGES, max_size=CHANGES))


def disturbed(build, found, data):
    job = crowd.Crowd(build, rows)
    for world_size, num_steps, ahead in changes(data.draw, found["lanes"]):
        job.stint(world_size, num_steps, ahead=ahead)
    assert job.steps == undisturbed(build, len(job.steps))
    verdict = job.verdict()
    assert [fault.text for fault in verdict.faults] == []
    assert verdict.samples == len(flat(job.steps)) == len(job.steps) * found["global_batch"]
    return job


@MANY
@given(streams(), st.sampled_from(["plain", "state", "skip", "both"]), st.data())
def test_twenty_changes(made, how, data):
    found, sizes = made
    disturbed(lambda: Stream(Opener(sizes, how=how), **found), found, data)


@MANY
@given(streams(packed=st.just(True)), st.data())
def test_twenty_changes_shuffled_and_packed(made, data):
    found, lengths = made
    disturbed(lambda: Stream(Documents(lengths), **found), found, data)


@MANY
@given(streams(sized=st.just(True)))
def test_each_item_once_in_each_epoch(made):
    found, sizes = made
    size, whole = sum(sizes), found["global_batch"]
    steps = undisturbed(lambda: Stream(Opener(sizes), **found), -(-3 * size // whole))
    everything = [i * 1000 + n for i, num in enumerate(sizes) for n in range(num)]
    # Within a step the samples of one lane lie together: number them by their turn.
    items, lanes = [None] * (len(steps) * whole), found["lanes"]
    for step, row in itertools.product(range(len(steps)), range(whole)):
        lane, place = divmod(row, whole // lanes)
        items[(step * (whole // lanes) + place) * lanes + lane] = steps[step][row]
    for epoch in range(3):
        assert sorted(items[epoch * size : (epoch + 1) * size]) == everything


@MANY
@given(streams(packed=st.just(True)))
def test_each_token_once_in_each_pass_of_a_lane(made):
    """Lane by lane: the samples in a row are the documents in a row, none left out or cut away."""
    found, lengths = made
    lanes, per_lane = found["lanes"], found["global_batch"] // found["lanes"]
    documents = Documents(lengths)
    steps = undisturbed(lambda: Stream(documents, **found), 12)
    source = Stream(documents, **found).source
    for lane in range(lanes):
        mine = [
            token
            for step in steps
            for sample in step[lane * per_lane : (lane + 1) * per_lane]
            for token in sample
        ]
        for epoch in range(100):
            due = collections.Counter()
            for shard, first, stop in source.spans(lane, epoch):
                due.update(documents.tokens(shard)[first:stop])
            share, mine = mine[: due.total()], mine[due.total() :]
            if len(share) < due.total():
                assert collections.Counter(share) <= due
                break
            assert collections.Counter(share) == due


@MANY
@given(streams(sized=st.just(True), packed=st.booleans()), st.integers(0, 5))
def test_lanes_share_a_pass_without_gap_or_overlap(made, epoch):
    found, its = made
    source = Stream(Opener(its), **found).source
    for lane in range(source.lanes):
        assert all(low < high for _, low, high in source.spans(lane, epoch))
    covered = sorted(span for lane in range(source.lanes) for span in source.spans(lane, epoch))
    units = [(shard, unit) for shard, low, high in covered for unit in range(low, high)]
    assert units == [(s, u) for s, size in enumerate(source.sizes) for u in range(size)]


def test_the_order_of_shards_and_of_items_is_shuffled_anew_in_each_epoch():
    def items(**settings):
        steps = undisturbed(
            lambda: Stream(
                Opener([20] * 5), num_shards=5, sizes=[20] * 5, global_batch=1, **settings
            ),
            200,
        )
        return flat(steps[:100]), flat(steps[100:])

    first, second = items(shuffle=False)
    assert first == second == sorted(first)
    first, second = items()
    assert first != second
    assert sorted(first) == sorted(second)
    assert [one % 1000 for one in first] == 5 * list(range(20))
    blocks = items(buffer=10)[0]
    assert {one // 1000 for one in blocks[:20]} == {first[0] // 1000}
    assert sorted(blocks[:10]) == first[:10] != blocks[:10]


def test_a_worker_reads_its_own_shards_alone():
    openers = []

    def build():
        openers.append(Opener([30] * 8))
        return Stream(openers[-1], num_shards=8, global_batch=8, lanes=4, buffer=4)

    crowd.Crowd(build, rows).stint(4, 10)
    read = [set(opener.read) for opener in openers]
    assert all(not one & other for one, other in itertools.combinations(read, 2))
    assert set().union(*read) <= set(range(8))


@pytest.mark.parametrize(("how", "most"), [("plain", 106), ("state", 10), ("skip", 10)])
def test_what_a_resume_reads_again(how, most):
    def build(opener):
        return Stream(opener, num_shards=1, sizes=[200], global_batch=1, buffer=5, shuffle=False)

    job = crowd.Crowd(lambda: build(Opener([200], how=how)), rows).stint(1, 103)
    opener = Opener([200], how=how)
    job.build = lambda: build(opener)
    job.stint(1, 1)
    assert opener.read[0] <= most


def test_a_checkpoint_stays_small():
    stream = Stream(
        Documents([[50] * 100] * 64), num_shards=64, global_batch=64, buffer=100, pack=2048
    )
    feed = open_feed(stream, rank=0, world_size=1)
    for _ in range(3):
        next(feed)
    assert len(str(feed.state())) < 100 * 64


def test_endless_shards():
    def build():
        return Stream(itertools.count, num_shards=3, global_batch=6, lanes=3, buffer=3)

    job = crowd.Crowd(build, rows)
    for world_size in (1, 3, 2):
        job.stint(world_size, 5)
    assert job.steps == undisturbed(build, 15)
    assert sorted(flat(job.steps)) == sorted(i + n for i in range(3) for n in range(30))


def test_uneven_and_empty_shards_go_round_in_their_lane():
    def build():
        return Stream(Opener([0, 3, 5, 1]), num_shards=4, global_batch=2, lanes=2, shuffle=False)

    steps = undisturbed(build, 12)
    assert [step[0] for step in steps] == 2 * [2000, 2001, 2002, 2003, 2004] + [2000, 2001]
    assert [step[1] for step in steps] == 3 * [1000, 1001, 1002, 3000]


def test_a_lane_that_finds_nothing_says_so():
    with pytest.raises(ConfigError, match=r"lane 1 of 2 found no item in 100 passes"):
        undisturbed(lambda: Stream(Opener([1, 0]), num_shards=2, global_batch=2, shuffle=False), 1)


class Failing(Opener):
    """Raises at one item until it is mended."""

    is_broken = True

    def __call__(self, shard):
        for item in super().__call__(shard):
            if self.is_broken and item == 1002:
                raise OSError(5, "Input/output error", "shard-1")
            yield item


@pytest.mark.parametrize("buffer", [1, 4])
def test_a_shard_that_raises_is_named_and_nothing_is_lost(buffer):
    opener = Failing([5, 5])

    def build():
        return Stream(opener, num_shards=2, global_batch=2, lanes=2, buffer=buffer)

    opener.is_broken = False
    calm = undisturbed(build, 12)
    opener.is_broken = True
    job = crowd.Crowd(build, rows).stint(2, 0)
    feed = open_feed(build(), rank=0, world_size=1)
    with pytest.raises(ShardError, match=r"shard 1 raised OSError after 2 items of pass 0.*mend"):
        job.steps += [rows(batch) for batch in feed]
    job.saved = [feed_gate.through_json({"position": feed.state()})]
    job.steps = calm[: feed.loader.position // 2]
    opener.is_broken = False
    job.stint(2, 12 - len(job.steps))
    assert job.steps == calm


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([3, 5], r"shard 0 goes on behind them, and sizes says 3"),
        ([6, 5], r"shard 0 ends after 5, and sizes says 6"),
    ],
)
@pytest.mark.parametrize("buffer", [1, 3])
def test_sizes_that_are_not_those_of_the_shards(sizes, said, buffer):
    def build():
        return Stream(
            Opener([5, 5]), num_shards=2, sizes=sizes, global_batch=1, shuffle=False, buffer=buffer
        )

    with pytest.raises(ConfigError, match=said):
        undisturbed(build, 20)


def test_a_last_document_that_is_longer_than_sizes_says():
    build = lambda: Stream(  # noqa: E731
        Documents([[4, 4]]), num_shards=1, sizes=[6], global_batch=1, pack=3
    )
    with pytest.raises(ConfigError, match="goes on behind them"):
        undisturbed(build, 4)


class Noisy:
    """Random numbers in the shard's opening, in its items and after them."""

    def __call__(self, shard):
        offset = random.random()
        for number in range(7):
            yield (shard * 1000 + number, offset, float(np.random.rand()), float(torch.rand(())))


def noisy_rows(batch):
    return list(zip(*(column.tolist() for column in batch), strict=True))


def jitter(sample):
    return (*sample, random.random())


@pytest.mark.parametrize("buffer", [1, 3])
def test_random_numbers_are_those_of_the_samples(buffer):
    def build():
        return Stream(
            Noisy(), num_shards=6, global_batch=6, lanes=6, buffer=buffer, transform=jitter
        )

    feed_gate.seed_all(5)
    calm = crowd.Crowd(build, noisy_rows).stint(1, 20)
    expected = feed_gate.draw()
    assert len({row[3] for row in flat(calm.steps)}) == 120
    feed_gate.seed_all(5)
    job = crowd.Crowd(build, noisy_rows)
    for world_size in (3, 6, 1, 2, 5):
        job.stint(world_size, 4, ahead=1)
    assert job.steps == calm.steps
    assert feed_gate.draw() == expected


def test_the_training_script_goes_on_drawing_as_if_there_was_no_stream():
    feed_gate.check(lambda: Stream(Noisy(), num_shards=4, global_batch=4, buffer=3), 9)


class Sharded(torch.utils.data.IterableDataset):
    """As Hugging Face's streams have it: a state of the data set, not of its iterator."""

    def __init__(self, first=0, step=1):
        self.first, self.step, self.done, self.start = first, step, 0, 0

    def shard(self, num_shards, index):
        return Sharded(index, num_shards)

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.start = state["done"]

    def __iter__(self):
        for number in range(self.start, 8):
            self.done = number + 1
            yield self.first + number * self.step


def test_a_data_set_that_is_cut_by_its_own_method():
    def build():
        return Stream(Sharded(), num_shards=4, global_batch=4, buffer=3, shuffle=False)

    job = crowd.Crowd(build, rows)
    for world_size in (2, 4, 1):
        job.stint(world_size, 4)
    assert job.steps == undisturbed(build, 12)
    assert sorted(flat(job.steps[:8])) == list(range(32))


def test_the_global_batch_may_change():
    def build(size):
        return lambda: Stream(
            Opener([40] * 2), num_shards=2, sizes=[40] * 2, lanes=2, global_batch=size
        )

    job = crowd.Crowd(build(2), rows).stint(1, 5)
    job.build = build(6)
    job.stint(2, 5)
    assert sorted(flat(job.steps)) == sorted(flat(undisturbed(build(4), 10)))
    assert job.verdict().proved


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"seed": 2}, "seed=1.*seed=2"),
        ({"lanes": 1}, "lanes=2.*lanes=1"),
        ({"buffer": 4}, "buffer=1.*buffer=4"),
        ({"shuffle": False}, "shuffle=True.*shuffle=False"),
        ({"num_shards": 3, "sizes": [5] * 3}, "num_shards=2.*num_shards=3"),
        ({"sizes": [5, 6]}, "sizes="),
        ({"pack": 2}, "pack=None.*pack=2"),
    ],
)
def test_a_changed_order_is_refused(changed, words):
    def build(**more):
        settings = {"num_shards": 2, "sizes": [5, 5], "global_batch": 2, "lanes": 2, "seed": 1}
        return Stream(Opener([5] * 3), **{**settings, **more})

    with pytest.raises(ConfigError, match=words):
        build(**changed).load_state_dict(build().state_dict())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"global_batch": 0}, "global_batch must be"),
        ({"num_shards": 0}, "num_shards must be"),
        ({"buffer": 0}, "buffer must be"),
        ({"pack": 0}, "pack must be"),
        ({"lanes": 3}, "lanes=3 does not divide global_batch=4"),
        ({"lanes": 4}, "lanes=4 is more than the 2 shards"),
        ({"sizes": [1]}, "1 sizes for 2 shards"),
        ({"sizes": [0, 0]}, "all shards are empty"),
        ({"sizes": [-1, 2]}, "each of sizes must be"),
        ({"shards": [1, 2]}, "list is neither"),
    ],
)
def test_settings_out_of_range(settings, words):
    with pytest.raises(ConfigError, match=words):
        Stream(**{"shards": iter, "num_shards": 2, "global_batch": 4, **settings})


def test_lanes_by_default():
    def lanes(**settings):
        return Stream(iter, **settings).source.lanes

    assert lanes(num_shards=1000, global_batch=256) == 64
    assert lanes(num_shards=10, global_batch=24) == 8
    assert lanes(num_shards=1, sizes=[9], global_batch=24) == 24
    assert lanes(num_shards=1, sizes=[9], global_batch=7) == 7


def test_more_workers_than_lanes():
    with pytest.raises(ConfigError, match="3 workers cannot share a stream of 2 lanes"):
        open_feed(Stream(iter, num_shards=2, global_batch=2), rank=0, world_size=3)


def test_a_part_of_the_position_that_is_missing_is_named():
    stream = Stream(Opener([9, 9]), num_shards=2, global_batch=2)
    stream.set_worker(0, 2)
    next(iter(stream))
    other = Stream(Opener([9, 9]), num_shards=2, global_batch=2)
    other.load_state_dict(stream.state_dict())
    with pytest.raises(ConfigError, match=r"does not know where lanes \[1\] stand"):
        next(iter(other))


def test_epochs_need_sizes():
    feed = open_feed(Stream(Opener([4, 4]), num_shards=2, global_batch=2), rank=0, world_size=1)
    with pytest.raises(ConfigError, match="until=10_000"):
        feed.max_epochs = 1
    sized = Stream(Opener([4, 4]), num_shards=2, sizes=[4, 4], global_batch=2)
    feed = open_feed(sized, rank=0, world_size=1)
    feed.max_epochs = 2
    assert len(list(feed)) == 8
    assert feed.epoch == 1


@pytest.mark.parametrize(
    ("item", "words"),
    [("text", "a str"), ([[1], [2]], r"of shape \(2, 1\)"), (3, r"of shape \(\)")],
)
def test_what_cannot_be_packed(item, words):
    stream = Stream(lambda _: iter([item]), num_shards=1, global_batch=1, pack=2)
    with pytest.raises(ConfigError, match=words):
        next(iter(stream))


def test_data_that_became_fewer_are_refused():
    def build(sizes):
        return lambda: Stream(Opener(sizes), num_shards=1, global_batch=1, buffer=4)

    job = crowd.Crowd(build([9]), rows).stint(1, 7)
    job.build = build([5])
    with pytest.raises(ConfigError, match="had used 3: the data have changed"):
        job.stint(1, 1)


class Elsewhere(Remembering):
    """Comes back one item late."""

    def load_state_dict(self, state):
        self.place = state["place"] + 1


class SkipsTooFew(Skipping):
    def skip(self, number):
        return super().skip(number - 1)


@pytest.mark.parametrize("bad", [Elsewhere, SkipsTooFew])
@pytest.mark.parametrize("buffer", [1, 5])
def test_a_shard_that_comes_to_another_place_is_refused(bad, buffer):
    def build(how):
        counter = collections.Counter()
        return lambda: Stream(
            lambda shard: how(Counted(shard, 300, counter)),
            num_shards=2,
            global_batch=2,
            buffer=buffer,
        )

    job = crowd.Crowd(build(bad.__base__), rows).stint(1, 103)
    job.build = build(bad)
    with pytest.raises(ConfigError, match=r"goes on in pass 0 with another item.*state_dict or sk"):
        job.stint(2, 1)


def test_what_items_have_a_fingerprint():
    items = [
        *(None, True, 1, 1.0, 1j, "1", b"1", [1], [1, 1], [[1], 1], {"a": 1}, {"b": 1}),
        *(torch.ones(2), torch.ones(3), torch.zeros(2), torch.ones(2, dtype=torch.bfloat16)),
        *(np.ones(2, np.int32), np.ones((1, 2), np.int32), np.float32(1.0), torch.ones(())),
        *(torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(6), torch.zeros(6, dtype=torch.int32)),
        *(torch.zeros(24, dtype=torch.uint8), torch.zeros(24, dtype=torch.bool)),
    ]
    words = [fingerprint(item) for item in items]
    assert None not in words
    assert len(set(words)) == len(words)
    assert fingerprint((1, torch.arange(3))) == fingerprint((1, torch.arange(6)[:3]))
    assert fingerprint(torch.ones(2, 3).T) == fingerprint(torch.ones(3, 2))
    assert fingerprint(torch.ones(3)) == "fb4c606f7ebd8ccf"
    assert fingerprint([object()]) is fingerprint(np.array([object()])) is None
    assert fingerprint({"text": "word", "ids": np.arange(4)}) == "bd9a4e5c8146bcd7"


def test_another_kind_is_refused():
    stream = Stream(Opener([9]), num_shards=1, global_batch=1)
    feed = open_feed(stream, rank=0, world_size=1)
    next(feed)
    other = open_feed(Loader([1, 2, 3], global_batch=1), rank=0, world_size=1)
    with pytest.raises(ConfigError, match=r"saved with outlast\.data\.Stream"):
        other.restore(feed.state())
    assert stream.kind == "stream"


def test_two_iterators_at_once_are_refused():
    stream = Stream(Opener([9]), num_shards=1, global_batch=1)
    first, second = iter(stream), iter(stream)
    next(first)
    next(second)
    with pytest.raises(ConfigError, match="iterated twice"):
        next(first)
