"""Batches that were left out: passed over once, and proved to be left out on purpose."""

import random

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader

from outlast.data import Loader, Stream, open_feed, random_state
from outlast.data.audit import History
from outlast.data.feed import Skipping, place, take_over
from outlast.data.trail import Trail, read_record
from outlast.policy.rollbacks import Batches

OUT = [Batches(loop=1, first=4, last=5), Batches(loop=1, first=9, last=9)]
KEPT = [1, 2, 3, 6, 7, 8, 10, 11, 12]


def numbers(feed, skipping, count, step=0):
    return [skipping.next(feed, step + done) for done in range(count)]


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("kind", ["list", "loader", "stream", "stock", "stateful"])
def test_they_do_not_come_and_the_others_do(kind):
    batches = [torch.tensor([2 * n, 2 * n + 1]) for n in range(1, 13)]
    points = torch.arange(2, 26)
    made = {
        "list": lambda: batches,
        "loader": lambda: Loader(points, global_batch=2, shuffle=False),
        "stream": lambda: Stream(lambda _: points, num_shards=1, global_batch=2, shuffle=False),
        "stock": lambda: DataLoader(points, batch_size=2),
        "stateful": lambda: stateful()(points, batch_size=2),
    }[kind]
    skipping = Skipping(OUT)
    skipping.begin(1, 0)
    feed = open_feed(made(), rank=0, world_size=1)
    got = [batch.tolist()[0] // 2 for batch in numbers(feed, skipping, len(KEPT))]
    assert got == KEPT
    assert skipping.batch == 12
    feed.close()


def stateful():
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader


def test_in_another_loop_they_come():
    skipping = Skipping(OUT)
    skipping.begin(2, 0)
    assert numbers(open_feed([1, 2, 3, 4, 5], rank=0, world_size=1), skipping, 5) == [1, 2, 3, 4, 5]


def test_a_loop_may_end_with_them():
    skipping = Skipping([Batches(loop=1, first=3, last=9)])
    skipping.begin(1, 0)
    feed = open_feed([1, 2, 3, 4], rank=0, world_size=1)
    feed.max_epochs = 1
    assert numbers(feed, skipping, 2) == [1, 2]
    with pytest.raises(StopIteration):
        skipping.next(feed, 2)


def test_what_loading_them_draws_leaves_no_trace():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            return torch.rand(())

    def run(ranges, count):
        torch.manual_seed(1)
        skipping = Skipping(ranges)
        skipping.begin(1, 0)
        feed = open_feed(DataLoader(Noisy(), batch_size=2), rank=0, world_size=1)
        return torch.cat(numbers(feed, skipping, count))

    assert torch.equal(run(OUT, 9), run([], 9))


class Drawn(torch.utils.data.Sampler):
    """Draws from the script's stream as it goes."""

    def __len__(self):
        return 20

    def __iter__(self):
        left = list(range(20))
        while left:
            yield left.pop(random.randrange(len(left)))


class Shuffled:
    """A shuffle buffer."""

    def __iter__(self):
        return iter(Drawn())


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("ranges", [[], OUT], ids=["none", "left-out"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Shuffled, id="iterable"),
        pytest.param(lambda: DataLoader(range(20), sampler=Drawn(), batch_size=1), id="stock"),
        pytest.param(lambda: DataLoader(range(20), sampler=Drawn(), batch_size=None), id="single"),
    ],
)
def test_an_interruption_behind_them_changes_no_order(make, ranges):
    def run(cuts):
        random.seed(7)
        torch.manual_seed(0)
        feed, skipping, got = open_feed(make(), rank=0, world_size=1), Skipping(ranges), []
        feed.max_epochs = 1
        skipping.begin(1, 0)
        for done in range(20):
            if done in cuts:
                state, drawn = feed.state(), random_state.capture()
                feed.close()
                feed = open_feed(make(), rank=0, world_size=1)
                feed.max_epochs = 1
                feed.restore(state)
                random_state.restore(drawn)
            try:
                got.append(int(skipping.next(feed, done)))
            except StopIteration:
                break
        feed.close()
        return got

    assert run({7, 12}) == run(())


def audited(world_size, stints, save_at=()):
    """A job of several attempts; each begins where the one before has saved."""
    loader_of = lambda: Loader(range(200), global_batch=6, seed=5)  # noqa: E731
    saved, saved_by, step, ids = None, world_size, 0, []
    for workers, count in stints:
        states, handed = [], []
        for rank in range(workers):
            trail, batch, data = Trail(), 0, None
            if saved is not None:
                data, trail = take_over(saved.__getitem__, saved_by, rank, workers)
                batch = data["batch"]
            feed = open_feed(loader_of(), rank=rank, world_size=workers, trail=trail, step=step)
            if data is not None:
                feed.restore(data["position"])
            skipping = Skipping(OUT)
            skipping.begin(1, batch)
            handed.append([one.tolist() for one in numbers(feed, skipping, count, step)])
            states.append(place(1, feed, trail.state(), skipping.batch))
            feed.close()
        ids += [[one for part in parts for one in part] for parts in zip(*handed, strict=True)]
        saved, saved_by, step = states, workers, step + count
    records = [read_record(one["trail"]) for one in saved]
    return History([msgspec.convert(msgspec.to_builtins(r), type(r)) for r in records], step), ids


@pytest.mark.parametrize(
    "stints", [[(2, 9)], [(1, 3), (2, 2), (3, 4)], [(2, 2), (2, 7)], [(3, 6), (1, 3)]]
)
def test_they_are_proved_to_be_left_out_and_nothing_else(stints):
    history, ids = audited(1, stints)
    plain = Loader(range(200), global_batch=6, seed=5)
    assert ids == [plain.ids((number - 1) * 6) for number in KEPT]
    verdict = history.verdict()
    assert verdict.proved, verdict.faults
    assert verdict.samples == 9 * 6
    assert [(one.step, one.samples) for one in verdict.left_out] == [(4, 12), (7, 6)]
    assert verdict.left_out[0].ids == plain.ids(3 * 6) + plain.ids(4 * 6)
    assert history.ids(4) == plain.ids(5 * 6)
    assert history.ids(7) == plain.ids(9 * 6)


def test_what_is_left_out_without_a_rollback_is_a_fault():
    trail = Trail()
    loader = Loader(range(200), global_batch=6, seed=5)
    feed = open_feed(loader, rank=0, world_size=1, trail=trail)
    next(feed)
    feed.close()
    loader.position += 6
    feed._step = 1
    next(feed)
    verdict = History([read_record(trail.state())], 2).verdict()
    assert [fault.what for fault in verdict.faults] == ["uncounted"]
    feed.close()
